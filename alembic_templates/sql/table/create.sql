CREATE OR REPLACE FUNCTION lock.create(keys bigint[]) RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  created bigint;
BEGIN
  IF keys IS NULL OR array_position(keys, NULL) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock key must not be NULL';
  END IF;
  PERFORM lock.refuse(true);
  -- In the order of the keys, so that concurrent callers can't deadlock.
  INSERT INTO lock.locked_keys (key)
  SELECT DISTINCT k.key FROM unnest(keys) AS k (key) ORDER BY k.key
  ON CONFLICT DO NOTHING;
  GET DIAGNOSTICS created = ROW_COUNT;
  RETURN created;
END
$body$;

CREATE OR REPLACE FUNCTION lock.create(keys bigint[]) RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  made bigint;
BEGIN
  IF keys IS NULL OR array_position(keys, NULL) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  END IF;
  PERFORM lock.refuse(true);
  -- In one order for everybody, so that two callers that make the same keys can't deadlock.
  INSERT INTO lock.locked_keys (key)
  SELECT DISTINCT wanted.key FROM unnest(keys) AS wanted (key) ORDER BY wanted.key
  ON CONFLICT DO NOTHING;
  GET DIAGNOSTICS made = ROW_COUNT;
  RETURN made;
END
$body$;

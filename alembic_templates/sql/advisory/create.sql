CREATE OR REPLACE FUNCTION lock.create(keys bigint[]) RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF keys IS NULL OR array_position(keys, NULL) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock key must not be NULL';
  END IF;
  PERFORM lock.refuse(true);
  -- Advisory locks need no row: there is nothing to create.
  RETURN 0;
END
$body$;

CREATE OR REPLACE FUNCTION lock.unlock(key bigint) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  END IF;
  -- Nothing to remove: an advisory lock leaves no row, and lasts to the end of its transaction either way.
  PERFORM lock.refuse(true);
END
$body$;

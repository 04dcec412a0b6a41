CREATE OR REPLACE FUNCTION lock.unlock(key bigint) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock key must not be NULL';
  END IF;
  -- Nothing to delete: an advisory lock has no row, and lasts until its transaction ends.
  PERFORM lock.refuse(true);
END
$body$;

CREATE OR REPLACE FUNCTION lock.unlock(key bigint) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  END IF;
  PERFORM lock.refuse(true);
  -- SKIP LOCKED: never waits for another holder, and two sharers who both unlock don't deadlock.
  DELETE FROM lock.locked_keys AS gone WHERE gone.key = ANY (ARRAY(
    SELECT free.key FROM lock.locked_keys AS free WHERE free.key = unlock.key FOR UPDATE SKIP LOCKED));
END
$body$;

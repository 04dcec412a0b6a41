CREATE OR REPLACE FUNCTION lock.unlock(key bigint) RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = 'off'
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock key must not be NULL';
  END IF;
  PERFORM lock.refuse(true);
  -- SKIP LOCKED: it never waits for another holder, and two shared holders that both unlock can't deadlock.
  DELETE FROM lock.locked_keys AS k WHERE k.key = ANY (ARRAY(
    SELECT free.key FROM lock.locked_keys AS free WHERE free.key = unlock.key FOR UPDATE SKIP LOCKED));
END
$body$;

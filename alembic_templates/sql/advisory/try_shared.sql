CREATE OR REPLACE FUNCTION lock.try_shared(key bigint, allow_stale boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    -- the server's own function would return without having locked anything
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  ELSIF pg_is_in_recovery()
    OR current_setting('transaction_read_only') = 'on'
    OR (allow_stale IS NOT TRUE
        AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted'))
  THEN
    PERFORM lock.refuse(allow_stale);
  END IF;
  IF pg_try_advisory_xact_lock_shared(key) THEN
    RETURN true;
  ELSIF EXISTS (
    SELECT FROM pg_catalog.pg_locks AS mine
    WHERE mine.pid = pg_backend_pid() AND mine.locktype = 'advisory' AND mine.objsubid = 1
      AND mine.mode = 'ExclusiveLock' AND mine.granted
      AND (mine.classid::bigint << 32) | mine.objid::bigint = try_shared.key)
  THEN
    -- It is held alone by this very session: before 17, the server has a try stand behind those who wait for that one
    -- to end all the same, and grants at once what isn't a try.
    PERFORM pg_advisory_xact_lock_shared(key);
    RETURN true;
  END IF;
  RETURN false;
END
$body$;

CREATE OR REPLACE FUNCTION lock.try_shared(key bigint, allow_stale boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    -- pg_advisory_xact_lock() and its like return NULL without locking
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock key must not be NULL';
  ELSIF pg_is_in_recovery()
    OR current_setting('transaction_read_only') = 'on'
    OR (allow_stale IS NOT TRUE
        AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted'))
    -- on YugabyteDB there is more to refuse
    OR current_setting('yb_disable_transactional_writes', true) IS NOT NULL
  THEN
    PERFORM lock.refuse(allow_stale);
  END IF;
  IF pg_try_advisory_xact_lock_shared(key) THEN
    RETURN true;
  ELSIF current_setting('yb_disable_transactional_writes', true) IS NULL AND EXISTS (
    SELECT FROM pg_catalog.pg_locks AS l
    WHERE l.pid = pg_backend_pid() AND l.locktype = 'advisory' AND l.objsubid = 1
      AND l.mode = 'ExclusiveLock' AND l.granted
      AND (l.classid::bigint << 32) | l.objid::bigint = try_shared.key)
  THEN
    -- This session holds the key exclusively. Before version 17 the server denies such a try while others wait for
    -- the key, but grants the plain call immediately.
    PERFORM pg_advisory_xact_lock_shared(key);
    RETURN true;
  END IF;
  RETURN false;
END
$body$;

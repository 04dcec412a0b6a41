CREATE OR REPLACE FUNCTION lock.try_exclusive(key bigint, allow_stale boolean DEFAULT false) RETURNS boolean
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
  RETURN pg_try_advisory_xact_lock(key);
END
$body$;

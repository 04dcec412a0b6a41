CREATE OR REPLACE FUNCTION lock.try_exclusive(key bigint, allow_stale boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql
SET enable_seqscan = 'off'
SET lock_timeout = '1ms'
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock key must not be NULL';
  ELSIF pg_is_in_recovery()
    OR current_setting('transaction_read_only') = 'on'
    OR (allow_stale IS NOT TRUE
        AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted'))
  THEN
    PERFORM lock.refuse(allow_stale);
  END IF;
  LOOP
    PERFORM 1 FROM lock.locked_keys AS held WHERE held.key = try_exclusive.key FOR UPDATE NOWAIT;
    EXIT WHEN FOUND;
    -- NOWAIT doesn't apply to an insert: lock_timeout ends the wait for another session's uncommitted insert.
    INSERT INTO lock.locked_keys (key) VALUES (try_exclusive.key) ON CONFLICT DO NOTHING;
    EXIT WHEN FOUND;
  END LOOP;
  RETURN true;
EXCEPTION WHEN lock_not_available OR serialization_failure THEN
  RETURN false;
END
$body$;

CREATE OR REPLACE FUNCTION lock.exclusive(key bigint, allow_stale boolean DEFAULT false,
  wait_ms integer DEFAULT NULL::integer) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  previous text;
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
  IF wait_ms IS NOT NULL THEN
    previous := current_setting('lock_timeout');
    PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
  END IF;
  PERFORM pg_advisory_xact_lock(key);
  IF wait_ms IS NOT NULL THEN
    PERFORM set_config('lock_timeout', previous, true);
  END IF;
END
$body$;

CREATE OR REPLACE FUNCTION lock.exclusive(key bigint, allow_stale boolean DEFAULT false,
  wait_ms integer DEFAULT NULL::integer) RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = 'off'
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  previous text;
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
  IF wait_ms IS NOT NULL THEN
    previous := current_setting('lock_timeout');
    PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
  END IF;
  -- Repeated until the row exists: unlock() and vacuum() may delete it during the wait.
  LOOP
    PERFORM 1 FROM lock.locked_keys AS held WHERE held.key = exclusive.key FOR UPDATE;
    EXIT WHEN FOUND;
    INSERT INTO lock.locked_keys (key) VALUES (exclusive.key) ON CONFLICT DO NOTHING;
    EXIT WHEN FOUND;
  END LOOP;
  IF wait_ms IS NOT NULL THEN
    PERFORM set_config('lock_timeout', previous, true);
  END IF;
END
$body$;

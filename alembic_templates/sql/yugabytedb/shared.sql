CREATE OR REPLACE FUNCTION lock.shared(key bigint, allow_stale boolean DEFAULT false,
  wait_ms integer DEFAULT NULL::integer) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  previous text := current_setting('yb_disable_transactional_writes');
  previous_wait text;
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock key must not be NULL';
  END IF;
  PERFORM lock.refuse(allow_stale);
  IF wait_ms IS NOT NULL THEN
    -- A wait for a row may ignore it, and then ends at statement_timeout, which only an earlier statement can set.
    previous_wait := current_setting('lock_timeout');
    PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
  END IF;
  -- Repeated until the row exists: unlock() and vacuum() may delete it during the wait. Bounded, because under
  -- allow_stale a row that is newer than the snapshot would never be found.
  FOR round IN 1..100 LOOP
    PERFORM 1 FROM lock.locked_keys AS held WHERE held.key = shared.key FOR SHARE;
    IF FOUND THEN
      -- The advisory lock, too: a revision may replace these functions by those that acquire nothing else.
      IF current_setting('yb_enable_advisory_locks', true) = 'on' THEN
        PERFORM pg_advisory_xact_lock_shared(key);
      END IF;
      IF wait_ms IS NOT NULL THEN
        PERFORM set_config('lock_timeout', previous_wait, true);
      END IF;
      RETURN;
    END IF;
    -- Outside the transaction, so that the insert of a new key holds no lock: that lock would be exclusive even
    -- for shared(), and try_*() would wait for it, because row locks ignore lock_timeout on YugabyteDB.
    PERFORM set_config('yb_disable_transactional_writes', 'on', true);
    INSERT INTO lock.locked_keys (key) VALUES (shared.key) ON CONFLICT DO NOTHING;
    PERFORM set_config('yb_disable_transactional_writes', previous, true);
  END LOOP;
  RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE =
    'could not serialize access: the key is not visible to this transaction; run the transaction again';
END
$body$;

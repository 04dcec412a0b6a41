CREATE OR REPLACE FUNCTION lock.try_shared(key bigint, allow_stale boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql
SET lock_timeout = '100ms'
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  previous text := current_setting('yb_disable_transactional_writes');
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock key must not be NULL';
  END IF;
  PERFORM lock.refuse(allow_stale);
  FOR attempt IN 1..2 LOOP
    BEGIN
      FOR round IN 1..100 LOOP
        PERFORM 1 FROM lock.locked_keys AS held WHERE held.key = try_shared.key FOR SHARE NOWAIT;
        IF FOUND THEN
          -- The advisory lock, too, as in shared(). The exception frees the row.
          IF current_setting('yb_enable_advisory_locks', true) = 'on' THEN
            IF NOT pg_try_advisory_xact_lock_shared(key) THEN
              RAISE lock_not_available;
            END IF;
          END IF;
          RETURN true;
        END IF;
        -- Outside the transaction, as in shared(), so that it leaves no uncommitted insert to wait for. If there is
        -- one nevertheless, lock_timeout ends the wait. It is not shorter, because it also limits the wait for the
        -- lock of the table, which another process grants.
        PERFORM set_config('yb_disable_transactional_writes', 'on', true);
        INSERT INTO lock.locked_keys (key) VALUES (try_shared.key) ON CONFLICT DO NOTHING;
        PERFORM set_config('yb_disable_transactional_writes', previous, true);
      END LOOP;
      RETURN false;
    EXCEPTION
      WHEN lock_not_available THEN
        RETURN false;
      WHEN serialization_failure THEN
        -- A conflict with one that has ended, or a read restart: the key may be free. It is asked for once more.
        NULL;
    END;
  END LOOP;
  RETURN false;
END
$body$;

CREATE OR REPLACE FUNCTION lock.shared(key bigint, allow_stale boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  previous text := current_setting('yb_disable_transactional_writes');
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  END IF;
  PERFORM lock.refuse(allow_stale);
  -- Again until the row is there: unlock() and vacuum() may remove it while we wait for it. Bounded, because
  -- under allow_stale a row that the snapshot is too old to see would have it go round for ever.
  FOR round IN 1..100 LOOP
    PERFORM 1 FROM lock.locked_keys AS held WHERE held.key = shared.key FOR SHARE;
    IF FOUND THEN
      RETURN;
    END IF;
    -- Not part of the transaction: so a new key is never held by its insert, which a sharer must not
    -- do and which try_* could not get past, as row locks don't heed lock_timeout here.
    PERFORM set_config('yb_disable_transactional_writes', 'on', true);
    INSERT INTO lock.locked_keys (key) VALUES (shared.key) ON CONFLICT DO NOTHING;
    PERFORM set_config('yb_disable_transactional_writes', previous, true);
  END LOOP;
  RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE =
    'could not serialize access: the key is not visible to this transaction, begin it again';
END
$body$;

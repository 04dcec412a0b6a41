DO $sqlalchemy_locks$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'lock') THEN
    CREATE SCHEMA lock;
    COMMENT ON SCHEMA lock IS 'created by sqlalchemy_locks';
  END IF;
END
$sqlalchemy_locks$;

CREATE TABLE IF NOT EXISTS lock.installed (step TEXT NOT NULL, installed_by TEXT NOT NULL, owner TEXT NOT NULL, PRIMARY KEY (step, owner));

DO $sqlalchemy_locks$
BEGIN
  IF to_regprocedure('lock.exclusive(bigint)') IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'duplicate_function', MESSAGE =
      'a function lock.exclusive(bigint) exists already, and calls would reach it'
      ' instead of the one to be installed: drop it, or install into another schema';
  END IF;
  IF to_regprocedure('lock.shared(bigint)') IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'duplicate_function', MESSAGE =
      'a function lock.shared(bigint) exists already, and calls would reach it'
      ' instead of the one to be installed: drop it, or install into another schema';
  END IF;
  IF strpos(version(), '-YB-') > 0
    AND (coalesce(current_setting('yb_enable_advisory_locks', true), 'off') <> 'on'
      OR coalesce(current_setting('yb_silence_advisory_locks_not_supported_error', true), 'off') = 'on'
      OR EXISTS (SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace AS n ON n.oid = relnamespace WHERE relname = 'locked_keys' AND nspname = 'lock' AND relkind = 'r'))
  THEN
    IF EXISTS (SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace AS n ON n.oid = relnamespace WHERE relname = 'locked_keys' AND nspname = 'lock' AND relkind <> 'r') THEN
      RAISE EXCEPTION USING ERRCODE = 'wrong_object_type', MESSAGE =
        'lock.locked_keys exists already and is not a table: with another locking option'
        ' two kinds of locks would not exclude each other. End every process that uses locks, drop it, and'
        ' upgrade again';
    END IF;
    CREATE TABLE IF NOT EXISTS lock.locked_keys (key BIGINT NOT NULL, ts TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(), PRIMARY KEY (key));
    EXECUTE $command$
CREATE OR REPLACE FUNCTION lock.refuse(allow_stale boolean) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  isolation text := current_setting('transaction_isolation');
BEGIN
  IF pg_is_in_recovery() THEN
    RAISE EXCEPTION USING ERRCODE = 'SL001', MESSAGE =
      'no lock is taken on a standby, because its locks are separate from the primary''s and two sessions'
      ' could hold the same one: connect to the primary';
  ELSIF current_setting('transaction_read_only') = 'on' THEN
    RAISE EXCEPTION USING ERRCODE = 'SL002', MESSAGE =
      'no lock is taken in a read-only transaction, because the server may be a replica, whose locks'
      ' exclude no session on the primary: use a read-write transaction';
  ELSIF allow_stale IS NOT TRUE THEN
    -- A cluster without yb_enable_read_committed_isolation reports read committed but runs snapshot isolation.
    IF to_regprocedure('yb_get_effective_transaction_isolation_level()') IS NOT NULL THEN
      EXECUTE 'SELECT lower(yb_get_effective_transaction_isolation_level())' INTO isolation;
    ELSE
      isolation := coalesce(current_setting('yb_effective_transaction_isolation_level', true), isolation);
    END IF;
    IF isolation NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION USING ERRCODE = 'SL003', MESSAGE =
        'no lock is taken in a transaction that is effectively ' || upper(isolation) || ', because its'
        ' snapshot may be older than the lock, so that the holder would read stale rows:'
        ' use READ COMMITTED, with yb_enable_read_committed_isolation on in the cluster, or pass allow_stale';
    END IF;
  END IF;
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION lock.exclusive(key bigint, allow_stale boolean DEFAULT false,
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
    PERFORM 1 FROM lock.locked_keys AS held WHERE held.key = exclusive.key FOR UPDATE;
    IF FOUND THEN
      -- The advisory lock, too: a revision may replace these functions by those that acquire nothing else.
      IF current_setting('yb_enable_advisory_locks', true) = 'on' THEN
        PERFORM pg_advisory_xact_lock(key);
      END IF;
      IF wait_ms IS NOT NULL THEN
        PERFORM set_config('lock_timeout', previous_wait, true);
      END IF;
      RETURN;
    END IF;
    -- Outside the transaction, so that the insert of a new key holds no lock: that lock would be exclusive even
    -- for shared(), and try_*() would wait for it, because row locks ignore lock_timeout on YugabyteDB.
    PERFORM set_config('yb_disable_transactional_writes', 'on', true);
    INSERT INTO lock.locked_keys (key) VALUES (exclusive.key) ON CONFLICT DO NOTHING;
    PERFORM set_config('yb_disable_transactional_writes', previous, true);
  END LOOP;
  RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE =
    'could not serialize access: the key is not visible to this transaction; run the transaction again';
END
$body$
$command$;
    EXECUTE $command$
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
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION lock.try_exclusive(key bigint, allow_stale boolean DEFAULT false) RETURNS boolean
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
        PERFORM 1 FROM lock.locked_keys AS held WHERE held.key = try_exclusive.key FOR UPDATE NOWAIT;
        IF FOUND THEN
          -- The advisory lock, too, as in exclusive(). The exception frees the row.
          IF current_setting('yb_enable_advisory_locks', true) = 'on' THEN
            IF NOT pg_try_advisory_xact_lock(key) THEN
              RAISE lock_not_available;
            END IF;
          END IF;
          RETURN true;
        END IF;
        -- Outside the transaction, as in exclusive(), so that it leaves no uncommitted insert to wait for. If there is
        -- one nevertheless, lock_timeout ends the wait. It is not shorter, because it also limits the wait for the
        -- lock of the table, which another process grants.
        PERFORM set_config('yb_disable_transactional_writes', 'on', true);
        INSERT INTO lock.locked_keys (key) VALUES (try_exclusive.key) ON CONFLICT DO NOTHING;
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
$body$
$command$;
    EXECUTE $command$
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
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION lock.create(keys bigint[]) RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  created bigint;
BEGIN
  IF keys IS NULL OR array_position(keys, NULL) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock key must not be NULL';
  END IF;
  PERFORM lock.refuse(true);
  -- In the order of the keys, so that concurrent callers can't deadlock.
  INSERT INTO lock.locked_keys (key)
  SELECT DISTINCT k.key FROM unnest(keys) AS k (key) ORDER BY k.key
  ON CONFLICT DO NOTHING;
  GET DIAGNOSTICS created = ROW_COUNT;
  RETURN created;
END
$body$
$command$;
    EXECUTE $command$
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
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION lock.vacuum() RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  removed bigint := 0;
  round bigint;
BEGIN
  PERFORM lock.refuse(true);
  LOOP
    DELETE FROM lock.locked_keys AS k WHERE k.key = ANY (ARRAY(
      SELECT free.key FROM lock.locked_keys AS free LIMIT 10000 FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS round = ROW_COUNT;
    removed := removed + round;
    EXIT WHEN round = 0;
  END LOOP;
  RETURN removed;
END
$body$
$command$;
  ELSE
    IF EXISTS (SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace AS n ON n.oid = relnamespace WHERE relname = 'locked_keys' AND nspname = 'lock' AND relkind <> 'v') THEN
      RAISE EXCEPTION USING ERRCODE = 'wrong_object_type', MESSAGE =
        'lock.locked_keys exists already and is not a view: with another locking option'
        ' two kinds of locks would not exclude each other. End every process that uses locks, drop it, and'
        ' upgrade again';
    END IF;
    EXECUTE $command$
CREATE OR REPLACE VIEW lock.locked_keys AS
-- sqlalchemy_locks 0001
-- Left join: ts is NULL for a prepared transaction, which has no session, and for a session whose activity
-- the role may not see.
SELECT (held.classid::bigint << 32) | held.objid::bigint AS key,
       session.xact_start AS ts,
       held.pid,
       CASE held.mode WHEN 'ExclusiveLock' THEN 'exclusive' ELSE 'shared' END AS mode
FROM pg_catalog.pg_locks AS held
JOIN pg_catalog.pg_database AS d ON d.oid = held.database AND d.datname = current_database()
LEFT JOIN pg_catalog.pg_stat_activity AS session ON session.pid = held.pid
WHERE held.locktype = 'advisory' AND held.objsubid = 1 AND held.granted
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION lock.refuse(allow_stale boolean) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  isolation text := current_setting('transaction_isolation');
BEGIN
  IF pg_is_in_recovery() THEN
    RAISE EXCEPTION USING ERRCODE = 'SL001', MESSAGE =
      'no lock is taken on a standby, because its locks are separate from the primary''s and two sessions'
      ' could hold the same one: connect to the primary';
  ELSIF current_setting('transaction_read_only') = 'on' THEN
    RAISE EXCEPTION USING ERRCODE = 'SL002', MESSAGE =
      'no lock is taken in a read-only transaction, because the server may be a replica, whose locks'
      ' exclude no session on the primary: use a read-write transaction';
  ELSIF current_setting('yb_enable_advisory_locks', true) = 'off'
    OR current_setting('yb_silence_advisory_locks_not_supported_error', true) = 'on'
  THEN
    RAISE EXCEPTION USING ERRCODE = 'SL004', MESSAGE =
      'no lock is taken, because YugabyteDB has no advisory locks without yb_enable_advisory_locks, and may pretend to'
      ' have them with yb_silence_advisory_locks_not_supported_error: turn the first on and the second off, or install'
      ' the functions that lock rows (locking="table")';
  ELSIF allow_stale IS NOT TRUE THEN
    -- YugabyteDB without yb_enable_read_committed_isolation reports read committed but runs snapshot isolation.
    IF to_regprocedure('yb_get_effective_transaction_isolation_level()') IS NOT NULL THEN
      EXECUTE 'SELECT lower(yb_get_effective_transaction_isolation_level())' INTO isolation;
    END IF;
    IF isolation NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION USING ERRCODE = 'SL003', MESSAGE =
        'no lock is taken in a transaction that is effectively ' || upper(isolation) || ', because its'
        ' snapshot may be older than the lock, so that the holder would read stale rows:'
        ' use READ COMMITTED (on YugabyteDB with yb_enable_read_committed_isolation), or pass allow_stale';
    END IF;
  END IF;
END
$body$
$command$;
    EXECUTE $command$
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
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION lock.shared(key bigint, allow_stale boolean DEFAULT false,
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
  PERFORM pg_advisory_xact_lock_shared(key);
  IF wait_ms IS NOT NULL THEN
    PERFORM set_config('lock_timeout', previous, true);
  END IF;
END
$body$
$command$;
    EXECUTE $command$
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
$body$
$command$;
    EXECUTE $command$
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
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION lock.create(keys bigint[]) RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF keys IS NULL OR array_position(keys, NULL) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock key must not be NULL';
  END IF;
  PERFORM lock.refuse(true);
  -- Advisory locks need no row: there is nothing to create.
  RETURN 0;
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION lock.unlock(key bigint) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock key must not be NULL';
  END IF;
  -- Nothing to delete: an advisory lock has no row, and lasts until its transaction ends.
  PERFORM lock.refuse(true);
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION lock.vacuum() RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  -- Nothing to delete: advisory locks have no rows.
  PERFORM lock.refuse(true);
  RETURN 0;
END
$body$
$command$;
  END IF;
END
$sqlalchemy_locks$;

CREATE TABLE IF NOT EXISTS lock.task_state (queue_id TEXT NOT NULL DEFAULT 'default', id TEXT NOT NULL, acquired BOOLEAN NOT NULL DEFAULT false, owner TEXT, token TEXT, fence BIGINT NOT NULL DEFAULT 0, acquired_at TIMESTAMP WITH TIME ZONE, retries_left INTEGER, PRIMARY KEY (queue_id, id));

CREATE TABLE IF NOT EXISTS lock.task_timeout (queue_id TEXT NOT NULL DEFAULT 'default', id TEXT NOT NULL, ts BIGINT NOT NULL DEFAULT 0, timeout BIGINT NOT NULL, token TEXT, fence BIGINT NOT NULL DEFAULT 0, retries_left INTEGER, PRIMARY KEY (queue_id, id));

CREATE TABLE IF NOT EXISTS lock.task (queue_id TEXT NOT NULL DEFAULT 'default', id TEXT NOT NULL, status TEXT NOT NULL DEFAULT 'done', claim BIGINT NOT NULL DEFAULT 0, updated_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(), timeout BIGINT, retries_left INTEGER, PRIMARY KEY (queue_id, id));

CREATE TABLE IF NOT EXISTS lock.job (internal_id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, external_id UUID NOT NULL, queue_id TEXT NOT NULL DEFAULT 'default', payload JSONB NOT NULL, priority INTEGER NOT NULL DEFAULT 0, run_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(), claim BIGINT NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0, max_attempts INTEGER NOT NULL DEFAULT 5, processing_host TEXT, created_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(), started_at TIMESTAMP WITH TIME ZONE, completed_at TIMESTAMP WITH TIME ZONE, failed_at TIMESTAMP WITH TIME ZONE, error TEXT, unique_key TEXT);

CREATE TABLE IF NOT EXISTS lock.paused_queue (id TEXT NOT NULL, paused_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(), PRIMARY KEY (id));

CREATE TABLE IF NOT EXISTS lock.worker (host TEXT NOT NULL, heartbeat_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(), started_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(), PRIMARY KEY (host));

CREATE TABLE IF NOT EXISTS lock.semaphore (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, name TEXT NOT NULL, capacity INTEGER, fence BIGINT NOT NULL DEFAULT 0, used_at_most BIGINT, on_demand BOOLEAN NOT NULL DEFAULT false, created_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(), updated_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(), CONSTRAINT semaphore_by_name UNIQUE (name));

CREATE TABLE IF NOT EXISTS lock.permit_request (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, external_id TEXT NOT NULL, owner TEXT, state TEXT NOT NULL, ttl_seconds DOUBLE PRECISION, token TEXT, renewed_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(), created_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(), updated_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(), CONSTRAINT request_by_id UNIQUE (external_id));

CREATE TABLE IF NOT EXISTS lock.permit (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, semaphore_id BIGINT NOT NULL, permit_request_id BIGINT NOT NULL, count INTEGER NOT NULL, fence BIGINT NOT NULL, state TEXT NOT NULL);

CREATE TABLE IF NOT EXISTS lock.semaphore_history (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, semaphore_id BIGINT NOT NULL, old_capacity INTEGER, new_capacity INTEGER, changed_by TEXT, changed_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp());

CREATE INDEX IF NOT EXISTS task_ready ON lock.task (queue_id, id) WHERE status IN ('done', 'failed');

CREATE INDEX IF NOT EXISTS task_captured ON lock.task (updated_at) WHERE status = 'in_progress';

CREATE INDEX IF NOT EXISTS job_ready ON lock.job (queue_id, priority, run_at, internal_id) WHERE started_at IS NULL;

CREATE INDEX IF NOT EXISTS job_running ON lock.job (started_at) WHERE started_at IS NOT NULL AND completed_at IS NULL AND failed_at IS NULL;

CREATE UNIQUE INDEX IF NOT EXISTS job_external_id ON lock.job (external_id);

CREATE INDEX IF NOT EXISTS job_completed ON lock.job (completed_at) WHERE completed_at IS NOT NULL;

CREATE INDEX IF NOT EXISTS job_dead ON lock.job (failed_at) WHERE failed_at IS NOT NULL;

CREATE UNIQUE INDEX IF NOT EXISTS job_unique ON lock.job (queue_id, unique_key) WHERE unique_key IS NOT NULL;

CREATE INDEX IF NOT EXISTS request_by_state ON lock.permit_request (state, updated_at);

CREATE INDEX IF NOT EXISTS permit_held ON lock.permit (semaphore_id, state, permit_request_id, count) WHERE state = 'ACQUIRED';

CREATE INDEX IF NOT EXISTS permit_by_request ON lock.permit (permit_request_id);

CREATE INDEX IF NOT EXISTS history_by_semaphore ON lock.semaphore_history (semaphore_id, id);

INSERT INTO lock.semaphore (name) VALUES ('') ON CONFLICT DO NOTHING;

CREATE OR REPLACE FUNCTION lock.key(VARIADIC parts text[]) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $body$
  -- sqlalchemy_locks 0001
  -- The separator is NUL, which no text contains: ('a', 'b') differs from ('a:b') and ('ab').
  -- A NULL part gives NULL, which the locks refuse.
  SELECT CASE WHEN array_position(parts, NULL) IS NULL THEN ('x' || left(encode(sha256(
    string_agg(convert_to(part, 'UTF8'), decode('00', 'hex') ORDER BY number)
  ), 'hex'), 16))::bit(64)::bigint END
  FROM unnest(parts) WITH ORDINALITY AS p (part, number)
$body$;

CREATE OR REPLACE FUNCTION lock.semaphore_checked(value text, what text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  -- Texts that every engine stores and compares unchanged.
  IF length(value) BETWEEN 1 AND 255 AND right(value, 1) <> ' ' THEN
    RETURN value;
  END IF;
  RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = what || CASE
    WHEN value IS NULL THEN ' must not be NULL'
    WHEN value = '' THEN ' must not be empty'
    WHEN length(value) > 255 THEN ' has ' || length(value) || ' characters: 255 are the most that every engine can keep'
    ELSE ' ends with a space, which some collations don''t compare: ' || quote_literal(value)
  END;
END
$body$;

CREATE OR REPLACE FUNCTION lock.semaphore_take_back(semaphore bigint) RETURNS integer
LANGUAGE plpgsql
SET enable_seqscan = 'off'
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  taken bigint[];
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    -- The snapshot may be too old to see a release: this then raises a serialization failure instead of a false
    -- denial.
    PERFORM 1 FROM lock.permit AS p WHERE p.semaphore_id = semaphore AND p.state = 'ACQUIRED' FOR SHARE;
  END IF;
  -- SKIP LOCKED: requests that are being renewed, released, or held by a guarded write are skipped without a wait.
  WITH expired AS MATERIALIZED (
    SELECT r.id, r.renewed_at FROM lock.permit_request AS r
    WHERE r.id IN (SELECT p.permit_request_id FROM lock.permit AS p
                   WHERE p.semaphore_id = semaphore AND p.state = 'ACQUIRED')
      AND r.state = 'ACQUIRED' AND r.renewed_at + r.ttl_seconds * interval '1 second' <= clock_timestamp()
    FOR UPDATE SKIP LOCKED
  ), released AS (
    UPDATE lock.permit_request AS r SET state = 'RELEASED', updated_at = clock_timestamp()
    FROM expired AS e WHERE r.id = e.id AND r.state = 'ACQUIRED' AND r.renewed_at = e.renewed_at
    RETURNING r.id
  )
  SELECT array_agg(released.id) INTO taken FROM released;
  UPDATE lock.permit AS p SET state = 'RELEASED'
  WHERE p.permit_request_id = ANY (taken) AND p.state <> 'RELEASED';
  RETURN coalesce(cardinality(taken), 0);
END
$body$;

CREATE OR REPLACE FUNCTION lock.semaphore_acquire(names text[], counts integer[], external_id text,
  owner text DEFAULT NULL::text, ttl_seconds double precision DEFAULT NULL::double precision,
  wait_ms integer DEFAULT NULL::integer, nonce text DEFAULT NULL::text, replaces_expired boolean DEFAULT false,
  queue_keys bigint[] DEFAULT NULL::bigint[],
  OUT acquired boolean, OUT state text, OUT replayed boolean, OUT token text,
  OUT expires_at timestamp with time zone, OUT semaphores text[], OUT fences bigint[],
  OUT exhausted text[], OUT capacities integer[]) RETURNS record
LANGUAGE plpgsql
SET enable_seqscan = 'off'
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  previous text;
  request bigint;
  began timestamptz;
  ended timestamptz;
  ids bigint[];
  sem record;
  bounded boolean := true;
  totals bigint[];
  used bigint;
  held record;
BEGIN
  IF cardinality(names) = 1 AND cardinality(counts) = 1 AND counts[1] > 0
    AND length(names[1]) BETWEEN 1 AND 255 AND right(names[1], 1) <> ' '
    AND length(external_id) BETWEEN 1 AND 255 AND right(external_id, 1) <> ' '
    AND (owner IS NULL OR length(owner) BETWEEN 1 AND 255 AND right(owner, 1) <> ' ')
    AND (ttl_seconds IS NULL OR ttl_seconds BETWEEN 0.001 AND 3155760000)
    AND (queue_keys IS NULL OR cardinality(queue_keys) = 1 AND queue_keys[1] IS NOT NULL)
  THEN
    -- A valid request of one semaphore: one expression costs much less than the checks one by one.
    semaphores := names;
  ELSE
    external_id := lock.semaphore_checked(external_id, 'the external_id of a request');
    IF owner IS NOT NULL THEN
      owner := lock.semaphore_checked(owner, 'an owner');
    END IF;
    IF coalesce(cardinality(names), 0) = 0 OR cardinality(names) IS DISTINCT FROM cardinality(counts) THEN
      RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
        'semaphore.acquire needs at least one semaphore, and one count for each name';
    ELSIF (array_ndims(names), array_ndims(counts), array_lower(names, 1), array_lower(counts, 1)) <> (1, 1, 1, 1) THEN
      RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
        'names and counts must be one-dimensional arrays whose indexes begin at 1';
    ELSIF queue_keys IS NOT NULL AND (
      cardinality(queue_keys) <> cardinality(names) OR array_position(queue_keys, NULL) IS NOT NULL
      OR (array_ndims(queue_keys), array_lower(queue_keys, 1)) <> (1, 1)
    ) THEN
      RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
        'queue_keys is NULL, or has one key for each name';
    ELSIF NOT (ttl_seconds BETWEEN 0.001 AND 3155760000) THEN
      RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'ttl ' || CASE
        WHEN ttl_seconds <= 0 THEN 'must be more than 0 seconds'
        WHEN ttl_seconds < 1 THEN 'is at least 0.001 seconds'
        ELSE 'must be at most a hundred years, 3155760000 seconds'
      END || ', not ' || ttl_seconds;
    END IF;
    FOR i IN 1 .. cardinality(names) LOOP
      semaphores[i] := lock.semaphore_checked(names[i], 'a semaphore''s name');
      IF counts[i] IS NULL OR counts[i] < 1 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
          'a count of permits is from 1 to 2147483647, not ' || coalesce(counts[i]::text, 'NULL');
      END IF;
    END LOOP;
    IF cardinality(names) > 1 THEN
      -- Sorted independently of the collation, so that two requests can't deadlock; each name once.
      SELECT array_agg(given.name ORDER BY given.name COLLATE "C"),
             array_agg(given.count ORDER BY given.name COLLATE "C")
      INTO semaphores, totals
      FROM (SELECT u.name, sum(u.count) AS count
            FROM unnest(names, counts) AS u (name, count) GROUP BY u.name) AS given;
      FOR i IN 1 .. cardinality(totals) LOOP
        IF totals[i] > 2147483647 THEN
          RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'the counts of '
            || quote_literal(semaphores[i]) || ' add up to ' || totals[i] || ', and the maximum is 2147483647';
        END IF;
      END LOOP;
      counts := totals;
    END IF;
  END IF;
  -- A denial rolls this block back: it leaves no row, and its locks are released immediately.
  BEGIN
    -- A request that gives the keys of the semaphores' queues must not overtake the waiters.
    FOR i IN 1 .. coalesce(cardinality(queue_keys), 0) LOOP
      -- Waiters for permits hold this lock or wait for it: the try fails in both cases. On YugabyteDB they poll.
      IF strpos(version(), '-YB-') = 0 AND NOT pg_try_advisory_xact_lock_shared(queue_keys[i]) THEN
        exhausted := exhausted || names[i];
      END IF;
    END LOOP;
    IF exhausted IS NOT NULL THEN
      -- A request that was granted already must not queue behind the waiters.
      IF NOT EXISTS (
        SELECT FROM lock.permit_request AS r WHERE r.external_id = semaphore_acquire.external_id)
      THEN
        state := 'DENIED';
        replayed := false;
        RAISE EXCEPTION USING ERRCODE = 'SL010', MESSAGE = 'denied';
      END IF;
      exhausted := NULL;
    END IF;
    IF wait_ms IS NOT NULL THEN
      previous := current_setting('lock_timeout');
      PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
    END IF;
    FOR attempt IN 1 .. 100 LOOP
      -- A concurrent call with the same external_id waits at this insert until this request is decided. The token
      -- distinguishes it from every other request with this external_id; a caller that gives it knows its own again.
      INSERT INTO lock.permit_request AS r (external_id, owner, state, ttl_seconds, token)
      VALUES (semaphore_acquire.external_id, semaphore_acquire.owner, 'ACQUIRED', semaphore_acquire.ttl_seconds,
        coalesce(nonce,
          to_hex((random() * 9007199254740992)::bigint) || to_hex((random() * 9007199254740992)::bigint)))
      ON CONFLICT DO NOTHING RETURNING r.id, r.token, r.renewed_at INTO request, token, began;
      replayed := request IS NULL;
      EXIT WHEN NOT replayed;
      -- Locked, so that a release that is under way is seen, whatever the isolation level.
      SELECT r.id, r.token, r.state, r.renewed_at + r.ttl_seconds * interval '1 second', r.updated_at
      INTO request, token, state, expires_at, ended
      FROM lock.permit_request AS r WHERE r.external_id = semaphore_acquire.external_id FOR UPDATE;
      IF replaces_expired AND expires_at <= (CASE state WHEN 'RELEASED' THEN ended ELSE clock_timestamp() END) THEN
        -- Its time ran out before it was released: it is deleted, and this request inserted in its place.
        DELETE FROM lock.permit AS p WHERE p.permit_request_id = request;
        DELETE FROM lock.permit_request AS r WHERE r.id = request;
        state := NULL;
        expires_at := NULL;
      END IF;
      EXIT WHEN state IS NOT NULL;  -- otherwise it was deleted here, or is being cleaned up
    END LOOP;
    IF replayed THEN
      IF state IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE =
          'could not serialize access: the request is not visible to this transaction; run the transaction again';
      END IF;
      SELECT array_agg(s.name ORDER BY s.name COLLATE "C") AS names,
             array_agg(p.count ORDER BY s.name COLLATE "C") AS counts,
             array_agg(p.fence ORDER BY s.name COLLATE "C") AS fences
      INTO held FROM lock.permit AS p JOIN lock.semaphore AS s ON s.id = p.semaphore_id
      WHERE p.permit_request_id = request;
      fences := held.fences;
      IF held.names IS DISTINCT FROM semaphores OR held.counts IS DISTINCT FROM counts THEN
        state := 'CONFLICT';
      ELSIF state = 'ACQUIRED' AND expires_at <= clock_timestamp() THEN
        state := 'EXPIRED';
      END IF;
    ELSE
      FOR i IN 1 .. cardinality(semaphores) LOOP
        -- The update is the lock: a snapshot from before the last grant fails here. A denial undoes it.
        UPDATE lock.semaphore AS s
        SET fence = s.fence + 1, used_at_most = s.used_at_most + counts[i], updated_at = clock_timestamp()
        WHERE s.name = semaphores[i] AND s.capacity IS NOT NULL
        RETURNING s.id, s.capacity, s.fence, s.used_at_most INTO sem;
        ids[i] := sem.id;
        capacities[i] := sem.capacity;
        fences[i] := sem.fence;
        IF sem.id IS NULL THEN  -- no semaphore of that name, or a deleted one
          state := 'UNKNOWN';
          exhausted := exhausted || semaphores[i];
        ELSIF (sem.used_at_most <= sem.capacity) IS NOT TRUE THEN
          bounded := false;  -- says nothing: a release lowers no bound
        END IF;
      END LOOP;
      -- In statements after the locking ones: only these see what the previous holder has committed.
      FOR i IN 1 .. CASE WHEN bounded OR state IS NOT NULL THEN 0 ELSE cardinality(semaphores) END LOOP
        FOR attempt IN 1 .. 2 LOOP
          SELECT coalesce(sum(p.count), 0) INTO used FROM lock.permit AS p
          WHERE p.semaphore_id = ids[i] AND p.state = 'ACQUIRED';
          EXIT WHEN used + counts[i] <= capacities[i];
          IF attempt = 2 OR lock.semaphore_take_back(ids[i]) = 0 THEN
            exhausted := exhausted || semaphores[i];
            EXIT;
          END IF;
        END LOOP;
        -- Where some further grants will need no sum.
        IF used + 5::bigint * counts[i] <= capacities[i] THEN
          UPDATE lock.semaphore AS s SET used_at_most = used + counts[i] WHERE s.id = ids[i];
        END IF;
      END LOOP;
      IF exhausted IS NOT NULL THEN
        state := coalesce(state, 'DENIED');
        RAISE EXCEPTION USING ERRCODE = 'SL010', MESSAGE = 'denied';
      END IF;
      state := 'ACQUIRED';
      FOR i IN 1 .. cardinality(semaphores) LOOP
        INSERT INTO lock.permit (semaphore_id, permit_request_id, count, fence, state)
        VALUES (ids[i], request, counts[i], fences[i], 'ACQUIRED');
      END LOOP;
      IF ttl_seconds IS NOT NULL THEN
        IF clock_timestamp() - began > least(0.01, ttl_seconds / 100) * interval '1 second' THEN
          -- The lease starts now, not before the waits.
          UPDATE lock.permit_request AS r SET renewed_at = clock_timestamp() WHERE r.id = request
          RETURNING r.renewed_at INTO began;
        END IF;
        expires_at := began + ttl_seconds * interval '1 second';
      END IF;
    END IF;
    IF wait_ms IS NOT NULL THEN
      PERFORM set_config('lock_timeout', previous, true);
    END IF;
  EXCEPTION WHEN SQLSTATE 'SL010' THEN
    token := NULL;
    fences := NULL;
    capacities := NULL;
  END;
  acquired := coalesce(state = 'ACQUIRED', false);
END
$body$;

CREATE OR REPLACE FUNCTION lock.semaphore_release(external_id text,
  token text DEFAULT NULL::text, wait_ms integer DEFAULT NULL::integer) RETURNS text
LANGUAGE plpgsql
SET enable_seqscan = 'off'
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  request bigint;
  previous text;
BEGIN
  IF (length(external_id) BETWEEN 1 AND 255 AND right(external_id, 1) <> ' ') IS NOT TRUE THEN
    external_id := lock.semaphore_checked(external_id, 'the external_id of a request');  -- raises
  END IF;
  IF wait_ms IS NOT NULL THEN
    previous := current_setting('lock_timeout');
    PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
  END IF;
  -- Only its request and its permits are locked: it never waits for an acquire. Not "state = 'ACQUIRED'", which may
  -- make the planner prefer the index of held permits to that of the id.
  UPDATE lock.permit_request AS r SET state = 'RELEASED', updated_at = clock_timestamp()
  WHERE r.external_id = semaphore_release.external_id AND r.state <> 'RELEASED'
    AND (semaphore_release.token IS NULL OR r.token = semaphore_release.token)
  RETURNING r.id INTO request;
  IF wait_ms IS NOT NULL THEN
    PERFORM set_config('lock_timeout', previous, true);
  END IF;
  IF request IS NULL THEN
    PERFORM 1 FROM lock.permit_request AS r
    WHERE r.external_id = semaphore_release.external_id
      AND (semaphore_release.token IS NULL OR r.token = semaphore_release.token);
    RETURN CASE WHEN FOUND THEN 'ALREADY_RELEASED' ELSE 'UNKNOWN' END;
  END IF;
  UPDATE lock.permit AS p SET state = 'RELEASED' WHERE p.permit_request_id = request AND p.state <> 'RELEASED';
  RETURN 'RELEASED';
END
$body$;

CREATE OR REPLACE FUNCTION lock.semaphore_renew(external_id text, token text DEFAULT NULL::text,
  wait_ms integer DEFAULT NULL::integer) RETURNS boolean
LANGUAGE plpgsql
SET enable_seqscan = 'off'
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  request bigint;
  previous text;
BEGIN
  external_id := lock.semaphore_checked(external_id, 'the external_id of a request');
  IF wait_ms IS NOT NULL THEN
    previous := current_setting('lock_timeout');
    PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
  END IF;
  SELECT r.id INTO request FROM lock.permit_request AS r
  WHERE r.external_id = semaphore_renew.external_id
    AND (semaphore_renew.token IS NULL OR r.token = semaphore_renew.token)
  FOR NO KEY UPDATE;
  IF wait_ms IS NOT NULL THEN
    PERFORM set_config('lock_timeout', previous, true);
  END IF;
  -- After the locking statement: a clock that is read before a wait is late by the wait.
  UPDATE lock.permit_request AS r SET renewed_at = clock_timestamp()
  WHERE r.id = request AND r.state <> 'RELEASED'
    AND (r.ttl_seconds IS NULL OR r.renewed_at + r.ttl_seconds * interval '1 second' > clock_timestamp());
  RETURN FOUND;
END
$body$;

CREATE OR REPLACE FUNCTION lock.semaphore_create(name text, capacity integer,
  changed_by text DEFAULT NULL::text, wait_ms integer DEFAULT NULL::integer,
  on_demand boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  created bigint;
  existing record;
  previous text;
BEGIN
  name := lock.semaphore_checked(name, 'a semaphore''s name');
  IF changed_by IS NOT NULL THEN
    changed_by := lock.semaphore_checked(changed_by, 'changed_by');
  END IF;
  IF capacity IS NULL OR capacity < 0 THEN
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
      'a capacity is from 0 to 2147483647, not ' || coalesce(capacity::text, 'NULL');
  END IF;
  IF wait_ms IS NOT NULL THEN
    previous := current_setting('lock_timeout');
    PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
  END IF;
  on_demand := coalesce(on_demand, false);
  LOOP
    -- Read without a lock first: if the semaphore exists, the call neither waits nor locks.
    SELECT s.capacity, s.on_demand INTO existing FROM lock.semaphore AS s WHERE s.name = semaphore_create.name;
    IF NOT FOUND THEN
      -- Its fence starts at the greatest fence of all removed semaphores, which the row without a name keeps. The lock
      -- keeps semaphores from being removed until this one exists.
      SELECT s.fence INTO existing FROM lock.semaphore AS s WHERE s.name = '' FOR SHARE;
      IF NOT FOUND THEN  -- the table was emptied
        INSERT INTO lock.semaphore (name) VALUES ('') ON CONFLICT DO NOTHING;
        CONTINUE;
      END IF;
      INSERT INTO lock.semaphore AS s (name, capacity, on_demand, fence)
      VALUES (semaphore_create.name, semaphore_create.capacity, semaphore_create.on_demand, existing.fence)
      ON CONFLICT DO NOTHING RETURNING s.id INTO created;
    ELSIF existing.capacity IS NULL THEN
      -- The row of a deleted semaphore keeps its fence: the fences of a name never decrease.
      UPDATE lock.semaphore AS s SET capacity = semaphore_create.capacity, on_demand = semaphore_create.on_demand,
        updated_at = clock_timestamp()
      WHERE s.name = semaphore_create.name AND s.capacity IS NULL RETURNING s.id INTO created;
    ELSE
      EXIT WHEN semaphore_create.on_demand OR NOT existing.on_demand;
      -- A lease created it: from now on it is kept even if unused.
      UPDATE lock.semaphore AS s SET on_demand = false WHERE s.name = semaphore_create.name AND s.capacity IS NOT NULL;
    END IF;
    EXIT WHEN FOUND;  -- otherwise it was created, deleted or removed meanwhile
  END LOOP;
  IF wait_ms IS NOT NULL THEN
    PERFORM set_config('lock_timeout', previous, true);
  END IF;
  IF created IS NOT NULL AND NOT on_demand THEN
    INSERT INTO lock.semaphore_history (semaphore_id, new_capacity, changed_by)
    VALUES (created, semaphore_create.capacity, semaphore_create.changed_by);
  END IF;
  RETURN created IS NOT NULL;
END
$body$;

CREATE OR REPLACE FUNCTION lock.semaphore_resize(name text, capacity integer,
  changed_by text DEFAULT NULL::text, wait_ms integer DEFAULT NULL::integer,
  missing_ok boolean DEFAULT false) RETURNS integer
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  sem record;
  previous text;
BEGIN
  name := lock.semaphore_checked(name, 'a semaphore''s name');
  IF changed_by IS NOT NULL THEN
    changed_by := lock.semaphore_checked(changed_by, 'changed_by');
  END IF;
  IF capacity IS NULL OR capacity < 0 THEN
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
      'a capacity is from 0 to 2147483647, not ' || coalesce(capacity::text, 'NULL');
  END IF;
  IF wait_ms IS NOT NULL THEN
    previous := current_setting('lock_timeout');
    PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
  END IF;
  SELECT s.id, s.capacity, s.on_demand INTO sem
  FROM lock.semaphore AS s WHERE s.name = semaphore_resize.name FOR UPDATE;
  IF wait_ms IS NOT NULL THEN
    PERFORM set_config('lock_timeout', previous, true);
  END IF;
  IF sem.capacity IS NULL AND missing_ok IS NOT TRUE THEN
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
      'there is no semaphore ' || quote_literal(name) || ': make it with semaphore.create';
  ELSIF sem.capacity <> semaphore_resize.capacity THEN
    UPDATE lock.semaphore AS s
    SET capacity = semaphore_resize.capacity, on_demand = false, updated_at = clock_timestamp()
    WHERE s.id = sem.id;
    INSERT INTO lock.semaphore_history (semaphore_id, old_capacity, new_capacity, changed_by)
    VALUES (sem.id, sem.capacity, semaphore_resize.capacity, semaphore_resize.changed_by);
  ELSIF sem.capacity IS NOT NULL AND sem.on_demand THEN
    -- A lease created it: from now on it is kept, though its capacity is unchanged.
    UPDATE lock.semaphore AS s SET on_demand = false WHERE s.id = sem.id;
  END IF;
  RETURN sem.capacity;
END
$body$;

CREATE OR REPLACE FUNCTION lock.semaphore_delete(name text, changed_by text DEFAULT NULL::text,
  wait_ms integer DEFAULT NULL::integer) RETURNS text
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  sem record;
  previous text;
BEGIN
  name := lock.semaphore_checked(name, 'a semaphore''s name');
  IF changed_by IS NOT NULL THEN
    changed_by := lock.semaphore_checked(changed_by, 'changed_by');
  END IF;
  -- A refusal rolls this block back, which releases its locks.
  BEGIN
    IF wait_ms IS NOT NULL THEN
      previous := current_setting('lock_timeout');
      PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
    END IF;
    SELECT s.id, s.capacity INTO sem FROM lock.semaphore AS s WHERE s.name = semaphore_delete.name FOR UPDATE;
    IF sem.capacity IS NOT NULL THEN
      PERFORM lock.semaphore_take_back(sem.id);
      -- A separate statement: it sees what was released before the lock was acquired.
      PERFORM 1 FROM lock.permit AS p WHERE p.semaphore_id = sem.id AND p.state = 'ACQUIRED';
      IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'SL010', MESSAGE = 'held';
      END IF;
    END IF;
    IF wait_ms IS NOT NULL THEN
      PERFORM set_config('lock_timeout', previous, true);
    END IF;
  EXCEPTION WHEN SQLSTATE 'SL010' THEN
    RETURN 'HELD';
  END;
  IF sem.capacity IS NULL THEN
    RETURN 'UNKNOWN';
  END IF;
  -- The row keeps the fence: a semaphore that is created again under this name continues from it.
  UPDATE lock.semaphore AS s SET capacity = NULL, updated_at = clock_timestamp() WHERE s.id = sem.id;
  INSERT INTO lock.semaphore_history (semaphore_id, old_capacity, changed_by)
  VALUES (sem.id, sem.capacity, semaphore_delete.changed_by);
  RETURN 'DELETED';
END
$body$;

INSERT INTO lock.installed (step, installed_by, owner) VALUES ('0001', 'directives', coalesce((SELECT nspname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = relnamespace WHERE c.oid = to_regclass('"alembic_version"')), '') || '.alembic_version') ON CONFLICT DO NOTHING;

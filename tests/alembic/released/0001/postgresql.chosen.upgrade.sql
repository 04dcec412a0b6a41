DO $sqlalchemy_locks$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'elsewhere') THEN
    CREATE SCHEMA "elsewhere";
    COMMENT ON SCHEMA "elsewhere" IS 'created by sqlalchemy_locks';
  END IF;
END
$sqlalchemy_locks$;

CREATE TABLE IF NOT EXISTS "elsewhere".installed (step text PRIMARY KEY, door text NOT NULL);

DO $sqlalchemy_locks$
BEGIN
  IF to_regprocedure('"elsewhere".exclusive(bigint)') IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'duplicate_function', MESSAGE =
      'there is a function elsewhere.exclusive(bigint) already, and calls would reach it'
      ' instead of the one to be installed: drop it, or install into another schema';
  END IF;
  IF to_regprocedure('"elsewhere".shared(bigint)') IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'duplicate_function', MESSAGE =
      'there is a function elsewhere.shared(bigint) already, and calls would reach it'
      ' instead of the one to be installed: drop it, or install into another schema';
  END IF;
  IF strpos(version(), '-YB-') > 0 THEN
    IF EXISTS (SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace AS place ON place.oid = relnamespace WHERE relname = 'locked_keys' AND nspname = 'elsewhere' AND relkind <> 'r') THEN
      RAISE EXCEPTION USING ERRCODE = 'wrong_object_type', MESSAGE =
        'elsewhere.locked_keys is there already and is not a table: drop it, or downgrade'
        ' to base with the locking option that it was installed with, then upgrade again';
    END IF;
    CREATE TABLE IF NOT EXISTS "elsewhere".locked_keys (
      key bigint PRIMARY KEY, ts timestamp with time zone NOT NULL DEFAULT clock_timestamp());
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".key(VARIADIC parts text[]) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $body$
  -- sqlalchemy_locks 0001
  -- A NUL between the parts: no text holds one, so ('a', 'b') is never ('a:b') or ('ab').
  -- A NULL part gives NULL, which the locks refuse.
  SELECT CASE WHEN array_position(parts, NULL) IS NULL THEN ('x' || left(encode(sha256(
    string_agg(convert_to(part, 'UTF8'), '\x00'::bytea ORDER BY place)
  ), 'hex'), 16))::bit(64)::bigint END
  FROM unnest(parts) WITH ORDINALITY AS given (part, place)
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".refuse(allow_stale boolean) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  isolation text := current_setting('transaction_isolation');
BEGIN
  IF pg_is_in_recovery() THEN
    RAISE EXCEPTION USING ERRCODE = 'SL001', MESSAGE =
      'no lock is taken on a standby, because it grants locks of its own and so two sessions'
      ' could hold the same one: connect to the primary';
  ELSIF current_setting('transaction_read_only') = 'on' THEN
    RAISE EXCEPTION USING ERRCODE = 'SL002', MESSAGE =
      'no lock is taken in a read-only transaction, because the server may be a replica whose locks'
      ' bind nobody else: use a read-write transaction';
  ELSIF allow_stale IS NOT TRUE THEN
    -- A cluster without yb_enable_read_committed_isolation runs Snapshot and calls it read committed.
    IF to_regprocedure('yb_get_effective_transaction_isolation_level()') IS NOT NULL THEN
      EXECUTE 'SELECT lower(yb_get_effective_transaction_isolation_level())' INTO isolation;
    ELSE
      isolation := coalesce(current_setting('yb_effective_transaction_isolation_level', true), isolation);
    END IF;
    IF isolation NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION USING ERRCODE = 'SL003', MESSAGE =
        'no lock is taken in a transaction that is effectively ' || upper(isolation) || ', because its'
        ' snapshot is older than the lock and so what the holder then reads may be stale:'
        ' use READ COMMITTED, with yb_enable_read_committed_isolation on in the cluster, or pass allow_stale';
    END IF;
  END IF;
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".exclusive(key bigint, allow_stale boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  previous text := current_setting('yb_disable_transactional_writes');
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  END IF;
  PERFORM "elsewhere".refuse(allow_stale);
  -- Again until the row is there: unlock() and vacuum() may remove it while we wait for it. Bounded, because
  -- under allow_stale a row that the snapshot is too old to see would have it go round for ever.
  FOR round IN 1..100 LOOP
    PERFORM 1 FROM "elsewhere".locked_keys AS held WHERE held.key = exclusive.key FOR UPDATE;
    IF FOUND THEN
      RETURN;
    END IF;
    -- Not part of the transaction: so a new key is never held by its insert, which a sharer must not
    -- do and which try_* could not get past, as row locks don't heed lock_timeout here.
    PERFORM set_config('yb_disable_transactional_writes', 'on', true);
    INSERT INTO "elsewhere".locked_keys (key) VALUES (exclusive.key) ON CONFLICT DO NOTHING;
    PERFORM set_config('yb_disable_transactional_writes', previous, true);
  END LOOP;
  RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE =
    'could not serialize access: the key is not visible to this transaction, begin it again';
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".shared(key bigint, allow_stale boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  previous text := current_setting('yb_disable_transactional_writes');
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  END IF;
  PERFORM "elsewhere".refuse(allow_stale);
  -- Again until the row is there: unlock() and vacuum() may remove it while we wait for it. Bounded, because
  -- under allow_stale a row that the snapshot is too old to see would have it go round for ever.
  FOR round IN 1..100 LOOP
    PERFORM 1 FROM "elsewhere".locked_keys AS held WHERE held.key = shared.key FOR SHARE;
    IF FOUND THEN
      RETURN;
    END IF;
    -- Not part of the transaction: so a new key is never held by its insert, which a sharer must not
    -- do and which try_* could not get past, as row locks don't heed lock_timeout here.
    PERFORM set_config('yb_disable_transactional_writes', 'on', true);
    INSERT INTO "elsewhere".locked_keys (key) VALUES (shared.key) ON CONFLICT DO NOTHING;
    PERFORM set_config('yb_disable_transactional_writes', previous, true);
  END LOOP;
  RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE =
    'could not serialize access: the key is not visible to this transaction, begin it again';
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".try_exclusive(key bigint, allow_stale boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql
SET lock_timeout = '100ms'
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  previous text := current_setting('yb_disable_transactional_writes');
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  END IF;
  PERFORM "elsewhere".refuse(allow_stale);
  FOR round IN 1..100 LOOP
    PERFORM 1 FROM "elsewhere".locked_keys AS held WHERE held.key = try_exclusive.key FOR UPDATE NOWAIT;
    IF FOUND THEN
      RETURN true;
    END IF;
    -- Not part of the transaction, as in exclusive(), so that nobody's uncommitted insert is in the way. Where
    -- one is all the same, lock_timeout ends the wait; not sooner, as it counts for locks of the table, too,
    -- which are had from another process.
    PERFORM set_config('yb_disable_transactional_writes', 'on', true);
    INSERT INTO "elsewhere".locked_keys (key) VALUES (try_exclusive.key) ON CONFLICT DO NOTHING;
    PERFORM set_config('yb_disable_transactional_writes', previous, true);
  END LOOP;
  RETURN false;
EXCEPTION WHEN lock_not_available OR serialization_failure THEN
  RETURN false;
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".try_shared(key bigint, allow_stale boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql
SET lock_timeout = '100ms'
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  previous text := current_setting('yb_disable_transactional_writes');
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  END IF;
  PERFORM "elsewhere".refuse(allow_stale);
  FOR round IN 1..100 LOOP
    PERFORM 1 FROM "elsewhere".locked_keys AS held WHERE held.key = try_shared.key FOR SHARE NOWAIT;
    IF FOUND THEN
      RETURN true;
    END IF;
    -- Not part of the transaction, as in shared(), so that nobody's uncommitted insert is in the way. Where
    -- one is all the same, lock_timeout ends the wait; not sooner, as it counts for locks of the table, too,
    -- which are had from another process.
    PERFORM set_config('yb_disable_transactional_writes', 'on', true);
    INSERT INTO "elsewhere".locked_keys (key) VALUES (try_shared.key) ON CONFLICT DO NOTHING;
    PERFORM set_config('yb_disable_transactional_writes', previous, true);
  END LOOP;
  RETURN false;
EXCEPTION WHEN lock_not_available OR serialization_failure THEN
  RETURN false;
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".create(keys bigint[]) RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  made bigint;
BEGIN
  IF keys IS NULL OR array_position(keys, NULL) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  END IF;
  PERFORM "elsewhere".refuse(true);
  -- In one order for everybody, so that two callers that make the same keys can't deadlock.
  INSERT INTO "elsewhere".locked_keys (key)
  SELECT DISTINCT wanted.key FROM unnest(keys) AS wanted (key) ORDER BY wanted.key
  ON CONFLICT DO NOTHING;
  GET DIAGNOSTICS made = ROW_COUNT;
  RETURN made;
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".unlock(key bigint) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  END IF;
  PERFORM "elsewhere".refuse(true);
  -- SKIP LOCKED: never waits for another holder, and two sharers who both unlock don't deadlock.
  DELETE FROM "elsewhere".locked_keys AS gone WHERE gone.key = ANY (ARRAY(
    SELECT free.key FROM "elsewhere".locked_keys AS free WHERE free.key = unlock.key FOR UPDATE SKIP LOCKED));
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".vacuum() RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  removed bigint := 0;
  round bigint;
BEGIN
  PERFORM "elsewhere".refuse(true);
  LOOP
    DELETE FROM "elsewhere".locked_keys AS gone WHERE gone.key = ANY (ARRAY(
      SELECT free.key FROM "elsewhere".locked_keys AS free LIMIT 10000 FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS round = ROW_COUNT;
    removed := removed + round;
    EXIT WHEN round = 0;
  END LOOP;
  RETURN removed;
END
$body$
$command$;
  ELSE
    IF EXISTS (SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace AS place ON place.oid = relnamespace WHERE relname = 'locked_keys' AND nspname = 'elsewhere' AND relkind <> 'r') THEN
      RAISE EXCEPTION USING ERRCODE = 'wrong_object_type', MESSAGE =
        'elsewhere.locked_keys is there already and is not a table: drop it, or downgrade'
        ' to base with the locking option that it was installed with, then upgrade again';
    END IF;
    CREATE TABLE IF NOT EXISTS "elsewhere".locked_keys (
      key bigint PRIMARY KEY, ts timestamp with time zone NOT NULL DEFAULT clock_timestamp());
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".key(VARIADIC parts text[]) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $body$
  -- sqlalchemy_locks 0001
  -- A NUL between the parts: no text holds one, so ('a', 'b') is never ('a:b') or ('ab').
  -- A NULL part gives NULL, which the locks refuse.
  SELECT CASE WHEN array_position(parts, NULL) IS NULL THEN ('x' || left(encode(sha256(
    string_agg(convert_to(part, 'UTF8'), '\x00'::bytea ORDER BY place)
  ), 'hex'), 16))::bit(64)::bigint END
  FROM unnest(parts) WITH ORDINALITY AS given (part, place)
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".refuse(allow_stale boolean) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF pg_is_in_recovery() THEN
    RAISE EXCEPTION USING ERRCODE = 'SL001', MESSAGE =
      'no lock is taken on a standby, because it grants locks of its own and so two sessions'
      ' could hold the same one: connect to the primary';
  ELSIF current_setting('transaction_read_only') = 'on' THEN
    RAISE EXCEPTION USING ERRCODE = 'SL002', MESSAGE =
      'no lock is taken in a read-only transaction, because the server may be a replica whose locks'
      ' bind nobody else: use a read-write transaction';
  ELSIF allow_stale IS NOT TRUE
    AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
  THEN
    RAISE EXCEPTION USING ERRCODE = 'SL003', MESSAGE =
      'no lock is taken in a ' || upper(current_setting('transaction_isolation')) || ' transaction, because its'
      ' snapshot is older than the lock and so what the holder then reads may be stale:'
      ' use READ COMMITTED, or pass allow_stale';
  END IF;
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".exclusive(key bigint, allow_stale boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  ELSIF pg_is_in_recovery()
    OR current_setting('transaction_read_only') = 'on'
    OR (allow_stale IS NOT TRUE
        AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted'))
  THEN
    PERFORM "elsewhere".refuse(allow_stale);
  END IF;
  -- Again until the row is there: unlock() and vacuum() may remove it while we wait for it.
  LOOP
    PERFORM 1 FROM "elsewhere".locked_keys AS held WHERE held.key = exclusive.key FOR UPDATE;
    EXIT WHEN FOUND;
    INSERT INTO "elsewhere".locked_keys (key) VALUES (exclusive.key) ON CONFLICT DO NOTHING;
    EXIT WHEN FOUND;
  END LOOP;
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".shared(key bigint, allow_stale boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  ELSIF pg_is_in_recovery()
    OR current_setting('transaction_read_only') = 'on'
    OR (allow_stale IS NOT TRUE
        AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted'))
  THEN
    PERFORM "elsewhere".refuse(allow_stale);
  END IF;
  -- Again until the row is there: unlock() and vacuum() may remove it while we wait for it.
  LOOP
    PERFORM 1 FROM "elsewhere".locked_keys AS held WHERE held.key = shared.key FOR SHARE;
    EXIT WHEN FOUND;
    INSERT INTO "elsewhere".locked_keys (key) VALUES (shared.key) ON CONFLICT DO NOTHING;
    EXIT WHEN FOUND;
  END LOOP;
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".try_exclusive(key bigint, allow_stale boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql
SET lock_timeout = '1ms'
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  ELSIF pg_is_in_recovery()
    OR current_setting('transaction_read_only') = 'on'
    OR (allow_stale IS NOT TRUE
        AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted'))
  THEN
    PERFORM "elsewhere".refuse(allow_stale);
  END IF;
  LOOP
    PERFORM 1 FROM "elsewhere".locked_keys AS held WHERE held.key = try_exclusive.key FOR UPDATE NOWAIT;
    EXIT WHEN FOUND;
    -- NOWAIT has no say here: it is lock_timeout that ends the wait for another's uncommitted insert.
    INSERT INTO "elsewhere".locked_keys (key) VALUES (try_exclusive.key) ON CONFLICT DO NOTHING;
    EXIT WHEN FOUND;
  END LOOP;
  RETURN true;
EXCEPTION WHEN lock_not_available OR serialization_failure THEN
  RETURN false;
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".try_shared(key bigint, allow_stale boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql
SET lock_timeout = '1ms'
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  ELSIF pg_is_in_recovery()
    OR current_setting('transaction_read_only') = 'on'
    OR (allow_stale IS NOT TRUE
        AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted'))
  THEN
    PERFORM "elsewhere".refuse(allow_stale);
  END IF;
  LOOP
    PERFORM 1 FROM "elsewhere".locked_keys AS held WHERE held.key = try_shared.key FOR SHARE NOWAIT;
    EXIT WHEN FOUND;
    -- NOWAIT has no say here: it is lock_timeout that ends the wait for another's uncommitted insert.
    INSERT INTO "elsewhere".locked_keys (key) VALUES (try_shared.key) ON CONFLICT DO NOTHING;
    EXIT WHEN FOUND;
  END LOOP;
  RETURN true;
EXCEPTION WHEN lock_not_available OR serialization_failure THEN
  RETURN false;
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".create(keys bigint[]) RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  made bigint;
BEGIN
  IF keys IS NULL OR array_position(keys, NULL) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  END IF;
  PERFORM "elsewhere".refuse(true);
  -- In one order for everybody, so that two callers that make the same keys can't deadlock.
  INSERT INTO "elsewhere".locked_keys (key)
  SELECT DISTINCT wanted.key FROM unnest(keys) AS wanted (key) ORDER BY wanted.key
  ON CONFLICT DO NOTHING;
  GET DIAGNOSTICS made = ROW_COUNT;
  RETURN made;
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".unlock(key bigint) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'a lock needs a key, and NULL is none';
  END IF;
  PERFORM "elsewhere".refuse(true);
  -- SKIP LOCKED: never waits for another holder, and two sharers who both unlock don't deadlock.
  DELETE FROM "elsewhere".locked_keys AS gone WHERE gone.key = ANY (ARRAY(
    SELECT free.key FROM "elsewhere".locked_keys AS free WHERE free.key = unlock.key FOR UPDATE SKIP LOCKED));
END
$body$
$command$;
    EXECUTE $command$
CREATE OR REPLACE FUNCTION "elsewhere".vacuum() RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  removed bigint := 0;
  round bigint;
BEGIN
  PERFORM "elsewhere".refuse(true);
  LOOP
    DELETE FROM "elsewhere".locked_keys AS gone WHERE gone.key = ANY (ARRAY(
      SELECT free.key FROM "elsewhere".locked_keys AS free LIMIT 10000 FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS round = ROW_COUNT;
    removed := removed + round;
    EXIT WHEN round = 0;
  END LOOP;
  RETURN removed;
END
$body$
$command$;
  END IF;
END
$sqlalchemy_locks$;

REVOKE ALL ON FUNCTION "elsewhere".key(text[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION "elsewhere".refuse(boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION "elsewhere".exclusive(bigint, boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION "elsewhere".shared(bigint, boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION "elsewhere".try_exclusive(bigint, boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION "elsewhere".try_shared(bigint, boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION "elsewhere".create(bigint[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION "elsewhere".unlock(bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION "elsewhere".vacuum() FROM PUBLIC;

GRANT USAGE ON SCHEMA "elsewhere" TO "app";

GRANT EXECUTE ON FUNCTION "elsewhere".key(text[]) TO "app";

GRANT EXECUTE ON FUNCTION "elsewhere".refuse(boolean) TO "app";

GRANT EXECUTE ON FUNCTION "elsewhere".exclusive(bigint, boolean) TO "app";

GRANT EXECUTE ON FUNCTION "elsewhere".shared(bigint, boolean) TO "app";

GRANT EXECUTE ON FUNCTION "elsewhere".try_exclusive(bigint, boolean) TO "app";

GRANT EXECUTE ON FUNCTION "elsewhere".try_shared(bigint, boolean) TO "app";

GRANT EXECUTE ON FUNCTION "elsewhere".create(bigint[]) TO "app";

GRANT EXECUTE ON FUNCTION "elsewhere".unlock(bigint) TO "app";

GRANT EXECUTE ON FUNCTION "elsewhere".vacuum() TO "app";

GRANT SELECT ON "elsewhere".installed TO "app";

DO $sqlalchemy_locks$
BEGIN
  IF EXISTS (SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace AS place ON place.oid = relnamespace WHERE relname = 'locked_keys' AND nspname = 'elsewhere' AND relkind = 'r') THEN
    GRANT SELECT, INSERT, UPDATE, DELETE ON "elsewhere".locked_keys TO "app";
  ELSE
    GRANT SELECT ON "elsewhere".locked_keys TO "app";
  END IF;
END
$sqlalchemy_locks$;

GRANT USAGE ON SCHEMA "elsewhere" TO "other";

GRANT EXECUTE ON FUNCTION "elsewhere".key(text[]) TO "other";

GRANT EXECUTE ON FUNCTION "elsewhere".refuse(boolean) TO "other";

GRANT EXECUTE ON FUNCTION "elsewhere".exclusive(bigint, boolean) TO "other";

GRANT EXECUTE ON FUNCTION "elsewhere".shared(bigint, boolean) TO "other";

GRANT EXECUTE ON FUNCTION "elsewhere".try_exclusive(bigint, boolean) TO "other";

GRANT EXECUTE ON FUNCTION "elsewhere".try_shared(bigint, boolean) TO "other";

GRANT EXECUTE ON FUNCTION "elsewhere".create(bigint[]) TO "other";

GRANT EXECUTE ON FUNCTION "elsewhere".unlock(bigint) TO "other";

GRANT EXECUTE ON FUNCTION "elsewhere".vacuum() TO "other";

GRANT SELECT ON "elsewhere".installed TO "other";

DO $sqlalchemy_locks$
BEGIN
  IF EXISTS (SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace AS place ON place.oid = relnamespace WHERE relname = 'locked_keys' AND nspname = 'elsewhere' AND relkind = 'r') THEN
    GRANT SELECT, INSERT, UPDATE, DELETE ON "elsewhere".locked_keys TO "other";
  ELSE
    GRANT SELECT ON "elsewhere".locked_keys TO "other";
  END IF;
END
$sqlalchemy_locks$;

INSERT INTO "elsewhere".installed (step, door) VALUES ('0001', 'directives') ON CONFLICT DO NOTHING;

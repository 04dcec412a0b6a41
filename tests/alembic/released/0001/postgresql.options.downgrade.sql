-- fails with a duplicate key while another version table has this step, too
INSERT INTO "elsewhere".installed (step, installed_by, owner) SELECT step, installed_by, owner FROM "elsewhere".installed WHERE step = '0001' AND owner <> coalesce((SELECT nspname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = relnamespace WHERE c.oid = to_regclass('"alembic_version"')), '') || '.alembic_version';

DROP FUNCTION IF EXISTS "elsewhere".semaphore_delete(text, text, integer);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_resize(text, integer, text, integer, boolean);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_create(text, integer, text, integer, boolean);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_renew(text, text, integer);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_release(text, text, integer);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_acquire(text[], integer[], text, text, double precision, integer, text, boolean, bigint[]);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_take_back(bigint);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_checked(text, text);

DROP FUNCTION IF EXISTS "elsewhere".key(text[]);

DROP FUNCTION IF EXISTS "elsewhere".vacuum();

DROP FUNCTION IF EXISTS "elsewhere".unlock(bigint);

DROP FUNCTION IF EXISTS "elsewhere".create(bigint[]);

DROP FUNCTION IF EXISTS "elsewhere".try_shared(bigint, boolean);

DROP FUNCTION IF EXISTS "elsewhere".try_exclusive(bigint, boolean);

DROP FUNCTION IF EXISTS "elsewhere".shared(bigint, boolean, integer);

DROP FUNCTION IF EXISTS "elsewhere".exclusive(bigint, boolean, integer);

DROP FUNCTION IF EXISTS "elsewhere".refuse(boolean);

DROP TABLE IF EXISTS "elsewhere".semaphore_history;

DROP TABLE IF EXISTS "elsewhere".permit;

DROP TABLE IF EXISTS "elsewhere".permit_request;

DROP TABLE IF EXISTS "elsewhere".semaphore;

DROP TABLE IF EXISTS "elsewhere".worker;

DROP TABLE IF EXISTS "elsewhere".paused_queue;

DROP TABLE IF EXISTS "elsewhere".job;

DROP TABLE IF EXISTS "elsewhere".task;

DROP TABLE IF EXISTS "elsewhere".task_timeout;

DROP TABLE IF EXISTS "elsewhere".task_state;

DO $sqlalchemy_locks$
BEGIN
  IF EXISTS (SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace AS n ON n.oid = relnamespace WHERE relname = 'locked_keys' AND nspname = 'elsewhere' AND relkind = 'v') THEN
    DROP VIEW "elsewhere".locked_keys;
  ELSE
    DROP TABLE IF EXISTS "elsewhere".locked_keys;
  END IF;
END
$sqlalchemy_locks$;

DROP TABLE IF EXISTS "elsewhere".installed;

DO $sqlalchemy_locks$
BEGIN
  IF EXISTS (
    SELECT FROM pg_catalog.pg_namespace AS n
    WHERE nspname = 'elsewhere'
      AND obj_description(n.oid, 'pg_namespace') = 'created by sqlalchemy_locks'
      AND pg_has_role(nspowner, 'USAGE')
      AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend
        WHERE refclassid = 'pg_catalog.pg_namespace'::regclass AND refobjid = n.oid)
  ) THEN
    DROP SCHEMA "elsewhere";
  END IF;
END
$sqlalchemy_locks$;

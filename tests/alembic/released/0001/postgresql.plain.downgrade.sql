DROP FUNCTION IF EXISTS lock.vacuum();

DROP FUNCTION IF EXISTS lock.unlock(bigint);

DROP FUNCTION IF EXISTS lock.create(bigint[]);

DROP FUNCTION IF EXISTS lock.try_shared(bigint, boolean);

DROP FUNCTION IF EXISTS lock.try_exclusive(bigint, boolean);

DROP FUNCTION IF EXISTS lock.shared(bigint, boolean);

DROP FUNCTION IF EXISTS lock.exclusive(bigint, boolean);

DROP FUNCTION IF EXISTS lock.refuse(boolean);

DROP FUNCTION IF EXISTS lock.key(text[]);

DO $sqlalchemy_locks$
BEGIN
  IF EXISTS (SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace AS place ON place.oid = relnamespace WHERE relname = 'locked_keys' AND nspname = 'lock' AND relkind = 'v') THEN
    DROP VIEW lock.locked_keys;
  ELSE
    DROP TABLE IF EXISTS lock.locked_keys;
  END IF;
END
$sqlalchemy_locks$;

DROP TABLE IF EXISTS lock.installed;

DO $sqlalchemy_locks$
BEGIN
  IF EXISTS (
    SELECT FROM pg_catalog.pg_namespace AS place
    WHERE nspname = 'lock'
      AND obj_description(place.oid, 'pg_namespace') = 'created by sqlalchemy_locks'
      AND pg_has_role(nspowner, 'USAGE')
      AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend
        WHERE refclassid = 'pg_catalog.pg_namespace'::regclass AND refobjid = place.oid)
  ) THEN
    DROP SCHEMA lock;
  END IF;
END
$sqlalchemy_locks$;

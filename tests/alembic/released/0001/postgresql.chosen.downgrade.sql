DROP FUNCTION IF EXISTS "elsewhere".vacuum();

DROP FUNCTION IF EXISTS "elsewhere".unlock(bigint);

DROP FUNCTION IF EXISTS "elsewhere".create(bigint[]);

DROP FUNCTION IF EXISTS "elsewhere".try_shared(bigint, boolean);

DROP FUNCTION IF EXISTS "elsewhere".try_exclusive(bigint, boolean);

DROP FUNCTION IF EXISTS "elsewhere".shared(bigint, boolean);

DROP FUNCTION IF EXISTS "elsewhere".exclusive(bigint, boolean);

DROP FUNCTION IF EXISTS "elsewhere".refuse(boolean);

DROP FUNCTION IF EXISTS "elsewhere".key(text[]);

DO $sqlalchemy_locks$
BEGIN
  IF EXISTS (SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace AS place ON place.oid = relnamespace WHERE relname = 'locked_keys' AND nspname = 'elsewhere' AND relkind = 'v') THEN
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
    SELECT FROM pg_catalog.pg_namespace AS place
    WHERE nspname = 'elsewhere'
      AND obj_description(place.oid, 'pg_namespace') = 'created by sqlalchemy_locks'
      AND pg_has_role(nspowner, 'USAGE')
      AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend
        WHERE refclassid = 'pg_catalog.pg_namespace'::regclass AND refobjid = place.oid)
  ) THEN
    DROP SCHEMA "elsewhere";
  END IF;
END
$sqlalchemy_locks$;

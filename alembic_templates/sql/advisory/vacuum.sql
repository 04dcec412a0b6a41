CREATE OR REPLACE FUNCTION lock.vacuum() RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  -- Nothing to delete: advisory locks have no rows.
  PERFORM lock.refuse(true);
  RETURN 0;
END
$body$;

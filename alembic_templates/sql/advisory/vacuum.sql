CREATE OR REPLACE FUNCTION lock.vacuum() RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  -- Nothing to remove: an advisory lock leaves no row.
  PERFORM lock.refuse(true);
  RETURN 0;
END
$body$;

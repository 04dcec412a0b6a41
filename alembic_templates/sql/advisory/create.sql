CREATE OR REPLACE FUNCTION lock.create(keys bigint[]) RETURNS bigint
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  PERFORM lock.refuse(true);
  -- Advisory locks need no row that would have to be there before.
  RETURN 0;
END
$body$;

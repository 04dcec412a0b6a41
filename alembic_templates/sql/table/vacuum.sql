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
$body$;

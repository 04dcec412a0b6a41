CREATE OR REPLACE FUNCTION lock.semaphore_renew(external_id text) RETURNS boolean
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0004
DECLARE
  request bigint;
BEGIN
  SELECT r.id INTO request FROM lock.permit_request AS r
  WHERE r.external_id = semaphore_renew.external_id FOR NO KEY UPDATE;
  -- In a later statement than the lock's, since a clock that is read before a wait is slow by the wait.
  UPDATE lock.permit_request AS r SET renewed_at = clock_timestamp()
  WHERE r.id = request AND r.state <> 'RELEASED'
    AND (r.ttl_seconds IS NULL OR r.renewed_at + r.ttl_seconds * interval '1 second' > clock_timestamp());
  RETURN FOUND;
END
$body$;

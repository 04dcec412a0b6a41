CREATE OR REPLACE FUNCTION lock.semaphore_known(external_id text, names text[], counts integer[],
  OUT state text, OUT request_id bigint, OUT expires_at timestamp with time zone, OUT fences bigint[]) RETURNS record
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0004
DECLARE
  held record;
BEGIN
  -- Locked, so that the answer is the one after a release that is under way, whatever the isolation level.
  SELECT r.id, r.state, r.renewed_at + r.ttl_seconds * interval '1 second'
  INTO request_id, state, expires_at
  FROM lock.permit_request AS r WHERE r.external_id = semaphore_known.external_id FOR UPDATE;
  IF state IS NULL THEN
    RETURN;  -- cleaned up meanwhile
  END IF;
  SELECT array_agg(s.name ORDER BY s.name COLLATE "C") AS names,
         array_agg(p.count ORDER BY s.name COLLATE "C") AS counts,
         array_agg(p.fence ORDER BY s.name COLLATE "C") AS fences
  INTO held FROM lock.permit AS p JOIN lock.semaphore AS s ON s.id = p.semaphore_id
  WHERE p.permit_request_id = request_id;
  IF held.names IS DISTINCT FROM names OR held.counts IS DISTINCT FROM counts THEN
    state := 'CONFLICT';
  ELSIF state = 'ACQUIRED' AND expires_at <= clock_timestamp() THEN
    state := 'EXPIRED';
  END IF;
  fences := held.fences;
END
$body$;

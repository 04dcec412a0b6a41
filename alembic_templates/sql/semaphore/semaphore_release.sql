CREATE OR REPLACE FUNCTION lock.semaphore_release(external_id text) RETURNS text
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0004
DECLARE
  request bigint;
BEGIN
  -- Its own request, then its own permits: it waits for nobody who acquires. Not "state = 'ACQUIRED'", for which
  -- the planner may prefer an index on what is held to the one on the id.
  UPDATE lock.permit_request AS r SET state = 'RELEASED', updated_at = clock_timestamp()
  WHERE r.external_id = semaphore_release.external_id AND r.state <> 'RELEASED'
  RETURNING r.id INTO request;
  IF request IS NULL THEN
    PERFORM 1 FROM lock.permit_request AS r WHERE r.external_id = semaphore_release.external_id;
    RETURN CASE WHEN FOUND THEN 'ALREADY_RELEASED' ELSE 'UNKNOWN' END;
  END IF;
  UPDATE lock.permit AS p SET state = 'RELEASED' WHERE p.permit_request_id = request AND p.state <> 'RELEASED';
  RETURN 'RELEASED';
END
$body$;

CREATE OR REPLACE FUNCTION lock.semaphore_release(external_id text,
  token text DEFAULT NULL::text, wait_ms integer DEFAULT NULL::integer) RETURNS text
LANGUAGE plpgsql
SET enable_seqscan = 'off'
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  request bigint;
  previous text;
BEGIN
  IF (length(external_id) BETWEEN 1 AND 255 AND right(external_id, 1) <> ' ') IS NOT TRUE THEN
    external_id := lock.semaphore_checked(external_id, 'the external_id of a request');  -- raises
  END IF;
  IF wait_ms IS NOT NULL THEN
    previous := current_setting('lock_timeout');
    PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
  END IF;
  -- Only its request and its permits are locked: it never waits for an acquire. Not "state = 'ACQUIRED'", which may
  -- make the planner prefer the index of held permits to that of the id.
  UPDATE lock.permit_request AS r SET state = 'RELEASED', updated_at = clock_timestamp()
  WHERE r.external_id = semaphore_release.external_id AND r.state <> 'RELEASED'
    AND (semaphore_release.token IS NULL OR r.token = semaphore_release.token)
  RETURNING r.id INTO request;
  IF wait_ms IS NOT NULL THEN
    PERFORM set_config('lock_timeout', previous, true);
  END IF;
  IF request IS NULL THEN
    PERFORM 1 FROM lock.permit_request AS r
    WHERE r.external_id = semaphore_release.external_id
      AND (semaphore_release.token IS NULL OR r.token = semaphore_release.token);
    RETURN CASE WHEN FOUND THEN 'ALREADY_RELEASED' ELSE 'UNKNOWN' END;
  END IF;
  UPDATE lock.permit AS p SET state = 'RELEASED' WHERE p.permit_request_id = request AND p.state <> 'RELEASED';
  RETURN 'RELEASED';
END
$body$;

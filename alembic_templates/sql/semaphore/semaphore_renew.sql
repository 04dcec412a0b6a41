CREATE OR REPLACE FUNCTION lock.semaphore_renew(external_id text, token text DEFAULT NULL::text,
  wait_ms integer DEFAULT NULL::integer) RETURNS boolean
LANGUAGE plpgsql
SET enable_seqscan = 'off'
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  request bigint;
  previous text;
BEGIN
  external_id := lock.semaphore_checked(external_id, 'the external_id of a request');
  IF wait_ms IS NOT NULL THEN
    previous := current_setting('lock_timeout');
    PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
  END IF;
  SELECT r.id INTO request FROM lock.permit_request AS r
  WHERE r.external_id = semaphore_renew.external_id
    AND (semaphore_renew.token IS NULL OR r.token = semaphore_renew.token)
  FOR NO KEY UPDATE;
  IF wait_ms IS NOT NULL THEN
    PERFORM set_config('lock_timeout', previous, true);
  END IF;
  -- After the locking statement: a clock that is read before a wait is late by the wait.
  UPDATE lock.permit_request AS r SET renewed_at = clock_timestamp()
  WHERE r.id = request AND r.state <> 'RELEASED'
    AND (r.ttl_seconds IS NULL OR r.renewed_at + r.ttl_seconds * interval '1 second' > clock_timestamp());
  RETURN FOUND;
END
$body$;

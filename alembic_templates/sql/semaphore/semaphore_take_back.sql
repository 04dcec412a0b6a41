CREATE OR REPLACE FUNCTION lock.semaphore_take_back(semaphore bigint) RETURNS integer
LANGUAGE plpgsql
SET enable_seqscan = 'off'
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  taken bigint[];
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    -- The snapshot may be too old to see a release: this then raises a serialization failure instead of a false
    -- denial.
    PERFORM 1 FROM lock.permit AS p WHERE p.semaphore_id = semaphore AND p.state = 'ACQUIRED' FOR SHARE;
  END IF;
  -- SKIP LOCKED: requests that are being renewed, released, or held by a guarded write are skipped without a wait.
  WITH expired AS MATERIALIZED (
    SELECT r.id, r.renewed_at FROM lock.permit_request AS r
    WHERE r.id IN (SELECT p.permit_request_id FROM lock.permit AS p
                   WHERE p.semaphore_id = semaphore AND p.state = 'ACQUIRED')
      AND r.state = 'ACQUIRED' AND r.renewed_at + r.ttl_seconds * interval '1 second' <= clock_timestamp()
    FOR UPDATE SKIP LOCKED
  ), released AS (
    UPDATE lock.permit_request AS r SET state = 'RELEASED', updated_at = clock_timestamp()
    FROM expired AS e WHERE r.id = e.id AND r.state = 'ACQUIRED' AND r.renewed_at = e.renewed_at
    RETURNING r.id
  )
  SELECT array_agg(released.id) INTO taken FROM released;
  UPDATE lock.permit AS p SET state = 'RELEASED'
  WHERE p.permit_request_id = ANY (taken) AND p.state <> 'RELEASED';
  RETURN coalesce(cardinality(taken), 0);
END
$body$;

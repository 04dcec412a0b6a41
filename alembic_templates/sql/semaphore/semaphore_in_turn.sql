CREATE OR REPLACE FUNCTION lock.semaphore_in_turn(lines bigint[], names text[], counts integer[], external_id text,
  owner text DEFAULT NULL::text, ttl_seconds double precision DEFAULT NULL::double precision,
  lock_wait text DEFAULT NULL::text, OUT acquired boolean, OUT state text, OUT replayed boolean,
  OUT token text, OUT expires_at timestamp with time zone, OUT semaphores text[],
  OUT fences bigint[], OUT exhausted text[], OUT capacities integer[]) RETURNS record
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  free boolean;
BEGIN
  FOR i IN 1 .. coalesce(cardinality(names), 0) LOOP
    IF strpos(version(), '-YB-') = 0 THEN
      -- Waiters for permits hold this lock or wait for it: the try fails in both cases.
      free := pg_try_advisory_xact_lock_shared(lines[i]);
    ELSE
      -- The lock of a row, which exists once a session has waited; the first waiter holds it.
      free := NOT EXISTS (SELECT FROM lock.locked_keys AS line WHERE line.key = lines[i])
        OR lock.try_shared(lines[i], true);
    END IF;
    IF NOT free THEN
      exhausted := exhausted || names[i];
    END IF;
  END LOOP;
  -- A request that was granted already must not queue behind the waiters.
  IF exhausted IS NOT NULL AND NOT EXISTS (
    SELECT FROM lock.permit_request AS r WHERE r.external_id = semaphore_in_turn.external_id)
  THEN
    acquired := false;
    state := 'DENIED';
    replayed := false;
    semaphores := names;
    RETURN;
  END IF;
  SELECT granted.* INTO acquired, state, replayed, token, expires_at, semaphores, fences, exhausted,
    capacities
  FROM lock.semaphore_acquire(names, counts, semaphore_in_turn.external_id, semaphore_in_turn.owner,
    semaphore_in_turn.ttl_seconds, semaphore_in_turn.lock_wait) AS granted;
END
$body$;

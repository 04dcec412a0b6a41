CREATE OR REPLACE FUNCTION lock.semaphore_acquire(names text[], counts integer[], external_id text,
  owner text DEFAULT NULL::text, ttl_seconds double precision DEFAULT NULL::double precision,
  lock_wait text DEFAULT NULL::text, OUT acquired boolean, OUT state text, OUT replayed boolean,
  OUT request_id bigint, OUT expires_at timestamp with time zone, OUT semaphores text[],
  OUT fences bigint[], OUT exhausted text[]) RETURNS record
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0004
DECLARE
  was text := current_setting('lock_timeout');
  asked integer[] := counts;
  decided record;
BEGIN
  external_id := lock.semaphore_checked(external_id, 'the external_id of a request');
  IF owner IS NOT NULL THEN
    owner := lock.semaphore_checked(owner, 'an owner');
  END IF;
  IF coalesce(cardinality(names), 0) = 0 OR cardinality(names) IS DISTINCT FROM cardinality(counts) THEN
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
      'semaphore.acquire needs at least one semaphore, and one count for each name';
  ELSIF NOT (ttl_seconds BETWEEN 0.001 AND 3155760000) THEN
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'ttl ' || CASE
      WHEN ttl_seconds <= 0 THEN 'must be more than 0 seconds'
      WHEN ttl_seconds < 1 THEN 'is at least 0.001 seconds'
      ELSE 'must be at most a hundred years, 3155760000 seconds'
    END || ', not ' || ttl_seconds;
  END IF;
  FOR i IN 1 .. cardinality(names) LOOP
    semaphores[i] := lock.semaphore_checked(names[i], 'a semaphore''s name');
    IF counts[i] IS NULL OR counts[i] < 1 THEN
      RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
        'a count of permits is from 1 to 2147483647, not ' || coalesce(counts[i]::text, 'NULL');
    END IF;
  END LOOP;
  IF cardinality(names) > 1 THEN
    -- In one order for everybody, whatever the collation, so that two requests can't deadlock; each name once.
    SELECT array_agg(given.name ORDER BY given.name COLLATE "C"), array_agg(given.count ORDER BY given.name COLLATE "C")
    INTO semaphores, asked
    FROM (SELECT u.name, sum(u.count)::integer AS count
          FROM unnest(names, counts) AS u (name, count) GROUP BY u.name) AS given;
  END IF;
  -- A denial rolls this block back: it leaves no row, and the gate and the semaphores are free at once.
  BEGIN
    IF lock_wait IS NOT NULL THEN
      PERFORM set_config('lock_timeout', lock_wait, true);
    END IF;
    FOR attempt IN 1 .. 100 LOOP
      -- The gate: who asks with the same id waits here until this request is decided.
      INSERT INTO lock.permit_request AS made (external_id, owner, state, ttl_seconds)
      VALUES (semaphore_acquire.external_id, semaphore_acquire.owner, 'ACQUIRED', semaphore_acquire.ttl_seconds)
      ON CONFLICT DO NOTHING RETURNING made.id INTO request_id;
      replayed := request_id IS NULL;
      IF replayed THEN
        decided := lock.semaphore_known(semaphore_acquire.external_id, semaphores, asked);
        request_id := decided.request_id;
        expires_at := decided.expires_at;
      ELSE
        decided := lock.semaphore_grant(request_id, semaphores, asked);
        exhausted := decided.exhausted;
      END IF;
      EXIT WHEN decided.state IS NOT NULL;  -- unless it was known, and is being cleaned up
    END LOOP;
    state := decided.state;
    fences := decided.fences;
    IF exhausted IS NOT NULL THEN
      RAISE EXCEPTION USING ERRCODE = 'SL010', MESSAGE = 'denied';
    ELSIF state IS NULL THEN
      RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE =
        'could not serialize access: the request is not visible to this transaction, begin it again';
    END IF;
    IF ttl_seconds IS NOT NULL AND NOT replayed THEN
      -- The lease counts from now, not from before the waits.
      UPDATE lock.permit_request AS r SET renewed_at = clock_timestamp() WHERE r.id = request_id
      RETURNING r.renewed_at + r.ttl_seconds * interval '1 second' INTO expires_at;
    END IF;
    IF lock_wait IS NOT NULL THEN
      PERFORM set_config('lock_timeout', was, true);
    END IF;
  EXCEPTION WHEN SQLSTATE 'SL010' THEN
    request_id := NULL;
    fences := NULL;
  END;
  acquired := coalesce(state = 'ACQUIRED', false);
END
$body$;

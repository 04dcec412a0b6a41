CREATE OR REPLACE FUNCTION lock.semaphore_acquire(names text[], counts integer[], external_id text,
  owner text DEFAULT NULL::text, ttl_seconds double precision DEFAULT NULL::double precision,
  wait_ms integer DEFAULT NULL::integer, nonce text DEFAULT NULL::text, replaces_expired boolean DEFAULT false,
  queue_keys bigint[] DEFAULT NULL::bigint[],
  OUT acquired boolean, OUT state text, OUT replayed boolean, OUT token text,
  OUT expires_at timestamp with time zone, OUT semaphores text[], OUT fences bigint[],
  OUT exhausted text[], OUT capacities integer[]) RETURNS record
LANGUAGE plpgsql
SET enable_seqscan = 'off'
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  previous text;
  request bigint;
  began timestamptz;
  ended timestamptz;
  ids bigint[];
  sem record;
  bounded boolean := true;
  totals bigint[];
  used bigint;
  held record;
BEGIN
  IF cardinality(names) = 1 AND cardinality(counts) = 1 AND counts[1] > 0
    AND length(names[1]) BETWEEN 1 AND 255 AND right(names[1], 1) <> ' '
    AND length(external_id) BETWEEN 1 AND 255 AND right(external_id, 1) <> ' '
    AND (owner IS NULL OR length(owner) BETWEEN 1 AND 255 AND right(owner, 1) <> ' ')
    AND (ttl_seconds IS NULL OR ttl_seconds BETWEEN 0.001 AND 3155760000)
    AND (queue_keys IS NULL OR cardinality(queue_keys) = 1 AND queue_keys[1] IS NOT NULL)
  THEN
    -- A valid request of one semaphore: one expression costs much less than the checks one by one.
    semaphores := names;
  ELSE
    external_id := lock.semaphore_checked(external_id, 'the external_id of a request');
    IF owner IS NOT NULL THEN
      owner := lock.semaphore_checked(owner, 'an owner');
    END IF;
    IF coalesce(cardinality(names), 0) = 0 OR cardinality(names) IS DISTINCT FROM cardinality(counts) THEN
      RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
        'semaphore.acquire needs at least one semaphore, and one count for each name';
    ELSIF (array_ndims(names), array_ndims(counts), array_lower(names, 1), array_lower(counts, 1)) <> (1, 1, 1, 1) THEN
      RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
        'names and counts must be one-dimensional arrays whose indexes begin at 1';
    ELSIF queue_keys IS NOT NULL AND (
      cardinality(queue_keys) <> cardinality(names) OR array_position(queue_keys, NULL) IS NOT NULL
      OR (array_ndims(queue_keys), array_lower(queue_keys, 1)) <> (1, 1)
    ) THEN
      RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
        'queue_keys is NULL, or has one key for each name';
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
      -- Sorted independently of the collation, so that two requests can't deadlock; each name once.
      SELECT array_agg(given.name ORDER BY given.name COLLATE "C"),
             array_agg(given.count ORDER BY given.name COLLATE "C")
      INTO semaphores, totals
      FROM (SELECT u.name, sum(u.count) AS count
            FROM unnest(names, counts) AS u (name, count) GROUP BY u.name) AS given;
      FOR i IN 1 .. cardinality(totals) LOOP
        IF totals[i] > 2147483647 THEN
          RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'the counts of '
            || quote_literal(semaphores[i]) || ' add up to ' || totals[i] || ', and the maximum is 2147483647';
        END IF;
      END LOOP;
      counts := totals;
    END IF;
  END IF;
  -- A denial rolls this block back: it leaves no row, and its locks are released immediately.
  BEGIN
    -- A request that gives the keys of the semaphores' queues must not overtake the waiters.
    FOR i IN 1 .. coalesce(cardinality(queue_keys), 0) LOOP
      -- Waiters for permits hold this lock or wait for it: the try fails in both cases. On YugabyteDB they poll.
      IF strpos(version(), '-YB-') = 0 AND NOT pg_try_advisory_xact_lock_shared(queue_keys[i]) THEN
        exhausted := exhausted || names[i];
      END IF;
    END LOOP;
    IF exhausted IS NOT NULL THEN
      -- A request that was granted already must not queue behind the waiters.
      IF NOT EXISTS (
        SELECT FROM lock.permit_request AS r WHERE r.external_id = semaphore_acquire.external_id)
      THEN
        state := 'DENIED';
        replayed := false;
        RAISE EXCEPTION USING ERRCODE = 'SL010', MESSAGE = 'denied';
      END IF;
      exhausted := NULL;
    END IF;
    IF wait_ms IS NOT NULL THEN
      previous := current_setting('lock_timeout');
      PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
    END IF;
    FOR attempt IN 1 .. 100 LOOP
      -- A concurrent call with the same external_id waits at this insert until this request is decided. The token
      -- distinguishes it from every other request with this external_id; a caller that gives it knows its own again.
      INSERT INTO lock.permit_request AS r (external_id, owner, state, ttl_seconds, token)
      VALUES (semaphore_acquire.external_id, semaphore_acquire.owner, 'ACQUIRED', semaphore_acquire.ttl_seconds,
        coalesce(nonce,
          to_hex((random() * 9007199254740992)::bigint) || to_hex((random() * 9007199254740992)::bigint)))
      ON CONFLICT DO NOTHING RETURNING r.id, r.token, r.renewed_at INTO request, token, began;
      replayed := request IS NULL;
      EXIT WHEN NOT replayed;
      -- Locked, so that a release that is under way is seen, whatever the isolation level.
      SELECT r.id, r.token, r.state, r.renewed_at + r.ttl_seconds * interval '1 second', r.updated_at
      INTO request, token, state, expires_at, ended
      FROM lock.permit_request AS r WHERE r.external_id = semaphore_acquire.external_id FOR UPDATE;
      IF replaces_expired AND expires_at <= (CASE state WHEN 'RELEASED' THEN ended ELSE clock_timestamp() END) THEN
        -- Its time ran out before it was released: it is deleted, and this request inserted in its place.
        DELETE FROM lock.permit AS p WHERE p.permit_request_id = request;
        DELETE FROM lock.permit_request AS r WHERE r.id = request;
        state := NULL;
        expires_at := NULL;
      END IF;
      EXIT WHEN state IS NOT NULL;  -- otherwise it was deleted here, or is being cleaned up
    END LOOP;
    IF replayed THEN
      IF state IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE =
          'could not serialize access: the request is not visible to this transaction; run the transaction again';
      END IF;
      SELECT array_agg(s.name ORDER BY s.name COLLATE "C") AS names,
             array_agg(p.count ORDER BY s.name COLLATE "C") AS counts,
             array_agg(p.fence ORDER BY s.name COLLATE "C") AS fences
      INTO held FROM lock.permit AS p JOIN lock.semaphore AS s ON s.id = p.semaphore_id
      WHERE p.permit_request_id = request;
      fences := held.fences;
      IF held.names IS DISTINCT FROM semaphores OR held.counts IS DISTINCT FROM counts THEN
        state := 'CONFLICT';
      ELSIF state = 'ACQUIRED' AND expires_at <= clock_timestamp() THEN
        state := 'EXPIRED';
      END IF;
    ELSE
      FOR i IN 1 .. cardinality(semaphores) LOOP
        -- The update is the lock: a snapshot from before the last grant fails here. A denial undoes it.
        UPDATE lock.semaphore AS s
        SET fence = s.fence + 1, used_at_most = s.used_at_most + counts[i], updated_at = clock_timestamp()
        WHERE s.name = semaphores[i] AND s.capacity IS NOT NULL
        RETURNING s.id, s.capacity, s.fence, s.used_at_most INTO sem;
        ids[i] := sem.id;
        capacities[i] := sem.capacity;
        fences[i] := sem.fence;
        IF sem.id IS NULL THEN  -- no semaphore of that name, or a deleted one
          state := 'UNKNOWN';
          exhausted := exhausted || semaphores[i];
        ELSIF (sem.used_at_most <= sem.capacity) IS NOT TRUE THEN
          bounded := false;  -- says nothing: a release lowers no bound
        END IF;
      END LOOP;
      -- In statements after the locking ones: only these see what the previous holder has committed.
      FOR i IN 1 .. CASE WHEN bounded OR state IS NOT NULL THEN 0 ELSE cardinality(semaphores) END LOOP
        FOR attempt IN 1 .. 2 LOOP
          SELECT coalesce(sum(p.count), 0) INTO used FROM lock.permit AS p
          WHERE p.semaphore_id = ids[i] AND p.state = 'ACQUIRED';
          EXIT WHEN used + counts[i] <= capacities[i];
          IF attempt = 2 OR lock.semaphore_take_back(ids[i]) = 0 THEN
            exhausted := exhausted || semaphores[i];
            EXIT;
          END IF;
        END LOOP;
        -- Where some further grants will need no sum.
        IF used + 5::bigint * counts[i] <= capacities[i] THEN
          UPDATE lock.semaphore AS s SET used_at_most = used + counts[i] WHERE s.id = ids[i];
        END IF;
      END LOOP;
      IF exhausted IS NOT NULL THEN
        state := coalesce(state, 'DENIED');
        RAISE EXCEPTION USING ERRCODE = 'SL010', MESSAGE = 'denied';
      END IF;
      state := 'ACQUIRED';
      FOR i IN 1 .. cardinality(semaphores) LOOP
        INSERT INTO lock.permit (semaphore_id, permit_request_id, count, fence, state)
        VALUES (ids[i], request, counts[i], fences[i], 'ACQUIRED');
      END LOOP;
      IF ttl_seconds IS NOT NULL THEN
        IF clock_timestamp() - began > least(0.01, ttl_seconds / 100) * interval '1 second' THEN
          -- The lease starts now, not before the waits.
          UPDATE lock.permit_request AS r SET renewed_at = clock_timestamp() WHERE r.id = request
          RETURNING r.renewed_at INTO began;
        END IF;
        expires_at := began + ttl_seconds * interval '1 second';
      END IF;
    END IF;
    IF wait_ms IS NOT NULL THEN
      PERFORM set_config('lock_timeout', previous, true);
    END IF;
  EXCEPTION WHEN SQLSTATE 'SL010' THEN
    token := NULL;
    fences := NULL;
    capacities := NULL;
  END;
  acquired := coalesce(state = 'ACQUIRED', false);
END
$body$;

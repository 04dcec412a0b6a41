CREATE OR REPLACE FUNCTION lock.semaphore_grant(request_id bigint, names text[], counts integer[],
  OUT state text, OUT fences bigint[], OUT exhausted text[]) RETURNS record
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0004
DECLARE
  ids bigint[];
  sem record;
BEGIN
  FOR i IN 1 .. cardinality(names) LOOP
    SELECT s.id, s.capacity, s.fence INTO sem FROM lock.semaphore AS s WHERE s.name = names[i] FOR UPDATE;
    ids[i] := sem.id;
    fences[i] := sem.fence;
    IF sem.capacity IS NULL THEN  -- none of that name, or what a deleted one has left
      state := 'UNKNOWN';
      exhausted := exhausted || names[i];
    END IF;
  END LOOP;
  IF state IS NOT NULL THEN
    RETURN;
  END IF;
  -- In later statements than the locks': only those see what the holder before us has committed.
  FOR i IN 1 .. cardinality(names) LOOP
    FOR attempt IN 1 .. 2 LOOP
      SELECT s.capacity, s.fence, (SELECT coalesce(sum(p.count), 0) FROM lock.permit AS p
        WHERE p.semaphore_id = s.id AND p.state = 'ACQUIRED') AS used
      INTO sem FROM lock.semaphore AS s WHERE s.id = ids[i];
      IF sem.fence IS DISTINCT FROM fences[i] THEN
        RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE =
          'could not serialize access: the snapshot is older than the lock, begin the transaction again';
      END IF;
      EXIT WHEN sem.used + counts[i] <= sem.capacity;
      IF attempt = 2 OR lock.semaphore_take_back(ids[i]) = 0 THEN
        exhausted := exhausted || names[i];
        EXIT;
      END IF;
    END LOOP;
  END LOOP;
  IF exhausted IS NOT NULL THEN
    state := 'DENIED';
    RETURN;
  END IF;
  FOR i IN 1 .. cardinality(names) LOOP
    fences[i] := fences[i] + 1;
    UPDATE lock.semaphore AS s SET fence = fences[i] WHERE s.id = ids[i];
    INSERT INTO lock.permit (semaphore_id, permit_request_id, count, fence, state)
    VALUES (ids[i], request_id, counts[i], fences[i], 'ACQUIRED');
  END LOOP;
  state := 'ACQUIRED';
END
$body$;

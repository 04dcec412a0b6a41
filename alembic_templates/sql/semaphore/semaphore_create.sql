CREATE OR REPLACE FUNCTION lock.semaphore_create(name text, capacity integer, changed_by text DEFAULT NULL::text)
RETURNS boolean
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0004
DECLARE
  made bigint;
BEGIN
  IF name = '' OR capacity < 0 OR capacity IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
      'a semaphore needs a name, and a capacity of at least 0';
  END IF;
  INSERT INTO lock.semaphore AS s (name, capacity) VALUES (semaphore_create.name, semaphore_create.capacity)
  ON CONFLICT DO NOTHING RETURNING s.id INTO made;
  IF made IS NULL THEN
    -- What a deleted one has left keeps its fence, and so the name goes on counting.
    UPDATE lock.semaphore AS s SET capacity = semaphore_create.capacity, updated_at = clock_timestamp()
    WHERE s.name = semaphore_create.name AND s.capacity IS NULL RETURNING s.id INTO made;
  END IF;
  IF made IS NOT NULL THEN
    INSERT INTO lock.semaphore_history (semaphore_id, new_capacity, changed_by)
    VALUES (made, semaphore_create.capacity, semaphore_create.changed_by);
  END IF;
  RETURN made IS NOT NULL;
END
$body$;

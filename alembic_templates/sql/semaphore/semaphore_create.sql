CREATE OR REPLACE FUNCTION lock.semaphore_create(name text, capacity integer,
  changed_by text DEFAULT NULL::text, lock_wait text DEFAULT NULL::text) RETURNS boolean
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0004
DECLARE
  made bigint;
  was text := current_setting('lock_timeout');
BEGIN
  name := lock.semaphore_checked(name, 'a semaphore''s name');
  IF changed_by IS NOT NULL THEN
    changed_by := lock.semaphore_checked(changed_by, 'who changes a semaphore');
  END IF;
  IF capacity IS NULL OR capacity < 0 THEN
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
      'a capacity is from 0 to 2147483647, not ' || coalesce(capacity::text, 'NULL');
  END IF;
  IF lock_wait IS NOT NULL THEN
    PERFORM set_config('lock_timeout', lock_wait, true);
  END IF;
  INSERT INTO lock.semaphore AS s (name, capacity) VALUES (semaphore_create.name, semaphore_create.capacity)
  ON CONFLICT DO NOTHING RETURNING s.id INTO made;
  IF made IS NULL THEN
    -- What a deleted one has left keeps its fence, and so the name goes on counting.
    UPDATE lock.semaphore AS s SET capacity = semaphore_create.capacity, updated_at = clock_timestamp()
    WHERE s.name = semaphore_create.name AND s.capacity IS NULL RETURNING s.id INTO made;
  END IF;
  IF lock_wait IS NOT NULL THEN
    PERFORM set_config('lock_timeout', was, true);
  END IF;
  IF made IS NOT NULL THEN
    INSERT INTO lock.semaphore_history (semaphore_id, new_capacity, changed_by)
    VALUES (made, semaphore_create.capacity, semaphore_create.changed_by);
  END IF;
  RETURN made IS NOT NULL;
END
$body$;

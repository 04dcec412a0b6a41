CREATE OR REPLACE FUNCTION lock.semaphore_resize(name text, capacity integer,
  changed_by text DEFAULT NULL::text, wait_ms integer DEFAULT NULL::integer,
  missing_ok boolean DEFAULT false) RETURNS integer
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  sem record;
  previous text;
BEGIN
  name := lock.semaphore_checked(name, 'a semaphore''s name');
  IF changed_by IS NOT NULL THEN
    changed_by := lock.semaphore_checked(changed_by, 'changed_by');
  END IF;
  IF capacity IS NULL OR capacity < 0 THEN
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
      'a capacity is from 0 to 2147483647, not ' || coalesce(capacity::text, 'NULL');
  END IF;
  IF wait_ms IS NOT NULL THEN
    previous := current_setting('lock_timeout');
    PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
  END IF;
  SELECT s.id, s.capacity, s.on_demand INTO sem
  FROM lock.semaphore AS s WHERE s.name = semaphore_resize.name FOR UPDATE;
  IF wait_ms IS NOT NULL THEN
    PERFORM set_config('lock_timeout', previous, true);
  END IF;
  IF sem.capacity IS NULL AND missing_ok IS NOT TRUE THEN
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
      'there is no semaphore ' || quote_literal(name) || ': make it with semaphore.create';
  ELSIF sem.capacity <> semaphore_resize.capacity THEN
    UPDATE lock.semaphore AS s
    SET capacity = semaphore_resize.capacity, on_demand = false, updated_at = clock_timestamp()
    WHERE s.id = sem.id;
    INSERT INTO lock.semaphore_history (semaphore_id, old_capacity, new_capacity, changed_by)
    VALUES (sem.id, sem.capacity, semaphore_resize.capacity, semaphore_resize.changed_by);
  ELSIF sem.capacity IS NOT NULL AND sem.on_demand THEN
    -- A lease created it: from now on it is kept, though its capacity is unchanged.
    UPDATE lock.semaphore AS s SET on_demand = false WHERE s.id = sem.id;
  END IF;
  RETURN sem.capacity;
END
$body$;

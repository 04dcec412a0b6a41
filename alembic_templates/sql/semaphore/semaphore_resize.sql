CREATE OR REPLACE FUNCTION lock.semaphore_resize(name text, capacity integer, changed_by text DEFAULT NULL::text)
RETURNS integer
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0004
DECLARE
  sem record;
BEGIN
  IF capacity < 0 OR capacity IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'a capacity is at least 0';
  END IF;
  SELECT s.id, s.capacity INTO sem FROM lock.semaphore AS s WHERE s.name = semaphore_resize.name FOR UPDATE;
  IF sem.capacity <> semaphore_resize.capacity THEN
    UPDATE lock.semaphore AS s SET capacity = semaphore_resize.capacity, updated_at = clock_timestamp()
    WHERE s.id = sem.id;
    INSERT INTO lock.semaphore_history (semaphore_id, old_capacity, new_capacity, changed_by)
    VALUES (sem.id, sem.capacity, semaphore_resize.capacity, semaphore_resize.changed_by);
  END IF;
  RETURN sem.capacity;
END
$body$;

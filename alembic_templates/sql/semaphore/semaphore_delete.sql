CREATE OR REPLACE FUNCTION lock.semaphore_delete(name text, changed_by text DEFAULT NULL::text) RETURNS text
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0004
DECLARE
  sem record;
BEGIN
  SELECT s.id, s.capacity INTO sem FROM lock.semaphore AS s WHERE s.name = semaphore_delete.name FOR UPDATE;
  IF sem.capacity IS NULL THEN
    RETURN 'UNKNOWN';
  END IF;
  PERFORM lock.semaphore_take_back(sem.id);
  PERFORM 1 FROM lock.permit AS p WHERE p.semaphore_id = sem.id AND p.state = 'ACQUIRED';
  IF FOUND THEN
    RETURN 'HELD';
  END IF;
  -- The row stays for its fence: a semaphore that is made again under this name goes on counting.
  UPDATE lock.semaphore AS s SET capacity = NULL, updated_at = clock_timestamp() WHERE s.id = sem.id;
  INSERT INTO lock.semaphore_history (semaphore_id, old_capacity, changed_by)
  VALUES (sem.id, sem.capacity, semaphore_delete.changed_by);
  RETURN 'DELETED';
END
$body$;

CREATE OR REPLACE FUNCTION lock.semaphore_delete(name text, changed_by text DEFAULT NULL::text,
  wait_ms integer DEFAULT NULL::integer) RETURNS text
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
  -- A refusal rolls this block back, which releases its locks.
  BEGIN
    IF wait_ms IS NOT NULL THEN
      previous := current_setting('lock_timeout');
      PERFORM set_config('lock_timeout', greatest(wait_ms, 1)::text, true);
    END IF;
    SELECT s.id, s.capacity INTO sem FROM lock.semaphore AS s WHERE s.name = semaphore_delete.name FOR UPDATE;
    IF sem.capacity IS NOT NULL THEN
      PERFORM lock.semaphore_take_back(sem.id);
      -- A separate statement: it sees what was released before the lock was acquired.
      PERFORM 1 FROM lock.permit AS p WHERE p.semaphore_id = sem.id AND p.state = 'ACQUIRED';
      IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'SL010', MESSAGE = 'held';
      END IF;
    END IF;
    IF wait_ms IS NOT NULL THEN
      PERFORM set_config('lock_timeout', previous, true);
    END IF;
  EXCEPTION WHEN SQLSTATE 'SL010' THEN
    RETURN 'HELD';
  END;
  IF sem.capacity IS NULL THEN
    RETURN 'UNKNOWN';
  END IF;
  -- The row keeps the fence: a semaphore that is created again under this name continues from it.
  UPDATE lock.semaphore AS s SET capacity = NULL, updated_at = clock_timestamp() WHERE s.id = sem.id;
  INSERT INTO lock.semaphore_history (semaphore_id, old_capacity, changed_by)
  VALUES (sem.id, sem.capacity, semaphore_delete.changed_by);
  RETURN 'DELETED';
END
$body$;

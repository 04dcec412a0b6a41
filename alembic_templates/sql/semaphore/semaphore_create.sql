CREATE OR REPLACE FUNCTION lock.semaphore_create(name text, capacity integer,
  changed_by text DEFAULT NULL::text, lock_wait text DEFAULT NULL::text,
  on_demand boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0004
DECLARE
  made bigint;
  there record;
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
  on_demand := coalesce(on_demand, false);
  LOOP
    -- Without a lock first: who finds it there shall not wait, nor lock it.
    SELECT s.capacity, s.on_demand INTO there FROM lock.semaphore AS s WHERE s.name = semaphore_create.name;
    IF NOT FOUND THEN
      -- It begins above what any that was removed has given, of whatever name, which the row without a name keeps.
      -- Locked, so that none is removed before this one is there.
      SELECT s.fence INTO there FROM lock.semaphore AS s WHERE s.name = '' FOR SHARE;
      IF NOT FOUND THEN  -- the table was emptied
        INSERT INTO lock.semaphore (name) VALUES ('') ON CONFLICT DO NOTHING;
        CONTINUE;
      END IF;
      INSERT INTO lock.semaphore AS s (name, capacity, on_demand, fence)
      VALUES (semaphore_create.name, semaphore_create.capacity, semaphore_create.on_demand, there.fence)
      ON CONFLICT DO NOTHING RETURNING s.id INTO made;
    ELSIF there.capacity IS NULL THEN
      -- What a deleted one has left keeps its fence, and so the name goes on counting.
      UPDATE lock.semaphore AS s SET capacity = semaphore_create.capacity, on_demand = semaphore_create.on_demand,
        updated_at = clock_timestamp()
      WHERE s.name = semaphore_create.name AND s.capacity IS NULL RETURNING s.id INTO made;
    ELSE
      EXIT WHEN semaphore_create.on_demand OR NOT there.on_demand;
      -- A lease has made it: from now on it is kept, used or not.
      UPDATE lock.semaphore AS s SET on_demand = false WHERE s.name = semaphore_create.name AND s.capacity IS NOT NULL;
    END IF;
    EXIT WHEN FOUND;  -- unless others have made, deleted or removed it since
  END LOOP;
  IF lock_wait IS NOT NULL THEN
    PERFORM set_config('lock_timeout', was, true);
  END IF;
  IF made IS NOT NULL AND NOT on_demand THEN
    INSERT INTO lock.semaphore_history (semaphore_id, new_capacity, changed_by)
    VALUES (made, semaphore_create.capacity, semaphore_create.changed_by);
  END IF;
  RETURN made IS NOT NULL;
END
$body$;

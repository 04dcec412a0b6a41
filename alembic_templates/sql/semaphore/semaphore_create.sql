CREATE OR REPLACE FUNCTION lock.semaphore_create(name text, capacity integer,
  changed_by text DEFAULT NULL::text, wait_ms integer DEFAULT NULL::integer,
  on_demand boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  created bigint;
  existing record;
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
  on_demand := coalesce(on_demand, false);
  LOOP
    -- Read without a lock first: if the semaphore exists, the call neither waits nor locks.
    SELECT s.capacity, s.on_demand INTO existing FROM lock.semaphore AS s WHERE s.name = semaphore_create.name;
    IF NOT FOUND THEN
      -- Its fence starts at the greatest fence of all removed semaphores, which the row without a name keeps. The lock
      -- keeps semaphores from being removed until this one exists.
      SELECT s.fence INTO existing FROM lock.semaphore AS s WHERE s.name = '' FOR SHARE;
      IF NOT FOUND THEN  -- the table was emptied
        INSERT INTO lock.semaphore (name) VALUES ('') ON CONFLICT DO NOTHING;
        CONTINUE;
      END IF;
      INSERT INTO lock.semaphore AS s (name, capacity, on_demand, fence)
      VALUES (semaphore_create.name, semaphore_create.capacity, semaphore_create.on_demand, existing.fence)
      ON CONFLICT DO NOTHING RETURNING s.id INTO created;
    ELSIF existing.capacity IS NULL THEN
      -- The row of a deleted semaphore keeps its fence: the fences of a name never decrease.
      UPDATE lock.semaphore AS s SET capacity = semaphore_create.capacity, on_demand = semaphore_create.on_demand,
        updated_at = clock_timestamp()
      WHERE s.name = semaphore_create.name AND s.capacity IS NULL RETURNING s.id INTO created;
    ELSE
      EXIT WHEN semaphore_create.on_demand OR NOT existing.on_demand;
      -- A lease created it: from now on it is kept even if unused.
      UPDATE lock.semaphore AS s SET on_demand = false WHERE s.name = semaphore_create.name AND s.capacity IS NOT NULL;
    END IF;
    EXIT WHEN FOUND;  -- otherwise it was created, deleted or removed meanwhile
  END LOOP;
  IF wait_ms IS NOT NULL THEN
    PERFORM set_config('lock_timeout', previous, true);
  END IF;
  IF created IS NOT NULL AND NOT on_demand THEN
    INSERT INTO lock.semaphore_history (semaphore_id, new_capacity, changed_by)
    VALUES (created, semaphore_create.capacity, semaphore_create.changed_by);
  END IF;
  RETURN created IS NOT NULL;
END
$body$;

CREATE OR REPLACE FUNCTION lock.refuse(allow_stale boolean) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  IF pg_is_in_recovery() THEN
    RAISE EXCEPTION USING ERRCODE = 'SL001', MESSAGE =
      'no lock is taken on a standby, because its locks are separate from the primary''s and two sessions'
      ' could hold the same one: connect to the primary';
  ELSIF current_setting('transaction_read_only') = 'on' THEN
    RAISE EXCEPTION USING ERRCODE = 'SL002', MESSAGE =
      'no lock is taken in a read-only transaction, because the server may be a replica, whose locks'
      ' exclude no session on the primary: use a read-write transaction';
  ELSIF allow_stale IS NOT TRUE
    AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
  THEN
    RAISE EXCEPTION USING ERRCODE = 'SL003', MESSAGE =
      'no lock is taken in a ' || upper(current_setting('transaction_isolation')) || ' transaction, because its'
      ' snapshot may be older than the lock, so that the holder would read stale rows:'
      ' use READ COMMITTED, or pass allow_stale';
  END IF;
END
$body$;

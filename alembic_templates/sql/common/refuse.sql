CREATE OR REPLACE FUNCTION lock.refuse(allow_stale boolean) RETURNS void
LANGUAGE plpgsql
AS $body$
-- sqlalchemy_locks 0001
DECLARE
  isolation text := current_setting('transaction_isolation');
BEGIN
  IF pg_is_in_recovery() THEN
    RAISE EXCEPTION USING ERRCODE = 'SL001', MESSAGE =
      'no lock is taken on a standby, because its locks are separate from the primary''s and two sessions'
      ' could hold the same one: connect to the primary';
  ELSIF current_setting('transaction_read_only') = 'on' THEN
    RAISE EXCEPTION USING ERRCODE = 'SL002', MESSAGE =
      'no lock is taken in a read-only transaction, because the server may be a replica, whose locks'
      ' exclude no session on the primary: use a read-write transaction';
  ELSIF current_setting('yb_enable_advisory_locks', true) = 'off'
    OR current_setting('yb_silence_advisory_locks_not_supported_error', true) = 'on'
  THEN
    RAISE EXCEPTION USING ERRCODE = 'SL004', MESSAGE =
      'no lock is taken, because YugabyteDB has no advisory locks without yb_enable_advisory_locks, and may pretend to'
      ' have them with yb_silence_advisory_locks_not_supported_error: turn the first on and the second off, or install'
      ' the functions that lock rows (locking="table")';
  ELSIF allow_stale IS NOT TRUE THEN
    -- YugabyteDB without yb_enable_read_committed_isolation reports read committed but runs snapshot isolation.
    IF to_regprocedure('yb_get_effective_transaction_isolation_level()') IS NOT NULL THEN
      EXECUTE 'SELECT lower(yb_get_effective_transaction_isolation_level())' INTO isolation;
    END IF;
    IF isolation NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION USING ERRCODE = 'SL003', MESSAGE =
        'no lock is taken in a transaction that is effectively ' || upper(isolation) || ', because its'
        ' snapshot may be older than the lock, so that the holder would read stale rows:'
        ' use READ COMMITTED (on YugabyteDB with yb_enable_read_committed_isolation), or pass allow_stale';
    END IF;
  END IF;
END
$body$;

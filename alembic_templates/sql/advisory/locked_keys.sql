CREATE OR REPLACE VIEW lock.locked_keys AS
-- sqlalchemy_locks 0001
-- Left joins, because a prepared transaction has no session, and a role that may not see
-- another's activity still sees that the key is held: ts is then NULL.
SELECT (held.classid::bigint << 32) | held.objid::bigint AS key,
       session.xact_start AS ts,
       held.pid,
       CASE held.mode WHEN 'ExclusiveLock' THEN 'exclusive' ELSE 'shared' END AS mode
FROM pg_catalog.pg_locks AS held
JOIN pg_catalog.pg_database AS here ON here.oid = held.database AND here.datname = current_database()
LEFT JOIN pg_catalog.pg_stat_activity AS session ON session.pid = held.pid
WHERE held.locktype = 'advisory' AND held.objsubid = 1 AND held.granted;

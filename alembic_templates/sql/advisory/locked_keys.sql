CREATE OR REPLACE VIEW lock.locked_keys AS
-- sqlalchemy_locks 0001
-- Left join: ts is NULL for a prepared transaction, which has no session, and for a session whose activity
-- the role may not see.
SELECT (held.classid::bigint << 32) | held.objid::bigint AS key,
       session.xact_start AS ts,
       held.pid,
       CASE held.mode WHEN 'ExclusiveLock' THEN 'exclusive' ELSE 'shared' END AS mode
FROM pg_catalog.pg_locks AS held
JOIN pg_catalog.pg_database AS d ON d.oid = held.database AND d.datname = current_database()
LEFT JOIN pg_catalog.pg_stat_activity AS session ON session.pid = held.pid
WHERE held.locktype = 'advisory' AND held.objsubid = 1 AND held.granted;

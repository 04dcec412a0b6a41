DROP TABLE IF EXISTS lock.task_timeout;

DROP TABLE IF EXISTS lock.task_state;

DELETE FROM lock.installed WHERE step = '0002';

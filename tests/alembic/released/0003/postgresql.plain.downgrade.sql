DROP TABLE IF EXISTS lock.job;

DROP TABLE IF EXISTS lock.task;

DELETE FROM lock.installed WHERE step = '0003';

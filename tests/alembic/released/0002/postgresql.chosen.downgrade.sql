DROP TABLE IF EXISTS "elsewhere".task_timeout;

DROP TABLE IF EXISTS "elsewhere".task_state;

DELETE FROM "elsewhere".installed WHERE step = '0002';

DROP TABLE IF EXISTS "elsewhere".job;

DROP TABLE IF EXISTS "elsewhere".task;

DELETE FROM "elsewhere".installed WHERE step = '0003';

DROP TABLE IF EXISTS "lock_job";

DROP TABLE IF EXISTS "lock_task";

DELETE FROM "lock_installed" WHERE step = '0003';

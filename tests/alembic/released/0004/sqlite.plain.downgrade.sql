DROP TABLE IF EXISTS "lock_semaphore_history";

DROP TABLE IF EXISTS "lock_permit";

DROP TABLE IF EXISTS "lock_permit_request";

DROP TABLE IF EXISTS "lock_semaphore";

DELETE FROM "lock_installed" WHERE step = '0004';

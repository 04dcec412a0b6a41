DROP TABLE IF EXISTS "my_semaphore_history";

DROP TABLE IF EXISTS "my_permit";

DROP TABLE IF EXISTS "my_permit_request";

DROP TABLE IF EXISTS "my_semaphore";

DELETE FROM "my_installed" WHERE step = '0004';

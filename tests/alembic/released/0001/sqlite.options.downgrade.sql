DROP TABLE IF EXISTS "my_semaphore_history";

DROP TABLE IF EXISTS "my_permit";

DROP TABLE IF EXISTS "my_permit_request";

DROP TABLE IF EXISTS "my_semaphore";

DROP TABLE IF EXISTS "my_worker";

DROP TABLE IF EXISTS "my_paused_queue";

DROP TABLE IF EXISTS "my_job";

DROP TABLE IF EXISTS "my_task";

DROP TABLE IF EXISTS "my_task_timeout";

DROP TABLE IF EXISTS "my_task_state";

DROP TABLE IF EXISTS "my_locked_keys";

DROP TABLE IF EXISTS "my_installed";

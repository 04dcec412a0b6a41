CREATE TABLE IF NOT EXISTS `my_task` (queue_id VARCHAR(255) NOT NULL DEFAULT 'default', id VARCHAR(255) NOT NULL, status VARCHAR(64) NOT NULL DEFAULT 'done', claim BIGINT NOT NULL DEFAULT 0, updated_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), timeout BIGINT, retries_left INTEGER, PRIMARY KEY (queue_id, id), INDEX `my_task_ready` (queue_id, status, id), INDEX `my_task_captured` (status, updated_at)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `my_job` (internal_id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, external_id CHAR(32) NOT NULL, queue_id VARCHAR(255) NOT NULL DEFAULT 'default', payload JSON NOT NULL, priority INTEGER NOT NULL DEFAULT 0, run_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), claim BIGINT NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0, max_attempts INTEGER NOT NULL DEFAULT 5, processing_host VARCHAR(255), heartbeat_at DATETIME(6), created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), started_at DATETIME(6), completed_at DATETIME(6), failed_at DATETIME(6), error TEXT, UNIQUE INDEX `my_job_external_id` (external_id), INDEX `my_job_ready` (queue_id, started_at, priority, run_at, internal_id), INDEX `my_job_running` (heartbeat_at), INDEX `my_job_completed` (completed_at), INDEX `my_job_dead` (failed_at)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_task` TO `app`@`10.%`;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_job` TO `app`@`10.%`;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_task` TO `role`;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_job` TO `role`;

INSERT INTO `my_installed` (step, door) VALUES ('0003', 'directives') ON DUPLICATE KEY UPDATE step = step;

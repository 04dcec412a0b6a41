CREATE TABLE IF NOT EXISTS `lock_installed` (step VARCHAR(32) NOT NULL, installed_by VARCHAR(32) NOT NULL, owner VARCHAR(255) NOT NULL, PRIMARY KEY (step, owner)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_locked_keys` (`key` BIGINT NOT NULL, ts DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), PRIMARY KEY (`key`)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_task_state` (queue_id VARCHAR(255) NOT NULL DEFAULT 'default', id VARCHAR(255) NOT NULL, acquired BOOL NOT NULL DEFAULT false, owner VARCHAR(255), token VARCHAR(32), fence BIGINT NOT NULL DEFAULT 0, acquired_at DATETIME(6), retries_left INTEGER, PRIMARY KEY (queue_id, id)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_task_timeout` (queue_id VARCHAR(255) NOT NULL DEFAULT 'default', id VARCHAR(255) NOT NULL, ts BIGINT NOT NULL DEFAULT 0, timeout BIGINT NOT NULL, token VARCHAR(32), fence BIGINT NOT NULL DEFAULT 0, retries_left INTEGER, PRIMARY KEY (queue_id, id)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_task` (queue_id VARCHAR(255) NOT NULL DEFAULT 'default', id VARCHAR(255) NOT NULL, status VARCHAR(64) NOT NULL DEFAULT 'done', claim BIGINT NOT NULL DEFAULT 0, updated_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), timeout BIGINT, retries_left INTEGER, PRIMARY KEY (queue_id, id), INDEX `lock_task_ready` (queue_id, status, id), INDEX `lock_task_captured` (status, updated_at)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_job` (internal_id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, external_id CHAR(32) NOT NULL, queue_id VARCHAR(255) NOT NULL DEFAULT 'default', payload JSON NOT NULL, priority INTEGER NOT NULL DEFAULT 0, run_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), claim BIGINT NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0, max_attempts INTEGER NOT NULL DEFAULT 5, processing_host VARCHAR(255), created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), started_at DATETIME(6), completed_at DATETIME(6), failed_at DATETIME(6), error TEXT, unique_key VARCHAR(255), INDEX `lock_job_ready` (queue_id, started_at, priority, run_at, internal_id), INDEX `lock_job_running` (completed_at, failed_at, started_at), UNIQUE INDEX `lock_job_external_id` (external_id), INDEX `lock_job_completed` (completed_at), INDEX `lock_job_dead` (failed_at), UNIQUE INDEX `lock_job_unique` (queue_id, unique_key)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_paused_queue` (id VARCHAR(255) NOT NULL, paused_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), PRIMARY KEY (id)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_worker` (host VARCHAR(255) NOT NULL, heartbeat_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), started_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), PRIMARY KEY (host)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_semaphore` (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, name VARCHAR(255) NOT NULL, capacity INTEGER, fence BIGINT NOT NULL DEFAULT 0, used_at_most BIGINT, on_demand BOOL NOT NULL DEFAULT false, created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), updated_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), CONSTRAINT `lock_semaphore_by_name` UNIQUE (name)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_permit_request` (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, external_id VARCHAR(255) NOT NULL, owner VARCHAR(255), state VARCHAR(16) NOT NULL, ttl_seconds DOUBLE, token VARCHAR(32), renewed_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), updated_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), CONSTRAINT `lock_request_by_id` UNIQUE (external_id), INDEX `lock_request_by_state` (state, updated_at)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_permit` (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, semaphore_id BIGINT NOT NULL, permit_request_id BIGINT NOT NULL, count INTEGER NOT NULL, fence BIGINT NOT NULL, state VARCHAR(16) NOT NULL, INDEX `lock_permit_held` (semaphore_id, state, permit_request_id, count), INDEX `lock_permit_by_request` (permit_request_id)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_semaphore_history` (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, semaphore_id BIGINT NOT NULL, old_capacity INTEGER, new_capacity INTEGER, changed_by VARCHAR(255), changed_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), INDEX `lock_history_by_semaphore` (semaphore_id, id)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT IGNORE INTO `lock_semaphore` (name) VALUES ('');

INSERT INTO `lock_installed` (step, installed_by, owner) VALUES ('0001', 'directives', '.alembic_version') ON DUPLICATE KEY UPDATE step = step;

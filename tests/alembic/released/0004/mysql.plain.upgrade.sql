CREATE TABLE IF NOT EXISTS `lock_semaphore` (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, name VARCHAR(255) NOT NULL, capacity INTEGER, fence BIGINT DEFAULT 0 NOT NULL, on_demand TINYINT DEFAULT 0 NOT NULL, created_at DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)) NOT NULL, updated_at DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)) NOT NULL, CONSTRAINT `lock_semaphore_by_name` UNIQUE (name)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_permit_request` (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, external_id VARCHAR(255) NOT NULL, owner VARCHAR(255), state VARCHAR(16) NOT NULL, ttl_seconds DOUBLE, token VARCHAR(32), renewed_at DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)) NOT NULL, created_at DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)) NOT NULL, updated_at DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)) NOT NULL, CONSTRAINT `lock_request_by_id` UNIQUE (external_id), INDEX `lock_request_by_state` (state, updated_at)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_permit` (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, semaphore_id BIGINT NOT NULL, permit_request_id BIGINT NOT NULL, count INTEGER NOT NULL, fence BIGINT NOT NULL, state VARCHAR(16) NOT NULL, INDEX `lock_permit_held` (semaphore_id, state, permit_request_id, count), INDEX `lock_permit_by_request` (permit_request_id)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `lock_semaphore_history` (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, semaphore_id BIGINT NOT NULL, old_capacity INTEGER, new_capacity INTEGER, changed_by VARCHAR(255), changed_at DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)) NOT NULL, INDEX `lock_history_by_semaphore` (semaphore_id, id)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT IGNORE INTO `lock_semaphore` (name) VALUES ('');

INSERT INTO `lock_installed` (step, door) VALUES ('0004', 'directives') ON DUPLICATE KEY UPDATE step = step;

CREATE TABLE IF NOT EXISTS `my_semaphore` (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, name VARCHAR(255) NOT NULL, capacity INTEGER, fence BIGINT DEFAULT 0 NOT NULL, on_demand TINYINT DEFAULT 0 NOT NULL, created_at DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)) NOT NULL, updated_at DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)) NOT NULL, CONSTRAINT `my_semaphore_by_name` UNIQUE (name)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `my_permit_request` (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, external_id VARCHAR(255) NOT NULL, owner VARCHAR(255), state VARCHAR(16) NOT NULL, ttl_seconds DOUBLE, token VARCHAR(32), renewed_at DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)) NOT NULL, created_at DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)) NOT NULL, updated_at DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)) NOT NULL, CONSTRAINT `my_request_by_id` UNIQUE (external_id), INDEX `my_request_by_state` (state, updated_at)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `my_permit` (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, semaphore_id BIGINT NOT NULL, permit_request_id BIGINT NOT NULL, count INTEGER NOT NULL, fence BIGINT NOT NULL, state VARCHAR(16) NOT NULL, INDEX `my_permit_held` (semaphore_id, state, permit_request_id, count), INDEX `my_permit_by_request` (permit_request_id)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `my_semaphore_history` (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, semaphore_id BIGINT NOT NULL, old_capacity INTEGER, new_capacity INTEGER, changed_by VARCHAR(255), changed_at DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)) NOT NULL, INDEX `my_history_by_semaphore` (semaphore_id, id)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT IGNORE INTO `my_semaphore` (name) VALUES ('');

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_semaphore` TO `app`@`10.%`;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_permit_request` TO `app`@`10.%`;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_permit` TO `app`@`10.%`;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_semaphore_history` TO `app`@`10.%`;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_semaphore` TO `role`;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_permit_request` TO `role`;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_permit` TO `role`;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_semaphore_history` TO `role`;

INSERT INTO `my_installed` (step, door) VALUES ('0004', 'directives') ON DUPLICATE KEY UPDATE step = step;

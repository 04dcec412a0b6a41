CREATE TABLE IF NOT EXISTS `my_task_state` (queue_id VARCHAR(255) NOT NULL DEFAULT 'default', id VARCHAR(255) NOT NULL, acquired BOOL NOT NULL DEFAULT false, owner VARCHAR(255), token VARCHAR(32), fence BIGINT NOT NULL DEFAULT 0, acquired_at DATETIME(6), retries_left INTEGER, PRIMARY KEY (queue_id, id)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `my_task_timeout` (queue_id VARCHAR(255) NOT NULL DEFAULT 'default', id VARCHAR(255) NOT NULL, ts BIGINT NOT NULL DEFAULT 0, timeout BIGINT NOT NULL, token VARCHAR(32), fence BIGINT NOT NULL DEFAULT 0, retries_left INTEGER, PRIMARY KEY (queue_id, id)) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_task_state` TO `app`@`10.%`;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_task_timeout` TO `app`@`10.%`;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_task_state` TO `role`;

GRANT SELECT, INSERT, UPDATE, DELETE ON `my_task_timeout` TO `role`;

INSERT INTO `my_installed` (step, door) VALUES ('0002', 'directives') ON DUPLICATE KEY UPDATE step = step;

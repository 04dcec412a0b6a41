CREATE TABLE IF NOT EXISTS "my_task_state" (queue_id VARCHAR(255) NOT NULL DEFAULT 'default', id VARCHAR(255) NOT NULL, acquired BOOLEAN NOT NULL DEFAULT 0, owner VARCHAR(255), token VARCHAR(32), fence BIGINT NOT NULL DEFAULT 0, acquired_at DATETIME, retries_left INTEGER, PRIMARY KEY (queue_id, id));

CREATE TABLE IF NOT EXISTS "my_task_timeout" (queue_id VARCHAR(255) NOT NULL DEFAULT 'default', id VARCHAR(255) NOT NULL, ts BIGINT NOT NULL DEFAULT 0, timeout BIGINT NOT NULL, token VARCHAR(32), fence BIGINT NOT NULL DEFAULT 0, retries_left INTEGER, PRIMARY KEY (queue_id, id));

INSERT INTO "my_installed" (step, door) VALUES ('0002', 'directives') ON CONFLICT DO NOTHING;

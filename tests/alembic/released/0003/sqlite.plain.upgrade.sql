CREATE TABLE IF NOT EXISTS "lock_task" (queue_id VARCHAR(255) NOT NULL DEFAULT 'default', id VARCHAR(255) NOT NULL, status VARCHAR(64) NOT NULL DEFAULT 'done', claim BIGINT NOT NULL DEFAULT 0, updated_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), timeout BIGINT, retries_left INTEGER, PRIMARY KEY (queue_id, id));

CREATE INDEX IF NOT EXISTS "lock_task_ready" ON "lock_task" (queue_id, status, id);

CREATE INDEX IF NOT EXISTS "lock_task_captured" ON "lock_task" (status, updated_at);

CREATE TABLE IF NOT EXISTS "lock_job" (internal_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, external_id CHAR(32) NOT NULL, queue_id VARCHAR(255) NOT NULL DEFAULT 'default', payload JSON NOT NULL, priority INTEGER NOT NULL DEFAULT 0, run_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), claim BIGINT NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0, max_attempts INTEGER NOT NULL DEFAULT 5, processing_host VARCHAR(255), heartbeat_at DATETIME, created_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), started_at DATETIME, completed_at DATETIME, failed_at DATETIME, error TEXT);

CREATE UNIQUE INDEX IF NOT EXISTS "lock_job_external_id" ON "lock_job" (external_id);

CREATE INDEX IF NOT EXISTS "lock_job_ready" ON "lock_job" (queue_id, started_at, priority, run_at, internal_id);

CREATE INDEX IF NOT EXISTS "lock_job_running" ON "lock_job" (heartbeat_at) WHERE heartbeat_at IS NOT NULL;

CREATE INDEX IF NOT EXISTS "lock_job_completed" ON "lock_job" (completed_at) WHERE completed_at IS NOT NULL;

CREATE INDEX IF NOT EXISTS "lock_job_dead" ON "lock_job" (failed_at) WHERE failed_at IS NOT NULL;

INSERT INTO "lock_installed" (step, door) VALUES ('0003', 'directives') ON CONFLICT DO NOTHING;

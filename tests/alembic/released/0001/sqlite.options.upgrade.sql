CREATE TABLE IF NOT EXISTS "my_installed" (step VARCHAR(32) NOT NULL, installed_by VARCHAR(32) NOT NULL, owner VARCHAR(255) NOT NULL, PRIMARY KEY (step, owner));

CREATE TABLE IF NOT EXISTS "my_locked_keys" (key INTEGER NOT NULL, ts DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), PRIMARY KEY (key));

CREATE TABLE IF NOT EXISTS "my_task_state" (queue_id VARCHAR(255) NOT NULL DEFAULT 'default', id VARCHAR(255) NOT NULL, acquired BOOLEAN NOT NULL DEFAULT 0, owner VARCHAR(255), token VARCHAR(32), fence BIGINT NOT NULL DEFAULT 0, acquired_at DATETIME, retries_left INTEGER, PRIMARY KEY (queue_id, id));

CREATE TABLE IF NOT EXISTS "my_task_timeout" (queue_id VARCHAR(255) NOT NULL DEFAULT 'default', id VARCHAR(255) NOT NULL, ts BIGINT NOT NULL DEFAULT 0, timeout BIGINT NOT NULL, token VARCHAR(32), fence BIGINT NOT NULL DEFAULT 0, retries_left INTEGER, PRIMARY KEY (queue_id, id));

CREATE TABLE IF NOT EXISTS "my_task" (queue_id VARCHAR(255) NOT NULL DEFAULT 'default', id VARCHAR(255) NOT NULL, status VARCHAR(64) NOT NULL DEFAULT 'done', claim BIGINT NOT NULL DEFAULT 0, updated_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), timeout BIGINT, retries_left INTEGER, PRIMARY KEY (queue_id, id));

CREATE TABLE IF NOT EXISTS "my_job" (internal_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, external_id CHAR(32) NOT NULL, queue_id VARCHAR(255) NOT NULL DEFAULT 'default', payload JSON NOT NULL, priority INTEGER NOT NULL DEFAULT 0, run_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), claim BIGINT NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0, max_attempts INTEGER NOT NULL DEFAULT 5, processing_host VARCHAR(255), created_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), started_at DATETIME, completed_at DATETIME, failed_at DATETIME, error TEXT, unique_key VARCHAR(255));

CREATE TABLE IF NOT EXISTS "my_paused_queue" (id VARCHAR(255) NOT NULL, paused_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), PRIMARY KEY (id));

CREATE TABLE IF NOT EXISTS "my_worker" (host VARCHAR(255) NOT NULL, heartbeat_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), started_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), PRIMARY KEY (host));

CREATE TABLE IF NOT EXISTS "my_semaphore" (id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, name VARCHAR(255) NOT NULL, capacity INTEGER, fence BIGINT NOT NULL DEFAULT 0, used_at_most BIGINT, on_demand BOOLEAN NOT NULL DEFAULT 0, created_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), updated_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), CONSTRAINT "my_semaphore_by_name" UNIQUE (name));

CREATE TABLE IF NOT EXISTS "my_permit_request" (id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, external_id VARCHAR(255) NOT NULL, owner VARCHAR(255), state VARCHAR(16) NOT NULL, ttl_seconds DOUBLE, token VARCHAR(32), renewed_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), created_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), updated_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')), CONSTRAINT "my_request_by_id" UNIQUE (external_id));

CREATE TABLE IF NOT EXISTS "my_permit" (id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, semaphore_id BIGINT NOT NULL, permit_request_id BIGINT NOT NULL, count INTEGER NOT NULL, fence BIGINT NOT NULL, state VARCHAR(16) NOT NULL);

CREATE TABLE IF NOT EXISTS "my_semaphore_history" (id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, semaphore_id BIGINT NOT NULL, old_capacity INTEGER, new_capacity INTEGER, changed_by VARCHAR(255), changed_at DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')));

CREATE INDEX IF NOT EXISTS "my_task_ready" ON "my_task" (queue_id, status, id);

CREATE INDEX IF NOT EXISTS "my_task_captured" ON "my_task" (status, updated_at);

CREATE INDEX IF NOT EXISTS "my_job_ready" ON "my_job" (queue_id, started_at, priority, run_at, internal_id);

CREATE INDEX IF NOT EXISTS "my_job_running" ON "my_job" (completed_at, failed_at, started_at);

CREATE UNIQUE INDEX IF NOT EXISTS "my_job_external_id" ON "my_job" (external_id);

CREATE INDEX IF NOT EXISTS "my_job_completed" ON "my_job" (completed_at) WHERE completed_at IS NOT NULL;

CREATE INDEX IF NOT EXISTS "my_job_dead" ON "my_job" (failed_at) WHERE failed_at IS NOT NULL;

CREATE UNIQUE INDEX IF NOT EXISTS "my_job_unique" ON "my_job" (queue_id, unique_key) WHERE unique_key IS NOT NULL;

CREATE INDEX IF NOT EXISTS "my_request_by_state" ON "my_permit_request" (state, updated_at);

CREATE INDEX IF NOT EXISTS "my_permit_held" ON "my_permit" (semaphore_id, state, permit_request_id, count) WHERE state = 'ACQUIRED';

CREATE INDEX IF NOT EXISTS "my_permit_by_request" ON "my_permit" (permit_request_id);

CREATE INDEX IF NOT EXISTS "my_history_by_semaphore" ON "my_semaphore_history" (semaphore_id, id);

INSERT INTO "my_semaphore" (name) VALUES ('') ON CONFLICT DO NOTHING;

INSERT INTO "my_installed" (step, installed_by, owner) VALUES ('0001', 'directives', '.alembic_version') ON CONFLICT DO NOTHING;

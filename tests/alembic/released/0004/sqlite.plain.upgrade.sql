CREATE TABLE IF NOT EXISTS "lock_semaphore" (id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, name VARCHAR(255) NOT NULL, capacity INTEGER, fence BIGINT DEFAULT 0 NOT NULL, on_demand BOOLEAN DEFAULT 0 NOT NULL, created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')) NOT NULL, updated_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')) NOT NULL, CONSTRAINT "lock_semaphore_by_name" UNIQUE (name));

CREATE TABLE IF NOT EXISTS "lock_permit_request" (id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, external_id VARCHAR(255) NOT NULL, owner VARCHAR(255), state VARCHAR(16) NOT NULL, ttl_seconds DOUBLE, token VARCHAR(32), renewed_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')) NOT NULL, created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')) NOT NULL, updated_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')) NOT NULL, CONSTRAINT "lock_request_by_id" UNIQUE (external_id));

CREATE TABLE IF NOT EXISTS "lock_permit" (id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, semaphore_id BIGINT NOT NULL, permit_request_id BIGINT NOT NULL, count INTEGER NOT NULL, fence BIGINT NOT NULL, state VARCHAR(16) NOT NULL);

CREATE TABLE IF NOT EXISTS "lock_semaphore_history" (id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, semaphore_id BIGINT NOT NULL, old_capacity INTEGER, new_capacity INTEGER, changed_by VARCHAR(255), changed_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')) NOT NULL);

CREATE INDEX IF NOT EXISTS "lock_request_by_state" ON "lock_permit_request" (state, updated_at);

CREATE INDEX IF NOT EXISTS "lock_permit_held" ON "lock_permit" (semaphore_id, state, permit_request_id, count) WHERE state = 'ACQUIRED';

CREATE INDEX IF NOT EXISTS "lock_permit_by_request" ON "lock_permit" (permit_request_id);

CREATE INDEX IF NOT EXISTS "lock_history_by_semaphore" ON "lock_semaphore_history" (semaphore_id, id);

INSERT INTO "lock_semaphore" (name) VALUES ('') ON CONFLICT DO NOTHING;

INSERT INTO "lock_installed" (step, door) VALUES ('0004', 'directives') ON CONFLICT DO NOTHING;

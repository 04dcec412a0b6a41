CREATE TABLE IF NOT EXISTS "elsewhere".task_state (queue_id text NOT NULL DEFAULT 'default', id text NOT NULL, acquired boolean NOT NULL DEFAULT false, owner text, token text, fence BIGINT NOT NULL DEFAULT 0, acquired_at timestamp with time zone, retries_left INTEGER, PRIMARY KEY (queue_id, id));

CREATE TABLE IF NOT EXISTS "elsewhere".task_timeout (queue_id text NOT NULL DEFAULT 'default', id text NOT NULL, ts BIGINT NOT NULL DEFAULT 0, timeout BIGINT NOT NULL, token text, fence BIGINT NOT NULL DEFAULT 0, retries_left INTEGER, PRIMARY KEY (queue_id, id));

GRANT SELECT, INSERT, UPDATE, DELETE ON "elsewhere".task_state TO "app";

GRANT SELECT, INSERT, UPDATE, DELETE ON "elsewhere".task_timeout TO "app";

GRANT SELECT, INSERT, UPDATE, DELETE ON "elsewhere".task_state TO "other";

GRANT SELECT, INSERT, UPDATE, DELETE ON "elsewhere".task_timeout TO "other";

INSERT INTO "elsewhere".installed (step, door) VALUES ('0002', 'directives') ON CONFLICT DO NOTHING;

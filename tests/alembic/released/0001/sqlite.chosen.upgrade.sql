CREATE TABLE IF NOT EXISTS "my_installed" (step VARCHAR(32) NOT NULL PRIMARY KEY, door VARCHAR(32) NOT NULL);

CREATE TABLE IF NOT EXISTS "my_locked_keys" ("key" INTEGER NOT NULL PRIMARY KEY, ts DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')));

INSERT INTO "my_installed" (step, door) VALUES ('0001', 'directives') ON CONFLICT DO NOTHING;

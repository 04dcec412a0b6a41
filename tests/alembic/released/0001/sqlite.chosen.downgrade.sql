DROP TABLE IF EXISTS "my_locked_keys";

DROP TABLE IF EXISTS "my_installed";

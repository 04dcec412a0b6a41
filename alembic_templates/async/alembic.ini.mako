# One database behind an async engine, with the shipped revisions of sqlalchemy-locks beside your own.

[alembic]
# The folder of env.py; %(here)s is the folder of this file.
script_location = ${script_location}

# Two branches: your revisions, and those that sqlalchemy-locks ships. Hence `alembic upgrade heads`,
# in the plural.
version_locations =
    ${script_location}/versions
    sqlalchemy_locks.alembic_templates:versions

# Not "os": that splits at colons, and the shipped revisions would be ignored silently.
path_separator = newline

# `alembic revision` runs env.py, which puts your revisions into your own branch and needs the database
# for that. Without one, pass --head and --version-path as README, beside env.py, shows.
revision_environment = true

prepend_sys_path = .

# Where the locks live; the values here are the defaults.
# PostgreSQL, YugabyteDB: the schema
# sqlalchemy_locks_schema = lock
# MySQL, MariaDB, SQLite: the prefix of the tables' names
# sqlalchemy_locks_prefix = lock_
# The role that the app runs as, if it isn't the one that migrates; separate several by commas.
# MySQL and MariaDB take user@host, where a percent sign is written twice: app@%%
# sqlalchemy_locks_grant_to =
# PostgreSQL: "table" locks rows of a table instead of the server's advisory keys
# sqlalchemy_locks_locking = native

# file_template = %%(rev)s_%%(slug)s
# timezone =
# truncate_slug_length = 40
# output_encoding = utf-8

# Used by env.py only.
sqlalchemy.url = driver://user:pass@localhost/dbname


[post_write_hooks]
# hooks = ruff
# ruff.type = exec
# ruff.executable = ruff
# ruff.options = check --fix REVISION_SCRIPT_FILENAME

[loggers]
keys = root,sqlalchemy,alembic

[handlers]
keys = console

[formatters]
keys = generic

[logger_root]
level = WARNING
handlers = console
qualname =

[logger_sqlalchemy]
level = WARNING
handlers =
qualname = sqlalchemy.engine

[logger_alembic]
level = INFO
handlers =
qualname = alembic

[handler_console]
class = StreamHandler
args = (sys.stderr,)
level = NOTSET
formatter = generic

[formatter_generic]
format = %(levelname)-5.5s [%(name)s] %(message)s
datefmt = %H:%M:%S

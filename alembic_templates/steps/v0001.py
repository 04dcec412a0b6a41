"""Step 0001: every table, the ``lock.*`` functions, and ``installed``. Frozen once released.

Every command can be repeated: YugabyteDB, MySQL and MariaDB commit DDL as they go, so a step that failed halfway is run
again as a whole.

Two rules shape the tables:

- A capture reads an index in the index's own order, behind conditions that are equalities or the index's own. Nothing
  is sorted and no row is skipped. PostgreSQL and YugabyteDB use partial indexes for that. InnoDB has none, and locks
  every row that it sorts: there, what is ready is an equality on the first columns of the index.
- The semaphore's tables have no foreign keys. InnoDB locks gaps to check them at every isolation level, so a denied
  request would block other requests until its transaction ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alembic.operations import Operations

from sqlalchemy_locks.alembic.options import Options, Refused
from sqlalchemy_locks.alembic.script import Family, InstallScript

#: The functions of the locks, with the types of their arguments. Their bodies differ between servers.
_LOCK_FUNCTIONS = {
    "refuse": "boolean",
    "exclusive": "bigint, boolean, integer",
    "shared": "bigint, boolean, integer",
    "try_exclusive": "bigint, boolean",
    "try_shared": "bigint, boolean",
    "create": "bigint[]",
    "unlock": "bigint",
    "vacuum": "",
}

#: The functions that have one body on every server.
_COMMON_FUNCTIONS = {
    "key": "text[]",
    "semaphore_checked": "text, text",
    "semaphore_take_back": "bigint",
    "semaphore_acquire": "text[], integer[], text, text, double precision, integer, text, boolean, bigint[]",
    "semaphore_release": "text, text, integer",
    "semaphore_renew": "text, text, integer",
    "semaphore_create": "text, integer, text, integer, boolean",
    "semaphore_resize": "text, integer, text, integer, boolean",
    "semaphore_delete": "text, text, integer",
}

#: Every function, with the types of its arguments as ``oidvectortypes`` spells them.
FUNCTIONS: Mapping[str, str] = _LOCK_FUNCTIONS | _COMMON_FUNCTIONS

_COMMON_BODIES = {name: f"{'common' if name == 'key' else 'semaphore'}/{name}.sql" for name in _COMMON_FUNCTIONS}
_LOCK_BODIES = {
    "advisory": {name: f"advisory/{name}.sql" for name in _LOCK_FUNCTIONS} | {"refuse": "common/refuse.sql"},
    "table": {name: f"table/{name}.sql" for name in _LOCK_FUNCTIONS} | {"refuse": "common/refuse.sql"},
    "yugabytedb": {
        name: f"{'table' if name in ('create', 'unlock', 'vacuum') else 'yugabytedb'}/{name}.sql"
        for name in _LOCK_FUNCTIONS
    },
}

#: The file of each function's body, by what is installed.
BODIES: Mapping[str, Mapping[str, str]] = {variant: files | _COMMON_BODIES for variant, files in _LOCK_BODIES.items()}

#: Types as SQLAlchemy's reflection spells them, and the values of defaults.
_TYPES: Mapping[Family, Mapping[str, str]] = {
    "postgresql": {
        "text16": "TEXT",
        "text32": "TEXT",
        "text64": "TEXT",
        "text255": "TEXT",
        "id": "BIGINT",
        "key": "BIGINT",
        "boolean": "BOOLEAN",
        "false": "false",
        "seconds": "DOUBLE PRECISION",
        "instant": "TIMESTAMP WITH TIME ZONE",
        "now": "clock_timestamp()",
        "uuid": "UUID",
        "json": "JSONB",
    },
    "mysql": {
        "text16": "VARCHAR(16)",
        "text32": "VARCHAR(32)",
        "text64": "VARCHAR(64)",
        "text255": "VARCHAR(255)",
        "id": "BIGINT",
        "key": "BIGINT",
        "boolean": "TINYINT",
        "false": "false",
        "seconds": "DOUBLE",
        "instant": "DATETIME(6)",
        "now": "(UTC_TIMESTAMP(6))",
        "uuid": "CHAR(32)",
        "json": "JSON",
    },
    "sqlite": {
        "text16": "VARCHAR(16)",
        "text32": "VARCHAR(32)",
        "text64": "VARCHAR(64)",
        "text255": "VARCHAR(255)",
        "id": "INTEGER",
        "key": "INTEGER",
        "boolean": "BOOLEAN",
        "false": "0",
        "seconds": "DOUBLE",
        "instant": "DATETIME",
        # six digits, as SQLAlchemy writes and reads them
        "now": "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))",
        "uuid": "CHAR(32)",
        "json": "JSON",
    },
}

#: Table to column to type; `` NULL`` follows if it may be null, and the default at the end.
_TABLES: Mapping[str, Mapping[str, str]] = {
    # an owner is the version table of an Alembic history, of which several may share the tables
    "installed": {"step": "{text32}", "installed_by": "{text32}", "owner": "{text255}"},
    "locked_keys": {"key": "{key}", "ts": "{instant} DEFAULT {now}"},
    "task_state": {
        "queue_id": "{text255} DEFAULT 'default'",
        "id": "{text255}",
        "acquired": "{boolean} DEFAULT {false}",
        "owner": "{text255} NULL",
        "token": "{text32} NULL",
        "fence": "BIGINT DEFAULT 0",
        "acquired_at": "{instant} NULL",
        "retries_left": "INTEGER NULL",
    },
    "task_timeout": {
        "queue_id": "{text255} DEFAULT 'default'",
        "id": "{text255}",
        "ts": "BIGINT DEFAULT 0",
        "timeout": "BIGINT",
        "token": "{text32} NULL",
        "fence": "BIGINT DEFAULT 0",
        "retries_left": "INTEGER NULL",
    },
    "task": {
        "queue_id": "{text255} DEFAULT 'default'",
        "id": "{text255}",
        "status": "{text64} DEFAULT 'done'",
        "claim": "BIGINT DEFAULT 0",
        "updated_at": "{instant} DEFAULT {now}",
        "timeout": "BIGINT NULL",
        "retries_left": "INTEGER NULL",
    },
    "job": {
        "internal_id": "{id}",
        "external_id": "{uuid}",
        "queue_id": "{text255} DEFAULT 'default'",
        "payload": "{json}",
        "priority": "INTEGER DEFAULT 0",
        "run_at": "{instant} DEFAULT {now}",
        "claim": "BIGINT DEFAULT 0",
        "attempts": "INTEGER DEFAULT 0",
        "max_attempts": "INTEGER DEFAULT 5",
        "processing_host": "{text255} NULL",
        "created_at": "{instant} DEFAULT {now}",
        "started_at": "{instant} NULL",
        "completed_at": "{instant} NULL",
        "failed_at": "{instant} NULL",
        "error": "TEXT NULL",
        "unique_key": "{text255} NULL",
    },
    "paused_queue": {"id": "{text255}", "paused_at": "{instant} DEFAULT {now}"},
    "worker": {"host": "{text255}", "heartbeat_at": "{instant} DEFAULT {now}", "started_at": "{instant} DEFAULT {now}"},
    "semaphore": {
        "id": "{id}",
        "name": "{text255}",
        "capacity": "INTEGER NULL",
        "fence": "BIGINT DEFAULT 0",
        "used_at_most": "BIGINT NULL",
        "on_demand": "{boolean} DEFAULT {false}",
        "created_at": "{instant} DEFAULT {now}",
        "updated_at": "{instant} DEFAULT {now}",
    },
    "permit_request": {
        "id": "{id}",
        "external_id": "{text255}",
        "owner": "{text255} NULL",
        "state": "{text16}",
        "ttl_seconds": "{seconds} NULL",
        "token": "{text32} NULL",
        "renewed_at": "{instant} DEFAULT {now}",
        "created_at": "{instant} DEFAULT {now}",
        "updated_at": "{instant} DEFAULT {now}",
    },
    "permit": {
        "id": "{id}",
        "semaphore_id": "BIGINT",
        "permit_request_id": "BIGINT",
        "count": "INTEGER",
        "fence": "BIGINT",
        "state": "{text16}",
    },
    "semaphore_history": {
        "id": "{id}",
        "semaphore_id": "BIGINT",
        "old_capacity": "INTEGER NULL",
        "new_capacity": "INTEGER NULL",
        "changed_by": "{text255} NULL",
        "changed_at": "{instant} DEFAULT {now}",
    },
}

#: What the drift check expects: the columns' types, without their defaults.
TABLES: Mapping[Family, Mapping[str, Mapping[str, str]]] = {
    family: {
        table: {column: spec.partition(" DEFAULT ")[0].format(**types) for column, spec in columns.items()}
        for table, columns in _TABLES.items()
    }
    for family, types in _TYPES.items()
}

#: The primary keys that are not a table's first column alone.
KEYS: Mapping[str, tuple[str, ...]] = {
    "installed": ("step", "owner"),
    "task_state": ("queue_id", "id"),
    "task_timeout": ("queue_id", "id"),
    "task": ("queue_id", "id"),
}

#: Unique constraints: the table and the column.
_UNIQUE = {"semaphore_by_name": ("semaphore", "name"), "request_by_id": ("permit_request", "external_id")}

#: Indexes: the table, the columns, and the condition where the engine has partial indexes.
_INDEXES: Mapping[str, tuple[str, str, str]] = {
    "job_external_id": ("job", "external_id", ""),
    "job_completed": ("job", "completed_at", "completed_at IS NOT NULL"),
    "job_dead": ("job", "failed_at", "failed_at IS NOT NULL"),
    "job_unique": ("job", "queue_id, unique_key", "unique_key IS NOT NULL"),
    "request_by_state": ("permit_request", "state, updated_at", ""),
    # released permits are left out: the index answers how many are held
    "permit_held": ("permit", "semaphore_id, state, permit_request_id, count", "state = 'ACQUIRED'"),
    "permit_by_request": ("permit", "permit_request_id", ""),
    "history_by_semaphore": ("semaphore_history", "semaphore_id, id", ""),
}
_UNIQUE_INDEXES = {"job_external_id", "job_unique"}

_ORDER = "priority, run_at, internal_id"
#: The indexes that captures read.
_CAPTURE_INDEXES: Mapping[str, tuple[str, str, str]] = {
    "task_ready": ("task", "queue_id, status, id", ""),
    "task_captured": ("task", "status, updated_at", ""),
    "job_ready": ("job", f"queue_id, started_at, {_ORDER}", ""),
    "job_running": ("job", "completed_at, failed_at, started_at", ""),
}
_PARTIAL_CAPTURE_INDEXES: Mapping[str, tuple[str, str, str]] = {
    "task_ready": ("task", "queue_id, id", "status IN ('done', 'failed')"),
    "task_captured": ("task", "updated_at", "status = 'in_progress'"),
    "job_ready": ("job", f"queue_id, {_ORDER}", "started_at IS NULL"),
    "job_running": ("job", "started_at", "started_at IS NOT NULL AND completed_at IS NULL AND failed_at IS NULL"),
}

#: The indexes and unique constraints of each table.
INDEXES: Mapping[str, tuple[str, ...]] = {
    table: tuple(name for name, (of, *_) in {**_UNIQUE, **_CAPTURE_INDEXES, **_INDEXES}.items() if of == table)
    for table in ("task", "job", "semaphore", "permit_request", "permit", "semaphore_history")
}

_INNODB = " ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"

_IDENTITY: Mapping[Family, str] = {
    "postgresql": "bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY",
    "mysql": "BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY",
    # AUTOINCREMENT: without it SQLite reuses the id of a deleted last row
    "sqlite": "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT",
}

#: The row without a name keeps the greatest fence of all semaphores that were removed: a new one starts there.
_FENCE_FLOOR: Mapping[Family, str] = {
    "postgresql": "INSERT INTO {} (name) VALUES ('') ON CONFLICT DO NOTHING",
    "mysql": "INSERT IGNORE INTO {} (name) VALUES ('')",
    "sqlite": "INSERT INTO {} (name) VALUES ('') ON CONFLICT DO NOTHING",
}

#: The comment of a schema that this step created, and that downgrade may therefore drop.
CREATED = "created by sqlalchemy_locks"


def upgrade(op: Operations, options: Options) -> None:
    """Install."""
    script = InstallScript(op, options)
    if script.family != "postgresql" and options.locking != "native":
        raise Refused(
            f"locking={options.locking!r} is for PostgreSQL and YugabyteDB: other engines have one kind of locks"
        )
    if script.family == "sqlite" and options.grantees:
        raise Refused("grant_to is refused on SQLite, which has no roles: access to the file is access to the locks")
    if script.family == "postgresql":
        _create_schema(script)
    _create_table(script, "installed")
    if script.family == "postgresql":
        _create_lock_functions(script)
    else:
        _create_table(script, "locked_keys")
    for table in _TABLES:
        if table not in ("installed", "locked_keys"):
            _create_table(script, table)
    if script.family != "mysql":
        for name, (table, columns, where) in _indexes(script.family).items():
            script.run(
                f"CREATE {_unique(name)}INDEX IF NOT EXISTS {_index_name(script, name)} "
                f"ON {script.table(table)} ({columns}){f' WHERE {where}' if where else ''}"
            )
    script.run(_FENCE_FLOOR[script.family].format(script.table("semaphore")))
    if script.family == "postgresql":
        for path in _COMMON_BODIES.values():
            script.run(script.body(path))
        _grant_postgresql(script)
    else:
        for grantee in map(script.grantee, options.grantees):
            script.run(f"GRANT SELECT ON {script.table('installed')} TO {grantee}")
            for table in _TABLES:
                if table != "installed":
                    script.run(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {script.table(table)} TO {grantee}")


def downgrade(op: Operations, options: Options) -> None:
    """Remove what upgrade() created, and nothing that depends on it: the engine refuses in that case."""
    script = InstallScript(op, options)
    if script.family == "postgresql":
        for name, arguments in reversed(FUNCTIONS.items()):
            script.run(f"DROP FUNCTION IF EXISTS {script.schema}.{name}({arguments})")
    for table in reversed(_TABLES):
        if table == "locked_keys" and script.family == "postgresql":
            script.block(
                f"  IF EXISTS ({_locked_keys(script)} AND relkind = 'v') THEN",
                f"    DROP VIEW {script.table('locked_keys')};",
                "  ELSE",
                f"    DROP TABLE IF EXISTS {script.table('locked_keys')};",
                "  END IF;",
            )
        else:
            script.run(f"DROP TABLE IF EXISTS {script.table(table)}")
    if script.family == "postgresql":
        _drop_schema(script)


def _create_table(script: InstallScript, table: str) -> None:
    columns = _TABLES[table]
    first = next(iter(columns))
    identity = columns[first] == "{id}"
    lines = [_column(script.family, table, column) for column in columns]
    if not identity:
        lines.append(f"PRIMARY KEY ({', '.join(_quoted(script.family, name) for name in KEYS.get(table, (first,)))})")
    lines += [
        f"CONSTRAINT {_index_name(script, name)} UNIQUE ({column})"
        for name, (of, column) in _UNIQUE.items()
        if of == table
    ]
    if script.family == "mysql":
        # inside CREATE TABLE, as CREATE INDEX has no IF NOT EXISTS there
        lines += [
            f"{_unique(name)}INDEX {_index_name(script, name)} ({on})"
            for name, (of, on, _) in _indexes("mysql").items()
            if of == table
        ]
    tail = _INNODB if script.family == "mysql" else ""
    script.run(f"CREATE TABLE IF NOT EXISTS {script.table(table)} ({', '.join(lines)}){tail}")


def _column(family: Family, table: str, column: str) -> str:
    spec = _TABLES[table][column]
    if spec == "{id}":
        return f"{column} {_IDENTITY[family]}"
    type_, _, default = spec.format(**_TYPES[family]).partition(" DEFAULT ")
    bare = type_.removesuffix(" NULL")
    not_null = " NOT NULL" if bare == type_ else ""
    # TINYINT is what reflection finds, TINYINT(1) what tools take for a boolean
    shown = "BOOL" if bare == "TINYINT" else bare
    return f"{_quoted(family, column)} {shown}{not_null}{f' DEFAULT {default}' if default else ''}"


def _quoted(family: Family, column: str) -> str:
    """Quote the one column whose name MySQL and MariaDB reserve."""
    return "`key`" if column == "key" and family == "mysql" else column


def _indexes(family: Family) -> Mapping[str, tuple[str, str, str]]:
    return {**(_PARTIAL_CAPTURE_INDEXES if family == "postgresql" else _CAPTURE_INDEXES), **_INDEXES}


def _index_name(script: InstallScript, name: str) -> str:
    """Return an index's name; on PostgreSQL it is in the schema of its table and must not be qualified."""
    return name if script.family == "postgresql" else script.table(name)


def _unique(name: str) -> str:
    return "UNIQUE " if name in _UNIQUE_INDEXES else ""


def _create_schema(script: InstallScript) -> None:
    # Looked up first: even with IF NOT EXISTS the command needs the right to create a schema
    script.block(
        f"  IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = '{script.options.schema}') THEN",
        f"    CREATE SCHEMA {script.schema};",
        f"    COMMENT ON SCHEMA {script.schema} IS '{CREATED}';",
        "  END IF;",
    )


def _drop_schema(script: InstallScript) -> None:
    # A schema that existed before stays, and so does one that holds an object of another origin
    script.block(
        "  IF EXISTS (",
        "    SELECT FROM pg_catalog.pg_namespace AS n",
        f"    WHERE nspname = '{script.options.schema}'",
        f"      AND obj_description(n.oid, 'pg_namespace') = '{CREATED}'",
        "      AND pg_has_role(nspowner, 'USAGE')",
        "      AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend",
        "        WHERE refclassid = 'pg_catalog.pg_namespace'::regclass AND refobjid = n.oid)",
        "  ) THEN",
        f"    DROP SCHEMA {script.schema};",
        "  END IF;",
    )


def _create_lock_functions(script: InstallScript) -> None:
    """Create the locks' functions, and the view or table behind them, in one block: the server picks the variant."""
    locking = script.options.locking
    if locking == "advisory":
        script.block(*_refuse_overloads(script), *_bodies(script, "advisory"))
        return
    lines = ["  IF strpos(version(), '-YB-') > 0"]
    if locking == "native":
        # what is installed stays: holders of the other kind of lock would not be seen
        lines += [
            "    AND (coalesce(current_setting('yb_enable_advisory_locks', true), 'off') <> 'on'",
            "      OR coalesce(current_setting('yb_silence_advisory_locks_not_supported_error', true), 'off') = 'on'",
            f"      OR EXISTS ({_locked_keys(script)} AND relkind = 'r'))",
        ]
    script.block(
        *_refuse_overloads(script),
        *lines,
        "  THEN",
        *_bodies(script, "yugabytedb"),
        "  ELSE",
        *_bodies(script, "table" if locking == "table" else "advisory"),
        "  END IF;",
    )


def _refuse_overloads(script: InstallScript) -> Iterator[str]:
    """Refuse to install beside functions of another origin that calls would reach instead."""
    for name in ("exclusive", "shared"):
        yield f"  IF to_regprocedure('{script.schema}.{name}(bigint)') IS NOT NULL THEN"
        yield "    RAISE EXCEPTION USING ERRCODE = 'duplicate_function', MESSAGE ="
        yield f"      'a function {script.options.schema}.{name}(bigint) exists already, and calls would reach it'"
        yield "      ' instead of the one to be installed: drop it, or install into another schema';"
        yield "  END IF;"


def _bodies(script: InstallScript, variant: str) -> Iterator[str]:
    if variant == "advisory":
        yield from _refuse_other_kind(script, "v", "a view")
        yield _execute(script.body("advisory/locked_keys.sql"))
    else:
        columns = ", ".join(_column("postgresql", "locked_keys", column) for column in _TABLES["locked_keys"])
        yield from _refuse_other_kind(script, "r", "a table")
        yield f"    CREATE TABLE IF NOT EXISTS {script.table('locked_keys')} ({columns}, PRIMARY KEY (key));"
    for path in _LOCK_BODIES[variant].values():
        yield _execute(script.body(path))


def _refuse_other_kind(script: InstallScript, kind: str, what: str) -> Iterator[str]:
    """Refuse a ``locked_keys`` of the other kind, which IF NOT EXISTS would skip and OR REPLACE not explain."""
    yield f"    IF EXISTS ({_locked_keys(script)} AND relkind <> '{kind}') THEN"
    yield "      RAISE EXCEPTION USING ERRCODE = 'wrong_object_type', MESSAGE ="
    yield f"        '{script.options.schema}.locked_keys exists already and is not {what}: with another locking option'"
    yield "        ' two kinds of locks would not exclude each other. End every process that uses locks, drop it, and'"
    yield "        ' upgrade again';"
    yield "    END IF;"


def _locked_keys(script: InstallScript) -> str:
    return (
        "SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace AS n ON n.oid = relnamespace"
        f" WHERE relname = 'locked_keys' AND nspname = '{script.options.schema}'"
    )


def _execute(command: str) -> str:
    return f"    EXECUTE $command$\n{command}\n$command$;"


def _grant_postgresql(script: InstallScript) -> None:
    if not script.options.grantees:
        return
    functions = [f"{script.schema}.{name}({arguments})" for name, arguments in FUNCTIONS.items()]
    for function in functions:
        script.run(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC")
    for grantee in map(script.grantee, script.options.grantees):
        script.run(f"GRANT USAGE ON SCHEMA {script.schema} TO {grantee}")
        for function in functions:
            script.run(f"GRANT EXECUTE ON FUNCTION {function} TO {grantee}")
        script.run(f"GRANT SELECT ON {script.table('installed')} TO {grantee}")
        script.block(
            # FOR UPDATE and FOR SHARE need the right to update; the functions run with the rights of their caller
            f"  IF EXISTS ({_locked_keys(script)} AND relkind = 'r') THEN",
            f"    GRANT SELECT, INSERT, UPDATE, DELETE ON {script.table('locked_keys')} TO {grantee};",
            "  ELSE",
            f"    GRANT SELECT ON {script.table('locked_keys')} TO {grantee};",
            "  END IF;",
        )
        for table in _TABLES:
            if table not in ("installed", "locked_keys"):
                script.run(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {script.table(table)} TO {grantee}")

"""Step 0001: ``locked_keys``, the ``lock.*`` functions, and ``installed``. Frozen once released.

Every command can be run again, because YugabyteDB, MySQL and MariaDB commit DDL as they go: a step
that died in the middle is repeated as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alembic.operations import Operations

from sqlalchemy_locks.alembic.options import Options, Refused
from sqlalchemy_locks.alembic.script import Family, InstallScript

#: Our functions, with the arguments that tell them from another's.
FUNCTIONS = {
    "key": "text[]",
    "refuse": "boolean",
    "exclusive": "bigint, boolean",
    "shared": "bigint, boolean",
    "try_exclusive": "bigint, boolean",
    "try_shared": "bigint, boolean",
    "create": "bigint[]",
    "unlock": "bigint",
    "vacuum": "",
}

#: Where their bodies are, by what is installed.
BODIES = {
    "advisory": {name: f"advisory/{name}.sql" for name in FUNCTIONS}
    | {"key": "common/key.sql", "refuse": "common/refuse.sql"},
    "table": {name: f"table/{name}.sql" for name in FUNCTIONS}
    | {"key": "common/key.sql", "refuse": "common/refuse.sql"},
    "yugabytedb": {name: f"yugabytedb/{name}.sql" for name in FUNCTIONS}
    | {
        "key": "common/key.sql",
        "create": "table/create.sql",
        "unlock": "table/unlock.sql",
        "vacuum": "table/vacuum.sql",
    },
}

#: What the drift check expects of the tables: the columns' types as the engine spells them.
TABLES: Mapping[Family, Mapping[str, Mapping[str, str]]] = {
    "postgresql": {
        "installed": {"step": "TEXT", "door": "TEXT"},
        "locked_keys": {"key": "BIGINT", "ts": "TIMESTAMP WITH TIME ZONE"},
    },
    "mysql": {
        "installed": {"step": "VARCHAR(32)", "door": "VARCHAR(32)"},
        "locked_keys": {"key": "BIGINT", "ts": "DATETIME(6)"},
    },
    "sqlite": {
        "installed": {"step": "VARCHAR(32)", "door": "VARCHAR(32)"},
        "locked_keys": {"key": "INTEGER", "ts": "DATETIME"},
    },
}

#: The primary keys that are not a table's first column alone.
KEYS: Mapping[str, tuple[str, ...]] = {}

#: The indexes and unique constraints besides: none.
INDEXES: Mapping[str, tuple[str, ...]] = {}

CREATED = "created by sqlalchemy_locks"
INNODB = "ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"


def upgrade(op: Operations, options: Options) -> None:
    """Install."""
    script = InstallScript(op, options)
    if script.family != "postgresql" and options.locking == "table":
        raise Refused("locking='table' is for PostgreSQL: here, locks are rows of a table anyway")
    if script.family == "sqlite" and options.grant_to:
        raise Refused("grant_to is refused on SQLite, which has no roles: whoever can open the file can lock")
    {"postgresql": _postgresql, "mysql": _mysql, "sqlite": _sqlite}[script.family](script)


def downgrade(op: Operations, options: Options) -> None:
    """Remove what upgrade() made, and nothing that depends on it: the engine refuses then."""
    script = InstallScript(op, options)
    if script.family == "postgresql":
        _postgresql_downgrade(script)
    else:
        for name in ("locked_keys", "installed"):
            script.run(f"DROP TABLE IF EXISTS {script.table(name)}")


def _postgresql(script: InstallScript) -> None:
    # Looked for first, because even with IF NOT EXISTS the command needs the right to create a schema
    script.block(
        f"  IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = '{script.options.schema}') THEN",
        f"    CREATE SCHEMA {script.schema};",
        f"    COMMENT ON SCHEMA {script.schema} IS '{CREATED}';",
        "  END IF;",
    )
    script.run(f"CREATE TABLE IF NOT EXISTS {script.table('installed')} (step text PRIMARY KEY, door text NOT NULL)")
    script.block(
        *_strangers(script),
        "  IF strpos(version(), '-YB-') > 0 THEN",
        *_bodies(script, "yugabytedb"),
        "  ELSE",
        *_bodies(script, "table" if script.options.locking == "table" else "advisory"),
        "  END IF;",
    )
    _postgresql_grant(script)


def _strangers(script: InstallScript) -> Iterator[str]:
    """Refuse to install beside functions of another making, which calls would reach instead of ours."""
    for name in ("exclusive", "shared"):
        yield f"  IF to_regprocedure('{script.schema}.{name}(bigint)') IS NOT NULL THEN"
        yield "    RAISE EXCEPTION USING ERRCODE = 'duplicate_function', MESSAGE ="
        yield f"      'there is a function {script.options.schema}.{name}(bigint) already, and calls would reach it'"
        yield "      ' instead of the one to be installed: drop it, or install into another schema';"
        yield "  END IF;"


def _bodies(script: InstallScript, variant: str) -> Iterator[str]:
    if variant == "advisory":
        yield from _unless_relation(script, "v", "a view")
        yield _execute(script.body("advisory/locked_keys.sql"))
    else:
        yield from _unless_relation(script, "r", "a table")
        yield f"    CREATE TABLE IF NOT EXISTS {script.table('locked_keys')} ("
        yield "      key bigint PRIMARY KEY, ts timestamp with time zone NOT NULL DEFAULT clock_timestamp());"
    for path in BODIES[variant].values():
        yield _execute(script.body(path))


def _unless_relation(script: InstallScript, kind: str, what: str) -> Iterator[str]:
    """Refuse what IF NOT EXISTS and OR REPLACE would pass over or not explain: the other way of locking."""
    yield f"    IF EXISTS ({_relation(script)} AND relkind <> '{kind}') THEN"
    yield "      RAISE EXCEPTION USING ERRCODE = 'wrong_object_type', MESSAGE ="
    yield f"        '{script.options.schema}.locked_keys is there already and is not {what}: drop it, or downgrade'"
    yield "        ' to base with the locking option that it was installed with, then upgrade again';"
    yield "    END IF;"


def _relation(script: InstallScript) -> str:
    return (
        "SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace AS place ON place.oid = relnamespace"
        f" WHERE relname = 'locked_keys' AND nspname = '{script.options.schema}'"
    )


def _execute(command: str) -> str:
    return f"    EXECUTE $command$\n{command}\n$command$;"


def _postgresql_grant(script: InstallScript) -> None:
    if not script.options.grant_to:
        return
    functions = [f"{script.schema}.{name}({arguments})" for name, arguments in FUNCTIONS.items()]
    for function in functions:
        script.run(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC")
    for grantee in map(script.grantee, script.options.grant_to):
        script.run(f"GRANT USAGE ON SCHEMA {script.schema} TO {grantee}")
        for function in functions:
            script.run(f"GRANT EXECUTE ON FUNCTION {function} TO {grantee}")
        script.run(f"GRANT SELECT ON {script.table('installed')} TO {grantee}")
        script.block(
            # FOR UPDATE and FOR SHARE need the right to update; the functions run as whoever calls them
            f"  IF EXISTS ({_relation(script)} AND relkind = 'r') THEN",
            f"    GRANT SELECT, INSERT, UPDATE, DELETE ON {script.table('locked_keys')} TO {grantee};",
            "  ELSE",
            f"    GRANT SELECT ON {script.table('locked_keys')} TO {grantee};",
            "  END IF;",
        )


def _postgresql_downgrade(script: InstallScript) -> None:
    for name, arguments in reversed(FUNCTIONS.items()):
        script.run(f"DROP FUNCTION IF EXISTS {script.schema}.{name}({arguments})")
    script.block(
        f"  IF EXISTS ({_relation(script)} AND relkind = 'v') THEN",
        f"    DROP VIEW {script.table('locked_keys')};",
        "  ELSE",
        f"    DROP TABLE IF EXISTS {script.table('locked_keys')};",
        "  END IF;",
    )
    script.run(f"DROP TABLE IF EXISTS {script.table('installed')}")
    # A schema that was there before us stays, and so does one that holds anything of somebody else's
    script.block(
        "  IF EXISTS (",
        "    SELECT FROM pg_catalog.pg_namespace AS place",
        f"    WHERE nspname = '{script.options.schema}'",
        f"      AND obj_description(place.oid, 'pg_namespace') = '{CREATED}'",
        "      AND pg_has_role(nspowner, 'USAGE')",
        "      AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend",
        "        WHERE refclassid = 'pg_catalog.pg_namespace'::regclass AND refobjid = place.oid)",
        "  ) THEN",
        f"    DROP SCHEMA {script.schema};",
        "  END IF;",
    )


def _mysql(script: InstallScript) -> None:
    script.run(
        f"CREATE TABLE IF NOT EXISTS {script.table('installed')} "
        f"(step VARCHAR(32) NOT NULL, door VARCHAR(32) NOT NULL, PRIMARY KEY (step)) {INNODB}"
    )
    script.run(
        f"CREATE TABLE IF NOT EXISTS {script.table('locked_keys')} "
        "(`key` BIGINT NOT NULL, ts DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), "
        f"PRIMARY KEY (`key`)) {INNODB}"
    )
    for grantee in map(script.grantee, script.options.grant_to):
        script.run(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {script.table('locked_keys')} TO {grantee}")


def _sqlite(script: InstallScript) -> None:
    script.run(
        f"CREATE TABLE IF NOT EXISTS {script.table('installed')} "
        "(step VARCHAR(32) NOT NULL PRIMARY KEY, door VARCHAR(32) NOT NULL)"
    )
    script.run(
        f"CREATE TABLE IF NOT EXISTS {script.table('locked_keys')} ("
        '"key" INTEGER NOT NULL PRIMARY KEY, '
        "ts DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')))"
    )

"""Step 0002: ``task_state`` (the mutex) and ``task_timeout``. Frozen once released.

Every command can be run again, because YugabyteDB, MySQL and MariaDB commit DDL as they go.
"""

from __future__ import annotations

from collections.abc import Mapping

from alembic.operations import Operations

from sqlalchemy_locks.alembic.options import Options
from sqlalchemy_locks.alembic.script import Family, InstallScript

FUNCTIONS: Mapping[str, str] = {}
BODIES: Mapping[str, Mapping[str, str]] = {"advisory": {}, "table": {}, "yugabytedb": {}}

#: What the drift check expects: the columns' types as the engine spells them.
TABLES: Mapping[Family, Mapping[str, Mapping[str, str]]] = {
    "postgresql": {
        "task_state": {
            "queue_id": "TEXT",
            "id": "TEXT",
            "acquired": "BOOLEAN",
            "owner": "TEXT NULL",
            "token": "TEXT NULL",
            "fence": "BIGINT",
            "acquired_at": "TIMESTAMP WITH TIME ZONE NULL",
            "retries_left": "INTEGER NULL",
        },
        "task_timeout": {
            "queue_id": "TEXT",
            "id": "TEXT",
            "ts": "BIGINT",
            "timeout": "BIGINT",
            "token": "TEXT NULL",
            "fence": "BIGINT",
            "retries_left": "INTEGER NULL",
        },
    },
    "mysql": {
        "task_state": {
            "queue_id": "VARCHAR(255)",
            "id": "VARCHAR(255)",
            "acquired": "TINYINT",
            "owner": "VARCHAR(255) NULL",
            "token": "VARCHAR(32) NULL",
            "fence": "BIGINT",
            "acquired_at": "DATETIME(6) NULL",
            "retries_left": "INTEGER NULL",
        },
        "task_timeout": {
            "queue_id": "VARCHAR(255)",
            "id": "VARCHAR(255)",
            "ts": "BIGINT",
            "timeout": "BIGINT",
            "token": "VARCHAR(32) NULL",
            "fence": "BIGINT",
            "retries_left": "INTEGER NULL",
        },
    },
    "sqlite": {
        "task_state": {
            "queue_id": "VARCHAR(255)",
            "id": "VARCHAR(255)",
            "acquired": "BOOLEAN",
            "owner": "VARCHAR(255) NULL",
            "token": "VARCHAR(32) NULL",
            "fence": "BIGINT",
            "acquired_at": "DATETIME NULL",
            "retries_left": "INTEGER NULL",
        },
        "task_timeout": {
            "queue_id": "VARCHAR(255)",
            "id": "VARCHAR(255)",
            "ts": "BIGINT",
            "timeout": "BIGINT",
            "token": "VARCHAR(32) NULL",
            "fence": "BIGINT",
            "retries_left": "INTEGER NULL",
        },
    },
}

#: The primary keys that are not a table's first column alone.
KEYS: Mapping[str, tuple[str, ...]] = {"task_state": ("queue_id", "id"), "task_timeout": ("queue_id", "id")}

#: The indexes and unique constraints besides: none.
INDEXES: Mapping[str, tuple[str, ...]] = {}

INNODB = "ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"

_TYPES: Mapping[Family, Mapping[str, str]] = {
    "postgresql": {"name": "text", "token": "text", "flag": "boolean", "no": "false", "at": "timestamp with time zone"},
    "mysql": {"name": "VARCHAR(255)", "token": "VARCHAR(32)", "flag": "BOOL", "no": "false", "at": "DATETIME(6)"},
    "sqlite": {"name": "VARCHAR(255)", "token": "VARCHAR(32)", "flag": "BOOLEAN", "no": "0", "at": "DATETIME"},
}


def upgrade(op: Operations, options: Options) -> None:
    """Install."""
    script = InstallScript(op, options)
    tail = f" {INNODB}" if script.family == "mysql" else ""
    for name, columns in _columns(_TYPES[script.family]).items():
        lines = ", ".join([*columns, "PRIMARY KEY (queue_id, id)"])
        script.run(f"CREATE TABLE IF NOT EXISTS {script.table(name)} ({lines}){tail}")
    for grantee in map(script.grantee, options.grant_to):
        for name in KEYS:
            script.run(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {script.table(name)} TO {grantee}")


def _columns(types: Mapping[str, str]) -> dict[str, list[str]]:
    identity = [f"queue_id {types['name']} NOT NULL DEFAULT 'default'", f"id {types['name']} NOT NULL"]
    token = [f"token {types['token']}", "fence BIGINT NOT NULL DEFAULT 0"]
    retries = ["retries_left INTEGER"]
    return {
        "task_state": [
            *identity,
            f"acquired {types['flag']} NOT NULL DEFAULT {types['no']}",
            f"owner {types['name']}",
            *token,
            f"acquired_at {types['at']}",
            *retries,
        ],
        "task_timeout": [*identity, "ts BIGINT NOT NULL DEFAULT 0", "timeout BIGINT NOT NULL", *token, *retries],
    }


def downgrade(op: Operations, options: Options) -> None:
    """Remove what upgrade() made, and nothing that depends on it: the engine refuses then."""
    script = InstallScript(op, options)
    for name in reversed(KEYS):
        script.run(f"DROP TABLE IF EXISTS {script.table(name)}")

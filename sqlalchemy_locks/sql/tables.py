"""The tables, and how another schema or prefix moves them.

Engines with schemas (PostgreSQL, YugabyteDB) keep them in the schema ``lock``, which the execution option
``schema_translate_map`` moves: SQLAlchemy translates tables, ``dialects/postgresql_compiler.py`` functions. The others
put a prefix before each name, by the option ``locks_prefix``: ``BuildContext`` in ``core/operation.py`` chooses the
tables. At installation both come from ``alembic/options.py``. Alembic's steps never read this module: a test compares
its tables with theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from sqlalchemy_locks.sql.clock import Instant, Now

DEFAULT_SCHEMA = "lock"
DEFAULT_PREFIX = "lock_"
#: SQLite generates the values of a primary key only if its type is INTEGER
_BIG_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

_INNODB: dict[str, Any] = {
    f"{name}_{option}": value
    for name in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


class Tables:
    """The tables in one schema, or with one prefix.

    :param metadata: the collection for the tables; its schema is theirs.
    :param prefix: the prefix of their names.
    """

    def __init__(self, metadata: sa.MetaData, prefix: str) -> None:
        self.installed = sa.Table(
            f"{prefix}installed",
            metadata,
            sa.Column("step", _name(32), primary_key=True),
            sa.Column("installed_by", _name(32), nullable=False),
            sa.Column("owner", _name(255), primary_key=True),
            **_INNODB,
        )
        self.locked_keys = sa.Table(
            f"{prefix}locked_keys",
            metadata,
            sa.Column("key", _BIG_KEY, primary_key=True, autoincrement=False),
            sa.Column("ts", Instant(), nullable=False, server_default=Now()),
            **_INNODB,
        )
        self.task_state = sa.Table(
            f"{prefix}task_state",
            metadata,
            *_identity(),
            sa.Column("acquired", sa.Boolean(), nullable=False, server_default=_false(metadata)),
            sa.Column("owner", _name(255)),
            *_token(),
            sa.Column("acquired_at", Instant()),
            sa.Column("retries_left", sa.Integer()),
            **_INNODB,
        )
        self.task_timeout = sa.Table(
            f"{prefix}task_timeout",
            metadata,
            *_identity(),
            sa.Column("ts", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
            sa.Column("timeout", sa.BigInteger(), nullable=False),
            *_token(),
            sa.Column("retries_left", sa.Integer()),
            **_INNODB,
        )
        self.task = sa.Table(
            f"{prefix}task",
            metadata,
            *_identity(),
            sa.Column("status", _name(64), nullable=False, server_default="done"),
            sa.Column("claim", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
            sa.Column("updated_at", Instant(), nullable=False, server_default=Now()),
            sa.Column("timeout", sa.BigInteger()),
            sa.Column("retries_left", sa.Integer()),
            **_INNODB,
        )
        at = self.task.c
        if metadata.schema:
            sa.Index("task_ready", at.queue_id, at.id, postgresql_where=at.status.in_(["done", "failed"]))
            sa.Index("task_captured", at.updated_at, postgresql_where=at.status == "in_progress")
        else:
            sa.Index(f"{prefix}task_ready", at.queue_id, at.status, at.id)
            sa.Index(f"{prefix}task_captured", at.status, at.updated_at)
        self.job = sa.Table(
            f"{prefix}job",
            metadata,
            _serial(metadata, "internal_id"),
            sa.Column("external_id", ExternalId(), nullable=False),
            sa.Column("queue_id", _name(255), nullable=False, server_default="default"),
            sa.Column("payload", Payload(), nullable=False),
            sa.Column("priority", sa.Integer(), nullable=False, server_default=sa.text("0")),
            sa.Column("run_at", Instant(), nullable=False, server_default=Now()),
            sa.Column("claim", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
            sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
            sa.Column("max_attempts", sa.Integer(), nullable=False, server_default=sa.text("5")),
            sa.Column("processing_host", _name(255)),
            sa.Column("created_at", Instant(), nullable=False, server_default=Now()),
            sa.Column("started_at", Instant()),
            sa.Column("completed_at", Instant()),
            sa.Column("failed_at", Instant()),
            sa.Column("error", sa.Text()),
            sa.Column("unique_key", _name(255)),
            sqlite_autoincrement=True,
            **_INNODB,
        )
        sa.Index(f"{prefix}job_external_id", self.job.c.external_id, unique=True)
        job_indexes(dict(self.job.c.items()), f"{prefix}job", partial=metadata.schema is not None)
        self.paused_queue = sa.Table(
            f"{prefix}paused_queue",
            metadata,
            sa.Column("id", _name(255), primary_key=True),
            *_stamps("paused_at"),
            **_INNODB,
        )
        self.worker = sa.Table(
            f"{prefix}worker",
            metadata,
            sa.Column("host", _name(255), primary_key=True),
            *_stamps("heartbeat_at", "started_at"),
            **_INNODB,
        )
        self.semaphore = sa.Table(
            f"{prefix}semaphore",
            metadata,
            _serial(metadata),
            sa.Column("name", _name(255), nullable=False),
            # NULL: the semaphore is deleted, and its row keeps the fence
            sa.Column("capacity", sa.Integer()),
            sa.Column("fence", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
            # an upper bound of the held permits; each grant raises it, and a grant that sums the permits lowers it;
            # NULL: unknown
            sa.Column("used_at_most", sa.BigInteger()),
            # created by a lease at its first use, and deleted when it is no longer used
            sa.Column("on_demand", sa.Boolean(), nullable=False, server_default=_false(metadata)),
            *_stamps("created_at", "updated_at"),
            sa.UniqueConstraint("name", name=f"{prefix}semaphore_by_name"),
            **_INNODB,
            sqlite_autoincrement=True,
        )
        self.permit_request = sa.Table(
            f"{prefix}permit_request",
            metadata,
            _serial(metadata),
            sa.Column("external_id", _name(255), nullable=False),
            sa.Column("owner", _name(255)),
            sa.Column("state", _name(16), nullable=False),
            sa.Column("ttl_seconds", sa.Double()),
            sa.Column("token", _name(32)),
            *_stamps("renewed_at", "created_at", "updated_at"),
            sa.UniqueConstraint("external_id", name=f"{prefix}request_by_id"),
            sa.Index(f"{prefix}request_by_state", "state", "updated_at"),
            **_INNODB,
            sqlite_autoincrement=True,
        )
        self.permit = sa.Table(
            f"{prefix}permit",
            metadata,
            _serial(metadata),
            sa.Column("semaphore_id", sa.BigInteger(), nullable=False),
            sa.Column("permit_request_id", sa.BigInteger(), nullable=False),
            sa.Column("count", sa.Integer(), nullable=False),
            sa.Column("fence", sa.BigInteger(), nullable=False),
            sa.Column("state", _name(16), nullable=False),
            _held(prefix),
            sa.Index(f"{prefix}permit_by_request", "permit_request_id"),
            **_INNODB,
            sqlite_autoincrement=True,
        )
        self.semaphore_history = sa.Table(
            f"{prefix}semaphore_history",
            metadata,
            _serial(metadata),
            sa.Column("semaphore_id", sa.BigInteger(), nullable=False),
            sa.Column("old_capacity", sa.Integer()),
            sa.Column("new_capacity", sa.Integer()),
            sa.Column("changed_by", _name(255)),
            *_stamps("changed_at"),
            sa.Index(f"{prefix}history_by_semaphore", "semaphore_id", "id"),
            **_INNODB,
            sqlite_autoincrement=True,
        )


@functools.cache
def tables(schema: str | None, prefix: str) -> Tables:
    """Return the tables in ``schema`` (``None`` where the engine has none), with ``prefix`` before their names."""
    return Tables(sa.MetaData(schema=schema), prefix)


def job_indexes(at: Mapping[str, Any], prefix: str, *, partial: bool | None) -> list[sa.Index]:
    """Return the indexes that a queue's statements need.

    :param at: the columns by role. :param prefix: the first part of the indexes' names.
    :param partial: whether the engine has partial indexes; ``None`` for both kinds, each created where it applies.
    """
    order = (at["priority"], at["run_at"], at["internal_id"])
    waiting = at["started_at"].is_(None)
    ended = (at["completed_at"], at["failed_at"])
    running = sa.and_(at["started_at"].is_not(None), *(column.is_(None) for column in ended))
    indexes: list[Any] = []
    if partial is not False:
        conditional: list[Any] = [
            sa.Index(f"{prefix}_ready", at["queue_id"], *order, postgresql_where=waiting),
            sa.Index(f"{prefix}_running", at["started_at"], postgresql_where=running),
        ]
        if partial is None:
            conditional = [each.ddl_if(dialect=("postgresql", "yugabytedb")) for each in conditional]
        indexes += conditional
    if not partial:
        # on an engine without partial indexes, the condition's columns come first
        names = ("ready", "running") if partial is False else ("waiting", "unfinished")
        complete: list[Any] = [
            sa.Index(f"{prefix}_{names[0]}", at["queue_id"], at["started_at"], *order),
            sa.Index(f"{prefix}_{names[1]}", *ended, at["started_at"]),
        ]
        if partial is None:
            complete = [each.ddl_if(dialect=("mysql", "mariadb", "sqlite")) for each in complete]
        indexes += complete
    for name, role in {"completed": "completed_at", "dead": "failed_at"}.items():
        is_set = at[role].is_not(None)
        indexes.append(sa.Index(f"{prefix}_{name}", at[role], postgresql_where=is_set, sqlite_where=is_set))
    if "unique_key" in at:
        # a capture sets the key to NULL, and a unique index allows any number of NULLs
        is_set = at["unique_key"].is_not(None)
        key = (at["queue_id"], at["unique_key"])
        indexes.append(sa.Index(f"{prefix}_unique", *key, unique=True, postgresql_where=is_set, sqlite_where=is_set))
    return indexes


def ExternalId() -> Any:
    """Return the type of a job's random identifier; not MariaDB's native one, which exists only since 10.7."""
    return sa.Uuid(native_uuid=False).with_variant(sa.Uuid(), "postgresql", "yugabytedb")


class Payload(sa.JSON):
    """JSON; JSONB on PostgreSQL, whose types aren't imported on the other engines."""


def _serial(metadata: sa.MetaData, name: str = "id") -> sa.Column[Any]:
    # only engines with schemas report an identity, which Alembic's autogenerate compares
    identity = (sa.Identity(),) if metadata.schema else ()
    return sa.Column(name, _BIG_KEY, *identity, primary_key=True)


def _false(metadata: sa.MetaData) -> Any:
    return sa.false() if metadata.schema else sa.text("0")  # as the server reports it


def _stamps(*names: str) -> tuple[sa.Column[Any], ...]:
    return tuple(sa.Column(name, Instant(), nullable=False, server_default=Now()) for name in names)


def _held(prefix: str) -> sa.Index:
    """Return the index of held permits, partial where the engine can: each acquire sums them."""
    held = sa.text("state = 'ACQUIRED'")
    columns = ("semaphore_id", "state", "permit_request_id", "count")
    return sa.Index(f"{prefix}permit_held", *columns, postgresql_where=held, sqlite_where=held)


def _name(length: int) -> Any:
    return sa.String(length).with_variant(sa.Text(), "postgresql", "yugabytedb")


def exact_name(length: int) -> Any:
    """Return the type of a name in a table of the app's: default collations of MySQL and MariaDB ignore case."""
    return sa.String(length).with_variant(sa.String(length, collation="utf8mb4_bin"), "mysql", "mariadb")


def _identity() -> tuple[sa.Column[Any], ...]:
    """Return the key columns of a task, whose id is unique within its queue."""
    return (
        sa.Column("queue_id", _name(255), primary_key=True, server_default="default"),
        sa.Column("id", _name(255), primary_key=True),
    )


def _token() -> tuple[sa.Column[Any], ...]:
    """Return the columns of the last acquirer's nonce and of the fencing token, which each acquire increments."""
    return (
        sa.Column("token", _name(32)),
        sa.Column("fence", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
    )

"""The tables, in any schema or under any prefix.

Engines with schemas (PostgreSQL, YugabyteDB) keep them in the schema ``lock``; the others put the prefix
``lock_`` before each name. Alembic's steps never read this module: a test holds the two equal.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    Identity,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    and_,
    false,
    text,
)

from sqlalchemy_locks.sql.clock import Instant, Now

DEFAULT_SCHEMA = "lock"
DEFAULT_PREFIX = "lock_"

_INNODB: dict[str, Any] = {
    f"{name}_{option}": value
    for name in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


class Tables:
    """The tables in one schema, or with one prefix.

    :param metadata: the collection that they are added to, with their schema.
    :param prefix: what their names begin with.
    """

    def __init__(self, metadata: MetaData, prefix: str) -> None:
        self.installed = Table(
            f"{prefix}installed",
            metadata,
            Column("step", _name(32), primary_key=True),
            Column("installed_by", _name(32), nullable=False),
            **_INNODB,
        )
        self.locked_keys = Table(
            f"{prefix}locked_keys",
            metadata,
            Column("key", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True, autoincrement=False),
            Column("ts", Instant(), nullable=False, server_default=Now()),
            **_INNODB,
        )
        self.task_state = Table(
            f"{prefix}task_state",
            metadata,
            *_identity(),
            Column("acquired", Boolean(), nullable=False, server_default=false()),
            Column("owner", _name(255)),
            *_token(),
            Column("acquired_at", Instant()),
            Column("retries_left", Integer()),
            **_INNODB,
        )
        self.task_timeout = Table(
            f"{prefix}task_timeout",
            metadata,
            *_identity(),
            Column("ts", BigInteger(), nullable=False, server_default=text("0")),
            Column("timeout", BigInteger(), nullable=False),
            *_token(),
            Column("retries_left", Integer()),
            **_INNODB,
        )
        self.task = Table(
            f"{prefix}task",
            metadata,
            *_identity(),
            Column("status", _name(64), nullable=False, server_default="done"),
            Column("claim", BigInteger(), nullable=False, server_default=text("0")),
            Column("updated_at", Instant(), nullable=False, server_default=Now()),
            Column("timeout", BigInteger()),
            Column("retries_left", Integer()),
            **_INNODB,
        )
        at = self.task.c
        if metadata.schema:
            Index("task_ready", at.queue_id, at.id, postgresql_where=at.status.in_(["done", "failed"]))
            Index("task_captured", at.updated_at, postgresql_where=at.status == "in_progress")
        else:
            Index(f"{prefix}task_ready", at.queue_id, at.status, at.id)
            Index(f"{prefix}task_captured", at.status, at.updated_at)
        self.job = Table(
            f"{prefix}job",
            metadata,
            Column("internal_id", BigInteger().with_variant(Integer(), "sqlite"), Identity(), primary_key=True),
            Column("external_id", ExternalId(), nullable=False),
            Column("queue_id", _name(255), nullable=False, server_default="default"),
            Column("payload", Payload(), nullable=False),
            Column("priority", Integer(), nullable=False, server_default=text("0")),
            Column("run_at", Instant(), nullable=False, server_default=Now()),
            Column("claim", BigInteger(), nullable=False, server_default=text("0")),
            Column("attempts", Integer(), nullable=False, server_default=text("0")),
            Column("max_attempts", Integer(), nullable=False, server_default=text("5")),
            Column("processing_host", _name(255)),
            Column("created_at", Instant(), nullable=False, server_default=Now()),
            Column("started_at", Instant()),
            Column("completed_at", Instant()),
            Column("failed_at", Instant()),
            Column("error", Text()),
            Column("unique_key", _name(255)),
            sqlite_autoincrement=True,
            **_INNODB,
        )
        Index(f"{prefix}job_external_id", self.job.c.external_id, unique=True)
        job_indexes(dict(self.job.c.items()), f"{prefix}job", partial=metadata.schema is not None)
        self.paused_queue = Table(
            f"{prefix}paused_queue",
            metadata,
            Column("id", _name(255), primary_key=True),
            *_stamps("paused_at"),
            **_INNODB,
        )
        self.worker = Table(
            f"{prefix}worker",
            metadata,
            Column("host", _name(255), primary_key=True),
            *_stamps("heartbeat_at", "started_at"),
            **_INNODB,
        )
        self.semaphore = Table(
            f"{prefix}semaphore",
            metadata,
            _serial(),
            Column("name", _name(255), nullable=False),
            # NULL: deleted, and the row kept for its fence
            Column("capacity", Integer()),
            Column("fence", BigInteger(), nullable=False, server_default=text("0")),
            # no more permits are held than this: raised by each grant, and lowered by one that sums them; NULL:
            # not known
            Column("used_at_most", BigInteger()),
            # created by a lease at its first use, and deleted when it is no longer used
            Column("on_demand", Boolean(), nullable=False, server_default=false()),
            *_stamps("created_at", "updated_at"),
            UniqueConstraint("name", name=f"{prefix}semaphore_by_name"),
            **_INNODB,
            sqlite_autoincrement=True,
        )
        self.permit_request = Table(
            f"{prefix}permit_request",
            metadata,
            _serial(),
            Column("external_id", _name(255), nullable=False),
            Column("owner", _name(255)),
            Column("state", _name(16), nullable=False),
            Column("ttl_seconds", Double()),
            Column("token", _name(32)),
            *_stamps("renewed_at", "created_at", "updated_at"),
            UniqueConstraint("external_id", name=f"{prefix}request_by_id"),
            Index(f"{prefix}request_by_state", "state", "updated_at"),
            **_INNODB,
            sqlite_autoincrement=True,
        )
        self.permit = Table(
            f"{prefix}permit",
            metadata,
            _serial(),
            Column("semaphore_id", BigInteger(), nullable=False),
            Column("permit_request_id", BigInteger(), nullable=False),
            Column("count", Integer(), nullable=False),
            Column("fence", BigInteger(), nullable=False),
            Column("state", _name(16), nullable=False),
            _held(prefix),
            Index(f"{prefix}permit_by_request", "permit_request_id"),
            **_INNODB,
            sqlite_autoincrement=True,
        )
        self.semaphore_history = Table(
            f"{prefix}semaphore_history",
            metadata,
            _serial(),
            Column("semaphore_id", BigInteger(), nullable=False),
            Column("old_capacity", Integer()),
            Column("new_capacity", Integer()),
            Column("changed_by", _name(255)),
            *_stamps("changed_at"),
            Index(f"{prefix}history_by_semaphore", "semaphore_id", "id"),
            **_INNODB,
            sqlite_autoincrement=True,
        )


@functools.cache
def tables(schema: str | None, prefix: str) -> Tables:
    """Return the tables in ``schema`` (``None`` where the engine has none), with ``prefix`` before their names."""
    return Tables(MetaData(schema=schema), prefix)


def job_indexes(at: Mapping[str, Any], prefix: str, *, partial: bool | None) -> list[Index]:
    """Return the indexes that a queue's statements need.

    :param at: the columns by role. :param prefix: the first part of the indexes' names.
    :param partial: whether the engine has partial indexes; ``None`` for both kinds, each created where it applies.
    """
    order = (at["priority"], at["run_at"], at["internal_id"])
    waiting = at["started_at"].is_(None)
    ended = (at["completed_at"], at["failed_at"])
    running = and_(at["started_at"].is_not(None), *(column.is_(None) for column in ended))
    made: list[Any] = []
    if partial is not False:
        conditional: list[Any] = [
            Index(f"{prefix}_ready", at["queue_id"], *order, postgresql_where=waiting),
            Index(f"{prefix}_running", at["started_at"], postgresql_where=running),
        ]
        if partial is None:
            conditional = [each.ddl_if(dialect=("postgresql", "yugabytedb")) for each in conditional]
        made += conditional
    if not partial:
        # with the condition's columns first, where an index can't have a condition
        names = ("ready", "running") if partial is False else ("waiting", "unfinished")
        complete: list[Any] = [
            Index(f"{prefix}_{names[0]}", at["queue_id"], at["started_at"], *order),
            Index(f"{prefix}_{names[1]}", *ended, at["started_at"]),
        ]
        if partial is None:
            complete = [each.ddl_if(dialect=("mysql", "mariadb", "sqlite")) for each in complete]
        made += complete
    for name, role in {"completed": "completed_at", "dead": "failed_at"}.items():
        there = at[role].is_not(None)
        made.append(Index(f"{prefix}_{name}", at[role], postgresql_where=there, sqlite_where=there))
    if "unique_key" in at:
        # a capture sets the key to NULL, of which there may be any number
        there = at["unique_key"].is_not(None)
        columns = (at["queue_id"], at["unique_key"])
        made.append(Index(f"{prefix}_unique", *columns, unique=True, postgresql_where=there, sqlite_where=there))
    return made


def ExternalId() -> Any:
    """Return the type of a job's random identifier; not MariaDB's native one, which exists only since 10.7."""
    return Uuid(native_uuid=False).with_variant(Uuid(), "postgresql", "yugabytedb")


class Payload(JSON):
    """JSON; JSONB on PostgreSQL, whose types aren't imported on the other engines."""


def _serial() -> Column[Any]:
    return Column("id", BigInteger().with_variant(Integer(), "sqlite"), Identity(), primary_key=True)


def _stamps(*names: str) -> tuple[Column[Any], ...]:
    return tuple(Column(name, Instant(), nullable=False, server_default=Now()) for name in names)


def _held(prefix: str) -> Index:
    """Return the index of held permits, partial where the engine can: each acquire sums them."""
    held = text("state = 'ACQUIRED'")
    columns = ("semaphore_id", "state", "permit_request_id", "count")
    return Index(f"{prefix}permit_held", *columns, postgresql_where=held, sqlite_where=held)


def _name(length: int) -> Any:
    return String(length).with_variant(Text(), "postgresql", "yugabytedb")


def _identity() -> tuple[Column[Any], ...]:
    """Return the key columns of a task, whose id is unique within its queue."""
    return (
        Column("queue_id", _name(255), primary_key=True, server_default="default"),
        Column("id", _name(255), primary_key=True),
    )


def _token() -> tuple[Column[Any], ...]:
    """Return the columns of the last acquirer's nonce and of the fencing token, which each acquire increments."""
    return (
        Column("token", _name(32)),
        Column("fence", BigInteger(), nullable=False, server_default=text("0")),
    )

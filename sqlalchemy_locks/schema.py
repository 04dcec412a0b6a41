"""The tables, in any schema or under any prefix.

Engines with schemas (PostgreSQL, YugabyteDB) keep them in the schema ``lock``; the others put the prefix
``lock_`` before each name. Alembic's steps never read this module: a test holds the two equal.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
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
    false,
    text,
)

from .clock import Instant, Now

DEFAULT_SCHEMA = "lock"
DEFAULT_PREFIX = "lock_"

_INNODB: dict[str, Any] = {
    f"{name}_{option}": value
    for name in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


@dataclass(frozen=True)
class Tables:
    """The tables of one place, as the statements of the patterns use them."""

    installed: Table
    locked_keys: Table
    task_state: Table
    task_timeout: Table
    semaphore: Table
    permit_request: Table
    permit: Table
    semaphore_history: Table


@functools.cache
def tables(schema: str | None, prefix: str) -> Tables:
    """The tables in ``schema`` (``None`` where the engine has none), their names behind ``prefix``."""
    return describe(MetaData(schema=schema), prefix)


def describe(metadata: MetaData, prefix: str) -> Tables:
    """Put the tables into ``metadata``."""
    return Tables(
        installed=Table(
            f"{prefix}installed",
            metadata,
            Column("step", _name(32), primary_key=True),
            Column("door", _name(32), nullable=False),
            **_INNODB,
        ),
        locked_keys=Table(
            f"{prefix}locked_keys",
            metadata,
            Column("key", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True, autoincrement=False),
            Column("ts", Instant(), nullable=False, server_default=Now()),
            **_INNODB,
        ),
        task_state=Table(
            f"{prefix}task_state",
            metadata,
            *_identity(),
            Column("acquired", Boolean(), nullable=False, server_default=false()),
            Column("owner", _name(255)),
            *_token(),
            Column("acquired_at", Instant()),
            Column("retries_left", Integer()),
            **_INNODB,
        ),
        task_timeout=Table(
            f"{prefix}task_timeout",
            metadata,
            *_identity(),
            Column("ts", BigInteger(), nullable=False, server_default=text("0")),
            Column("timeout", BigInteger(), nullable=False),
            *_token(),
            Column("retries_left", Integer()),
            **_INNODB,
        ),
        semaphore=Table(
            f"{prefix}semaphore",
            metadata,
            _serial(),
            Column("name", _name(255), nullable=False),
            # NULL: deleted, and the row kept for its fence
            Column("capacity", Integer()),
            Column("fence", BigInteger(), nullable=False, server_default=text("0")),
            *_stamps("created_at", "updated_at"),
            UniqueConstraint("name", name=f"{prefix}semaphore_by_name"),
            **_INNODB,
            sqlite_autoincrement=True,
        ),
        permit_request=Table(
            f"{prefix}permit_request",
            metadata,
            _serial(),
            Column("external_id", _name(255), nullable=False),
            Column("owner", _name(255)),
            Column("state", _name(16), nullable=False),
            Column("ttl_seconds", Double()),
            *_stamps("renewed_at", "created_at", "updated_at"),
            UniqueConstraint("external_id", name=f"{prefix}request_by_id"),
            Index(f"{prefix}request_by_state", "state", "updated_at"),
            **_INNODB,
            sqlite_autoincrement=True,
        ),
        permit=Table(
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
        ),
        semaphore_history=Table(
            f"{prefix}semaphore_history",
            metadata,
            _serial(),
            Column("semaphore_id", BigInteger(), nullable=False),
            Column("old_capacity", Integer()),
            Column("new_capacity", Integer()),
            Column("changed_by", _name(255)),
            *_stamps("changed_at"),
            Index(f"{prefix}history_by_semaphore", "semaphore_id"),
            **_INNODB,
            sqlite_autoincrement=True,
        ),
    )


def _serial() -> Column[Any]:
    return Column("id", BigInteger().with_variant(Integer(), "sqlite"), Identity(), primary_key=True)


def _stamps(*names: str) -> tuple[Column[Any], ...]:
    return tuple(Column(name, Instant(), nullable=False, server_default=Now()) for name in names)


def _held(prefix: str) -> Index:
    """What is held, alone where the engine can leave rows out of an index: the sum over it is made at each acquire."""
    held = text("state = 'ACQUIRED'")
    columns = ("semaphore_id", "state", "permit_request_id", "count")
    return Index(f"{prefix}permit_held", *columns, postgresql_where=held, sqlite_where=held)


def _name(length: int) -> Any:
    return String(length).with_variant(Text(), "postgresql", "yugabytedb")


def _identity() -> tuple[Column[Any], ...]:
    """A task: ids are unique inside a queue."""
    return (
        Column("queue_id", _name(255), primary_key=True, server_default="default"),
        Column("id", _name(255), primary_key=True),
    )


def _token() -> tuple[Column[Any], ...]:
    """The nonce of whoever acquired last, and the fencing token that each acquisition raises."""
    return (
        Column("token", _name(32)),
        Column("fence", BigInteger(), nullable=False, server_default=text("0")),
    )

"""The tables, in any schema or under any prefix.

Engines with schemas (PostgreSQL, YugabyteDB) keep them in the schema ``lock``; the others put the prefix
``lock_`` before each name. Alembic's steps never read this module: a test holds the two equal.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Integer, MetaData, String, Table, Text, false, text

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
    )


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

"""The tables, in any schema or under any prefix.

Engines with schemas (PostgreSQL, YugabyteDB) keep them in the schema ``lock``; the others put the prefix
``lock_`` before each name. Alembic's steps never read this module: a test holds the two equal.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, Text

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


@functools.cache
def tables(schema: str | None, prefix: str) -> Tables:
    """The tables in ``schema`` (``None`` where the engine has none), their names behind ``prefix``."""
    return describe(MetaData(schema=schema), prefix)


def describe(metadata: MetaData, prefix: str) -> Tables:
    """Put the tables into ``metadata``."""
    name = String(32).with_variant(Text(), "postgresql", "yugabytedb")
    return Tables(
        installed=Table(
            f"{prefix}installed",
            metadata,
            Column("step", name, primary_key=True),
            Column("door", name, nullable=False),
            **_INNODB,
        ),
        locked_keys=Table(
            f"{prefix}locked_keys",
            metadata,
            Column("key", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True, autoincrement=False),
            Column("ts", Instant(), nullable=False, server_default=Now()),
            **_INNODB,
        ),
    )

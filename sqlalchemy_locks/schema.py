"""The tables, as a MetaData that anyone can place in a schema or under a prefix.

Engines with schemas (PostgreSQL, YugabyteDB) keep them in the schema ``lock``; the others put the prefix
``lock_`` before each name. Alembic's steps never read this module: a test holds the two equal.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Column, DateTime, MetaData, Table, text
from sqlalchemy.dialects import mysql

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

    locked_keys: Table


@functools.cache
def tables(schema: str | None, prefix: str) -> Tables:
    """The tables in ``schema`` (``None`` where the engine has none), their names behind ``prefix``."""
    metadata = MetaData(schema=schema)
    instant = DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
    return Tables(
        locked_keys=Table(
            f"{prefix}locked_keys",
            metadata,
            Column("key", BigInteger, primary_key=True, autoincrement=False),
            Column("ts", instant, server_default=text("CURRENT_TIMESTAMP")),
            **_INNODB,
        )
    )

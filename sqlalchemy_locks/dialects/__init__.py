"""One file per engine: its facts, its compile hooks, the errors it calls transient."""

from __future__ import annotations

from typing import Any

from sqlalchemy.engine import Dialect

from sqlalchemy_locks.dialects import mariadb, mysql, postgresql, sqlite, yugabytedb
from sqlalchemy_locks.dialects.base import Engine
from sqlalchemy_locks.errors import Unsupported

_ENGINES: dict[str, Engine] = {
    "postgresql": postgresql.ENGINE,
    "yugabytedb": yugabytedb.ENGINE,
    "mysql": mysql.ENGINE,
    "mariadb": mariadb.ENGINE,
    "sqlite": sqlite.ENGINE,
}


def engine_of(dialect: Dialect) -> Engine:
    """The facts of the engine behind a dialect.

    :raises Unsupported: for an engine that this library has never been tried on.
    """
    any_dialect: Any = dialect
    # a mysql:// URL may lead to MariaDB: SQLAlchemy knows since the first connection
    return named("mariadb" if getattr(any_dialect, "is_mariadb", False) else dialect.name)


def named(name: str) -> Engine:
    """The facts of the engine whose dialect has this name. :raises Unsupported: as :func:`engine_of`."""
    try:
        return _ENGINES[name]
    except KeyError:
        raise Unsupported(
            f"sqlalchemy-locks does not know the engine {name!r}: it runs on PostgreSQL, YugabyteDB, "
            "MySQL, MariaDB and SQLite"
        ) from None


__all__ = ["Engine", "engine_of", "named"]

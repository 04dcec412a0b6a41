"""One file per engine: its facts, its compile hooks, the errors it calls transient."""

from __future__ import annotations

from typing import Any

from sqlalchemy.engine import Dialect

from sqlalchemy_locks.dialects import mariadb, mysql, postgresql, sqlite, yugabytedb
from sqlalchemy_locks.dialects.base import Backend
from sqlalchemy_locks.errors import Unsupported

_ENGINES: dict[str, Backend] = {
    "postgresql": postgresql.BACKEND,
    "yugabytedb": yugabytedb.BACKEND,
    "mysql": mysql.BACKEND,
    "mariadb": mariadb.BACKEND,
    "sqlite": sqlite.BACKEND,
}


def backend_for(dialect: Dialect) -> Backend:
    """The facts of the engine behind a dialect.

    :raises Unsupported: for an engine that this library has never been tried on.
    """
    any_dialect: Any = dialect
    # a mysql:// URL may lead to MariaDB: SQLAlchemy knows since the first connection
    name = "mariadb" if getattr(any_dialect, "is_mariadb", False) else dialect.name
    return _ENGINES.get(name) or dialect_name(name)


def dialect_name(name: str) -> Backend:
    """The facts of the engine whose dialect has this name. :raises Unsupported: as :func:`backend_for`."""
    try:
        return _ENGINES[name]
    except KeyError:
        raise Unsupported(
            f"sqlalchemy-locks does not know the engine {name!r}: it runs on PostgreSQL, YugabyteDB, "
            "MySQL, MariaDB and SQLite"
        ) from None


__all__ = ["Backend", "backend_for", "dialect_name"]

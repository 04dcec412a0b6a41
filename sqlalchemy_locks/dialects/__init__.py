"""One module per engine: what it can do, its errors, its driver, and how it compiles this library's SQL elements.

A new engine is a module here and what ARCHITECTURE.md lists. ``base.py`` says where else drivers' objects are touched.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.engine import Dialect

from sqlalchemy_locks.dialects import mariadb, mysql, postgresql, sqlite, yugabytedb
from sqlalchemy_locks.dialects.base import Backend, Server
from sqlalchemy_locks.errors import Unsupported

_BACKENDS: dict[str, Backend] = {
    "postgresql": postgresql.BACKEND,
    "yugabytedb": yugabytedb.BACKEND,
    "mysql": mysql.BACKEND,
    "mariadb": mariadb.BACKEND,
    "sqlite": sqlite.BACKEND,
}


def backend_for(dialect: Dialect, server: Server | None = None) -> Backend:
    """Return the backend for a dialect.

    :param server: what its server has told; without it a URL of PostgreSQL is not known to lead to YugabyteDB, nor one
        of MySQL to MariaDB before the dialect has connected.
    :raises Unsupported: for an engine that this library doesn't support.
    """
    if server is not None and server.yugabytedb is not None:
        return yugabytedb.BACKEND
    any_dialect: Any = dialect
    return backend_named("mariadb" if getattr(any_dialect, "is_mariadb", False) else dialect.name)


def backend_named(name: str) -> Backend:
    """Return the backend for the name of a dialect. :raises Unsupported: as :func:`backend_for`."""
    if name not in _BACKENDS:
        raise Unsupported(
            f"sqlalchemy-locks does not know the engine {name!r}: it runs on PostgreSQL, YugabyteDB, "
            "MySQL, MariaDB and SQLite"
        )
    return _BACKENDS[name]


__all__ = ["Backend", "Server", "backend_for", "backend_named"]

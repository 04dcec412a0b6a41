"""One module per engine: its capabilities, its errors, its driver, and its compilers of this library's SQL elements.

A new engine is a module here, and the changes that ARCHITECTURE.md lists. ``base.py`` lists the other modules that
touch drivers' objects.
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

    :param server: the answers of its server. Without them, nothing tells that a URL of PostgreSQL leads to YugabyteDB,
        or, before the dialect has connected, that a URL of MySQL leads to MariaDB.
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

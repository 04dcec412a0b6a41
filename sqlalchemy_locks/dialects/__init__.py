"""One module per engine: what it can do, its errors, and how it compiles this library's SQL elements."""

from __future__ import annotations

from typing import Any

from sqlalchemy.engine import Dialect

from sqlalchemy_locks.dialects import mariadb, mysql, postgresql, sqlite, yugabytedb
from sqlalchemy_locks.dialects.base import Backend
from sqlalchemy_locks.errors import Unsupported

_BACKENDS: dict[str, Backend] = {
    "postgresql": postgresql.BACKEND,
    "yugabytedb": yugabytedb.BACKEND,
    "mysql": mysql.BACKEND,
    "mariadb": mariadb.BACKEND,
    "sqlite": sqlite.BACKEND,
}

#: the attribute of a dialect that its first connection may change, and with it what :func:`backend_for` returns: a
#: ``mysql://`` URL may lead to MariaDB
KIND_FLAG = "is_mariadb"


def backend_for(dialect: Dialect) -> Backend:
    """Return the backend for a dialect.

    :raises Unsupported: for an engine that this library doesn't support.
    """
    any_dialect: Any = dialect
    name = "mariadb" if getattr(any_dialect, KIND_FLAG, False) else dialect.name
    return _BACKENDS.get(name) or backend_named(name)


def backend_named(name: str) -> Backend:
    """Return the backend for the name of a dialect. :raises Unsupported: as :func:`backend_for`."""
    if name not in _BACKENDS:
        raise Unsupported(
            f"sqlalchemy-locks does not know the engine {name!r}: it runs on PostgreSQL, YugabyteDB, "
            "MySQL, MariaDB and SQLite"
        )
    return _BACKENDS[name]


__all__ = ["KIND_FLAG", "Backend", "backend_for", "backend_named"]

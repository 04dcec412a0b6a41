"""SQLite only: make an engine's every transaction a writer from its start."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.engine import Connection

from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.sqlite import take_write_lock
from sqlalchemy_locks.errors import Unsupported


def begin_immediate(engine: Engine | Any) -> None:
    """Begin every transaction of ``engine`` with ``BEGIN IMMEDIATE``.

    A transaction that has read in SQLite's deferred mode can't always become a writer (``MustRollback``), and
    SQLite does not honour its busy timeout there. With this, a transaction waits for the write lock at its
    start, once, in the order in which they came, and all the library's locks are then had for nothing. Readers queue
    behind writers as well.

    :param engine: an ``Engine`` or ``AsyncEngine`` on SQLite (``sqlite3`` or ``aiosqlite``), before its first use.
    :raises Unsupported: for any other engine.

    >>> sl.sqlite.begin_immediate(engine)
    """
    sync: Engine = getattr(engine, "sync_engine", engine)
    backend = backend_for(sync.dialect)
    if backend.locking != "file":
        raise Unsupported(f"begin_immediate is for SQLite; {backend.name} waits for locks as it is: leave it out")

    def connect(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.isolation_level = None

    def begin(connection: Connection) -> None:
        take_write_lock(connection, lambda: connection.exec_driver_sql("BEGIN IMMEDIATE"))

    event.listen(sync, "connect", connect)
    event.listen(sync, "begin", begin)

"""SQLite only: begin every transaction of an engine as a writer."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.engine import Connection

from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.sqlite import BEGINS_IMMEDIATE, poll_for_write_lock
from sqlalchemy_locks.errors import Unsupported


def begin_immediate(engine: Engine | Any) -> None:
    """Begin every transaction of ``engine`` with ``BEGIN IMMEDIATE``.

    In SQLite's deferred mode, a transaction that has read can't always become a writer (``MustRollback``), and SQLite
    ignores its busy timeout then. With ``BEGIN IMMEDIATE``, a transaction waits for the write lock once, at its start,
    and all locks of this library are free of charge inside it. Readers queue behind writers as well.

    :param engine: an ``Engine`` or ``AsyncEngine`` on SQLite (``sqlite3`` or ``aiosqlite``), before its first use.
    :raises Unsupported: for an engine on any other database. :raises TypeError: for anything else.

    >>> sl.sqlite.begin_immediate(engine)
    """
    sync: Any = getattr(engine, "sync_engine", engine)
    if not isinstance(sync, Engine):
        raise TypeError(f"begin_immediate takes an Engine or an AsyncEngine, not {engine!r}")
    backend = backend_for(sync.dialect)
    if not backend.single_writer:
        raise Unsupported(f"begin_immediate is for SQLite only: {backend.name} doesn't need it")

    def connect(dbapi_connection: Any, record: Any) -> None:
        driver = dbapi_connection.driver_connection if sync.dialect.is_async else dbapi_connection
        dbapi_connection.rollback()
        reason = "sqlite3's connect(autocommit=False) begins each transaction itself"
        if not driver.in_transaction:
            cursor = dbapi_connection.cursor()
            cursor.execute("BEGIN")
            cursor.close()
            dbapi_connection.rollback()
            reason = "sqlite3's connect(autocommit=True) commits nothing that begin_immediate has begun"
        if driver.in_transaction:
            raise Unsupported(f"{reason}: leave it out of connect_args")
        dbapi_connection.isolation_level = None
        record.info[BEGINS_IMMEDIATE] = True

    def begin(connection: Connection) -> None:
        poll_for_write_lock(connection, lambda: connection.exec_driver_sql("BEGIN IMMEDIATE"))

    event.listen(sync, "connect", connect)
    event.listen(sync, "begin", begin)

"""The lock of migrations for each family of engines, made without a table.

Nothing here waits: a session that waited inside the server would have a snapshot, for which ``CREATE INDEX
CONCURRENTLY`` waits.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from sqlalchemy_locks._forks import shares_one_connection
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.base import Family
from sqlalchemy_locks.errors import NotWritable, Unsupported
from sqlalchemy_locks.keys import key

#: the default name of a lock
ALEMBIC = "alembic"
#: MySQL's longest ``wait_timeout`` on every platform, in seconds
_LONGEST_IDLE = 2147483


class MigrationLock(Protocol):
    """The lock that one process holds at a time, on a connection of its own."""

    #: its statements need the event loop
    asynchronous: bool

    def acquire(self) -> bool:
        """Try to acquire the lock."""
        ...

    def is_held(self) -> bool:
        """Return whether the lock is held, by asking the server: so the connection isn't idle either."""
        ...

    def holder(self) -> str | None:
        """Describe who holds it, as far as this user may know."""

    def release(self) -> None:
        """Release the lock, unless its connection has died."""


def in_memory(engine: Engine) -> bool:
    """Return whether the database is in memory, so that it belongs to one process, and to one connection."""
    return (
        engine.dialect.name == "sqlite"
        and shares_one_connection(engine.pool)
        and engine.url.database in (None, "", ":memory:")
    )


def migration_lock_on(connection: Connection, name: str) -> MigrationLock | None:
    """Return the lock of an engine; ``None`` where a database belongs to one process.

    :raises Unsupported: where no lock excludes all other processes.
    """
    backend = backend_for(connection.dialect)
    server = backend.ask_server(connection)
    connection.rollback()
    if not connection.get_execution_options().get("locks_one_node"):
        if server.several_nodes is not None:
            raise Unsupported(server.several_nodes)
        if server.cluster is not None:
            raise Unsupported(
                f"a migration lock is held on one node of {server.cluster} only: let one process migrate, or set the "
                "engine's execution option locks_one_node=True if all processes connect to one node"
            )
    if server.no_advisory_locks is not None:
        raise Unsupported(f"{server.no_advisory_locks}, or let one process migrate")
    return _KINDS[backend.family](connection, name)


class _AdvisoryLock:
    """An advisory lock of a transaction that stays open, so that a pooler keeps its server connection."""

    def __init__(self, connection: Connection, name: str) -> None:
        # whatever the role's default is: at a higher level the transaction would have a snapshot
        self._connection = connection.execution_options(isolation_level="READ COMMITTED")
        self._key = {"key": key("sqlalchemy_locks.migration", name)}
        self.asynchronous = connection.dialect.is_async

    def acquire(self) -> bool:
        connection = self._connection
        limits = text(
            "SELECT set_config(name, '0', true) FROM pg_catalog.pg_settings"
            " WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')"
        )
        connection.execute(limits).all()
        if connection.scalar(text("SELECT pg_catalog.pg_is_in_recovery()")):
            raise NotWritable("the database is a hot standby, which grants locks of its own: migrate the primary")
        if connection.scalar(text("SELECT pg_catalog.pg_try_advisory_xact_lock(:key)"), self._key):
            return self.is_held()
        connection.rollback()
        return False

    def is_held(self) -> bool:
        # The lock ends with the transaction; a transaction that has failed answers with an error. SET takes no
        # snapshot, but a SELECT does, and with asyncpg the snapshot lasts until the next statement.
        self._connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
        return self._connection.in_transaction()

    def holder(self) -> str | None:
        asking = text(
            "SELECT l.pid, host(a.client_addr), a.application_name, a.xact_start FROM pg_catalog.pg_locks l"
            " LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid"
            " WHERE l.granted AND l.locktype = 'advisory' AND l.objsubid = 1"
            " AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())"
            " AND (l.classid::bigint << 32 | l.objid::bigint) = :key"
        )
        row = self._connection.execute(asking, self._key).first()
        self._connection.rollback()
        return None if row is None else _description(f"server process {row[0]}", row[1], row[2], row[3])

    def release(self) -> None:
        with suppress(SQLAlchemyError):
            self._connection.rollback()


class _NamedLock:
    """A lock by ``GET_LOCK``. All databases of a server share its names, so this name contains the database's."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        database = connection.scalar(text("SELECT DATABASE()"))
        self._name = {"name": "sqlalchemy_locks:" + hashlib.sha256(f"{database}\0{name}".encode()).hexdigest()[:40]}
        self.asynchronous = connection.dialect.is_async

    def acquire(self) -> bool:
        self._connection.exec_driver_sql(f"SET SESSION wait_timeout = {_LONGEST_IDLE}")  # the holder is idle
        return bool(self._connection.scalar(text("SELECT GET_LOCK(:name, 0)"), self._name))

    def is_held(self) -> bool:
        return bool(self._connection.scalar(text("SELECT IS_USED_LOCK(:name) = CONNECTION_ID()"), self._name))

    def holder(self) -> str | None:
        id_ = self._connection.scalar(text("SELECT IS_USED_LOCK(:name)"), self._name)
        if id_ is None:
            return None
        asking = text("SELECT host FROM information_schema.processlist WHERE id = :id")
        return _description(f"connection {id_} of the server", self._connection.scalar(asking, {"id": id_}))

    def release(self) -> None:
        with suppress(SQLAlchemyError):
            self._connection.execute(text("SELECT RELEASE_LOCK(:name)"), self._name)


class _FileLock:
    """An exclusive transaction on a second file; it ends with its process. On the database it would block the DDL."""

    asynchronous = False

    def __init__(self, path: str, name: str) -> None:
        self._path = f"{path}-migration" if name == ALEMBIC else f"{path}-migration-{key(name) % 2**64:x}"
        self._holder = Path(f"{self._path}-holder")
        try:
            self._file = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        except sqlite3.OperationalError as error:
            raise self._refused(error) from error

    @classmethod
    def beside(cls, connection: Connection, name: str) -> _FileLock | None:
        """Return the lock of a database; ``None`` if the database is in memory."""
        path = connection.exec_driver_sql("PRAGMA database_list").all()[0][2]
        connection.close()
        return cls(path, name) if path else None

    def _refused(self, error: Exception) -> Unsupported:
        return Unsupported(f"a migration lock needs the file {self._path}, which can't be made: {error}")

    def acquire(self) -> bool:
        try:
            self._file.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                return False
            raise self._refused(error) from error
        since = datetime.now(timezone.utc)
        with suppress(OSError):
            self._holder.write_text(_description(f"process {os.getpid()}", socket.gethostname(), since=since))
        return True

    def is_held(self) -> bool:
        return self._file.in_transaction

    def holder(self) -> str | None:
        with suppress(OSError):
            return self._holder.read_text()
        return None

    def release(self) -> None:
        with suppress(OSError):
            self._holder.unlink()
        self._file.close()


_KINDS: dict[Family, Callable[[Connection, str], MigrationLock | None]] = {
    "postgresql": _AdvisoryLock,
    "mysql": _NamedLock,
    "sqlite": _FileLock.beside,
}


def _description(who: str, host: str | None, application: str | None = None, since: datetime | None = None) -> str:
    """Return a text about a holder."""
    parts = [who, f"from {host}" if host else "", f"({application})" if application else ""]
    if since is not None:
        parts.append(f"since {since.astimezone():%Y-%m-%d %H:%M:%S %z}")
    return " ".join(filter(None, parts))

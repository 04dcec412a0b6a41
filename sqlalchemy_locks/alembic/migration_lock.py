"""One process migrates at a time, the others wait: a lock for ``env.py``, which needs no table.

It is held on a second connection, so that whatever the migrations commit doesn't end it, and it ends with its process.
Waiters poll: one that waited inside the server would have a snapshot, for which ``CREATE INDEX CONCURRENTLY`` waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from alembic import context
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import SingletonThreadPool, StaticPool
from sqlalchemy.util import await_only, greenlet_spawn

from sqlalchemy_locks._validation import timeout_seconds, valid_name
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.yugabytedb import NO_ADVISORY_LOCKS
from sqlalchemy_locks.errors import LockLost, LockTimeout, NotWritable, Unsupported
from sqlalchemy_locks.keys import key

_logger = logging.getLogger("sqlalchemy_locks.alembic")

_NAME = "alembic"
#: seconds: between two tries, at first and at most; between two messages of a waiter; between two pings of a holder
_FIRST_PAUSE, _LONGEST_PAUSE, _MESSAGE_EVERY, _PING_EVERY = 0.05, 1.0, 10.0, 30.0
#: how long a holder doesn't ask again between two statements of one revision, in seconds
_RECENT = 1.0
#: MySQL's longest ``wait_timeout`` on every platform, in seconds
_LONGEST_IDLE = 2147483


@contextmanager
def migration_lock(
    connection: Connection,
    *,
    name: str = _NAME,
    timeout: float | timedelta | None = 600,
    required: bool = True,
) -> Iterator[None]:
    """Let one process at a time run migrations, in ``env.py``: around ``context.configure()`` and what follows.

    A process that waits prints who holds the lock, every ten seconds. When it is its turn, Alembic finds what is left
    to do, which is mostly nothing. Nothing is executed on ``connection``. The lock has a connection of its own, beside
    the pool of the engine, and ends when the process dies.

    :param connection: the one that ``context.configure()`` gets; in an async ``env.py``, that of ``run_sync()``.
    :param name: processes exclude one another that use the same name in the same database.
    :param timeout: the longest wait in seconds; ``None`` waits without a limit, 0 tries once.
    :param required: raise ``Unsupported`` where there is no lock that all processes see; otherwise warn, and go on
        without one.
    :raises LockTimeout: the lock was not free in time; nothing has run.
    :raises LockLost: its connection died: before the next statement of a migration, or at the end.
    :raises Unsupported: for clusters whose locks are a node's own (Galera, Group Replication with several primaries,
        Citus, pgactive, ...), without the engine's execution option ``locks_one_node=True``; for YugabyteDB before
        2025.1.
    :raises NotWritable: on a standby.

    SQLite: a second file beside the database, ``app.db-migration``, is locked. A database in memory needs no lock.

    >>> from sqlalchemy_locks.alembic import migration_lock
    >>> with engine.connect() as connection, migration_lock(connection, timeout=600):
    ...     print("context.configure(connection=connection); context.run_migrations()")
    context.configure(connection=connection); context.run_migrations()
    """
    if not isinstance(connection, Connection):
        raise TypeError(
            "migration_lock takes the Connection that context.configure() gets (in an async env.py, inside of "
            f"run_sync()), not {connection!r}"
        )
    valid_name(name, "the name of a migration lock")
    limit = timeout_seconds(timeout)
    engine = connection.engine
    if (
        engine.dialect.name == "sqlite"
        and isinstance(engine.pool, (StaticPool, SingletonThreadPool))
        and engine.url.database in (None, "", ":memory:")
    ):
        yield  # a database in memory is one process's own
        return
    pool = engine.pool.recreate()
    try:
        with closing(Connection(engine, connection=pool.connect())) as own:
            lock: _Lock | None = None
            try:
                lock = _lock_of(own, name)
                if lock is not None:
                    _wait(lock, name, limit)
            except Unsupported as error:
                if required:
                    raise
                _logger.warning("Migrations run without a lock: %s", error)
                lock = None
            if lock is None:
                yield
                return
            try:
                with _watched(connection, lock, name):
                    yield
            finally:
                lock.release()
    finally:
        pool.dispose()


class _PostgreSQL:
    """A transaction-level advisory lock, in a transaction that is left open: poolers keep its server connection."""

    def __init__(self, connection: Connection, name: str) -> None:
        # whatever the role's default is: at a higher level the transaction would have a snapshot
        self.connection = connection.execution_options(isolation_level="READ COMMITTED")
        self._key = {"key": key("sqlalchemy_locks.migration", name)}

    def acquire(self) -> bool:
        """Try to acquire the lock."""
        connection = self.connection
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
        """Ask the server, which also keeps the connection from being idle."""
        # The lock ends with the transaction, and one that has failed answers with an error. With asyncpg a SELECT
        # would keep its snapshot until the next statement; this command has none.
        self.connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
        return self.connection.in_transaction()

    def holder(self) -> str | None:
        """Describe who holds it, as far as this user may know."""
        asking = text(
            "SELECT l.pid, host(a.client_addr), a.application_name, a.xact_start FROM pg_catalog.pg_locks l"
            " LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid"
            " WHERE l.granted AND l.locktype = 'advisory' AND l.objsubid = 1"
            " AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())"
            " AND (l.classid::bigint << 32 | l.objid::bigint) = :key"
        )
        row = self.connection.execute(asking, self._key).first()
        self.connection.rollback()
        return None if row is None else _described(f"server process {row[0]}", row[1], row[2], row[3])

    def release(self) -> None:
        """Release the lock, unless its connection has died."""
        with suppress(SQLAlchemyError):
            self.connection.rollback()


class _MySQL:
    """``GET_LOCK``, whose names are the server's: this one has the database in it."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        database = self.connection.scalar(text("SELECT DATABASE()"))
        self._name = {"name": "sqlalchemy_locks:" + hashlib.sha256(f"{database}\0{name}".encode()).hexdigest()[:40]}

    def acquire(self) -> bool:
        """Try to acquire the lock."""
        self.connection.exec_driver_sql(f"SET SESSION wait_timeout = {_LONGEST_IDLE}")  # the holder is idle
        return bool(self.connection.scalar(text("SELECT GET_LOCK(:name, 0)"), self._name))

    def is_held(self) -> bool:
        """Ask the server, which also keeps the connection from being idle."""
        return bool(self.connection.scalar(text("SELECT IS_USED_LOCK(:name) = CONNECTION_ID()"), self._name))

    def holder(self) -> str | None:
        """Describe who holds it, as far as this user may know."""
        id_ = self.connection.scalar(text("SELECT IS_USED_LOCK(:name)"), self._name)
        if id_ is None:
            return None
        asking = text("SELECT host FROM information_schema.processlist WHERE id = :id")
        return _described(f"connection {id_} of the server", self.connection.scalar(asking, {"id": id_}))

    def release(self) -> None:
        """Release the lock, unless its connection has died."""
        with suppress(SQLAlchemyError):
            self.connection.execute(text("SELECT RELEASE_LOCK(:name)"), self._name)


class _SQLite:
    """An exclusive transaction on a second file, which ends with its process; the database's own would block it."""

    def __init__(self, path: str, name: str) -> None:
        self._path = f"{path}-migration" if name == _NAME else f"{path}-migration-{key(name) % 2**64:x}"
        self._holder = Path(f"{self._path}-holder")
        try:
            self._file = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        except sqlite3.OperationalError as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> Unsupported:
        return Unsupported(f"a migration lock needs the file {self._path}, which can't be made: {error}")

    def acquire(self) -> bool:
        """Try to acquire the lock."""
        try:
            self._file.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                return False
            raise self._refused(error) from error
        since = datetime.now(timezone.utc)
        with suppress(OSError):
            self._holder.write_text(_described(f"process {os.getpid()}", socket.gethostname(), since=since))
        return True

    def is_held(self) -> bool:
        """Return whether the transaction is open."""
        return self._file.in_transaction

    def holder(self) -> str | None:
        """Describe who holds it."""
        with suppress(OSError):
            return self._holder.read_text()
        return None

    def release(self) -> None:
        """Release the lock."""
        with suppress(OSError):
            self._holder.unlink()
        self._file.close()


_Lock = _PostgreSQL | _MySQL | _SQLite


def _lock_of(connection: Connection, name: str) -> _Lock | None:
    """Return the kind of lock that an engine has; ``None`` where a database belongs to one process.

    :raises Unsupported: where none is seen by all processes.
    """
    family, one_node = connection.dialect.name, connection.get_execution_options().get("locks_one_node")
    if family == "sqlite":
        database = connection.exec_driver_sql("PRAGMA database_list").all()[0]
        connection.close()
        return _SQLite(database[2], name) if database[2] else None
    if family not in ("mysql", "mariadb", "postgresql", "yugabytedb"):
        raise Unsupported(f"there is no migration lock for {family}: let one process migrate")
    server = backend_for(connection.dialect).ask_server(connection)
    connection.rollback()
    if server.several_nodes is not None and not one_node:
        raise Unsupported(server.several_nodes)
    if family in ("mysql", "mariadb"):
        if server.cluster is not None and not one_node:
            raise Unsupported(
                f"a migration lock is held on one node of {server.cluster} only: let one process migrate, or set the "
                "engine's execution option locks_one_node=True if all processes connect to one node"
            )
        return _MySQL(connection, name)
    if not server.advisory_locks:
        raise Unsupported(f"{NO_ADVISORY_LOCKS}, or let one process migrate")
    return _PostgreSQL(connection, name)


def _described(who: str, host: str | None, application: str | None = None, since: datetime | None = None) -> str:
    """Return a text about a holder."""
    parts = [who, f"from {host}" if host else "", f"({application})" if application else ""]
    if since is not None:
        parts.append(f"since {since.astimezone():%Y-%m-%d %H:%M:%S %z}")
    return " ".join(filter(None, parts))


def _wait(lock: _Lock, name: str, limit: float | None) -> None:
    """Try until the lock is acquired.

    :raises LockTimeout: when ``limit`` seconds have passed.
    """
    began_at, pause = time.monotonic(), _FIRST_PAUSE
    message_at = began_at + _MESSAGE_EVERY
    while not lock.acquire():
        now = time.monotonic()
        left = float("inf") if limit is None else began_at + limit - now
        if left <= 0:
            raise LockTimeout(
                f"the migration lock {name!r} could not be acquired within {limit:g} s: it is held by "
                f"{lock.holder() or 'another process'}; nothing was migrated"
            )
        if now >= message_at:
            message_at += _MESSAGE_EVERY
            end = "without a limit" if limit is None else f"for {left:.0f} s more"
            message = f"Waiting {end} for the migration lock {name!r}, held by {lock.holder() or 'another process'}"
            print(message, file=sys.stderr, flush=True)
        _sleep(lock, min(pause, left))
        pause = min(_LONGEST_PAUSE, pause * 1.5)


def _is_async(lock: _Lock) -> bool:
    return not isinstance(lock, _SQLite) and lock.connection.dialect.is_async


def _sleep(lock: _Lock, seconds: float) -> None:
    if _is_async(lock):
        await_only(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


@contextmanager
def _watched(connection: Connection, lock: _Lock, name: str) -> Iterator[None]:
    """Ask whether a lock is held before each revision, about once a second, and at the end; keep its connection alive.

    :raises LockLost: when it is not: in a statement of the migration, or at the end.
    """
    looked_at = -float("inf")

    def look() -> None:
        nonlocal looked_at
        cause: Exception | None = None
        try:
            if lock.is_held():
                looked_at = time.monotonic()
                return
        except Exception as error:
            cause = error
        raise LockLost(f"the migration lock {name!r} is lost: another process may migrate") from cause

    with _pinged(lock, look) as look_alone:

        def before_statement(_: Any, __: Any, statement: str, *___: Any) -> None:
            nonlocal looked_at
            if time.monotonic() - looked_at > _RECENT:
                look_alone()
            if _version_table() in statement:  # a revision ends: what follows belongs to the next one
                looked_at = -float("inf")

        event.listen(connection, "before_cursor_execute", before_statement)
        try:
            yield
        finally:
            event.remove(connection, "before_cursor_execute", before_statement)
        look_alone()


def _version_table() -> str:
    with suppress(Exception):  # outside of Alembic's own environment
        return str(context.get_context().version_table)
    return "alembic_version"


@contextmanager
def _pinged(lock: _Lock, look: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Keep a connection from being idle, in a thread, or in a task of the loop with an async driver.

    It yields ``look`` for the thread or task of the migrations: one of the two uses the connection at a time.
    """
    if _is_async(lock):
        alone = asyncio.Lock()

        def look_alone() -> None:
            await_only(alone.acquire())
            try:
                look()
            finally:
                alone.release()

        async def ping() -> None:
            with suppress(LockLost):  # the next statement of a migration says so
                while True:
                    await asyncio.sleep(_PING_EVERY)
                    await greenlet_spawn(look_alone)

        task = asyncio.get_running_loop().create_task(ping())
        try:
            yield look_alone
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await_only(task)
        return
    mutex, ended = threading.Lock(), threading.Event()

    def look_exclusively() -> None:
        with mutex:
            look()

    def ping_in_thread() -> None:
        with suppress(LockLost):
            while not ended.wait(_PING_EVERY):
                look_exclusively()

    thread = threading.Thread(target=ping_in_thread, name="sqlalchemy_locks.migration_lock", daemon=True)
    thread.start()
    try:
        yield look_exclusively
    finally:
        ended.set()
        thread.join(1)  # it may wait for a server that doesn't reply

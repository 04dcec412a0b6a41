"""One process migrates at a time, the others wait: a lock for ``env.py``, which needs no table.

The lock is held on a second connection, so that a commit of the migrations doesn't end it. It ends with its process.
Waiters poll: a waiter inside the server would have a snapshot, and ``CREATE INDEX CONCURRENTLY`` waits for snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from typing import Any

from alembic import context
from sqlalchemy import Connection, event
from sqlalchemy.util import await_only, greenlet_spawn

from sqlalchemy_locks._validation import timeout_seconds, valid_name
from sqlalchemy_locks.dialects.base import Sleep, sleep_for
from sqlalchemy_locks.dialects.migration_locks import ALEMBIC, MigrationLock, in_memory, migration_lock_on
from sqlalchemy_locks.errors import LockLost, LockTimeout, Unsupported

#: a child of Alembic's logger: the ``fileConfig()`` of an ``env.py`` disables all other existing loggers
_logger = logging.getLogger("alembic.sqlalchemy_locks")

#: seconds: between two tries, at first and at most; between two messages of a waiter; between two pings of a holder
_FIRST_PAUSE, _LONGEST_PAUSE, _MESSAGE_EVERY, _PING_EVERY = 0.05, 1.0, 10.0, 30.0
#: between two statements of one revision, a holder asks again only after this time, in seconds
_RECENT = 1.0


@contextmanager
def migration_lock(
    connection: Connection, *, name: str = ALEMBIC, timeout: float | timedelta | None = 600, required: bool = True
) -> Iterator[None]:
    """Let one process at a time run migrations, in ``env.py``: around ``context.configure()`` and what follows.

    A process that waits prints who holds the lock, every ten seconds. When its turn comes, Alembic runs the migrations
    that are still missing, usually none. Nothing is executed on ``connection``. The lock has a connection of its own,
    beside the pool of the engine, and ends when the process dies.

    :param connection: the connection that ``context.configure()`` gets; in an async ``env.py``, that of ``run_sync()``.
    :param name: processes exclude one another that use the same name in the same database.
    :param timeout: the longest wait in seconds; ``None`` waits without a limit, 0 tries once.
    :param required: raise ``Unsupported`` where there is no lock that all processes see; otherwise warn, and go on
        without one.
    :raises LockTimeout: the lock was not free in time; nothing has run.
    :raises LockLost: its connection died; raised before the next statement of a migration, or at the end.
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
    if in_memory(engine):
        yield
        return
    pool = engine.pool.recreate()
    try:
        with closing(Connection(engine, connection=pool.connect())) as own:
            lock: MigrationLock | None = None
            try:
                lock = migration_lock_on(own, name)
                if lock is not None:
                    _wait(lock, name, limit, sleep_for(engine.dialect))
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


def _wait(lock: MigrationLock, name: str, limit: float | None, sleep: Sleep) -> None:
    """Try until the lock is acquired.

    :raises LockTimeout: when ``limit`` seconds have passed.
    """
    began_at, pause = time.monotonic(), _FIRST_PAUSE
    message_at = began_at + _MESSAGE_EVERY
    while not lock.acquire():
        now = time.monotonic()
        remaining = float("inf") if limit is None else began_at + limit - now
        if remaining <= 0:
            raise LockTimeout(
                f"the migration lock {name!r} could not be acquired within {limit:g} s: it is held by "
                f"{lock.holder() or 'another process'}; nothing was migrated"
            )
        if now >= message_at:
            message_at += _MESSAGE_EVERY
            end = "without a limit" if limit is None else f"for {remaining:.0f} s more"
            message = f"Waiting {end} for the migration lock {name!r}, held by {lock.holder() or 'another process'}"
            print(message, file=sys.stderr, flush=True)
        sleep(min(pause, remaining))
        pause = min(_LONGEST_PAUSE, pause * 1.5)


@contextmanager
def _watched(connection: Connection, lock: MigrationLock, name: str) -> Iterator[None]:
    """Ask whether a lock is held before each revision, about once a second, and at the end; keep its connection alive.

    :raises LockLost: when the lock is lost: in a statement of the migration, or at the end.
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
            if _version_table() in statement:  # a revision ends: the next statement begins another one
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
def _pinged(lock: MigrationLock, look: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Keep the lock's connection from being idle, by a thread, or with an async driver by a task of the event loop.

    It yields a ``look`` for the migrations that never uses the connection at the same time as the thread or task.
    """
    if lock.asynchronous:
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

"""Connections: how one is checked out and returned, and how a call that waits for its server is ended."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from sqlalchemy import URL, Engine
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as CheckoutTimeout
from sqlalchemy.pool import QueuePool, SingletonThreadPool, StaticPool
from sqlalchemy.util.langhelpers import only_once

from sqlalchemy_locks.errors import NotWritable, PoolTimeout


def connect(engine: Engine, within: float | None = None) -> Connection:
    """Check a connection out of the engine's pool.

    :raises PoolTimeout: when none was free within the pool's own ``pool_timeout``.
    :raises DBAPIError: with ``connection_invalidated`` when none could be made: nothing was sent.
    """
    try:
        return engine.connect()
    except CheckoutTimeout as error:
        raise PoolTimeout(f"no connection was free within the pool's own pool_timeout: {error}") from error
    except DBAPIError as error:
        error.connection_invalidated = True  # drivers don't tell a connection that died from one that was refused
        raise
    except _driver_errors(engine) as error:
        # of a statement that SQLAlchemy sends at the checkout, or of a driver that has errors outside its DBAPI
        raise OperationalError(None, None, error, connection_invalidated=True) from error


def _driver_errors(engine: Engine) -> tuple[type[BaseException], ...]:
    """Return the errors that a driver raises at a checkout and that SQLAlchemy doesn't translate."""
    asyncpg: Any = sys.modules.get("asyncpg")
    errors: tuple[type[BaseException], ...] = engine.dialect.loaded_dbapi.Error, ConnectionError
    return errors if asyncpg is None else (*errors, asyncpg.InterfaceError, asyncpg.PostgresError)


def return_to_pool(connection: Connection, error: BaseException | None = None) -> None:
    """Return a connection to its pool, without an error where it has died meanwhile.

    One on which nothing can be written is replaced: the name of the server may lead to the primary by now.

    :param error: what its use has raised.
    """
    if isinstance(error, NotWritable) and not (connection.closed or connection.invalidated):
        connection.invalidate()
    try:
        connection.close()
    except (DBAPIError, connection.dialect.loaded_dbapi.Error) as raised:
        if not connection.closed and not connection.invalidated:
            connection.invalidate(raised)
            connection.close()


@contextlib.contextmanager
def connected(engine: Engine) -> Iterator[Connection]:
    """Check a connection out for the length of a block, as :func:`connect`."""
    connection = connect(engine)
    try:
        yield connection
    except BaseException as error:
        return_to_pool(connection, error)
        raise
    return_to_pool(connection)


def abort(connection: Connection) -> None:
    """Shut the socket of a connection down, so that a call that waits for its server raises an error immediately."""
    with contextlib.suppress(Exception):
        pooled: Any = connection.connection
        driver: Any = pooled.driver_connection
        if hasattr(driver, "fileno"):
            with socket.socket(fileno=os.dup(driver.fileno())) as twin:
                twin.shutdown(socket.SHUT_RDWR)
        elif connection.dialect.has_terminate:
            connection.dialect.do_terminate(pooled.dbapi_connection)


def shares_one_connection(pool: Any) -> bool:
    """Return whether the pool shares one connection, and so one transaction, between checkouts."""
    return isinstance(pool, (StaticPool, SingletonThreadPool))


def is_in_memory(url: URL) -> bool:
    """Return whether a SQLite database is in memory, and ends with its last connection."""
    return ":memory:" in (url.database or ":memory:") or url.query.get("mode") == "memory"


# What follows goes with its callers.


def is_guarded(connection: Connection) -> bool:
    """Return whether every statement is preceded by a look at a lock, as inside a block of ``Locks``."""
    return "_cursor_execute" in connection.__dict__


def autobegin(connection: Connection) -> None:
    """Begin a transaction as SQLAlchemy does before the first statement."""
    private: Any = connection
    private._autobegin()


def begin_failed(connection: Connection) -> None:
    """Forget a BEGIN that raised in the app's ``begin`` listener.

    SQLAlchemy would continue as if the listener were still running, and execute what follows without a transaction.
    """
    connection.__dict__["_Connection__in_begin"] = False


def pool_capacity(pool: Any) -> float:
    """Return how many connections a pool can have checked out at the same time; infinite without a limit."""
    if not isinstance(pool, QueuePool) or pool._max_overflow < 0:
        return math.inf
    return pool.size() + pool._max_overflow


def has_room(engine: Engine) -> bool:
    """Return whether a connection can be checked out of the engine's pool without a wait."""
    pool: Any = engine.pool
    limit = pool_capacity(pool)
    return limit == math.inf or pool.checkedout() < limit


def engine_with_own_pool(engine: Engine) -> Engine:
    """Return an engine with a pool of its own, and the options and listeners of another one."""
    own: Any = Engine(
        engine.pool.recreate(),
        engine.dialect,
        engine.url,
        execution_options=engine.get_execution_options(),
        hide_parameters=engine.hide_parameters,
    )
    own.dispatch = own.dispatch._join(engine.dispatch)
    own._has_events = engine._has_events
    # The first connection of any of the pools would be the only one that finds out what server it is: while this pool's
    # did, the app's would compile for an unknown one, and SQLAlchemy would keep those statements.
    listeners = own.pool.dispatch.connect.listeners
    for number, listener in enumerate(listeners):
        if getattr(listener, "__qualname__", "") == "only_once.<locals>.go":
            first = inspect.getclosurevars(listener).nonlocals["fn"]
            if getattr(first, "__qualname__", "") == "create_engine.<locals>.first_connect":
                listeners[number] = only_once(first, retry_on_exception=True)
    return own  # type: ignore[no-any-return]


@contextlib.contextmanager
def disposing_replaced_pool(engine: Engine) -> Iterator[None]:
    """Close the connections of a background task's engine when the app disposes of the engine meanwhile.

    A connection that is returned after ``Engine.dispose()`` goes to the old pool, and would stay open until the
    garbage collector finds it.
    """
    pool, process = engine.pool, os.getpid()
    try:
        yield
    finally:
        # after a fork the connections are the parent's
        if engine.pool is not pool and os.getpid() == process:
            pool.dispose()

"""Connections: how one is checked out and returned, and how a call that waits for its server is ended."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as CheckoutTimeout
from sqlalchemy.pool import QueuePool, SingletonThreadPool, StaticPool

from sqlalchemy_locks.dialects.checks import COMMITTED
from sqlalchemy_locks.errors import NotWritable, PoolTimeout


def connect(engine: Engine) -> Connection:
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
        # Of a statement that SQLAlchemy sends at the checkout, or of a driver that has errors outside its DBAPI. The
        # frames refer to the connection, which returns to its pool when nothing does.
        traceback.clear_frames(error.__traceback__)
        raise OperationalError(None, None, error, connection_invalidated=True) from error


def _driver_errors(engine: Engine) -> tuple[type[BaseException], ...]:
    """Return the errors that a driver raises at a checkout and that SQLAlchemy doesn't translate."""
    asyncpg: Any = sys.modules.get("asyncpg")
    errors: tuple[type[BaseException], ...] = engine.dialect.loaded_dbapi.Error, ConnectionError
    return errors if asyncpg is None else (*errors, asyncpg.InterfaceError, asyncpg.PostgresError)


def set_level(connection: Connection, level: Any) -> None:
    """Set the isolation level of a connection until it returns to its pool, before its transaction begins.

    :raises DBAPIError: with ``connection_invalidated`` when it is dead: nothing was sent.
    """
    try:
        connection.execution_options(isolation_level=level)
    except connection.dialect.loaded_dbapi.Error as error:
        connection.invalidate(error)
        raise OperationalError(None, None, error, connection_invalidated=True) from error


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


def begins_read_committed(connection: Connection) -> bool:
    """Return whether transactions begin at READ COMMITTED, as far as SQLAlchemy knows without asking the server."""
    return connection.get_execution_options().get("isolation_level", connection.default_isolation_level) in COMMITTED


def shares_one_connection(pool: Any) -> bool:
    """Return whether the pool shares one connection, and so one transaction, between checkouts."""
    return isinstance(pool, (StaticPool, SingletonThreadPool))


def has_room(engine: Engine) -> bool:
    """Return whether a connection can be checked out of the engine's pool without a wait, its overflow apart."""
    pool = engine.pool
    return not isinstance(pool, QueuePool) or pool.size() == 0 or pool.checkedout() < pool.size()

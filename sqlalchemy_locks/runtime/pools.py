"""A pool's connections: how one is checked out and given back, how many there are, and whether two callers get two.

What SQLAlchemy keeps private of its pools is used here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoneFree
from sqlalchemy.pool import QueuePool, SingletonThreadPool, StaticPool
from sqlalchemy.util.queue import Empty

from sqlalchemy_locks.errors import PoolTimeout


def most(pool: Any) -> float:
    """The most connections that a pool has out at once; endless where it sets no limit."""
    if not isinstance(pool, QueuePool) or pool._max_overflow < 0:
        return math.inf
    return pool.size() + pool._max_overflow


def one_for_all(pool: Any) -> bool:
    """Whether who asks again, while the first one is out, is given the same connection, and so the same transaction."""
    return isinstance(pool, (StaticPool, SingletonThreadPool))


def connect(engine: Engine, within: float | None = None) -> Connection:
    """Check a connection out of the engine's pool, as ``engine.connect()`` does, and more safely.

    ``engine.connect()`` talks to the server by itself where the isolation level is an execution option of the engine.
    When the connection is dead, it raises the driver's own error, and the connection stays checked out; here the error
    is translated as SQLAlchemy translates it where no connection can be made, and the pool replaces the dead one and
    its contemporaries.

    :param within: the longest wait for one that is free, in seconds; without it, the pool's own ``pool_timeout``.
    :raises PoolTimeout: when none was free in time.
    """
    private: Any = engine.pool, Connection
    pool, connection_class = private
    pooled: Any = None
    try:
        if within is None or not isinstance(pool, QueuePool):
            pooled = engine.raw_connection()
        else:
            hurried = _hurried(type(pool))  # type: ignore[arg-type]
            pooled = hurried(pool, min(within, threading.TIMEOUT_MAX)).connect()
        return engine._connection_cls(engine, pooled)
    except NoneFree as error:
        limit = "its own pool_timeout" if within is None else "the timeout"
        raise PoolTimeout(
            f"no connection was free in the pool within {limit}: all {most(pool):g} are in use"
        ) from error
    except engine.dialect.loaded_dbapi.Error as error:
        if pooled is not None:
            pool._invalidate(pooled, error)
        connection_class._handle_dbapi_exception_noconnection(error, engine.dialect, engine)
        raise
    except BaseException:
        if pooled is not None and pooled.is_valid:
            pooled.invalidate()
        raise


@cache
def _hurried(kind: type[QueuePool]) -> Callable[[QueuePool, float], QueuePool]:
    """A pool as one checkout sees it: the same in everything but how long it waits.

    SQLAlchemy has one ``pool_timeout`` for a pool and none for a checkout, and a pool that had room when it was asked
    may have none a moment later: so it is the checkout itself that has to know its limit.
    """

    class Hurried(kind):  # type: ignore[misc,valid-type]
        __slots__ = ("_seconds", "_shared")

        def __init__(self, pool: QueuePool, seconds: float) -> None:
            self.__dict__ = pool.__dict__  # type: ignore[misc]
            self._shared, self._seconds = pool, seconds

        @property
        def _timeout(self) -> float:
            return self._seconds

        def _do_get(self) -> Any:
            try:
                # asyncio.wait_for(0) gives up without a look at what is there
                return self._pool.get(False)
            except Empty:
                return super()._do_get()

        def _create_connection(self) -> Any:
            return self._shared._create_connection()  # which is to know its pool, and not this look at it

    return Hurried


def give_back(connection: Connection) -> None:
    """Close a connection; one that dies while its isolation level is put back is invalidated.

    ``close()`` would raise what the driver says to that, and the pool would count the connection as checked out for
    ever. The record that keeps what is to be put back is private to SQLAlchemy's pool.
    """
    if not connection.closed and not connection.invalidated:
        pooled: Any = connection.connection
        record = pooled._connection_record
        try:
            if record is not None and record.finalize_callback:
                if connection.in_transaction():
                    connection.rollback()
                while record.finalize_callback:
                    record.finalize_callback.pop()(pooled.dbapi_connection)
        except (connection.dialect.loaded_dbapi.Error, DBAPIError) as error:
            connection.invalidate(error)
    connection.close()


@contextlib.contextmanager
def connected(engine: Engine, within: float | None = None) -> Iterator[Connection]:
    """A connection of the pool, checked out meanwhile; as :func:`connect`."""
    connection = connect(engine, within)
    try:
        yield connection
    finally:
        give_back(connection)


@contextlib.contextmanager
def unattended(engine: Engine) -> Iterator[None]:
    """Work inside is waited for by nobody, who may dispose of the engine meanwhile: no connection outlives that.

    What is given back after it goes to the pool that the engine had, and would stay open until somebody collects it.
    """
    pool, process = engine.pool, os.getpid()
    try:
        yield
    finally:
        # a fork's are its parent's connections, and not its to close
        if engine.pool is not pool and os.getpid() == process:
            pool.dispose()

"""A pool's connections: how one is checked out and given back, how many there are, and whether two who ask get two."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool, SingletonThreadPool, StaticPool


def most(pool: Any) -> float:
    """The most connections that a pool has out at once; endless where it sets no limit."""
    if not isinstance(pool, QueuePool) or pool._max_overflow < 0:
        return math.inf
    return pool.size() + pool._max_overflow


def one_for_all(pool: Any) -> bool:
    """Whether who asks again, while the first one is out, is given the same connection, and so the same transaction."""
    return isinstance(pool, (StaticPool, SingletonThreadPool))


def connect(engine: Engine) -> Connection:
    """Check a connection out, as ``engine.connect()`` does.

    That one talks to the server by itself where the isolation level is an execution option of the engine. When the
    connection is dead, it raises the driver's own error, and the connection stays checked out; here the error is
    translated as SQLAlchemy translates it where no connection can be made, and the pool replaces the dead one and its
    contemporaries. SQLAlchemy keeps both steps private.
    """
    private: Any = engine.pool, Connection
    pool, connection_class = private
    pooled: Any = None
    try:
        pooled = engine.raw_connection()
        return Connection(engine, pooled)
    except engine.dialect.loaded_dbapi.Error as error:
        if pooled is not None:
            pool._invalidate(pooled, error)
        connection_class._handle_dbapi_exception_noconnection(error, engine.dialect, engine)
        raise
    except BaseException:
        if pooled is not None:
            pooled.invalidate()
        raise


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
def connected(engine: Engine) -> Iterator[Connection]:
    """A connection of the pool, checked out meanwhile."""
    connection = connect(engine)
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

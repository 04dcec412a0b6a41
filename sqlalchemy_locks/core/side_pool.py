"""Connections beside the app's pool, for work that must not wait for that pool: renewals, heartbeats, rows of new keys.

The app's handlers may hold every connection of its pool. These connections are made as the app's are (URL, ``creator``,
``connect_args``, listeners of pool and engine), and count against the server's limit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from sqlalchemy import Engine, event
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolExhausted

from sqlalchemy_locks._forks import in_forked_child, shares_one_connection
from sqlalchemy_locks.core.operation import Execution, translated
from sqlalchemy_locks.core.transaction import return_to_pool, roll_back
from sqlalchemy_locks.errors import PoolTimeout, Unsupported

#: the side pools of this process; in a forked child, each gets a new pool
_side_pools: WeakSet[SidePool] = WeakSet()
#: pools of the parent process, kept here: collecting one would close its connections for the parent, too
_inherited: list[Any] = []


class SidePool:
    """A pool of an engine beside the engine's own; its owner disposes of it.

    :param engine: the app's engine. If it has a single connection (SQLite in memory), its own pool is used: another
        connection would have another database.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shared = shares_one_connection(engine.pool)
        self._pool = engine.pool if self._shared else engine.pool.recreate()
        self._process = os.getpid()
        #: a cache of its own: SQLAlchemy refuses a statement compiled for a map of schemas without the key ``None``
        self.compiled: dict[Any, Any] = {}
        _side_pools.add(self)

    def connect(self) -> Connection:
        """Check a connection out, which calls the engine's listeners; ``close()`` returns it.

        :raises DBAPIError: with ``connection_invalidated`` when no connection could be made: nothing was sent.
        """
        if self._shared:
            return self._engine.connect()
        pooled = None
        try:
            pooled = self._pool.connect()
            return Connection(self._engine, connection=pooled)  # calls the listeners of engine_connect
        except BaseException as error:
            if pooled is not None and pooled.is_valid:
                pooled.invalidate(error)
            if isinstance(error, SQLAlchemyError) or not isinstance(error, Exception):
                raise
            # an error of the driver or of asyncio, which SQLAlchemy translates only in Engine.connect()
            raise OperationalError(None, None, error, connection_invalidated=True) from error

    def dispose(self) -> None:
        """Close the idle connections, except the parent's of a forked process."""
        if not self._shared and self._process == os.getpid():
            self._pool.dispose()


@in_forked_child
def _after_fork() -> None:
    for pool in list(_side_pools):
        pool._process = os.getpid()
        if not pool._shared:
            _inherited.append(pool._pool)
            pool._pool = pool._pool.recreate()


#: Side pools by dialect, which copies of an engine share. With strong references neither would ever be collected, since
#: a pool refers to its engine, and so to the dialect. A listener of the dialect keeps the pool instead.
_pools: WeakKeyDictionary[Dialect, ReferenceType[SidePool]] = WeakKeyDictionary()


@contextlib.contextmanager
def side_connection(execution: Execution, row_wait: int = 0) -> Iterator[Connection]:
    """Check out a connection beside the caller's transaction: at READ COMMITTED, in autocommit, with short waits.

    It has the caller's options, role and database.

    :param row_wait: the longest wait for a row, in seconds; the server's shortest limit may be longer.
    :raises PoolTimeout: when all such connections were in use for too long.
    :raises LockTimeout: when such a wait reached its limit.
    """
    backend, pool = execution.backend, pool_beside(execution.connection.engine)

    def connect() -> Connection:
        try:
            connection = pool.connect()
        except PoolExhausted as error:
            raise PoolTimeout(f"the connections beside the pool were in use for too long: {error}") from error
        try:
            database = backend.prepare_side(connection, execution.connection, row_wait)
        except BaseException:
            connection.close()
            raise
        # the caller's database, which may differ from the one that the engine's listeners have chosen
        schemas = execution.schema_map if database is None else {None: database, **execution.schema_map}
        options = {**execution.options, "schema_translate_map": schemas, "compiled_cache": pool.compiled}
        return connection.execution_options(**options)

    with translated(backend, needs_installation=True):
        try:
            connection = connect()
        except DBAPIError as error:
            if not error.connection_invalidated or execution.connection.invalidated:
                raise
            pool.dispose()  # the connection was idle for too long, and so were the others of the pool
            connection = connect()
        try:
            yield connection
        except BaseException:
            roll_back(connection)  # with skip_autocommit_rollback, SQLAlchemy itself sends no ROLLBACK
            raise
        finally:
            return_to_pool(connection)


def pool_beside(engine: Engine) -> SidePool:
    """Return the pool beside the engine's own, which its copies share.

    :raises Unsupported: for an engine with a single connection.
    """
    reference = _pools.get(engine.dialect)
    pool = None if reference is None else reference()
    if pool is None:
        if shares_one_connection(engine.pool):
            raise Unsupported(
                f"this needs a second connection to {engine.dialect.name}, and a {type(engine.pool).__name__} has one: "
                "use another pool"
            )
        pool = SidePool(engine)
        if _pools.setdefault(engine.dialect, ref(pool))() is not pool:
            return pool_beside(engine)  # another thread was faster
        event.listen(engine, "do_connect", partial(_keep, pool))
    return pool


def _keep(pool: SidePool, *connecting: Any) -> None:
    """Do nothing: a listener of the dialect, which keeps the pool from being collected."""


@event.listens_for(Engine, "engine_disposed")
def _on_disposed(engine: Engine) -> None:
    reference = _pools.get(engine.dialect)
    pool = None if reference is None else reference()
    if pool is not None:
        pool.dispose()

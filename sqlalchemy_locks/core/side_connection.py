"""A second connection beside a caller's transaction, for what that can't do or see itself.

That is a row that is committed at once, and rows as they are committed now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from sqlalchemy import Engine, event
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolExhausted

from sqlalchemy_locks.core.operation import Execution, translated
from sqlalchemy_locks.core.side_pool import SidePool
from sqlalchemy_locks.dialects.connections import return_to_pool, shares_one_connection
from sqlalchemy_locks.errors import PoolTimeout, Unsupported

#: By the dialect, which copies of an engine share. A pool refers to its engine, and so to the dialect: it is kept by a
#: listener of the dialect, and not from here, where neither of them would ever be collected.
_pools: WeakKeyDictionary[Dialect, ReferenceType[SidePool]] = WeakKeyDictionary()


@contextlib.contextmanager
def side_connection(execution: Execution, row_wait: int = 0) -> Iterator[Connection]:
    """Check out a connection at READ COMMITTED, in autocommit, whose waits are short.

    :param row_wait: the longest wait for a row in seconds; the server may have a longer one as its shortest.
    :raises PoolTimeout: when all such connections were in use for too long.
    :raises LockTimeout: when a wait was not short.
    """
    backend, pool = execution.backend, pool_beside(execution.connection.engine)

    def connect() -> Connection:
        try:
            connection = pool.connect()
        except PoolExhausted as error:
            raise PoolTimeout(f"the connections beside the pool were in use for too long: {error}") from error
        try:
            backend.prepare_side(connection, row_wait)
        except BaseException:
            connection.close()
            raise
        return connection

    with translated(backend, needs_installation=True):
        try:
            connection = connect()
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            pool.dispose()  # it was idle for too long, and so were the others
            connection = connect()
        try:
            yield connection
        finally:
            return_to_pool(connection)


def side_options(execution: Execution) -> dict[str, Any]:
    """Return the options of the caller for a statement on a side connection, whose engine may be a copy with others."""
    every = {**execution.connection.get_execution_options(), **execution.options}
    return {**execution.options, "schema_translate_map": every.get("schema_translate_map")}


def pool_beside(engine: Engine) -> SidePool:
    """Return the pool beside the engine's own, which its copies share.

    :raises Unsupported: for an engine that has all of its work on one connection.
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
    """Refer to the pool, as a listener of the dialect's."""


@event.listens_for(Engine, "engine_disposed")
def _on_disposed(engine: Engine) -> None:
    reference = _pools.get(engine.dialect)
    pool = None if reference is None else reference()
    if pool is not None:
        pool.dispose()

"""A second connection beside a caller's transaction, for what that can't do or see itself.

That is a row that is committed at once, and rows as they are committed now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Engine, event
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolExhausted

from sqlalchemy_locks.core.operation import Execution, translated
from sqlalchemy_locks.core.side_pool import SidePool
from sqlalchemy_locks.dialects.connections import return_to_pool, shares_one_connection
from sqlalchemy_locks.errors import PoolTimeout, Unsupported

#: by the dialect, which copies of an engine share
_pools: WeakKeyDictionary[Dialect, SidePool] = WeakKeyDictionary()


@contextlib.contextmanager
def side_connection(execution: Execution, row_wait: int = 0) -> Iterator[Connection]:
    """Check out a connection at READ COMMITTED, in autocommit, whose waits are short.

    :param row_wait: the longest wait for a row in seconds; the server may have a longer one as its shortest.
    :raises PoolTimeout: when all such connections were in use for too long.
    :raises LockTimeout: when a wait was not short.
    """
    backend, pool = execution.backend, _pool_of(execution.connection.engine)

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


def _pool_of(engine: Engine) -> SidePool:
    pool = _pools.get(engine.dialect)
    if pool is None:
        if shares_one_connection(engine.pool):
            raise Unsupported(
                f"this needs a second connection to {engine.dialect.name}, and a {type(engine.pool).__name__} has one: "
                "use another pool"
            )
        pool = _pools.setdefault(engine.dialect, SidePool(engine))
        # not event.contains(), which identifies an engine by its address, where a collected one may have been
        if _on_disposed not in engine.dispatch.engine_disposed:
            event.listen(engine, "engine_disposed", _on_disposed)
    return pool


def _on_disposed(engine: Engine) -> None:
    pool = _pools.pop(engine.dialect, None)
    if pool is not None:
        pool.dispose()

"""Connections beside the app's pool, for what must not wait for it: renewals, heartbeats, the rows of new keys.

The app's handlers may hold every connection of its pool. These connections are made as the app's are (URL, ``creator``,
``connect_args``, listeners of pool and engine), and count against the server's limit.
"""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakSet

from sqlalchemy import Engine
from sqlalchemy.engine import Connection
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from sqlalchemy_locks.dialects.connections import shares_one_connection
from sqlalchemy_locks.dialects.forks import in_forked_child

#: of this process; a forked child gives each a new pool
_side_pools: WeakSet[SidePool] = WeakSet()
#: pools of the parent process: where they were collected, their connections would be closed for the parent, too
_inherited: list[Any] = []


class SidePool:
    """A pool of an engine beside the engine's own; its owner disposes of it.

    :param engine: the engine of the app. One that has all of its work on one connection (SQLite in memory) is used
        itself, since another connection would have another database.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shared = shares_one_connection(engine.pool)
        self._pool = engine.pool if self._shared else engine.pool.recreate()
        self._process = os.getpid()
        _side_pools.add(self)

    def connect(self) -> Connection:
        """Check a connection out; ``close()`` returns it. It hears the listeners of the engine.

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
            # the driver's, and asyncio's, which SQLAlchemy translates in Engine.connect() only
            raise OperationalError(None, None, error, connection_invalidated=True) from error

    def dispose(self) -> None:
        """Close the idle connections, except the parent's of a forked process."""
        if not self._shared and self._process == os.getpid():
            self._pool.dispose()

    def _leave_to_parent(self) -> None:
        self._process = os.getpid()
        if not self._shared:
            _inherited.append(self._pool)
            self._pool = self._pool.recreate()


@in_forked_child
def _after_fork() -> None:
    for pool in list(_side_pools):
        pool._leave_to_parent()

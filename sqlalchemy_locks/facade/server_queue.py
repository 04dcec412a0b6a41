"""The queue of a semaphore that the server keeps, of all processes.

It is an advisory lock of a transaction on PostgreSQL, the lock of a row on YugabyteDB, ``GET_LOCK`` on MySQL and
MariaDB. A connection that dies drops out of it, and the server ends one that is at the head and silent for ten seconds.
"""

from __future__ import annotations

import math
import threading
from types import TracebackType

from sqlalchemy import Engine

from sqlalchemy_locks.core.engine_state import behind_pooler
from sqlalchemy_locks.core.operation import translated
from sqlalchemy_locks.runtime.transaction import ShortTransaction

#: seconds to queue before attempting an acquire regardless of position
QUEUE_TIMEOUT = 60.0
#: the same in the main thread, where the driver's wait keeps Python from running the handlers of signals
SIGNAL_TIMEOUT = 5.0


class ServerQueue:
    """One position in the server's queue of a key, in a transaction of its own.

    :param within: how long to wait for a connection of the pool, in seconds; ``None`` for no limit.
    """

    def __init__(self, engine: Engine, key: int, within: float | None) -> None:
        self.transaction = ShortTransaction(engine)
        self._key, self._within, self._joined = key, within, False

    def __enter__(self) -> ServerQueue:
        self.transaction.open(within=self._within)
        return self

    def available(self) -> bool:
        """Return whether to wait here: not through a pooler, whose server connection the holder may need to release."""
        with translated(self.transaction.backend):
            return not behind_pooler(self.transaction.connection)

    def wait(self, timeout: float | None) -> bool:
        """Wait for the head of the queue; return whether it was reached, where no error says so.

        :param timeout: the longest wait in seconds; ``QUEUE_TIMEOUT`` limits it, too.
        """
        backend, connection = self.transaction.backend, self.transaction.connection
        longest = QUEUE_TIMEOUT
        if threading.current_thread() is threading.main_thread() and backend.blocks_signals(connection):
            longest = SIGNAL_TIMEOUT
        self._joined = True
        with translated(backend):
            return backend.join_queue(connection, self._key, min(longest, math.inf if timeout is None else timeout))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection = self.transaction.connection
        try:
            if self._joined and not connection.invalidated:
                try:
                    self.transaction.backend.leave_queue(connection, self._key)
                except BaseException:
                    # a connection that is still in the queue must not go back to the pool
                    connection.invalidate()
                    raise
        finally:
            self.transaction.abandon(error)

"""The queue of a semaphore that the server keeps, of all processes.

It is an advisory lock of a transaction on PostgreSQL, and ``GET_LOCK`` on MySQL and MariaDB. A connection that dies
drops out of it, and the server ends one that is at the head and silent for ten seconds.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from sqlalchemy import Engine

from sqlalchemy_locks.core.engine_state import behind_pooler
from sqlalchemy_locks.core.operation import Execution, Operation, translated
from sqlalchemy_locks.runtime.transaction import ShortTransaction

#: the longest wait of one statement, in seconds
_LONGEST = 86400.0


class ServerQueue:
    """One position in the server's queue of a key, in a transaction of its own."""

    def __init__(self, engine: Engine, key: int) -> None:
        self._transaction, self._key, self._joined = ShortTransaction(engine), key, False

    def __enter__(self) -> ServerQueue:
        self._transaction.open()
        return self

    def join(self, timeout: float | None) -> bool:
        """Wait for the head of the queue; return whether it was reached, where no error says so.

        ``False`` on a server without queues, too, and through a pooler, whose server connection the holder may need to
        release.

        :param timeout: the longest wait in seconds; ``None`` for no limit.
        """
        backend, connection = self._transaction.backend, self._transaction.connection
        with translated(backend):
            if backend.shortest_queue_wait is None or behind_pooler(connection):
                return False
            self._joined = True
            return backend.join_queue(connection, self._key, _LONGEST if timeout is None else min(_LONGEST, timeout))

    def run(self, operation: Operation[Any]) -> Any:
        """Execute an operation in the transaction, and return its value."""
        return Execution(self._transaction.connection, operation, {}).value()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection = self._transaction.connection
        try:
            if self._joined and not connection.invalidated:
                try:
                    self._transaction.backend.leave_queue(connection, self._key)
                except BaseException as raised:
                    # a connection that is still in the queue must not go back to the pool; and what was granted, or
                    # has failed, is more important than that it died
                    connection.invalidate()
                    if not isinstance(raised, Exception):
                        raise
        finally:
            self._transaction.abandon(error)

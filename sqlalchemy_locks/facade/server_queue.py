"""The queue of a semaphore that the server keeps, of all processes.

It is an advisory lock of a transaction on PostgreSQL, and ``GET_LOCK`` on MySQL and MariaDB. A connection that dies
drops out of it, and the server ends one that is at the head and silent for ten seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from sqlalchemy import Engine

from sqlalchemy_locks.core.engine_state import behind_pooler, engine_state
from sqlalchemy_locks.core.operation import Execution, Operation, translated
from sqlalchemy_locks.runtime.transaction import ShortTransaction
from sqlalchemy_locks.values import Grant

#: the longest wait of one statement, in seconds
_LONGEST = 86400.0
#: the same in the main thread, where the driver's wait keeps Python from running the handlers of signals
_SIGNAL_TIMEOUT = 5.0
#: drivers that wait in C, where Python runs no signal handler before the reply has arrived
_WAIT_IN_C = frozenset(["psycopg2", "mysqldb", "mysqlconnector", "mariadbconnector"])


class ServerQueue:
    """One position in the server's queue of a key, in a transaction of its own, in which the permits are acquired."""

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
        longest = _LONGEST
        if threading.current_thread() is threading.main_thread() and connection.dialect.driver in _WAIT_IN_C:
            longest = _SIGNAL_TIMEOUT
        with translated(backend):
            if backend.shortest_queue_wait is None or behind_pooler(connection):
                return False
            self._joined = True
            return backend.join_queue(connection, self._key, longest if timeout is None else min(longest, timeout))

    def run(self, operation: Operation[Any], options: Mapping[str, Any]) -> Any:
        """Execute an operation in the transaction, and return its value."""
        return Execution(self._transaction.connection, operation, options).value()

    def acquire(self, request: Operation[Any], options: Mapping[str, Any]) -> Grant:
        """Acquire at the head of the queue; a grant is to be committed."""
        grant: Grant = self.run(request, options)
        transaction = self._transaction
        if not grant.acquired and not transaction.backend.schemas:
            # a denial keeps its row locks until the transaction ends
            transaction.transaction.rollback()
            server = engine_state(transaction.connection).server
            transaction.transaction = transaction.backend.begin(transaction.connection, server)
        return grant

    def commit(self) -> None:
        """Commit the grant."""
        self._transaction.transaction.commit()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection = self._transaction.connection
        try:
            if self._joined and not connection.invalidated:
                try:
                    self._transaction.backend.leave_queue(connection, self._key)
                except BaseException:
                    # a connection that is still in the queue must not go back to the pool
                    connection.invalidate()
                    raise
        finally:
            self._transaction.abandon(error)

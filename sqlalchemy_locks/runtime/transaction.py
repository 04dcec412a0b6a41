"""A short transaction: one pooled connection in one READ COMMITTED transaction, with its settings restored afterwards.

The isolation level that the app gave its engine, or sets in a ``connect`` event, is restored when the
transaction ends; so are the wait settings.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.core.operation import translated
from sqlalchemy_locks.dialects import Backend, backend_for
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.dialects.connections import (
    connect,
    driver_calls,
    on_driver_error,
    on_statement_and_commit,
    return_to_pool,
)
from sqlalchemy_locks.errors import LockLost, OutcomeUnknown, Unsupported

# why a lock is gone, and what has become of the work
_FAILED = (
    "the transaction that held the lock has failed or ended, or its connection died: nothing that was done in it is "
    "committed"
)
_DIED = (
    "the connection of the transaction that held the lock died: nothing that was done in it is committed, unless the "
    "statement at which it died commits"
)
_ENDED = (
    "the transaction that held the lock was ended inside its block: what was done before is committed or rolled back, "
    "by what ended it, and nothing that was done afterwards is committed"
)
_CLOSED = (
    "held.session was closed inside the block, which rolled back what it had done, and with it the lock: the block "
    "itself commits and closes it"
)
_READ_ONLY = (
    "the server has become read-only, as a primary does before a replica takes its place, where others may acquire the "
    "lock: nothing that was done in its block is committed"
)
_FORKED = "the lock is held by the process that forked this one: nothing that was done in it is committed here"
#: a fork's copies of its parent's transactions, kept so that they are not closed: there they continue
_inherited: list[Any] = []


class ShortTransaction:
    """One connection of the pool, in one READ COMMITTED transaction.

    :meth:`use` and :meth:`guard` are for a transaction in which the caller works, too: its end is then detected, even
    where SQLAlchemy doesn't know of it.
    """

    connection: Connection
    backend: Backend
    transaction: RootTransaction

    def __init__(self, engine: Engine, connection: Connection | None = None) -> None:
        """:param connection: checked out of the engine's pool; without it :meth:`open` does so."""
        self.engine = engine
        if connection is not None:
            self.connection, self.backend = connection, backend_for(connection.dialect)
        #: other work than the lock is done in it
        self.used = False
        #: the server, or the driver, can tell this transaction from a later one
        self._marked = False
        #: a transaction was open at the last look at the driver; before it, only the first statement may begin one
        self._seen_open = False
        #: how many statements were sent since it is guarded
        self._sent: int | None = None
        #: the statement (by number) that failed and left it aborted, in a way that the driver doesn't remember
        self._aborted_at: int | None = None
        #: it was ended by the error of a statement
        self._rolled_back = False
        #: COMMIT was asked for
        self._ending = False
        self._committed = False
        self._loss: str | None = None
        self._restore: Callable[[], None] | None = None
        self._process = os.getpid()

    def __enter__(self) -> ShortTransaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon(error)

    def open(self, *, writes: bool = True, wait: float | None = None, within: float | None = None) -> None:
        """Check a connection out, and begin.

        :param writes: as for :meth:`begin`.
        :param wait: as for :meth:`begin`.
        :param within: how long to wait for a free connection of the pool, in seconds; without it the pool's own limit.
        :raises PoolTimeout: when none was free in time.
        """
        self.connection = connect(self.engine, within)
        # certain only now: a mysql:// URL may lead to MariaDB
        self.backend = backend_for(self.connection.dialect)
        try:
            self.begin(writes=writes, wait=wait)
        except BaseException as error:
            self.abandon(error)
            raise

    def begin(self, *, writes: bool = True, keep_isolation: bool = False, wait: float | None = None) -> None:
        """Begin on the connection.

        :param writes: the transaction writes, or locks.
        :param keep_isolation: leave the isolation level alone, for an operation that refuses a wrong one by itself.
        :param wait: how long BEGIN may wait, in seconds, where it can.
        :raises LockTimeout: when that was not enough.
        """
        try:
            if keep_isolation and not self.backend.autocommit(self.connection):
                self.transaction = self.connection.begin()
            else:
                begin = self.backend.begin_writing if writes else self.backend.begin
                self.transaction, self._restore = begin(self.connection, wait)
        except DBAPIError:
            with translated(self.backend):
                raise

    @property
    def active(self) -> bool:
        """Whether the transaction is still the one that was begun, as far as SQLAlchemy knows."""
        connection = self.connection
        return (
            os.getpid() == self._process
            and not connection.closed
            and not connection.invalidated
            and self.transaction.is_active
        )

    def loss(self, *, poll: bool = True) -> str | None:
        """Return why the lock is known to be gone, without asking the server; ``None`` if it isn't.

        :param poll: look at the socket, too, which the server may have closed.
        """
        if self._loss is None:
            self._loss = self._find_loss(poll)
        return self._loss

    def close_inside(self) -> None:
        """Roll back inside the block, whose session is being closed."""
        if self.loss(poll=False) is None:
            self.transaction.rollback()
            self._loss = _CLOSED

    def disconnected(self) -> bool:
        """Return whether the connection is known to be dead, without asking the server."""
        return self.connection.invalidated or self.backend.server_closed(self.connection)

    def _find_loss(self, poll: bool) -> str | None:
        if os.getpid() != self._process:
            return _FORKED
        connection, guarded = self.connection, self._sent is not None
        if not self.active:
            if self._ending and not self._committed:
                return _ENDED
            return _DIED if guarded and connection.invalidated else _FAILED
        if self.used and not self._ending:
            ended = self.backend.transaction_ended(connection)
            if ended and self._seen_open:
                return _ENDED if guarded and not self._rolled_back else _FAILED
            self._seen_open = not ended
            # Inside begin_nested() an error costs only what was done there. After its rollback the server still has its
            # savepoint, and keeps the lock for it when a later statement fails; but SQLAlchemy never returns to it.
            # Another thread may create or release a savepoint during this: hence the second look.
            sent = self._sent
            if (
                self._is_aborted()
                and not connection.in_nested_transaction()
                and self._is_aborted()
                and sent == self._sent
            ):
                return _FAILED
        return _FAILED if poll and self.backend.server_closed(connection) else None

    def _is_aborted(self) -> bool:
        # an aborted transaction accepts no statement except the one that ends it, or returns to a savepoint
        at = self._aborted_at
        return (at is not None and at == self._sent) or self.backend.transaction_aborted(self.connection)

    def use(self, *, marker: bool = True) -> None:
        """Detect the end of the transaction from here on: other work is about to be done in it.

        :param marker: code that may pass over an error, or end the transaction, does that work.
        """
        if not self.used:
            if marker:
                self.backend.set_marker(self.connection)
            self.used, self._marked = True, marker or not self.backend.marker_is_savepoint
            self._seen_open = not self.backend.transaction_ended(self.connection)

    def guard(self, on_lost: Callable[[LockLost], object]) -> None:
        """Refuse every statement from here on once the transaction is known to be over.

        :param on_lost: called with the error, before it is raised.
        """
        connection = self.connection
        self._sent = 0

        def before_statement() -> None:
            assert self._sent is not None
            if (why := self.loss(poll=False)) is not None:
                error = LockLost(why)
                on_lost(error)
                raise error
            self._sent += 1

        def on_error(error: BaseException) -> None:
            if isinstance(error, Exception) and self.active and not self._ending:
                with contextlib.suppress(Exception):  # without an answer, the block's end finds out
                    self._aborted_at = self._sent if self.backend.check_after_error(connection, error) else None
                    if self.backend.error_rolled_back(error) and self.backend.transaction_ended(connection):
                        self._rolled_back = True

        def on_commit() -> None:
            self._ending = True

        on_statement_and_commit(connection, before_statement, on_commit)
        on_driver_error(connection, on_error)

    def check(self) -> None:
        """Ask the server whether the transaction is still the one that was begun.

        :raises LockLost: when it is not, can only be rolled back, its connection is dead, or its server read-only.
        :raises Unsupported: where asking would release the caller's savepoint.
        """
        why = self.loss()
        nested = self.active and self.connection.in_nested_transaction()
        if why is None and self.backend.marker_is_savepoint and nested:
            raise Unsupported(
                f"check() inside begin_nested() can't be answered on {self.backend.name}, where asking ends the "
                "savepoint: ask before it, or after it"
            )
        try:
            if why is None and self._marked and self.backend.marker_is_savepoint:
                if self.backend.marker_lost(self.connection):
                    why = self._loss = self._marker_loss
                else:
                    self.backend.set_marker(self.connection)
            elif why is None:
                self.connection.exec_driver_sql("SELECT 1")
            if why is None and not self.backend.writable(self.connection):
                why = self._loss = _READ_ONLY
        except DBAPIError as error:
            # refused because of an error behind a savepoint: the transaction is there, and holds the lock
            if not nested or error.connection_invalidated:
                self._loss = _FAILED
                raise LockLost(_FAILED) from error
        if why is not None:
            raise LockLost(why)

    @property
    def _marker_loss(self) -> str:
        # both a deadlock that the caller ignored and a COMMIT remove the marker: only a guard sees which it was
        return _FAILED if self._sent is None else _ENDED

    def commit(self, wait: float | None = None, *, locks: bool = False) -> None:
        """Commit, and give the connection back.

        :param wait: how long COMMIT may wait for others, in seconds, where it does; without it the app's own limit.
        :param locks: what was done outside of the database relied on its lock.
        :raises LockTimeout: when that was not enough; the transaction is rolled back.
        :raises LockLost: when the transaction had ended or failed before, so that this commits nothing; and, with
            ``locks``, when the server has become read-only.
        :raises OutcomeUnknown: when work was done in it, and the connection died during COMMIT.
        """
        try:
            why = self.loss() if self.used or not self.active else self._loss
            try:
                if why is None and self._marked and self.backend.marker_lost(self.connection):
                    why = self._marker_loss if self.backend.marker_is_savepoint else _FAILED
                if why is None and locks and not self.backend.writable(self.connection):
                    why = _READ_ONLY
            except DBAPIError as error:
                raise LockLost(_FAILED) from error
            if why is not None:
                raise LockLost(why)
            self._ending = True
            try:
                with self.backend.committing(self.connection, wait):
                    self.transaction.commit()
                self._committed = True
            except BaseException as error:
                # a driver's own time limit (asyncpg's command_timeout) is no error of the database's
                died = isinstance(error, DriverTimeout) or (
                    isinstance(error, DBAPIError) and error.connection_invalidated
                )
                if not died:
                    roll_back(self.connection)
                    raise
                if not self.used:
                    raise LockLost(_FAILED) from error
                raise OutcomeUnknown(
                    "the connection died during COMMIT: what was done is committed, or it is not"
                ) from error
        except BaseException as error:
            self.abandon(error)
            raise
        self.abandon()

    def abandon(self, error: BaseException | None = None) -> None:
        """Roll back what isn't committed, and give the connection back; never raises over a dead connection.

        :param error: what was raised in the transaction.
        """
        connection = self.connection
        if os.getpid() != self._process:
            _inherited.append(self)  # the parent uses the socket
            return
        if error is not None:
            release_cursors(error)
        try:
            if connection.in_transaction() or connection.invalidated:
                connection.rollback()
            if self._restore is not None and not connection.invalidated:
                self._restore()
        except BaseException as raised:
            # its state is unknown
            if not connection.closed:
                connection.invalidate(raised)
            if not isinstance(raised, DBAPIError):
                raise
        finally:
            return_to_pool(connection, error, committed=self._committed)


def release_cursors(error: BaseException) -> None:
    """Drop the traceback's references to cursors of what was cancelled: an open cursor of SQLite's keeps its lock."""
    if not isinstance(error, Exception):
        traceback.clear_frames(error.__traceback__)


def roll_back(connection: Connection) -> None:
    """Roll back, even after a COMMIT that failed: it ends SQLAlchemy's transaction, and not SQLite's.

    A connection that dies at that is invalidated.
    """
    try:
        if not connection.invalidated and not connection.closed:
            with driver_calls(connection):
                connection.connection.dbapi_connection.rollback()  # type: ignore[union-attr]
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
    connection.rollback()

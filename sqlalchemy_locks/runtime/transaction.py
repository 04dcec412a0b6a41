"""A short transaction: one pooled connection in one READ COMMITTED transaction."""

from __future__ import annotations

import os
import traceback
from types import TracebackType
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.core.engine_state import engine_state
from sqlalchemy_locks.core.operation import translated
from sqlalchemy_locks.dialects import Backend
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.dialects.connections import connect, return_to_pool
from sqlalchemy_locks.errors import LockLost, OutcomeUnknown, Unsupported

# why a lock is gone, and what has become of the work
FAILED = (
    "the transaction that held the lock has failed or ended, or its connection died: nothing that was done in it after "
    "that is committed"
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

    :param connection: checked out of the engine's pool; without it :meth:`open` does so.
    """

    connection: Connection
    backend: Backend
    transaction: RootTransaction

    def __init__(self, engine: Engine, connection: Connection | None = None) -> None:
        self.engine = engine
        if connection is not None:
            self.connection = connection
        #: other work than the lock is done in it
        self.used = False
        #: the server, or the driver, can tell this transaction from a later one
        self._marked = False
        #: the driver has shown that it is open; before that, only the first statement may begin it
        self._seen_open = False
        self._loss: str | None = None
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
        :raises PoolTimeout: when no connection was free within the pool's own limit.
        """
        self.connection = connect(self.engine)
        try:
            self.begin(writes=writes, wait=wait)
        except BaseException as error:
            self.abandon(error)
            raise

    def begin(self, *, writes: bool = True, wait: float | None = None) -> None:
        """Begin on the connection.

        :param writes: the transaction writes, or locks.
        :param wait: how long BEGIN may wait, in seconds, where it can.
        :raises LockTimeout: when that was not enough.
        """
        state = engine_state(self.connection)
        self.backend = state.backend
        try:
            self.transaction = self.backend.begin(self.connection, state.server, wait, writes=writes)
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

    def loss(self) -> str | None:
        """Return why the lock is known to be gone, without asking the server; ``None`` if it isn't."""
        if self._loss is None:
            self._loss = self._find_loss()
        return self._loss

    def _find_loss(self) -> str | None:
        if os.getpid() != self._process:
            return _FORKED
        state = self.backend.transaction_state(self.connection) if self.active else "closed"
        if state == "closed":
            return FAILED
        if self.used:
            if state == "ended" and self._seen_open:
                return FAILED
            self._seen_open = state != "ended"
            # inside begin_nested() an error costs only what was done there; another thread may end it meanwhile
            nested = self.connection.in_nested_transaction()
            if self.backend.transaction_state(self.connection) == "failed" and not (
                nested or self.connection.in_nested_transaction()
            ):
                return FAILED
        return None

    def close_inside(self) -> None:
        """Roll back inside the block, whose session is being closed."""
        if self.loss() is None:
            self.transaction.rollback()
            self._loss = _CLOSED

    def use(self, *, marker: bool = True) -> None:
        """Detect the end of the transaction from here on: other work is about to be done in it.

        :param marker: code that may pass over an error, or end the transaction, does that work.
        """
        if not self.used:
            if marker:
                self.backend.set_marker(self.connection)
            self.used, self._marked = True, marker or not self.backend.marker_is_savepoint
            self._seen_open = self.backend.transaction_state(self.connection) != "ended"

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
                    why = self._loss = FAILED
                else:
                    self.backend.set_marker(self.connection)
            elif why is None:
                self.connection.exec_driver_sql("SELECT 1")
            if why is None and not self.backend.writable(self.connection):
                why = self._loss = _READ_ONLY
        except DBAPIError as error:
            # refused because of an error behind a savepoint: the transaction is there, and holds the lock
            if not nested or error.connection_invalidated:
                self._loss = FAILED
                raise LockLost(FAILED) from error
        if why is not None:
            raise LockLost(why)

    def commit(self, wait: float | None = None) -> None:
        """Commit, and give the connection back.

        :param wait: how long COMMIT may wait for others, in seconds, where it does; without it the app's own limit.
        :raises LockTimeout: when that was not enough; the transaction is rolled back.
        :raises LockLost: when the transaction had ended or failed before, so that this commits nothing.
        :raises OutcomeUnknown: when work was done in it, and the connection died during COMMIT.
        """
        try:
            self._verify()
            try:
                with self.backend.committing(self.connection, wait):
                    self.transaction.commit()
            except BaseException as error:
                # a driver's own time limit (asyncpg's command_timeout) is no error of the database's
                died = isinstance(error, DriverTimeout) or (
                    isinstance(error, DBAPIError) and error.connection_invalidated
                )
                if not died:
                    roll_back(self.connection)
                    raise
                if not self.used:
                    raise LockLost(FAILED) from error
                raise OutcomeUnknown(
                    "the connection died during COMMIT: what was done is committed, or it is not"
                ) from error
        except BaseException as error:
            self.abandon(error)
            raise
        self.abandon()

    def _verify(self) -> None:
        """:raises LockLost: when the transaction is not the one that was begun, or has failed."""
        why = self.loss() if self.used or not self.active else self._loss
        try:
            if why is None and self._marked and self.backend.marker_lost(self.connection):
                why = FAILED
        except DBAPIError as error:
            raise LockLost(FAILED) from error
        if why is not None:
            raise LockLost(why)

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
        except BaseException as raised:
            # its state is unknown
            if not connection.closed:
                connection.invalidate(raised)
            if not isinstance(raised, DBAPIError):
                raise
        finally:
            return_to_pool(connection, error)


def release_cursors(error: BaseException) -> None:
    """Drop the traceback's references to cursors of what was cancelled: an open cursor of SQLite's keeps its lock."""
    if not isinstance(error, Exception):
        traceback.clear_frames(error.__traceback__)


def roll_back(connection: Connection) -> None:
    """Roll back, even after a COMMIT that failed: it ends SQLAlchemy's transaction, and not SQLite's.

    A connection that dies at that is invalidated.
    """
    if not connection.invalidated and not connection.closed:
        try:
            connection.connection.rollback()
        except connection.dialect.loaded_dbapi.Error as error:
            connection.invalidate(error)
    connection.rollback()

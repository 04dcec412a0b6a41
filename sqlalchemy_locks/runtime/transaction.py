"""The short transaction that ``Locks`` gives an operation: READ COMMITTED, retried as a whole, and no trace left.

The isolation level that the app gave its engine, or sets in a ``connect`` event, is on the connection again
when this is over; so are the wait settings. What is retried has had no effect: a deadlock or a serialization
failure has rolled everything back, and so has the death of a connection before COMMIT was sent.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sqlalchemy import Engine, event
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.core.operation import Operation, translated
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.dialects.connections import connect, driver_calls, give_back, most, on_driver_error
from sqlalchemy_locks.errors import LockLost, LockTimeout, MustRollback, OutcomeUnknown, Unsupported

T = TypeVar("T")

Sleep = Callable[[float], None]
RETRIES = 3
#: why a lock is gone, and what has become of the work
_OVER = (
    "the transaction that held the lock has failed or is over, or its connection died: nothing that was done in it is "
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
_ANOTHERS = "the lock is held by the process that forked this one: nothing that was done in it is committed here"
#: what a fork has of its parent's transactions: whatever becomes of it here, they go on there
_inherited: list[Any] = []


class NotCommitted(LockLost):
    """Nothing of an operation is committed: it may be run again."""


class ShortTransaction:
    """One connection of the pool, in one READ COMMITTED transaction."""

    connection: Connection
    transaction: RootTransaction

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.backend = backend_for(engine.dialect)
        #: somebody works in it, besides the lock
        self.used = False
        #: the driver has told since that one is open: only the first statement that needs it may begin it
        self._open = False
        #: how many statements were sent since it is guarded
        self._sent: int | None = None
        #: its last statement failed and left it aborted, in a way that the driver doesn't remember
        self._aborted = False
        #: what ended it was the error of a statement
        self._rolled_back = False
        #: COMMIT was asked for
        self._ending = False
        self._committed = False
        self._known: str | None = None
        self._process = os.getpid()

    def open(
        self, *, writes: bool = True, as_it_is: bool = False, wait: float | None = None, within: float | None = None
    ) -> None:
        """Check a connection out and begin.

        :param writes: what is to be done writes, or locks.
        :param as_it_is: leave the isolation level alone, for an operation that refuses a wrong one by itself.
        :param wait: how long beginning may wait, in seconds, where it can.
        :param within: how long to wait for a free connection of the pool; as long as the pool lets one wait without it.
        :raises PoolTimeout: when there was none.
        """
        self.connection = connect(self.engine, within)
        # known for certain only now: a mysql:// URL may have led to MariaDB
        self.backend = backend_for(self.connection.dialect)
        self._restore: Callable[[], None] | None = None
        try:
            with translated(self.backend):
                if as_it_is and not self.backend.autocommit(self.connection):
                    self.transaction = self.connection.begin()
                else:
                    begin = self.backend.begin_writing if writes else self.backend.begin
                    self.transaction, self._restore = begin(self.connection, wait)
        except BaseException:
            self.abandon()
            raise

    @property
    def active(self) -> bool:
        """Whether the transaction is still the one that was begun."""
        connection = self.connection
        return not self._forked and not connection.closed and not connection.invalidated and self.transaction.is_active

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    def over(self, *, wire: bool = True) -> str | None:
        """Why the lock is known to be gone, without asking the server; ``None`` as long as nothing tells so.

        :param wire: look at the connection, too, which the server may have closed.
        """
        if self._known is None:
            self._known = self._look(wire)
        return self._known

    def _look(self, wire: bool) -> str | None:
        if self._forked:
            return _ANOTHERS
        connection, guarded = self.connection, self._sent is not None
        if not self.active:
            if self._ending and not self._committed:
                return _ENDED
            return _DIED if guarded and connection.invalidated else _OVER
        if self.used and not self._ending:
            ended = self.backend.transaction_ended(connection)
            if ended and self._open:
                return _ENDED if guarded and not self._rolled_back else _OVER
            self._open = not ended
            if self._failed():
                return _OVER
        return _OVER if wire and self.backend.server_closed(connection) else None

    def _failed(self) -> bool:
        """Whether the server has given it up for an error, and with it the lock.

        An error inside ``begin_nested()`` costs what was done there only. Once that was rolled back, the server still
        has its savepoint, and keeps the lock for it when something fails later; but SQLAlchemy never returns to it.
        """

        def aborted() -> bool:
            return self._aborted or self.backend.transaction_aborted(self.connection)

        sent = self._sent
        # looked at from another thread, a savepoint may come or go meanwhile: then the next look tells
        return (
            self.used and aborted() and not self.connection.in_nested_transaction() and aborted() and sent == self._sent
        )

    def use(self) -> None:
        """Somebody is about to work in the transaction: its end, from here on, must not pass unnoticed."""
        if not self.used:
            self.backend.set_marker(self.connection)
            self.used = True
            self._open = not self.backend.transaction_ended(self.connection)

    def guard(self, lost: Callable[[LockLost], object]) -> None:
        """From here on, no statement is executed when the transaction is known to be over.

        :param lost: hears of it when it is.
        """
        connection: Any = self.connection
        self._sent = 0

        def before(*_: Any) -> None:
            assert self._sent is not None
            if (why := self.over(wire=False)) is not None:
                error = LockLost(why)
                lost(error)
                raise error
            self._sent += 1

        def after(*_: Any) -> None:
            self._aborted = False  # an aborted transaction takes no statement but the one that ends it, or goes back

        def failed(error: BaseException) -> None:
            if isinstance(error, Exception) and self.active and not self._ending:
                with contextlib.suppress(Exception):  # without an answer, the block's end finds out
                    self._aborted = self.backend.check_after_error(self.connection, error)
                    self._rolled_back |= self.backend.error_rolled_back(error) and self.backend.transaction_ended(
                        self.connection
                    )

        def commit(_: Connection) -> None:
            self._ending = True

        event.listen(connection, "before_cursor_execute", before)
        event.listen(connection, "after_cursor_execute", after)
        event.listen(connection, "commit", commit)
        on_driver_error(connection, failed)

    def check(self) -> None:
        """Ask the server whether the transaction is still the one that was begun.

        :raises LockLost: when it is not, can only be rolled back, or its connection is dead.
        :raises Unsupported: where asking would take the caller's savepoint away.
        """
        why = self.over()
        nested = self.active and self.connection.in_nested_transaction()
        if why is None and self.backend.marker_is_savepoint and nested:
            raise Unsupported(
                f"check() inside begin_nested() can't be answered on {self.backend.name}, where asking ends the "
                "savepoint: ask before it, or after it"
            )
        try:
            if why is None and self.used and self.backend.marker_is_savepoint:
                if self.backend.marker_lost(self.connection):
                    why = self._known = self._mark_lost
                else:
                    self.backend.set_marker(self.connection)
            elif why is None:
                self.connection.exec_driver_sql("SELECT 1")
        except DBAPIError as error:
            # the server has refused it for an error behind a savepoint, and so it is there, and holds the lock
            if not nested or error.connection_invalidated:
                self._known = _OVER
                raise LockLost(_OVER) from error
        if why is not None:
            raise LockLost(why)

    @property
    def _mark_lost(self) -> str:
        # a deadlock that was passed over takes the mark along, and so does a COMMIT: only a guard sees which it was
        return _OVER if self._sent is None else _ENDED

    def commit(self, wait: float | None = None) -> None:
        """Commit, and give the connection back.

        :param wait: how long COMMIT may wait for others, where it does; as long as the app lets it without it.
        :raises LockTimeout: when that was not enough; it is rolled back.
        :raises LockLost: when the transaction had ended or failed before, so that nothing is committed by this.
        :raises OutcomeUnknown: when work was done in it, and the connection died while COMMIT was under way.
        """
        try:
            why = self.over() if self.used or not self.active else None
            try:
                if why is None and self.used and self.backend.marker_lost(self.connection):
                    why = self._mark_lost if self.backend.marker_is_savepoint else _OVER
            except DBAPIError as error:
                raise LockLost(_OVER) from error
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
                    raise LockLost(_OVER) from error
                raise OutcomeUnknown(
                    "the connection died while COMMIT was under way: what was done is committed, or it is not"
                ) from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Roll back what isn't committed, and give the connection back; never raises over a dead connection."""
        connection = self.connection
        if self._forked:
            _inherited.append(self)  # the socket is the parent's, too
            return
        forget(sys.exc_info()[1])
        try:
            if connection.in_transaction() or connection.invalidated:
                connection.rollback()
            if self._restore is not None and not connection.invalidated:
                self._restore()
            if self._committed:
                nothing_open(connection)
        except BaseException as error:
            # in what state it is nobody knows
            if not connection.closed:
                connection.invalidate(error)
            if not isinstance(error, DBAPIError):
                raise
        finally:
            give_back(connection)


def forget(error: BaseException | None) -> None:
    """Let go of the cursors of what was cancelled: SQLite's keep their locks, connection or not, while known of."""
    if error is not None and not isinstance(error, Exception):
        traceback.clear_frames(error.__traceback__)


def roll_back(connection: Connection) -> None:
    """Leave nothing open, even where COMMIT has failed: for SQLAlchemy the transaction is then over, for SQLite not.

    A connection that dies of it is invalidated, and nothing is open on it either.
    """
    try:
        if not connection.invalidated and not connection.closed:
            with driver_calls(connection):
                connection.connection.dbapi_connection.rollback()  # type: ignore[union-attr]
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
    connection.rollback()


def run_one(
    connection: Connection, operation: Operation[Any], options: Mapping[str, Any], wait: float | None = None
) -> Any:
    """Run an operation of one statement by itself: without BEGIN and COMMIT where that can be had for nothing.

    Once the answer to what commits is there, it is the result: a connection that dies while it is put back as the app
    had it is replaced.

    :param wait: how long it may wait for others, in seconds, COMMIT included where that waits.
    :raises LockTimeout: when COMMIT could not be done in time; it is rolled back.
    :raises OutcomeUnknown: when the connection died after the statement, or its COMMIT, was sent.
    """
    backend = backend_for(connection.dialect)
    until = None if wait is None else time.monotonic() + wait
    one_trip = backend.cheap_autocommit
    committed = final = one_trip or backend.autocommit(connection)
    if one_trip:
        options = {**options, "locks_alone": True}
    with backend.autocommitted(connection) if one_trip else contextlib.nullcontext():
        try:
            if not one_trip:
                with translated(backend):
                    connection.begin()
            value = operation.value(connection, options)
            if connection.in_transaction():
                try:
                    final = True
                    with backend.committing(connection, None if until is None else max(0.0, until - time.monotonic())):
                        connection.commit()
                except DBAPIError as error:
                    if not (committed and error.connection_invalidated):
                        raise
        except LockTimeout:
            if final and not one_trip:
                roll_back(connection)  # its COMMIT has failed: for SQLAlchemy it is over, and nobody else would
            raise
        except (DBAPIError, DriverTimeout) as error:
            if final and (isinstance(error, DriverTimeout) or error.connection_invalidated):
                raise OutcomeUnknown(
                    f"{operation.name}: the connection died before the answer came: it was done, or it was not"
                ) from error
            roll_back(connection)
            raise
        except BaseException as error:
            forget(error)
            raise
    nothing_open(connection)
    return value


def nothing_open(connection: Connection) -> None:
    """COMMIT was the last thing, so the pool need not send a ROLLBACK: on MySQL that is a round trip."""
    if not connection.invalidated and not connection.in_transaction():
        ended: Any = _Ended(connection)
        connection._transaction = ended


class _Ended:
    """What SQLAlchemy takes for a transaction that it has rolled back itself when it closes a connection."""

    is_active = False

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def close(self) -> None:
        # whoever has kept the connection is told by SQLAlchemy that it is closed
        self._connection._transaction = None


def has_room(engine: Engine) -> bool:
    """Whether the pool would give a connection without a wait, as far as it tells."""
    pool: Any = engine.pool
    limit = most(pool)
    return limit == math.inf or pool.checkedout() < limit


def retried(
    attempt: Callable[[], T],
    engine: Engine,
    sleep: Sleep,
    *,
    repeatable: bool = False,
    told: Callable[[BaseException, int], object] = lambda error, count: None,
) -> T:
    """Run ``attempt`` again, three times at most, after an error that leaves nothing behind.

    :param repeatable: it may also be run again when nobody knows whether it was done.
    :param told: hears of each error that is followed by another try, and which one that will be.
    """

    def worth(error: BaseException) -> bool:
        if isinstance(error, DBAPIError):
            return error.connection_invalidated or backend_for(engine.dialect).transient(error)
        return isinstance(error, (MustRollback, NotCommitted)) or (repeatable and isinstance(error, OutcomeUnknown))

    try:
        return attempt()  # by itself, since a retrying object costs as much as a round trip
    except Exception as error:
        if not worth(error):
            raise
        told(error, 1)
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

    def again(state: Any) -> None:
        told(state.outcome.exception(), state.attempt_number + 1)

    sleep(random.uniform(0, 0.01))
    retrying = Retrying(
        stop=stop_after_attempt(RETRIES),
        wait=wait_random_exponential(multiplier=0.01, max=0.5),
        retry=retry_if_exception(worth),
        sleep=sleep,
        before_sleep=again,
        reraise=True,
    )
    return retrying(attempt)

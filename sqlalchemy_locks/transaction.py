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
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sqlalchemy import Engine, event
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import DBAPIError

from .dialects import engine_of
from .dialects.base import driver_calls
from .errors import LockLost, MustRollback, OutcomeUnknown, Unsupported
from .operation import Operation, translated
from .pools import most

T = TypeVar("T")

Sleep = Callable[[float], None]
RETRIES = 3
_OVER = "the transaction that held the lock has failed or is over, or its connection died"
ENDED = "the transaction that held the lock was ended inside its block: leave the block first"
_ANOTHERS = "the lock is held by the process that forked this one"
#: a statement that ends a transaction, and not only what came after a savepoint
_ENDS = re.compile(
    r"\s*(COMMIT|END|ABORT|ROLLBACK(?!\s+(?:WORK\s+|TRANSACTION\s+)?TO\b)|PREPARE\s+TRANSACTION)\b", re.IGNORECASE
)
#: what a fork has of its parent's transactions: whatever becomes of it here, they go on there
_inherited: list[Any] = []


class ShortTransaction:
    """One connection of the pool, in one READ COMMITTED transaction."""

    connection: Connection
    transaction: RootTransaction

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.facts = engine_of(engine.dialect)
        #: somebody works in it, besides the lock
        self.used = False
        self._committed = False
        self._process = os.getpid()

    def open(self, *, writes: bool = True, as_it_is: bool = False, wait: float | None = None) -> None:
        """Check a connection out and begin.

        :param writes: what is to be done writes, or locks.
        :param as_it_is: leave the isolation level alone, for an operation that refuses a wrong one by itself.
        :param wait: how long beginning may wait, in seconds, where it can.
        """
        self.connection = self.engine.connect()
        # known for certain only now: a mysql:// URL may have led to MariaDB
        self.facts = engine_of(self.connection.dialect)
        self._restore: Callable[[], None] | None = None
        try:
            with translated(self.facts):
                if as_it_is and not self.facts.autocommit(self.connection):
                    self.transaction = self.connection.begin()
                else:
                    begin = self.facts.begin_writing if writes else self.facts.begin
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

    @property
    def _why(self) -> str:
        return _ANOTHERS if self._forked else _OVER

    def use(self) -> None:
        """Somebody is about to work in the transaction: its end, from here on, must not pass unnoticed."""
        if not self.used:
            self.facts.mark(self.connection)
            self.used = True

    def guard(self, lost: Callable[[LockLost], object]) -> None:
        """From here on, no statement ends the transaction, and none is executed when it is known to be over.

        What is seen is how a statement's text begins.

        :param lost: hears of it when it is.
        """

        def before(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
            if ends := _ENDS.match(statement):
                raise Unsupported(
                    f"{ends[1].upper()} as text would end the transaction that holds the lock: leave the block, which "
                    "commits, or raise, which rolls back"
                )
            if self.facts.commits is not None and (commits := self.facts.commits.match(statement)):
                told = " ".join(commits[1].upper().split())
                raise Unsupported(
                    f"{told} would commit on {self.facts.name}, and end the transaction that holds the lock: execute "
                    "it before the block, or after it"
                )
            if self.facts.ended(connection):
                error = LockLost(ENDED)
                lost(error)
                raise error

        event.listen(self.connection, "before_cursor_execute", before)

    @property
    def ended(self) -> bool:
        """Whether a statement of the caller's is known to have ended it."""
        return self.used and self.facts.ended(self.connection)

    def check(self) -> None:
        """Ask the server whether the transaction is still the one that was begun.

        :raises LockLost: when it is not, can only be rolled back, or its connection is dead.
        :raises Unsupported: where asking would take the caller's savepoint away.
        """
        if self.facts.marks_by_savepoint and self.active and self.connection.in_nested_transaction():
            raise Unsupported(
                f"check() inside begin_nested() can't be answered on {self.facts.name}, where asking ends the "
                "savepoint: ask before it, or after it"
            )
        try:
            # the mark first: asking anything may begin another transaction where this one was ended
            if self.active and not (self.used and self.facts.unmarked(self.connection)):
                self.connection.exec_driver_sql("SELECT 1")
                if self.used:
                    self.facts.mark(self.connection)
                return
        except DBAPIError as error:
            raise LockLost(_OVER) from error
        raise LockLost(self._why)

    def commit(self) -> None:
        """Commit, and give the connection back.

        :raises LockLost: when the transaction had ended or failed before, so that nothing is committed.
        :raises OutcomeUnknown: when work was done in it, and the connection died while COMMIT was under way.
        """
        try:
            try:
                if not self.active or (self.used and self.facts.unmarked(self.connection)):
                    raise LockLost(f"{self._why}: nothing that was done in it is committed")
            except DBAPIError as error:
                raise LockLost(f"{_OVER}: nothing that was done in it is committed") from error
            try:
                self.transaction.commit()
                self._committed = True
            except BaseException as error:
                if not isinstance(error, DBAPIError) or not error.connection_invalidated:
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
            connection.close()


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


def run_one(connection: Connection, operation: Operation[Any], options: Mapping[str, Any]) -> Any:
    """Run an operation of one statement by itself: without BEGIN and COMMIT where that can be had for nothing.

    Once the answer to what commits is there, it is the result: a connection that dies while it is put back as the app
    had it is replaced.

    :raises OutcomeUnknown: when the connection died after the statement, or its COMMIT, was sent.
    """
    facts = engine_of(connection.dialect)
    one_trip = facts.one_trip
    committed = final = one_trip or facts.autocommit(connection)
    if one_trip:
        options = {**options, "locks_alone": True}
    with facts.autocommitted(connection) if one_trip else contextlib.nullcontext():
        try:
            if not one_trip:
                with translated(facts):
                    connection.begin()
            value = operation.value(connection, options)
            if connection.in_transaction():
                try:
                    final = True
                    connection.commit()
                except DBAPIError as error:
                    if not (committed and error.connection_invalidated):
                        raise
        except (DBAPIError, TimeoutError) as error:
            # a driver's own time limit (asyncpg's command_timeout) is no error of the database's
            if final and (isinstance(error, TimeoutError) or error.connection_invalidated):
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
            return error.connection_invalidated or engine_of(engine.dialect).transient(error)
        return isinstance(error, MustRollback) or (repeatable and isinstance(error, OutcomeUnknown))

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

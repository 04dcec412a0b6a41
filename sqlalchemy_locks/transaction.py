"""The short transaction that ``Locks`` gives an operation: READ COMMITTED, retried as a whole, and no trace left.

The isolation level that the app gave its engine, or sets in a ``connect`` event, is on the connection again
when this is over; so are the wait settings. What is retried has had no effect: a deadlock or a serialization
failure has rolled everything back, and so has the death of a connection before COMMIT was sent.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import DBAPIError

from .dialects import engine_of
from .errors import LockLost, MustRollback
from .operation import translated

T = TypeVar("T")

Sleep = Callable[[float], None]
RETRIES = 3


class ShortTransaction:
    """One connection of the pool, in one READ COMMITTED transaction."""

    connection: Connection
    transaction: RootTransaction

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.facts = engine_of(engine.dialect)

    def open(self, *, as_it_is: bool = False) -> None:
        """Check a connection out and begin.

        :param as_it_is: leave the isolation level alone, for an operation that refuses a wrong one by itself.
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
                    self.transaction, self._restore = self.facts.begin(self.connection)
        except BaseException:
            self.abandon()
            raise

    @property
    def active(self) -> bool:
        """Whether the transaction is still the one that was begun."""
        connection = self.connection
        return not connection.closed and not connection.invalidated and self.transaction.is_active

    def commit(self) -> None:
        """Commit, and give the connection back.

        :raises LockLost: when the transaction had ended before, or its connection died.
        """
        try:
            if not self.active:
                raise LockLost("the transaction that held the lock was ended before its block was left")
            try:
                self.transaction.commit()
            except DBAPIError as error:
                if error.connection_invalidated:
                    raise LockLost("the connection that held the lock died before its work was committed") from error
                raise
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Roll back what isn't committed, and give the connection back; never raises over a dead connection."""
        connection = self.connection
        try:
            if connection.in_transaction() or connection.invalidated:
                connection.rollback()
            if self._restore is not None and not connection.invalidated:
                self._restore()
        except DBAPIError as error:
            connection.invalidate(error)
        finally:
            connection.close()


def retried(attempt: Callable[[], T], engine: Engine, sleep: Sleep) -> T:
    """Run ``attempt`` again, three times at most, after an error that leaves nothing behind."""
    facts = engine_of(engine.dialect)

    def worth(error: BaseException) -> bool:
        if isinstance(error, DBAPIError):
            return error.connection_invalidated or facts.transient(error)
        return isinstance(error, MustRollback)

    try:
        return attempt()  # by itself, since a retrying object costs as much as a round trip
    except Exception as error:
        if not worth(error):
            raise
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

    sleep(random.uniform(0, 0.01))
    retrying = Retrying(
        stop=stop_after_attempt(RETRIES),
        wait=wait_random_exponential(multiplier=0.01, max=0.5),
        retry=retry_if_exception(worth),
        sleep=sleep,
        reraise=True,
    )
    return retrying(attempt)

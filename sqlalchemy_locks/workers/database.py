"""A worker's operations in the database, repeated where that is safe, and the errors that the worker survives."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as SQLAlchemyPoolTimeout
from sqlalchemy.orm import sessionmaker

from sqlalchemy_locks.core.operation import Operation, backend_of, behind_pooler, engine_state
from sqlalchemy_locks.core.transaction import Attempts, connect, has_room, retried, return_to_pool
from sqlalchemy_locks.dialects.base import Backend, DriverTimeout, abort, sleep_for
from sqlalchemy_locks.errors import (
    LockError,
    LockLost,
    LockTimeout,
    MustRollback,
    NotWritable,
    OutcomeUnknown,
    PoolTimeout,
)
from sqlalchemy_locks.workers.config import WorkerConfig

logger = logging.getLogger("sqlalchemy_locks.worker")
#: how long a connection is kept for the next statement, in seconds: a handler may be waiting for one of the same pool
_KEPT = 0.01


class WorkerDatabase:
    """Runs the operations of one worker, each in a transaction of its own.

    :param checkout: checks a connection out; by default of the engine's pool.
    """

    def __init__(self, config: WorkerConfig, checkout: Callable[[], Connection] | None = None) -> None:
        self.config, self.sleep = config, sleep_for(config.engine.dialect)
        self._connect = checkout or config.engine.connect
        # not in sessions of the app's own class, whose listeners would be called
        self._attempts = Attempts(
            config.engine, sessionmaker(config.engine), self._checkout, self._give_back, in_sessions=False
        )
        #: the connection of the last operation, which may be under way
        self._connection: Connection | None = None
        #: keep the connection for the next statement: a checkout takes half as long as a statement
        self.keeps_connection = False
        self._kept: Connection | None = None
        #: when it has to be returned at the latest, by ``time.monotonic()``
        self.kept_until = float("inf")
        #: the last operation was executed again after an error, and the first execution may have taken effect
        self.was_retried = False

    def perform(self, operation: Operation[Any]) -> Any:
        """Run an operation that may be repeated: claims and hosts make a second execution harmless.

        :return: its value, or the list of its rows.
        """
        self.was_retried = False

        def pause(delay: float) -> None:
            self.was_retried = True
            self.sleep(delay)

        def attempt() -> Any:
            try:
                return self._attempts.run(operation, {})
            except OutcomeUnknown as error:
                # so that retried() repeats it after a lost connection, but not after a time limit of the driver
                raise error.__cause__ or error from None

        return retried(attempt, self.config.engine, pause)

    def _checkout(self) -> Connection:
        """Return the connection that was kept, or check one out."""
        connection = self._connection = self._kept or self._connect()
        self._kept = None
        return connection

    def _give_back(self, connection: Connection) -> None:
        self._kept, self.kept_until = connection, time.monotonic() + _KEPT
        if not self.keeps_connection or connection.invalidated or not has_room(self.config.engine):
            self.return_connection()

    def return_connection(self) -> None:
        """Return the connection that was kept to its pool."""
        self.keeps_connection, self.kept_until = False, float("inf")
        if self._kept is not None:
            connection, self._kept = self._kept, None
            return_to_pool(connection)

    def may_pass(self, error: Exception) -> bool:
        """Whether the database is unavailable for the moment, as opposed to a permanent error."""
        backend = backend_of(self.config.engine.dialect)
        if isinstance(error, DBAPIError):
            return may_pass(error, backend)
        if isinstance(error, NotWritable):
            return not backend.single_writer  # a primary may become one again, or its name lead to another
        return isinstance(error, (LockTimeout, LockLost, MustRollback, SQLAlchemyPoolTimeout, DriverTimeout, OSError))

    def connect_once(self) -> None:
        """Check a connection out and give it back: SQLAlchemy initializes the dialect by it."""
        return_to_pool(connect(self.config.engine, self._connect))

    def abort(self) -> None:
        """Make the operation that is under way fail, in any thread or task."""
        if (connection := self._connection) is not None:
            abort(connection)

    def states(self, pairs: Sequence[tuple[Any, int]]) -> dict[tuple[Any, int], str]:
        """Return the states of the jobs, given as pairs, that are still this worker's, or ended under its claim."""
        rows = self.perform(self.config.queue._claimed(pairs)) if pairs else ()
        return {(id_, claim): state for id_, claim, state in rows}


def may_pass(error: DBAPIError, backend: Backend) -> bool:
    """Return whether the same statement may succeed later, by itself: any other refusal is permanent."""
    passes = backend.meaning(error) in ("conflict", "newer row", "unavailable")
    return passes or error.connection_invalidated or backend.may_be_committed(error)


def supports_listen(engine: Engine) -> bool:
    """Whether a connection of this engine would receive notifications: not behind a pooler in transaction mode."""
    with engine.connect() as connection:
        pooled, notifies = behind_pooler(connection), engine_state(connection).server.notifies
    if pooled:
        log(
            logging.INFO,
            "Polling instead of listening: a pooler such as PgBouncer is between this worker and the server (if it is "
            "in session mode, set the engine's execution option locks_session_pooling=True)",
        )
    return notifies and not pooled


def log(level: int, message: str, *values: Any, exc_info: BaseException | None = None) -> None:
    """Log; a logging handler that raises, or an error that can't be formatted, must not end the worker."""
    with suppress(Exception):
        logger.log(level, message, *values, exc_info=exc_info)


def format_error(error: BaseException) -> str:
    """Return an error with its traceback, or its type only if it can't be formatted."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:
        return f"{type(error).__name__}: it raises another error when it is formatted"


def was_answered(error: Exception) -> bool:
    """Whether the server has replied, and refused one statement only, for instance because of a statement timeout."""
    if isinstance(error, DBAPIError):
        return error.statement is not None and not error.connection_invalidated
    return isinstance(error, LockError) and not isinstance(error, (LockLost, PoolTimeout))

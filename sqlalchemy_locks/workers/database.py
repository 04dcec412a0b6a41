"""What a worker asks of the database, retried where that is safe, and which errors it survives."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import CompileError, DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as SQLAlchemyPoolTimeout

from sqlalchemy_locks.core.engine_state import behind_pooler
from sqlalchemy_locks.core.operation import Execution, Operation
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.dialects.connections import abort, return_to_pool
from sqlalchemy_locks.errors import (
    LockError,
    LockLost,
    LockTimeout,
    MustRollback,
    NotInstalled,
    NotWritable,
    PoolTimeout,
)
from sqlalchemy_locks.runtime.retry import Sleep, retried
from sqlalchemy_locks.runtime.transaction import ShortTransaction
from sqlalchemy_locks.workers.config import WorkerConfig

logger = logging.getLogger("sqlalchemy_locks.worker")

#: a column, table, function or type that isn't there, or a column of another type: of PostgreSQL, then of MySQL and
#: MariaDB, and of SQLite, which has no codes for it
_WRONG_STATES = ("42703", "42P01", "42883", "42704", "42804", "3F000")
_WRONG_CODES = (1054, 1146)
_WRONG_PHRASES = ("no such column", "no such table", "has no column named")


class Owned(NamedTuple):
    """Jobs, as pairs of id and claim, by their state in the database."""

    #: still this worker's
    running: set[tuple[Any, int]]
    #: completed, or dead, by its claim: by the worker or by a handler
    ended: set[tuple[Any, int]]
    #: of another owner, returned to the queue, or deleted
    lost: set[tuple[Any, int]]


class WorkerDatabase:
    """Runs the operations of one worker, each in a transaction of its own.

    :param connect: checks a connection out; by default of the engine's pool.
    """

    def __init__(self, config: WorkerConfig, sleep: Sleep, connect: Callable[[], Connection] | None = None) -> None:
        self.config, self.sleep = config, sleep
        self._connect = connect or config.engine.connect
        #: that of the last operation, which may be under way
        self._connection: Connection | None = None
        #: the last operation was executed again, after an error that may have come when it had taken effect
        self.retried = False

    def perform(self, operation: Operation[Any]) -> Any:
        """Run an operation that may be repeated: claims and hosts make a second execution harmless.

        :return: its value, or the list of its rows.
        """
        self.retried = False

        def pause(delay: float) -> None:
            self.retried = True
            self.sleep(delay)

        return retried(lambda: self._attempt(operation), self.config.engine, pause, repeatable=True)

    def _attempt(self, operation: Operation[Any]) -> Any:
        connection = self._connection = self._connect()
        value: Any = None
        try:
            execution = Execution(connection, operation, {})
            one_statement = operation._impl.statement(execution.context) is not None
            in_autocommit = one_statement and execution.backend.allows_autocommit(connection, execution.server)
            if in_autocommit:
                execution.in_autocommit = True
                with execution.backend.autocommitted(connection):
                    value = execution.value()
        except BaseException as error:
            return_to_pool(connection, error)
            raise
        if in_autocommit:
            return_to_pool(connection)
            return value
        short = ShortTransaction(self.config.engine, connection)
        try:
            short.begin()
            value = Execution(connection, operation, {}).value()
        except BaseException as error:
            short.abandon(error)
            raise
        short.commit()
        return value

    def abort(self) -> None:
        """Let the operation that is under way fail, in whatever thread or task."""
        if (connection := self._connection) is not None:
            abort(connection)

    def look_at(self, pairs: Sequence[tuple[Any, int]]) -> Owned:
        """Look which of the jobs, given as pairs, are still this worker's."""
        owned = Owned(set(), set(), set())
        if not pairs:
            return owned
        states = {(id_, claim): running for id_, claim, running in self.perform(self.config.queue._claimed(pairs))}
        for pair in pairs:
            running = states.get(pair)
            (owned.lost if running is None else owned.running if running else owned.ended).add(pair)
        return owned


def supports_listen(engine: Engine) -> bool:
    """Whether a connection of this engine would receive notifications: not behind a pooler in transaction mode."""
    with engine.connect() as connection:
        pooled = behind_pooler(connection)
    if pooled:
        log(
            logging.INFO,
            "Polling instead of listening: a pooler such as PgBouncer is between this worker and the server (if it is "
            "in session mode, set the engine's execution option locks_session_pooling=True)",
        )
    return not pooled


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


def is_wrong_statement(error: Exception) -> bool:
    """Whether a statement is wrong for every job, as where the table lacks a column of the app's class."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, (CompileError, NotInstalled))
    cause: Any = error.orig
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    code = next(iter(getattr(cause, "args", ())), None)
    return state in _WRONG_STATES or code in _WRONG_CODES or any(phrase in str(cause) for phrase in _WRONG_PHRASES)


def is_temporary(error: Exception) -> bool:
    """Whether the database is unavailable for the moment, as opposed to a permanent error."""
    if is_wrong_statement(error):
        return False
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or not isinstance(error, (ProgrammingError, DataError, IntegrityError))
    return isinstance(
        error, (LockTimeout, LockLost, MustRollback, NotWritable, SQLAlchemyPoolTimeout, DriverTimeout, OSError)
    )

"""What a worker asks of the database, retried where that is safe, and which errors it survives."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import CompileError, DataError, DBAPIError, IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as SQLAlchemyPoolTimeout

from sqlalchemy_locks.core.engine_state import behind_pooler, engine_state
from sqlalchemy_locks.core.operation import Execution, Operation, build_context
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.dialects.connections import abort, connected
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
#: what is stored instead of an error that the database can't store
UNSTORABLE = "the error could not be stored: see the log of the worker"


class Owned(NamedTuple):
    """Jobs by what the database says of them."""

    #: still this worker's
    running: list[Any]
    #: completed, or dead, by its claim: by the worker or by a handler
    ended: list[Any]
    #: of another owner, returned to the queue, or deleted
    lost: list[Any]


class WorkerDatabase:
    """Runs the operations of one worker, each in a transaction of its own."""

    def __init__(self, config: WorkerConfig, sleep: Sleep, engine: Engine | None = None) -> None:
        self.config, self.sleep = config, sleep
        self.engine = engine or config.engine
        #: that of the last operation, which may be under way
        self._connection: Connection | None = None
        #: the last operation was executed again, after an error that may have come when it had taken effect
        self.retried = False

    def perform(self, operation: Operation[Any]) -> Any:
        """Run an operation that may be repeated: claims make a second execution harmless.

        :return: its value, or the list of its rows.
        """
        engine = self.engine
        self.retried = False

        def attempt() -> Any:
            context = build_context(engine.dialect, engine.get_execution_options())
            if operation._impl.statement(context) is not None:
                with connected(engine) as connection:
                    self._connection = connection
                    if context.backend.allows_autocommit(connection, engine_state(connection).server):
                        execution = Execution(connection, operation, {})
                        execution.in_autocommit = True
                        with context.backend.autocommitted(connection):
                            return execution.value()
            with transaction(engine) as short:
                self._connection = short.connection
                return Execution(short.connection, operation, {}).value()

        def pause(delay: float) -> None:
            self.retried = True
            self.sleep(delay)

        return retried(attempt, engine, pause, repeatable=True)

    def abort(self) -> None:
        """Let the operation that is under way fail, in whatever thread or task."""
        if (connection := self._connection) is not None:
            abort(connection)

    def look_at(self, jobs: Sequence[Any]) -> Owned:
        """Look which of the jobs (rows or pairs) are still this worker's."""
        if not jobs:
            return Owned([], [], [])
        queue = self.config.queue
        states = {(id_, claim): running for id_, claim, running in self.perform(queue._claimed(jobs))}
        found = Owned([], [], [])
        for job, pair in zip(jobs, queue._jobs.pairs(jobs), strict=True):
            running = states.get(pair)
            (found.lost if running is None else found.running if running else found.ended).append(job)
        return found


@contextmanager
def transaction(engine: Engine) -> Iterator[ShortTransaction]:
    """Open a short transaction and commit it, unless an exception is raised."""
    short = ShortTransaction(engine)
    short.open()
    try:
        yield short
    except BaseException as error:
        # references to a cursor whose rows could not be decoded: an open one of SQLite's keeps its lock
        traceback.clear_frames(error.__traceback__)
        short.abandon(error)
        raise
    short.commit()


def supports_listen(engine: Engine) -> bool:
    """Whether a connection of this engine would receive notifications: not behind a pooler in transaction mode."""
    with connected(engine) as connection:
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


def is_about_values(error: Exception) -> bool:
    """Whether the database may have refused the values of a statement, rather than be unavailable."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return False
    return not isinstance(error, (OperationalError, LockError, SQLAlchemyPoolTimeout, DriverTimeout, OSError))


def is_about_statement(error: Exception) -> bool:
    """Whether the database replied and refused one statement only, for instance because of a statement timeout."""
    if isinstance(error, DBAPIError):
        return error.statement is not None and not error.connection_invalidated
    return isinstance(error, LockError) and not isinstance(error, (LockLost, PoolTimeout))


def is_about_no_job(error: Exception) -> bool:
    """Whether no job is to blame for the error of its read: the statement is wrong, or the database didn't reply."""
    return is_wrong_statement(error) or (is_temporary(error) and not is_about_statement(error))


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

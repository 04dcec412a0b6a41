"""What a worker asks of the database, tried again where that is safe, and which errors it outlives."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.engine import Connection, Result
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as NoneFree

from sqlalchemy_locks.core.operation import Operation, build_context
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.base import DriverTimeout, nothing
from sqlalchemy_locks.dialects.connections import connected
from sqlalchemy_locks.errors import LockError, LockLost, LockTimeout, MustRollback, NotWritable, PoolTimeout
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.runtime.transaction import ShortTransaction, Sleep, retried

T = TypeVar("T")
log = logging.getLogger("sqlalchemy_locks.worker")

_ALONE = {"locks_alone": True}
#: what is stored for an error that the database can't store
UNSTORABLE = "the error could not be stored: the worker's log has it"


def rows(result: Result[Any]) -> list[Any]:
    """All rows of a result."""
    return list(result)


def perform(engine: Engine, operation: Operation[Any], sleep: Sleep, again: Callable[[], None] = nothing) -> Any:
    """Run an operation that can be repeated: what it may have done twice, a claim or a stall takes care of.

    :param again: called when it is run again, after an error that may have come when all was done.
    :return: its one value, or the list of its rows.
    """

    def attempt() -> Any:
        context = build_context(engine.dialect, engine.get_execution_options())
        if context.backend.one_trip and operation._body.statement(context) is not None:
            with connected(engine) as connection:
                if context.backend.alone(connection, False):
                    with context.backend.autocommitted(connection):
                        return operation.value(connection, _ALONE)
        with transaction(engine) as short:
            return operation.value(short.connection, {})

    def pause(delay: float) -> None:
        again()
        sleep(delay)

    return retried(attempt, engine, pause, repeatable=True)


def hears(engine: Engine) -> bool:
    """Whether a connection that listens would be told that something was put, and not whoever is in its place then."""
    with connected(engine) as connection:
        pooled = backend_for(connection.dialect).pooled(connection)
    if pooled:
        say(
            logging.INFO,
            "not listening, but polling: a pooler such as PgBouncer is between this worker and the server (if it is in "
            "session mode, say so by the engine's execution option locks_session_pooling=True)",
        )
    return not pooled


def say(level: int, message: str, *values: Any, exc_info: BaseException | None = None) -> None:
    """Log; a handler of logs that raises, and an error that can't be told, end no worker."""
    with suppress(Exception):
        log.log(level, message, *values, exc_info=exc_info)


def described(error: BaseException) -> str:
    """An error with its traceback, as far as it lets itself be told."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:
        return f"{type(error).__name__}: it raises another error when it is to be told"


def ended(connection: Connection, queue: Queue, job: Any, error: BaseException | None) -> None:
    """Complete or fail a job in the transaction that captured it."""
    if error is None:
        connection.execute(queue.complete(job))
        return
    try:
        with connection.begin_nested():
            connection.execute(queue.fail(job, error=described(error)))
    except Exception as unstorable:
        if database_away(unstorable):
            raise
        say(logging.WARNING, "an error could not be stored: %s", unstorable)
        connection.execute(queue.fail(job, error=UNSTORABLE))


def database_away(error: Exception) -> bool:
    """Whether it is not the values of a statement that the database refused."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(error, (OperationalError, LockError, NoneFree, DriverTimeout, OSError))


def answered(error: Exception) -> bool:
    """Whether the database is there, and has refused one statement only, for the time it took perhaps."""
    if isinstance(error, DBAPIError):
        return error.statement is not None and not error.connection_invalidated
    return isinstance(error, LockError) and not isinstance(error, (LockLost, PoolTimeout))


def passes(error: Exception) -> bool:
    """Whether it is the database that can't be had for the moment, rather than a mistake that will not mend itself."""
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or not isinstance(error, (ProgrammingError, DataError, IntegrityError))
    return isinstance(error, (LockTimeout, LockLost, MustRollback, NotWritable, NoneFree, DriverTimeout, OSError))


@contextmanager
def transaction(engine: Engine) -> Iterator[ShortTransaction]:
    """A short transaction, committed if nothing was raised."""
    short = ShortTransaction(engine)
    short.open()
    try:
        yield short
    except BaseException:
        short.abandon()
        raise
    short.commit()

"""How ``Locks`` runs one operation: in autocommit or in a short transaction, with retries, and nothing left behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.core.engine_state import backend_of
from sqlalchemy_locks.core.operation import Execution, Operation, RowsOperation, fresh_nonce, translated
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.dialects.connections import connect as connect_to_pool
from sqlalchemy_locks.dialects.connections import return_to_pool
from sqlalchemy_locks.errors import (
    IdempotencyConflict,
    LockLost,
    LockTimeout,
    OutcomeUnknown,
    UnknownSemaphore,
    UnknownTask,
)
from sqlalchemy_locks.runtime import reentry
from sqlalchemy_locks.runtime.retry import NotCommitted, Sleep, retried
from sqlalchemy_locks.runtime.transaction import ShortTransaction, release_cursors, roll_back

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session

#: options of a session that works in a block's transaction, whatever the options of its maker
IN_BLOCK: dict[str, Any] = {
    "binds": None,
    "join_transaction_mode": "rollback_only",
    "autobegin": True,
    "twophase": False,
}
#: errors which say that no attempt has done anything, including one without a reply
_NEVER_DONE = (UnknownTask, UnknownSemaphore, IdempotencyConflict)


class OperationRunner:
    """Runs operations on connections of one engine.

    :param session_maker: makes the session of an operation that gives entities, and of every operation where the app
        does something at the beginning of a session's transaction (``after_begin``).
    :param on_retry: called with the operation's name, the error, and the number of the retry.
    :param connect: gives the connections; by default the engine's pool does.
    """

    def __init__(
        self,
        engine: Engine,
        session_maker: Callable[..., Session],
        sleep: Sleep,
        on_retry: Callable[[str, BaseException, int], object],
        connect: Callable[[], Connection] | None = None,
    ) -> None:
        self._engine, self._session_maker, self._sleep, self._on_retry = engine, session_maker, sleep, on_retry
        #: gives the connections
        self._checkout = partial(connect_to_pool, engine) if connect is None else connect
        #: never used: it tells which listeners a session of the app has, of now and later
        self._idle_session = session_maker()

    def run(
        self,
        operation: Operation[Any],
        nonce: str | None = None,
        *,
        short: bool = False,
        wait: float | None = None,
        on_lost: Callable[[], object] = lambda: None,
    ) -> Any:
        """Run an operation, and again after an error that leaves nothing behind.

        :param nonce: identifies this call in all its attempts; by default a fresh one.
        :param short: in a short transaction, even where autocommit would be one round trip.
        :param wait: the longest wait for a lock, in seconds; ``None``: the operation's own, or the server's.
        :param on_lost: called when a reply was lost: that attempt may take effect even after the next one is answered.
        :raises OutcomeUnknown: when it is not known whether it was done, and it can't be repeated.
        :raises LockLost: when its transaction ended before COMMIT, at each attempt.
        :raises ReentryError: on SQLite, when it writes in an ``exclusive`` block of its caller.
        """
        impl = operation._impl
        if impl.writes and backend_of(self._engine.dialect).single_writer:
            reentry.refuse_write(self._engine)
        options: dict[str, Any] = {"locks_nonce": nonce or fresh_nonce()} if impl.uses_nonce else {}
        if wait is not None:
            options["locks_wait"] = wait
        repeatable = impl.repeatable(operation)

        def attempt() -> Any:
            try:
                return self._attempt(operation, options, short)
            except OutcomeUnknown as error:
                if not impl.writes and error.__cause__ is not None:
                    raise error.__cause__ from None  # it has nothing to do
                options["locks_again"] = True
                on_lost()
                raise
            except _NEVER_DONE:
                raise  # an earlier attempt would have failed with the same error
            except Exception as error:
                if "locks_again" not in options:
                    raise
                # whatever the error of this attempt, an earlier one may have been carried out
                raise OutcomeUnknown(
                    f"{operation.name}: a reply was lost, and the next attempt failed: it was done, or it was not"
                ) from error

        def on_retry(error: BaseException, count: int) -> None:
            self._on_retry(operation.name, error, count)

        try:
            return retried(attempt, self._engine, self._sleep, repeatable=repeatable, on_retry=on_retry)
        except NotCommitted as error:
            raise LockLost(str(error)) from error

    def _attempt(self, operation: Operation[Any], options: Mapping[str, Any], short: bool) -> Any:
        began, impl = time.monotonic(), operation._impl
        in_session = bool(self._idle_session.dispatch.after_begin) or (
            isinstance(operation, RowsOperation) and operation.is_select
        )
        connection = self._checkout()
        try:
            execution = Execution(connection, operation, options)
            deadline = None if execution.wait is None else began + execution.wait
            # a wait that is not sent along is set before the statement, and restored after it
            bounded = deadline is not None and not impl.sends_wait
            one_statement = not (short or in_session or bounded) and impl.statement(execution.context) is not None
            backend = execution.backend
            in_autocommit = one_statement and backend.allows_autocommit(connection, execution.server)
            # Elsewhere at the app's level, where a statement that writes reads the latest rows at each. A cancelled
            # task's statement may be executed late, and is then rolled back, unless it commits by itself.
            commits = connection.dialect.is_async and backend.autocommit(connection)
            plain = one_statement and not commits and (backend.stale_reads or backend.single_writer)
            alone = in_autocommit or plain
            value = run_alone(execution, deadline, in_autocommit) if alone else None
        except BaseException as error:
            return_to_pool(connection, error)
            raise
        if alone:
            return_to_pool(connection)
            return value
        return self._run_in_transaction(connection, operation, options, deadline, in_session)

    def _run_in_transaction(
        self,
        connection: Connection,
        operation: Operation[Any],
        options: Mapping[str, Any],
        deadline: float | None,
        in_session: bool,
    ) -> Any:
        impl, transaction = operation._impl, ShortTransaction(self._engine, connection)
        try:
            try:
                transaction.begin(writes=impl.writes, wait=0 if impl.impatient else _left(deadline))
            except LockTimeout as error:
                if not impl.impatient:
                    raise
                transaction.abandon(error)
                return impl.refused
            transaction.use(marker=in_session)  # an operation passes over no error that ends its transaction
            if in_session:
                value = self._in_session(connection, operation, options)
            else:
                value = Execution(connection, operation, options).value()
        except BaseException as error:
            transaction.abandon(error)
            raise
        try:
            transaction.commit(_left(deadline))
        except LockLost as error:
            if isinstance(error, OutcomeUnknown):
                raise
            raise NotCommitted(str(error)) from error
        return value

    def _in_session(self, connection: Connection, operation: Operation[Any], options: Mapping[str, Any]) -> Any:
        """Return the value or the rows of an operation that a session executes; entities are detached."""
        session = self._session_maker(bind=connection, expire_on_commit=False, **IN_BLOCK)
        session.get_bind = lambda *_, **named: connection  # type: ignore[method-assign]
        value = operation._unpack(session.execute(operation, execution_options=options))
        session.commit()
        session.expunge_all()
        session.close()
        return value


def run_alone(execution: Execution, deadline: float | None, in_autocommit: bool) -> Any:
    """Run an operation of one statement: in the driver's autocommit where that is free, else in a plain transaction.

    :param deadline: when COMMIT must be done, where it can wait.
    :param in_autocommit: the driver's autocommit is free.
    :raises LockTimeout: when it was not; it is rolled back.
    :raises OutcomeUnknown: when the connection died after the statement, or its COMMIT, was sent.
    """
    connection, backend = execution.connection, execution.backend
    #: the statement commits by itself; what was sent last commits
    commits = final = in_autocommit or backend.autocommit(connection)
    execution.in_autocommit = in_autocommit
    with backend.autocommitted(connection) if in_autocommit else contextlib.nullcontext():
        try:
            if not in_autocommit and not connection.in_transaction():
                with translated(backend):
                    connection.begin()
            value = execution.value()
            if connection.in_transaction():
                try:
                    final = True
                    with backend.committing(connection, _left(deadline)):
                        connection.commit()
                except DBAPIError as error:
                    if not (commits and error.connection_invalidated):
                        raise
        except LockTimeout:
            if final and not in_autocommit:
                roll_back(connection)  # a failed COMMIT ends SQLAlchemy's transaction, and not the server's
            raise
        except (DBAPIError, DriverTimeout) as error:
            if final and (isinstance(error, DriverTimeout) or error.connection_invalidated):
                name = execution.operation.name
                raise OutcomeUnknown(
                    f"{name}: the connection died before the reply arrived: it was done, or it was not"
                ) from error
            roll_back(connection)
            raise
        except BaseException as error:
            release_cursors(error)
            raise
    return value


def _left(deadline: float | None) -> float | None:
    """Return the seconds until a deadline, 0 when it has passed."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())

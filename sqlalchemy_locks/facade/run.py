"""How ``Locks`` runs one operation: in autocommit or in a short transaction, with retries, and nothing left behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.core.operation import Execution, Operation, RowsOperation, fresh_nonce, listed, translated
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.dialects.connections import connect, return_to_pool
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
#: maximum number of stale pooled connections to discard
_MAX_STALE = 20


class OperationRunner:
    """Runs operations on connections of one engine.

    :param session_maker: makes the session of an operation that gives entities.
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
        self._connect = connect

    def run(
        self,
        operation: Operation[Any],
        nonce: str | None = None,
        *,
        short: bool = False,
        wait: float | None = None,
        checkout: float | None = None,
        on_lost: Callable[[], object] = lambda: None,
    ) -> Any:
        """Run an operation, and again after an error that leaves nothing behind.

        :param nonce: identifies this call in all its attempts; by default a fresh one.
        :param short: in a short transaction, even where autocommit would be one round trip.
        :param wait: the longest wait for a lock, in seconds; ``None``: the operation's own, or the server's.
        :param checkout: the longest wait for a connection, in seconds; ``None``: the pool's own.
        :param on_lost: called when a reply was lost: that attempt may take effect even after the next one is answered.
        :raises OutcomeUnknown: when it is not known whether it was done, and it can't be repeated.
        :raises LockLost: when its transaction ended before COMMIT, at each attempt.
        :raises ReentryError: on SQLite, when it writes in an ``exclusive`` block of its caller.
        """
        impl = operation._impl
        if impl.writes and backend_for(self._engine.dialect).single_writer:
            reentry.refuse_write(self._engine)
        options: dict[str, Any] = {"locks_nonce": nonce or fresh_nonce()} if impl.uses_nonce else {}
        if wait is not None:
            options["locks_wait"] = wait
        repeatable = impl.repeatable(operation)

        def attempt() -> Any:
            try:
                return self._attempt(operation, options, repeatable, short, checkout)
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

    def _attempt(
        self,
        operation: Operation[Any],
        options: Mapping[str, Any],
        repeatable: bool,
        short: bool,
        checkout: float | None,
    ) -> Any:
        began, impl = time.monotonic(), operation._impl
        entities = isinstance(operation, RowsOperation) and operation.is_select
        stale = 0 if repeatable else _MAX_STALE
        connection = self._connect() if self._connect is not None else connect(self._engine, checkout)
        try:
            execution = Execution(connection, operation, options)
            while stale and execution.backend.server_closed(connection):
                connection.invalidate()  # nothing was sent yet, and so nothing is lost
                return_to_pool(connection)
                connection, stale = connect(self._engine, checkout), stale - 1
                execution = Execution(connection, operation, options)
            deadline = None if execution.wait is None else began + execution.wait
            # a wait that is not sent along is set before the statement, and restored after it
            bounded = deadline is not None and not impl.sends_wait
            alone = (
                not (short or entities)
                and impl.statement(execution.context) is not None
                and execution.backend.allows_autocommit(connection, bounded)
            )
            value = run_in_autocommit(execution, deadline) if alone else None
        except BaseException as error:
            return_to_pool(connection, error)
            raise
        if alone:
            return_to_pool(connection, committed=True)
            return value
        transaction = ShortTransaction(self._engine, connection)
        return self._run_in_transaction(transaction, operation, options, deadline, entities)

    def _run_in_transaction(
        self,
        transaction: ShortTransaction,
        operation: Operation[Any],
        options: Mapping[str, Any],
        deadline: float | None,
        entities: bool,
    ) -> Any:
        impl = operation._impl
        try:
            try:
                transaction.begin(writes=impl.writes, wait=0 if impl.impatient else _left(deadline))
            except LockTimeout as error:
                if not impl.impatient:
                    raise
                transaction.abandon(error)
                return impl.refused
            transaction.use(marker=entities)  # an operation passes over no error that ends its transaction
            if entities:
                value = self._entities(transaction, operation, options)
            else:
                value = Execution(transaction.connection, operation, options).value()
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

    def _entities(
        self, transaction: ShortTransaction, operation: Operation[Any], options: Mapping[str, Any]
    ) -> list[Any]:
        """Return the rows of an operation that gives entities, which only a session makes, and detach these."""
        connection = transaction.connection
        session = self._session_maker(bind=connection, expire_on_commit=False, **IN_BLOCK)
        session.get_bind = lambda *_, **named: connection  # type: ignore[method-assign]
        found = listed(session.execute(operation, execution_options=options))
        session.commit()
        session.expunge_all()
        session.close()
        return found


def run_in_autocommit(execution: Execution, deadline: float | None) -> Any:
    """Run an operation of one statement: without BEGIN and COMMIT where autocommit takes no round trip.

    Once the reply to what commits is there, it is the result: a connection that dies while its settings are restored is
    replaced.

    :param deadline: when COMMIT must be done, where it can wait.
    :raises LockTimeout: when it was not; it is rolled back.
    :raises OutcomeUnknown: when the connection died after the statement, or its COMMIT, was sent.
    """
    connection, backend = execution.connection, execution.backend
    cheap_autocommit = execution.in_autocommit = backend.cheap_autocommit
    #: the statement commits; what was sent last commits
    commits = final = cheap_autocommit or backend.autocommit(connection)
    with backend.autocommitted(connection) if cheap_autocommit else contextlib.nullcontext():
        try:
            if not cheap_autocommit:
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
            if final and not cheap_autocommit:
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

"""Transactions of this library's own: how a connection is checked out, a transaction begun, committed, and run again.

``ShortTransaction`` is one connection in one READ COMMITTED transaction. ``OperationRunner`` is how ``Locks`` runs one
operation: in autocommit or in a short transaction, again after an error that has left nothing behind.
"""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sqlalchemy import Engine, select
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as CheckoutTimeout
from sqlalchemy.pool import QueuePool
from sqlalchemy.util import await_only, greenlet_spawn

from sqlalchemy_locks._validation import seconds
from sqlalchemy_locks.core.asyncio_waits import shielded
from sqlalchemy_locks.core.backoff import Backoff
from sqlalchemy_locks.core.ended_transactions import failed_transactions, rolled_back_transactions
from sqlalchemy_locks.core.operation import (
    Execution,
    Operation,
    RowsOperation,
    backend_of,
    build_context,
    died_waiting,
    ended_by_limit,
    engine_state,
    engine_states,
    fresh_nonce,
    has_begun,
    translated,
)
from sqlalchemy_locks.dialects import Backend, Server, backend_for
from sqlalchemy_locks.dialects.base import DriverTimeout, Sleep, checkout_errors
from sqlalchemy_locks.errors import (
    IdempotencyConflict,
    LockLost,
    LockTimeout,
    MustRollback,
    NotWritable,
    OutcomeUnknown,
    PoolTimeout,
    UnknownSemaphore,
    UnknownTask,
    Unsupported,
)

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

T = TypeVar("T")
#: How an operation is run: by a session of the app's, in a short transaction at READ COMMITTED; in one, without a
#: session; or, if it is one statement, in autocommit, or in a transaction at the app's own level.
_Way = Literal["session", "short transaction", "autocommit", "plain transaction"]

RETRIES = 3
#: options of a session that works in a block's transaction, whatever the options of its maker
IN_BLOCK: dict[str, Any] = {
    "binds": None,
    "join_transaction_mode": "rollback_only",
    "autobegin": True,
    "twophase": False,
}
#: the longest wait for the rows of a semaphore or a request, and for the queue in memory before them, in seconds
ROW_TIMEOUT = 5.0
#: the pause after a wait that somebody else's time limit has ended, in seconds
PAUSE = 0.01
#: errors which prove that no attempt took effect, not even one whose reply was lost
_NEVER_DONE = (UnknownTask, UnknownSemaphore, IdempotencyConflict)
# why a lock is gone, and what has become of the work
FAILED = (
    "the transaction that held the lock has failed or ended, or its connection died: what was done in it after that "
    "is not committed"
)
_CLOSED = (
    "held.session was closed inside the block, which rolled back what it had done, and with it the lock: the block "
    "itself commits and closes it"
)
_READ_ONLY = (
    "the server has become read-only, as a primary does before a replica takes its place, where others may acquire the "
    "lock: nothing that was done in its block is committed"
)
_CONFLICTS = "other transactions were the first to commit, at each attempt within its time limit"
_FORKED = "the lock is held by the process that forked this one: nothing that was done in it is committed here"
#: a fork's copies of its parent's transactions, kept so that they are not closed: there they continue
_inherited: list[Any] = []


def connect(engine: Engine, checkout: Callable[[], Connection] | None = None) -> Connection:
    """Check a connection out of the engine's pool.

    If a listener has begun a transaction at the checkout, the library's question to the server would fix its snapshot.
    So the server is asked once, on the engine's first connection, which is then returned and checked out again.

    :param checkout: checks a connection of the engine out of another pool.
    :raises PoolTimeout: when none was free within the pool's own ``pool_timeout``.
    :raises DBAPIError: with ``connection_invalidated`` when none could be made: nothing was sent. Without it when the
        user has no privilege on the database.
    """
    try:
        connection = engine.connect() if checkout is None else checkout()
    except CheckoutTimeout as error:
        raise PoolTimeout(f"no connection was free within the pool's own pool_timeout: {error}") from error
    except DBAPIError as error:
        backend = backend_for(engine.dialect)
        ours = backend.translate(error)
        if isinstance(ours, NotWritable):  # a node that has no majority of its cluster
            raise ours from error
        # drivers don't tell a connection that died from one that was refused
        error.connection_invalidated = backend.meaning(error) != "denied"
        raise
    except checkout_errors(engine) as error:
        # Of a statement that SQLAlchemy sends at the checkout, or of a driver that has errors outside its DBAPI. The
        # frames refer to the connection, which returns to its pool when nothing does.
        traceback.clear_frames(error.__traceback__)
        raise OperationalError(None, None, error, connection_invalidated=True) from error
    if connection.dialect not in engine_states and has_begun(connection):
        try:
            engine_state(connection)
        finally:
            return_to_pool(connection)
        return connect(engine, checkout)
    return connection


def return_to_pool(connection: Connection, error: BaseException | None = None, *, uncancelled: bool = False) -> None:
    """Return a connection to its pool, without an error where it has died meanwhile.

    One on which nothing can be written is replaced: the name of the server may lead to the primary by now. One whose
    isolation level must be reset is returned in a task of its own under asyncio, as SQLAlchemy's ``async with`` does: a
    cancellation of the reset would leak its place in the pool.

    :param error: what its use has raised.
    :param uncancelled: nothing cancels the task that this is called in.
    """
    if connection.dialect.is_async and not uncancelled and "isolation_level" in connection.get_execution_options():
        returning = partial(return_to_pool, connection, error, uncancelled=True)
        await_only(shielded(greenlet_spawn(returning), raise_cancelled=True))
        return
    if isinstance(error, NotWritable) and not (connection.closed or connection.invalidated):
        connection.invalidate()
    pooled = None if connection.closed or connection.invalidated else connection.connection
    try:
        connection.close()
    except (DBAPIError, connection.dialect.loaded_dbapi.Error) as raised:
        if pooled is not None and pooled.is_valid:
            # an error while the level is reset would leak the connection's place in the pool
            driver_connection: Any = pooled.dbapi_connection
            pooled.detach()
            pooled.invalidate(raised)
            with suppress(Exception):
                connection.dialect.do_terminate(driver_connection)
        if not connection.closed:
            connection.close()


@contextmanager
def connected(engine: Engine) -> Iterator[Connection]:
    """Check a connection out for the length of a block, as :func:`connect`."""
    connection = connect(engine)
    try:
        yield connection
    except BaseException as error:
        return_to_pool(connection, error)
        raise
    return_to_pool(connection)


def has_room(engine: Engine) -> bool:
    """Return whether a connection can be checked out of the engine's pool without a wait, its overflow apart."""
    pool = engine.pool
    return not isinstance(pool, QueuePool) or pool.size() == 0 or pool.checkedout() < pool.size()


class ShortTransaction:
    """One connection, checked out of a pool, in one READ COMMITTED transaction."""

    backend: Backend
    server: Server
    transaction: RootTransaction

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        #: work is done in it, besides the lock
        self.used = False
        #: the server, or the driver, can tell this transaction from a later one
        self._shows_end = False
        #: the driver has shown that it is open; before that, only the first statement may begin it
        self._seen_open = False
        self._loss: str | None = None
        self._process = os.getpid()

    def begin(self, *, writes: bool = True, wait: float | None = None) -> None:
        """Begin on the connection.

        :param writes: the transaction writes, or locks.
        :param wait: how long BEGIN may wait, in seconds, where it can.
        :raises LockTimeout: when that was not enough.
        """
        state = engine_state(self.connection)
        self.backend, self.server = state.backend, state.server
        try:
            self.transaction = self.backend.begin(self.connection, state.server, wait, writes=writes)
        except DBAPIError:
            with translated(self.backend):
                raise
        self.connection.execution_options(locks_begun=True)

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
        if state == "closed" or self.connection.get_transaction() in rolled_back_transactions:
            return FAILED
        if self.used:
            if state == "ended" and self._seen_open:
                return FAILED
            self._seen_open = state != "ended"
            # inside begin_nested() an error costs only what was done there; another thread may end it meanwhile
            nested = self.connection.in_nested_transaction()
            failed = self.backend.transaction_state(self.connection) == "failed"
            failed = failed or self.connection.get_transaction() in failed_transactions
            if failed and not (nested or self.connection.in_nested_transaction()):
                return FAILED
        return None

    def close_inside(self) -> None:
        """Roll back inside the block, whose session is being closed."""
        if self.loss() is None:
            self.transaction.rollback()
            self._loss = _CLOSED

    def mark_first(self) -> None:
        """Set the marker, a savepoint, before the first lock, where SAVEPOINT hides a transaction's end."""
        if self.server.savepoint_hides_end:
            self._read_locked_keys()  # or the storage engine wouldn't know of the savepoint
            self.backend.set_marker(self.connection)
            self._shows_end = True

    def _read_locked_keys(self) -> None:
        table = build_context(self.connection.dialect, self.connection.get_execution_options()).tables.locked_keys
        with translated(self.backend, needs_installation=True):
            self.connection.execute(select(table.c.key).limit(1)).close()

    def watch_end(self, *, marker: bool = True) -> None:
        """Detect the end of the transaction from here on: other work is about to be done in it.

        :param marker: code that may pass over an error, or end the transaction, does that work.
        """
        if not self.used:
            if marker and not self._shows_end:
                self.backend.set_marker(self.connection)
            self.used = True
            self._shows_end = self._shows_end or marker or not self.backend.marker_is_savepoint
            self._seen_open = self.backend.transaction_state(self.connection) != "ended"

    def check(self) -> None:
        """Ask the server whether the transaction is still the one that was begun.

        :raises LockLost: when it is not, can only be rolled back, its connection is dead, or its server read-only.
        :raises Unsupported: where asking would release the caller's savepoint.
        """
        if (why := self.loss()) is not None:
            raise LockLost(why)
        nested = self.connection.in_nested_transaction()
        if self.backend.marker_is_savepoint and nested:
            raise Unsupported(
                f"check() inside begin_nested() can't be answered on {self.backend.name}, where asking ends the "
                "savepoint: ask before it, or after it"
            )
        try:
            if self.server.savepoint_hides_end:
                self._read_locked_keys()
            elif not (self._shows_end and self.backend.marker_is_savepoint):
                self.connection.exec_driver_sql("SELECT 1")
            elif self.backend.marker_lost(self.connection):
                self._loss = FAILED
            else:
                self.backend.set_marker(self.connection)
            if self._loss is None and not self.backend.writable(self.connection):
                self._loss = _READ_ONLY
        except (MustRollback, DBAPIError) as error:
            # refused because of an error behind a savepoint: the transaction is there, and holds the lock
            if nested and isinstance(error, DBAPIError) and not error.connection_invalidated:
                return
            self._loss = FAILED
            raise LockLost(FAILED) from error
        if self._loss is not None:
            raise LockLost(self._loss)

    def commit(self, wait: float | None = None) -> None:
        """Commit, and give the connection back.

        :param wait: how long COMMIT may wait for others, in seconds, where it does; without it the app's own limit.
        :raises LockTimeout: when that was not enough; the transaction is rolled back.
        :raises LockLost: when the transaction had ended or failed before, so that this commits nothing.
        :raises OutcomeUnknown: when work was done in it, and the connection died during COMMIT.
        """
        try:
            why = self.loss() if self.used or not self.active else self._loss
            try:
                if why is None and self._shows_end and self.backend.marker_lost(self.connection):
                    why = FAILED
            except DBAPIError as error:
                raise LockLost(FAILED) from error
            if why is not None:
                raise LockLost(why)
            try:
                _commit(self.connection, self.backend, wait)
            except OutcomeUnknown as error:
                if self.used:
                    raise
                raise LockLost(FAILED) from error.__cause__
            except DBAPIError as error:
                if self.backend.is_conflict(error):
                    raise LockLost(FAILED) from error
                with translated(self.backend):
                    raise
        except BaseException as error:
            self.abandon(error)
            raise
        self.abandon()

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
            restore = None if connection.closed else connection.get_execution_options().get("locks_on_return")
            if restore is not None and not connection.invalidated:
                try:
                    connection.execute(restore)
                except Exception as raised:  # what was done may be committed
                    connection.invalidate(raised)
        except BaseException as raised:
            # its state is unknown
            if not connection.closed:
                connection.invalidate(raised)
            if not isinstance(raised, (DBAPIError, LockLost)):  # in a cluster, ROLLBACK may find that it has been done
                raise
        finally:
            return_to_pool(connection, error)


def release_cursors(error: BaseException) -> None:
    """Drop the traceback's references to cursors of what was cancelled: an open cursor of SQLite's keeps its lock."""
    if not isinstance(error, Exception):
        traceback.clear_frames(error.__traceback__)


def roll_back(connection: Connection) -> None:
    """Roll back, even after a COMMIT that failed.

    After that SQLAlchemy's transaction has ended, but SQLite's is open: the driver rolls it back. A connection that
    dies then is invalidated.
    """
    if not connection.invalidated and not connection.closed:
        try:
            connection.connection.rollback()
        except connection.dialect.loaded_dbapi.Error as error:
            connection.invalidate(error)
    connection.rollback()


class AfterBegin:
    """Calls the app's listeners of ``after_begin`` for transactions in which none of its sessions executes anything.

    :param session_maker: makes the sessions that they listen to.
    """

    def __init__(self, session_maker: Callable[..., Session]) -> None:
        self._session_maker = session_maker
        #: executes nothing: only its listeners are read, also those that are added later
        self.idle_session = session_maker()

    def call(self, connection: Connection) -> None:
        """Call them for a transaction that has just begun."""
        if self.idle_session.dispatch.after_begin:
            session = self._session_maker(bind=connection, **IN_BLOCK)
            session.get_bind = lambda *_, **named: connection  # type: ignore[method-assign]
            session.connection()
            session.close()  # in this mode that ends no transaction of its connection


class Attempts:
    """Runs operations once, each on a connection of its own: in autocommit, or in a transaction.

    :param session_maker: makes the session of an operation that gives entities, and of every operation where the app
        does something at the beginning of a session's transaction (``after_begin``).
    :param checkout: checks a connection out; by default of the engine's pool.
    :param give_back: called with a connection after a statement that has succeeded; by default it returns to its pool.
    :param in_sessions: an operation that gives entities is executed in a session. ``False`` for a worker: rows stay
        rows, the listeners are called without a session, and reads aren't made at the app's own level, where those of
        SERIALIZABLE would lock jobs.
    """

    def __init__(
        self,
        engine: Engine,
        session_maker: Callable[..., Session],
        checkout: Callable[[], Connection] | None = None,
        give_back: Callable[[Connection], object] = return_to_pool,
        *,
        in_sessions: bool = True,
    ) -> None:
        self._session_maker, self._in_sessions, self._give_back = session_maker, in_sessions, give_back
        self._checkout = partial(connect, engine, checkout)
        self.after_begin = AfterBegin(session_maker)

    def run(
        self,
        operation: Operation[Any],
        options: Mapping[str, Any],
        deadline: float | None = None,
        *,
        short: bool = False,
    ) -> Any:
        """Run an operation.

        :param options: execution options.
        :param deadline: when a wait for a lock ends, by ``time.monotonic()``; by default after the operation's own
            longest wait, or the server's.
        :param short: in a short transaction, even where autocommit would be one round trip.
        :raises NotCommitted: when its transaction ended before COMMIT.
        :raises OutcomeUnknown: when the connection died after a statement was sent that commits.
        """
        connection = self._checkout()
        way: _Way = "short transaction"
        commits_itself = False
        try:
            execution = Execution(connection, operation, options, deadline=deadline)
            backend = execution.backend
            has_listeners = bool(self.after_begin.idle_session.dispatch.after_begin)
            if self._in_sessions and (has_listeners or (isinstance(operation, RowsOperation) and operation.is_select)):
                way = "session"
            elif short or has_listeners or execution.sets_limit or not operation._impl.is_one_statement(execution):
                way = "short transaction"
            elif backend.allows_autocommit(connection, execution.server, execution.level):
                way = "autocommit"
            # the statement of a task that is cancelled may still be executed, and would commit by itself
            elif connection.dialect.is_async and backend.autocommit(connection):
                way = "short transaction"
            # at every level of InnoDB an UPDATE reads the latest rows
            elif backend.stale_reads and self._in_sessions:
                way = "plain transaction"

            if way == "autocommit":
                commits_itself = True
                value = backend.autocommitted(connection, partial(execution.perform, unpack=True))
            elif way == "plain transaction":
                commits_itself = backend.autocommit(connection)
                value = _run_in_plain_transaction(execution, commits_itself)
        except BaseException as error:
            release_cursors(error)
            return_to_pool(connection, error)
            if commits_itself and execution.sent and _is_unsure(error, execution.backend):
                raise OutcomeUnknown(
                    f"{operation.name}: the connection died before the reply arrived: it was done, or it was not"
                ) from error
            with translated(backend) if way == "plain transaction" else nullcontext():
                raise
        if way in ("session", "short transaction"):
            return self._run_in_short_transaction(execution, options, in_session=way == "session")
        self._give_back(connection)
        return value

    def _run_in_short_transaction(self, execution: Execution, options: Mapping[str, Any], *, in_session: bool) -> Any:
        connection, operation, deadline = execution.connection, execution.operation, execution.deadline
        impl, transaction = operation._impl, ShortTransaction(connection)
        try:
            transaction.begin(writes=impl.writes, wait=0 if impl.impatient else _left(deadline))
        except BaseException as error:
            transaction.abandon(error)
            if not isinstance(error, LockTimeout):
                raise
            if impl.impatient:
                return impl.refused
            raise LockTimeout(f"{impl.described(execution.values)}: {error}") from error.__cause__
        try:
            transaction.watch_end(marker=in_session)  # an operation passes over no error that ends its transaction
            if in_session:
                value = self._run_in_session(execution, options)
            else:
                self.after_begin.call(connection)
                value = Execution(connection, operation, options, deadline=deadline).perform(unpack=True)
        except BaseException as error:
            transaction.abandon(error)
            raise
        try:
            transaction.commit(_left(deadline))
        except OutcomeUnknown:
            raise
        except LockLost as error:
            raise NotCommitted(str(error)) from error
        return value

    def _run_in_session(self, execution: Execution, options: Mapping[str, Any]) -> Any:
        """Return the value or the rows of an operation that a session executes; entities are detached."""
        if execution.wait is not None:
            options = {**options, "locks_wait": execution.wait}
        connection, operation = execution.connection, execution.operation
        session = self._session_maker(bind=connection, expire_on_commit=False, **IN_BLOCK)
        session.get_bind = lambda *_, **named: connection  # type: ignore[method-assign]
        value = operation._unpack(session.execute(operation, execution_options=options))
        session.commit()
        session.expunge_all()
        session.close()
        return value


class OperationRunner:
    """Runs operations on connections of one engine.

    :param attempts: of each operation; they use connections of this engine.
    :param on_retry: called with the operation's name, the error, and the number of the retry.
    :param before_write: called before what writes, where there is one writer at a time.
    """

    def __init__(
        self,
        engine: Engine,
        attempts: Attempts,
        sleep: Sleep,
        on_retry: Callable[[str, BaseException, int], object],
        before_write: Callable[[], object],
    ) -> None:
        self._engine, self.attempts, self._sleep, self._on_retry = engine, attempts, sleep, on_retry
        self._before_write = before_write
        #: as far as it is known without a connection: whether it has one writer, and functions
        self._backend = backend_for(engine.dialect)

    def run(
        self,
        operation: Operation[Any],
        nonce: str | None = None,
        *,
        short: bool = False,
        wait: float | None = None,
        on_reply_lost: Callable[[], object] = lambda: None,
    ) -> Any:
        """Run an operation, and again after an error that leaves nothing behind.

        :param nonce: identifies this call in all its attempts; by default a fresh one.
        :param short: in a short transaction, even where autocommit would be one round trip.
        :param wait: the longest wait for a lock, in seconds; ``None``: the operation's own, or the server's.
        :param on_reply_lost: called when a reply was lost: that attempt may take effect after the next one is answered.
        :raises OutcomeUnknown: when it is not known whether it was done, and it can't be repeated.
        :raises LockLost: when its transaction ended before COMMIT, at each attempt.
        :raises ReentryError: on SQLite, when it writes in an ``exclusive`` block of its caller.
        """
        impl = operation._impl
        if impl.writes and self._backend.single_writer:
            self._before_write()
        options: dict[str, Any] = {"locks_nonce": nonce or fresh_nonce()} if impl.uses_nonce else {}
        if wait is None:
            wait = {**self._engine.get_execution_options(), **operation.get_execution_options()}.get("locks_wait")
        began = time.monotonic()
        deadline = None if wait is None else began + seconds(wait, "locks_wait")

        def attempt() -> Any:
            nonlocal began
            began = time.monotonic()
            try:
                return self.attempts.run(operation, options, deadline, short=short)
            except OutcomeUnknown as error:
                if not impl.writes and error.__cause__ is not None:
                    with translated(self._backend):
                        raise error.__cause__ from None  # a read leaves nothing behind: its error says more
                options["locks_again"] = True
                on_reply_lost()
                raise
            except Exception as error:
                # no earlier attempt can have taken effect: this error proves it, or no reply was lost
                if isinstance(error, _NEVER_DONE) or "locks_again" not in options:
                    raise
                # whatever the error of this attempt, an earlier one may have been carried out
                raise OutcomeUnknown(
                    f"{operation.name}: a reply was lost, and the next attempt failed: it was done, or it was not"
                ) from error

        repeatable, on_retry = partial(impl.repeatable, operation), partial(self._on_retry, impl.name)
        while True:
            try:
                return retried(attempt, self._engine, self._sleep, deadline, repeatable=repeatable, on_retry=on_retry)
            except PoolTimeout:
                raise
            except Exception as error:
                waited = time.monotonic() - began
                if is_conflict(error, self._backend):
                    if deadline is not None:
                        raise LockTimeout(f"{operation.name}: {_CONFLICTS}") from error
                    if isinstance(error, NotCommitted):
                        raise LockLost(str(error)) from error
                    raise
                if not (isinstance(error, LockTimeout) or died_waiting(error, waited)):
                    raise
                # nothing is done, and a limit of the server's or the driver's may have ended the wait before its time
                if not _left(deadline):
                    if isinstance(error, LockTimeout):
                        raise
                    raise LockTimeout(f"{operation.name}: {ended_by_limit(waited)}") from error
            self._sleep(PAUSE)

    def run_on_request(self, operation: Operation[Any], on_reply_lost: Callable[[], object] = lambda: None) -> Any:
        """Run what may wait for a ``guarded`` write of a request, not longer than ``ROW_TIMEOUT``.

        :param on_reply_lost: as for :meth:`run`.
        """
        # elsewhere the limit is a setting, which takes two more round trips: the server's own limit has to do
        return self.run(operation, wait=ROW_TIMEOUT if self._backend.schemas else None, on_reply_lost=on_reply_lost)


def _run_in_plain_transaction(execution: Execution, commits_itself: bool) -> Any:
    """Run an operation of one statement in a transaction at the app's own level, and commit it.

    :param commits_itself: the app has set the driver to autocommit: COMMIT ends SQLAlchemy's transaction only.
    :raises LockTimeout: when COMMIT had to wait beyond the deadline; it is rolled back.
    :raises OutcomeUnknown: when the connection died after COMMIT was sent.
    """
    connection, backend = execution.connection, execution.backend
    if not connection.in_transaction():
        connection.begin()
    value = execution.perform(unpack=True)
    if connection.in_transaction():
        try:
            _commit(connection, backend, _left(execution.deadline))
        except OutcomeUnknown as error:
            # the reply of a statement that commits by itself says that it has, and one to COMMIT would say no more
            if not (commits_itself and _has_died(error.__cause__)):
                raise
    return value


def _commit(connection: Connection, backend: Backend, wait: float | None) -> None:
    """Commit, or roll back and raise what COMMIT has raised.

    :param wait: how long COMMIT may wait for others, in seconds, where it does; without it the app's own limit.
    :raises LockTimeout: when that was not enough.
    :raises OutcomeUnknown: when it may be committed nevertheless.
    """
    try:
        # where COMMIT can wait for readers
        with backend.committing(connection, wait) if backend.single_writer else nullcontext():
            connection.commit()
    except BaseException as error:
        if not _has_died(error):
            roll_back(connection)
        if _is_unsure(error, backend):
            raise OutcomeUnknown(
                "the connection died during COMMIT, or its server lost the majority of its cluster: what was done is "
                "committed, or it is not"
            ) from error
        raise


def _has_died(error: BaseException | None) -> bool:
    """Return whether a connection died; a driver's own time limit (asyncpg's command_timeout) is as good as that."""
    return isinstance(error, DriverTimeout) or (isinstance(error, DBAPIError) and error.connection_invalidated)


def _is_unsure(error: BaseException, backend: Backend) -> bool:
    """Return whether what was being committed may be committed, although there was an error."""
    return _has_died(error) or (isinstance(error, DBAPIError) and backend.may_be_committed(error))


def _left(deadline: float | None) -> float | None:
    """Return the seconds until a deadline, 0 when it has passed."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class NotCommitted(LockLost):
    """Nothing of an operation is committed: it may be run again."""


def is_conflict(error: BaseException, backend: Backend) -> bool:
    """Return whether others were the first: what was run is rolled back, and may succeed when it is run again."""
    if isinstance(error, DBAPIError):
        return not error.connection_invalidated and backend.is_conflict(error)
    return isinstance(error, (MustRollback, NotCommitted))


def retried(
    attempt: Callable[[], T],
    engine: Engine,
    sleep: Sleep,
    deadline: float | None = None,
    *,
    repeatable: Callable[[], bool] = lambda: False,
    on_retry: Callable[[BaseException, int], object] = lambda error, count: None,
) -> T:
    """Run ``attempt``, and again after an error that leaves nothing behind.

    A deadlock or a serialization failure has rolled everything back, and so has the death of a connection before COMMIT
    was sent. At most three retries; until the deadline a conflict is retried further, since between two busy nodes of a
    cluster one can lose many times in a row.

    :param deadline: by ``time.monotonic()``; may be infinite.
    :param repeatable: returns whether it may also be run again when it is not known whether it was done.
    :param on_retry: called with each error that is followed by a retry, and the number of that retry.
    """

    backoff: Backoff | None = None
    retry = 0
    while True:
        retry += 1
        began = time.monotonic()
        try:
            return attempt()
        except Exception as error:
            conflict = is_conflict(error, backend_of(engine.dialect))
            died = isinstance(error, DBAPIError) and error.connection_invalidated
            now = time.monotonic()
            if died_waiting(error, now - began) and deadline and now > deadline:
                raise
            if not (conflict or died or (isinstance(error, OutcomeUnknown) and repeatable())):
                raise
            if retry > RETRIES and not (conflict and deadline is not None and now < deadline):
                raise
            on_retry(error, retry)
        backoff = backoff or Backoff(shortest=0.01, share=1)
        # random, so that two that were each other's deadlock don't meet again
        sleep(random.uniform(0, backoff.pause()))

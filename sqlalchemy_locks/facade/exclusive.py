"""The blocks of ``Locks.exclusive`` and ``Locks.shared``: one transaction, from the wait for its keys to its end.

Guarantees: a block that was entered holds its keys, or reports that they are lost; a block that was left, in whatever
way, holds none, has no connection, and leaves no setting behind.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import repeat
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from sqlalchemy_locks._validation import timeout_seconds
from sqlalchemy_locks.core.ended_transactions import lost_when_ended, rolled_back_transactions
from sqlalchemy_locks.core.operation import Execution, cluster_behind, died_waiting, prepare_commit
from sqlalchemy_locks.core.transaction import (
    FAILED,
    IN_BLOCK,
    PAUSE,
    ShortTransaction,
    connect,
    connected,
    has_room,
    is_conflict,
    retried,
)
from sqlalchemy_locks.errors import LockLost, LockTimeout, PoolTimeout, ReentryError
from sqlalchemy_locks.facade.host import LockHost
from sqlalchemy_locks.keys import as_key
from sqlalchemy_locks.lock.key_holders import holders_now
from sqlalchemy_locks.lock.key_lock import acquire
from sqlalchemy_locks.runtime import reentry
from sqlalchemy_locks.runtime.decorators import in_block, refuse_truth
from sqlalchemy_locks.runtime.local_queue import Ticket, local_queues
from sqlalchemy_locks.values import Holder, KeyHolder

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

T = TypeVar("T")
P = ParamSpec("P")

Name = str | int


class Held:
    """The locks of a block while it runs.

    >>> with locks.exclusive("invoice:42") as held:
    ...     held.session.add(Payment(invoice=42))
    """

    def __init__(
        self,
        short: ShortTransaction,
        session_maker: Callable[..., Session],
        on_lost: Callable[[BaseException | None], object],
    ) -> None:
        self._short = short
        self._session_maker = session_maker
        self._session: Session | None = None
        self._lost = False
        #: called once, when the lock is lost
        self._on_lost: Callable[[BaseException | None], object] | None = on_lost

    @property
    def session(self) -> Session:
        """A session in the transaction that holds the lock; its work is committed when the block ends.

        Its own ``commit()`` flushes and commits nothing yet; its ``rollback()`` ends the transaction, and with
        it the lock, as does its ``close()`` once it was used.
        """
        if self._session is None:
            self._bind_session(self._session_maker(bind=self._short.connection, **IN_BLOCK))
            assert self._session is not None
        return self._session

    def _bind_session(self, session: Session) -> None:
        """Keep a session in the transaction that holds the lock, even one whose class routes elsewhere."""
        short, connection = self._short, self._short.connection

        def get_bind(*_: Any, **named: Any) -> Any:
            if connection.closed:
                return connection  # after the block: SQLAlchemy refuses it
            # A session asks for its bind before it begins. After the end of this transaction it would begin another
            # one, and commit it without the lock.
            if (why := short.loss()) is not None:
                error = LockLost(why)
                self._mark_lost(error)
                raise error
            short.watch_end()
            lost_when_ended(connection, FAILED)
            return connection

        def ending(end: Callable[[Session], None]) -> Callable[[], None]:
            def end_inside() -> None:
                # otherwise the block would commit what the session has flushed, without its other changes
                if session.in_transaction():
                    short.close_inside()
                end(session)

            return end_inside

        session.get_bind = get_bind  # type: ignore[method-assign]
        session.close = ending(type(session).close)  # type: ignore[method-assign]
        session.reset = ending(type(session).reset)  # type: ignore[method-assign]
        self._session = session

    @property
    def lost(self) -> bool:
        """Whether the lock is known to be gone, without asking the server; :meth:`check` asks."""
        if not self._lost and (why := self._short.loss()) is not None:
            self._mark_lost(LockLost(why))
        return self._lost

    def _mark_lost(self, error: BaseException | None) -> None:
        """Record that the lock is gone."""
        self._lost = True
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost(error)

    def check(self) -> None:
        """Ask the server whether the lock is still held.

        :raises LockLost: when the transaction that holds the lock has ended, its connection is dead, or its server has
            become read-only (MySQL, MariaDB), as a primary does before a replica takes its place.
        :raises Unsupported: on MySQL and MariaDB inside ``begin_nested()``, whose savepoint this would release.

        >>> with locks.exclusive("invoice:42") as held:
        ...     held.check()
        ...     send_report()
        """
        try:
            self._short.check()
        except LockLost as error:
            self._mark_lost(error)
            raise


class KeyBlock:
    """The context manager of :meth:`Locks.exclusive` and :meth:`Locks.shared`, for one thread or task at a time.

    It decorates functions, too: each call then has a block of its own.

    >>> @locks.exclusive("report")
    ... def report() -> None: ...
    """

    def __init__(
        self, locks: LockHost, names: tuple[Name, ...], *, shared: bool, timeout: float | timedelta | None
    ) -> None:
        if not names:
            raise ValueError("give at least one name to lock")
        self._locks = locks
        self._shared = shared
        #: by key, and sorted by key: every block acquires in the same order
        self._names: dict[int, Name] = dict(sorted(zip(map(as_key, names), names, strict=True), key=itemgetter(0)))
        self._timeout = timeout_seconds(timeout)
        self._entered: tuple[Held, reentry.HeldEntry, float] | None = None
        #: held by the one use that this block has at a time
        self._use = threading.Lock()

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        return in_block(function, self.display_name, self.copy)

    __bool__ = refuse_truth

    @property
    def display_name(self) -> str:
        """What error messages call it."""
        return "shared()" if self._shared else "exclusive()"

    def copy(self) -> KeyBlock:
        """Return a block with the same arguments, for another use at the same time."""
        other = copy.copy(self)
        other._entered, other._use = None, threading.Lock()
        return other

    def __enter__(self) -> Held:
        # during the wait, too: with two uses at a time, the first to leave would end the transaction of the other
        if not self._use.acquire(blocking=False):
            raise ReentryError("this block is entered already: make one for each use")
        started = time.monotonic()
        try:
            entry = self._record_keys()
            try:
                held = self._queue_and_acquire(started)
            except BaseException as error:
                entry.closed = True
                if isinstance(error, LockTimeout):
                    self._emit("waited", waited=time.monotonic() - started, error=error)
                raise
        except BaseException:
            self._use.release()
            raise
        entered = time.monotonic()
        self._entered = held, entry, entered
        if self._locks.dispatch.waited or self._locks.dispatch.acquired or self._locks._is_logged():
            try:
                self._emit("waited", waited=entered - started)
                self._emit("acquired", waited=entered - started)
            except BaseException as error:  # a listener's SystemExit or gevent.Timeout
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered is None:
            raise ReentryError("this block is not entered")
        (held, entry, entered), self._entered = self._entered, None
        self._use.release()
        entry.closed = True
        on_lost = None
        try:
            on_lost, held._on_lost = held._on_lost, None  # from here on it is released, and not lost
            self._close(held, error)
        except BaseException as failed:
            if isinstance(failed, LockLost):
                held._on_lost = on_lost
                held._mark_lost(failed)
            self._emit("released", held=time.monotonic() - entered, error=failed)
            raise
        if self._locks.dispatch.released or self._locks._is_logged():
            self._emit("released", held=time.monotonic() - entered, error=error)

    def _emit(self, event: str, **details: Any) -> None:
        self._locks._emit(event, "lock", self._names.values(), shared=self._shared, **details)

    def _record_keys(self) -> reentry.HeldEntry:
        """Record the keys as held by this thread or task.

        :raises ReentryError: when it holds one of them already, so that acquiring it again would deadlock.
        """
        locks, owner = self._locks, reentry.current_owner()
        # without key_rows, all schemas of a database share its keys
        where = locks._reentry_scope if locks._backend.key_rows else None
        keys = (0,) if locks._backend.single_writer else self._names  # its one lock is that of all keys
        counts = dict.fromkeys(zip(repeat((locks._engine.dialect, where)), keys), 1)
        for entry in reentry.held_by("key", owner):
            for scope, key in entry.held:
                if (scope, key) in counts:
                    name = self._names.get(key)
                    what = f"{locks.engine_name}'s write lock, which every key is," if name is None else repr(name)
                    raise ReentryError(
                        f"this thread or task holds {what} already, and acquiring it again would deadlock: work in the "
                        "held.session of the block that holds it"
                    )
        return reentry.enter("key", owner, counts)

    def _queue_and_acquire(self, started: float) -> Held:
        """Wait in the queue of this process for the first key, then in the database."""
        one_lock = self._locks._backend.single_writer
        deadline = None if self._timeout is None else started + self._timeout
        engine, sleep, ticket = self._locks._engine, self._locks._sleep, None

        def on_retry(error: BaseException, count: int) -> None:
            self._emit("retried", error=error, count=count)

        try:
            # sharers don't wait for one another, unless all keys are one lock; and timeout=0 doesn't wait
            if (one_lock or not self._shared) and self._timeout != 0:
                first = 0 if one_lock else next(iter(self._names))
                # the engine's options decide in which table the key is
                ticket = local_queues(engine.dialect).ticket(("key", self._locks._installation, first))
                if not ticket.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    raise self._timed_out(self._holders_now())
            attempt = partial(self._attempt, deadline, ticket)
            while True:
                # in a cluster a conflict with another node counts as a wait: without a timeout it is retried forever
                until = math.inf if deadline is None and cluster_behind(engine) is not None else deadline
                held = retried(attempt, engine, sleep, until, on_retry=on_retry)
                if held is not None:
                    return held
                sleep(PAUSE)
        except BaseException as error:
            if ticket is not None:
                ticket.leave()
            died_late = deadline is not None and time.monotonic() > deadline and died_waiting(error, math.inf)
            if died_late or (deadline is not None and is_conflict(error, self._locks._backend)):
                raise self._timed_out(()) from error
            raise

    def _attempt(self, deadline: float | None, ticket: Ticket | None) -> Held | None:
        """Acquire the keys in a new transaction.

        :return: ``None`` when a limit of the server's or the driver's ended the wait before the caller's.
        :raises LockTimeout: when the caller's limit has ended it.
        :raises PoolTimeout: when no connection was free within the pool's own limit.
        """
        locks, engine = self._locks, self._locks._engine
        short = ShortTransaction(connect(engine))
        try:
            short.begin(wait=math.inf if deadline is None else max(0.0, deadline - time.monotonic()))
            locks._after_begin.call(short.connection)
            short.mark_first()
            for key in self._names:
                # tried even after the deadline: a free key is acquired without a wait
                Execution(short.connection, acquire(key, shared=self._shared), {}, deadline=deadline).perform()
                if ticket is not None:
                    ticket.leave()
        except BaseException as error:
            short.abandon(error)
            if not isinstance(error, LockTimeout) or isinstance(error, PoolTimeout):
                raise
            if deadline is None or time.monotonic() < deadline:
                return None
            # timeout=0 must be cheap: it doesn't ask for the holders, but the caller can
            raise self._timed_out(() if self._timeout == 0 else self._holders_now()) from error
        return Held(short, locks._session_maker, lambda error: self._emit("lost", error=error))

    def _holders_now(self) -> tuple[KeyHolder, ...]:
        """Return the holders of the keys; empty where all connections of the pool are in use."""
        engine = self._locks._engine
        with contextlib.suppress(Exception):
            if has_room(engine):
                with connected(engine) as connection:
                    return holders_now(connection, self._names.values())
        return ()

    def _timed_out(self, holders: tuple[Holder, ...]) -> LockTimeout:
        names = ", ".join(repr(name) for name in self._names.values())
        if self._timeout == 0:
            return LockTimeout(f"{names} {'is' if len(self._names) == 1 else 'are'} locked (timeout=0)", holders)
        return LockTimeout(f"{names} could not be acquired within {self._timeout:g} s", holders)

    def _close(self, held: Held, error: BaseException | None) -> None:
        """Commit the transaction, or roll it back for an error of the block."""
        short, session = held._short, held._session
        if error is not None:
            ended = short.active and short.connection.get_transaction() in rolled_back_transactions
            try:
                if session is not None:
                    # the error of a ROLLBACK, or of one to a savepoint, must not hide the block's
                    with contextlib.suppress(LockLost, DBAPIError):
                        type(session).close(session)
            finally:
                short.abandon(error)
            if ended and isinstance(error, LockLost):
                raise error
            if ended and isinstance(error, SQLAlchemyError):  # its savepoint has gone with the transaction
                raise LockLost(FAILED) from error
            return
        try:
            if session is not None and short.loss() is None:
                prepare_commit(session)
        except BaseException as raised:
            # a deadlock has rolled the savepoint back: InnoDB answers a flush in it with error 1305
            lost = isinstance(raised, DBAPIError) and (
                raised.connection_invalidated or short.loss() is not None or short.backend.is_conflict(raised)
            )
            short.abandon(raised)
            if lost:
                raise LockLost(FAILED) from raised
            raise
        try:
            short.commit()
            if session is not None:
                session.commit()  # after the COMMIT: listeners of after_commit send mails, and put jobs
        finally:
            if session is not None:
                type(session).close(session)

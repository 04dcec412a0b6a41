"""The blocks of ``Locks.exclusive`` and ``Locks.shared``: one transaction, from the wait for its keys to its end.

What is promised: whoever is in a block holds its keys, or is told that they are lost; whoever left it holds none, has
no connection, and left no setting behind, in whatever way he left.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from sqlalchemy import Engine, event
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks import lock
from sqlalchemy_locks._validation import timeout_seconds
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.dialects.connections import connected
from sqlalchemy_locks.errors import LockLost, LockTimeout, PoolTimeout, ReentryError, StaleSnapshot
from sqlalchemy_locks.keys import as_key
from sqlalchemy_locks.lock.key_holders import holders_now
from sqlalchemy_locks.runtime import reentry
from sqlalchemy_locks.runtime.decorators import in_block
from sqlalchemy_locks.runtime.events import Observed
from sqlalchemy_locks.runtime.local_queue import Ticket, local_queues
from sqlalchemy_locks.runtime.transaction import ShortTransaction, Sleep, has_room, retried
from sqlalchemy_locks.values import Holder, KeyHolder

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

T = TypeVar("T")
P = ParamSpec("P")

Name = str | int
#: how a session is made that is to work in a block's transaction, whatever its maker was told
IN_BLOCK: dict[str, Any] = {
    "binds": None,
    "join_transaction_mode": "rollback_only",
    "autobegin": True,
    "twophase": False,
}


class LockHost(Observed):
    """What a block needs of ``Locks``."""

    _engine: Engine
    _session_maker: Callable[..., Session]
    _sleep: Sleep
    _sets_isolation: bool


class Held:
    """What a block holds while it runs.

    >>> with locks.exclusive("invoice:42") as held:
    ...     held.session.add(Payment(invoice=42))
    """

    def __init__(
        self,
        short: ShortTransaction,
        session_maker: Callable[..., Session],
        told: Callable[[BaseException | None], object] | None = None,
    ) -> None:
        self._short = short
        self._session_maker = session_maker
        self._session: Session | None = None
        self._lost = False
        #: is to hear, once, that it is lost
        self._told = told

    @property
    def session(self) -> Session:
        """A session in the very transaction that holds the lock; what it did is committed when the block ends.

        Its own ``commit()`` flushes and commits nothing yet; its ``rollback()`` ends the transaction, and with
        it the lock.
        """
        if self._session is None:
            self.adopt(self._session_maker(bind=self._short.connection, **IN_BLOCK))
            assert self._session is not None
        return self._session

    def adopt(self, session: Session) -> None:
        """Keep a session to the transaction that holds the lock, even one whose class routes elsewhere."""
        connection = self._short.connection
        session.get_bind = lambda *arguments, **named: connection  # type: ignore[method-assign]
        event.listen(session, "after_begin", self._stay)
        self._session = session

    def _stay(self, *_: Any) -> None:
        if (why := self._short.over(wire=False)) is not None:
            # what follows would be another transaction, which commits, and which no lock guards
            raise LockLost(why)
        if not self._short.used:
            self._short.use()
            self._short.guard(self.lose)

    @property
    def lost(self) -> bool:
        """Whether the lock is known to be gone, without asking the server; :meth:`check` asks."""
        if not self._lost and self._short.over() is not None:
            self.lose(None)
        return self._lost

    def lose(self, error: BaseException | None) -> None:
        """It is known to be gone."""
        self._lost = True
        told, self._told = self._told, None
        if told is not None:
            told(error)

    def check(self) -> None:
        """Ask the server.

        :raises LockLost: when the transaction that holds the lock is over, or its connection is dead.
        :raises Unsupported: on MySQL and MariaDB inside ``begin_nested()``, whose savepoint would not outlive it.

        >>> with locks.exclusive("invoice:42") as held:
        ...     held.check()
        ...     send_report()
        """
        try:
            self._short.check()
        except LockLost as error:
            self.lose(error)
            raise


class ExclusiveBlock:
    """The context manager of :meth:`Locks.exclusive` and :meth:`Locks.shared`, for one thread or task at a time.

    It decorates functions, too: each call then has a block of its own.

    >>> @locks.exclusive("report")
    ... def report() -> None: ...
    """

    def __init__(
        self, locks: LockHost, names: tuple[Name, ...], shared: bool, timeout: float | timedelta | None
    ) -> None:
        if not names:
            raise ValueError("give at least one name to lock")
        self._locks = locks
        self._shared = shared
        self._take, self._try = (lock.shared, lock.try_shared) if shared else (lock.exclusive, lock.try_exclusive)
        # by key: in one order for everybody, whatever their names sort like
        self._names = dict(sorted(((as_key(name), name) for name in names), key=itemgetter(0)))
        self._timeout = timeout_seconds(timeout)
        self._entered: tuple[Held, reentry.HeldEntry, float] | None = None
        #: whoever is inside, or about to be
        self._use = threading.Lock()

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        return in_block(function, self.shown, self.again)

    @property
    def shown(self) -> str:
        """What sentences call it."""
        return "shared()" if self._shared else "exclusive()"

    def again(self) -> ExclusiveBlock:
        """The same, for one more use at the same time."""
        twin = copy.copy(self)
        twin._entered, twin._use = None, threading.Lock()
        return twin

    def __enter__(self) -> Held:
        # while it is waited for, too: of two who are let in, the first to leave would end what the other has
        if not self._use.acquire(blocking=False):
            raise ReentryError("this block is entered already: make one for each use")
        asked = time.monotonic()
        try:
            held = self._enter(asked)
        except BaseException:
            self._use.release()
            raise
        if self._locks._heard:
            try:
                waited = time.monotonic() - asked
                self._tell("waited", waited=waited)
                self._tell("acquired", waited=waited)
            except BaseException as error:
                self.__exit__(type(error), error, None)  # which nobody else would do
                raise
        return held

    def _enter(self, asked: float) -> Held:
        mine = self._enter_thread()
        try:
            held = self._open(asked)
        except BaseException as error:
            reentry.leave(mine)
            if isinstance(error, LockTimeout):
                self._tell("waited", waited=time.monotonic() - asked, error=error)
            raise
        self._entered = held, mine, time.monotonic()
        return held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._entered is not None
        (held, mine, began), self._entered = self._entered, None
        self._use.release()
        reentry.leave(mine)
        told, held._told = held._told, None  # what is given back is lost to nobody, whoever still looks
        try:
            self._close(held, error)
        except BaseException as failed:
            if isinstance(failed, LockLost):
                held._told = told
                held.lose(failed)
            self._tell("released", held=time.monotonic() - began, error=failed)
            raise
        if self._locks._heard:
            self._tell("released", held=time.monotonic() - began, error=error)

    def _tell(self, what: str, **told: Any) -> None:
        self._locks._tell(what, "lock", self._names.values(), shared=self._shared, **told)

    def _enter_thread(self) -> reentry.HeldEntry:
        """Refuse what would wait for itself: this thread's, or this task's, own transaction."""
        dialect, me = self._locks._engine.dialect, reentry.current_owner()
        # on SQLite any two keys are one lock
        keys = [0] if backend_for(dialect).locking == "file" else self._names
        mine = {(dialect, key): 1 for key in keys}
        for one in reentry.held_by("key", me):
            for held in one.held:
                if held in mine:
                    name = self._names.get(held[1], "another lock of this database")
                    raise ReentryError(
                        f"this thread or task holds {name!r} already: taking it again would wait for itself"
                    )
        return reentry.enter("key", me, mine)

    def _open(self, asked: float) -> Held:
        deadline = None if self._timeout is None else asked + self._timeout
        dialect, options = self._locks._engine.dialect, self._locks._engine.get_execution_options()
        file = backend_for(dialect).locking == "file"
        # sharers don't wait for one another, unless there is one lock for all; and a try waits for nobody
        if (self._shared and not file) or self._timeout == 0:
            return self._wait(deadline, None)
        # the key that the first wait is for, in the schema whose rows may stand for it
        first = 0 if file else next(iter(self._names))
        where = (options.get("locks_prefix"), str(options.get("schema_translate_map"))) if options else None
        turn = local_queues(dialect).turn(("key", where, first))
        try:
            if not turn.come(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise self._timed_out(self._holders_aside())
            return self._wait(deadline, turn)
        finally:
            turn.give()

    def _wait(self, deadline: float | None, turn: Ticket | None) -> Held:
        locks = self._locks

        def told(error: BaseException, count: int) -> None:
            self._tell("retried", error=error, count=count)

        while True:
            try:
                return retried(lambda: self._attempt(deadline, turn), locks._engine, locks._sleep, told=told)
            except PoolTimeout:
                raise
            except LockTimeout as error:
                # a limit that the database sets of itself ends the wait, and not the caller's patience
                if deadline is not None:
                    raise self._timed_out(error.holders) from error

    def _attempt(self, deadline: float | None, turn: Ticket | None) -> Held:
        short = ShortTransaction(self._locks._engine)
        # Setting the level costs about a round trip's time, and most apps run at READ COMMITTED as it is. Where
        # the server would refuse another level anyway, it is set from the first refusal on.
        trusting = short.backend.refuses_stale_snapshots and not self._locks._sets_isolation
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        short.open(as_it_is=trusting, wait=math.inf if left is None else left, within=left)
        try:
            for key in self._names:
                self._acquire(short, key, deadline)
                if turn is not None:
                    turn.give()
        except StaleSnapshot:
            short.abandon()
            if not trusting:
                raise
            self._locks._sets_isolation = True
            return self._attempt(deadline, turn)
        except LockTimeout as error:
            try:
                # a try is to be cheap: who makes one, and wants to know, can ask
                if deadline is not None and self._timeout != 0:
                    error.holders = self._holders(short)
            finally:
                short.abandon()
            raise
        except BaseException:
            short.abandon()
            raise
        return Held(short, self._locks._session_maker, lambda error: self._tell("lost", error=error))

    def _acquire(self, short: ShortTransaction, key: int, deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            # what is free is had, however long it took to come to ask for it
            if not short.connection.execute(self._try(key)).scalar():
                raise self._timed_out(())
            return
        operation = self._take(key)
        if left is not None:
            operation = operation.execution_options(locks_wait=left)
        try:
            short.connection.execute(operation)
        except DriverTimeout as error:
            raise LockTimeout("the lock was not free in time (the driver's own limit of a statement)") from error

    def _holders(self, short: ShortTransaction) -> tuple[KeyHolder, ...]:
        """Who has them, asked on the connection that waited in vain, before anybody else gets it."""
        if short.connection.invalidated:
            return ()
        with contextlib.suppress(DBAPIError):
            short.connection.rollback()
            return holders_now(short.connection, self._names.values())
        return ()

    def _holders_aside(self) -> tuple[KeyHolder, ...]:
        """The same without such a connection, where the pool has one to spare."""
        engine = self._locks._engine
        if has_room(engine):
            with contextlib.suppress(Exception), connected(engine, 0) as connection:
                return holders_now(connection, self._names.values())
        return ()

    def _timed_out(self, holders: tuple[Holder, ...]) -> LockTimeout:
        names = ", ".join(repr(name) for name in self._names.values())
        within = "at the only try" if self._timeout == 0 else f"within {self._timeout:g} s"
        return LockTimeout(f"{names} {'was' if len(self._names) == 1 else 'were'} not free {within}", holders)

    def _close(self, held: Held, error: BaseException | None) -> None:
        session = held._session
        if error is not None:
            try:
                if session is not None:
                    session.close()
            finally:
                held._short.abandon()
            return
        try:
            if session is not None and held._short.over() is None:
                session.commit()
                session.close()
        except BaseException:
            held._short.abandon()
            raise
        held._short.commit()

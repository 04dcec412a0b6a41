"""Locks: the ready-made way. It opens the transaction, waits, retries and cleans up; it knows no SQL.

``AsyncLocks`` (``aio.py``) runs this very code in SQLAlchemy's greenlet, and awaits it.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlalchemy import Engine, event
from sqlalchemy.pool import StaticPool

from . import lock
from .errors import LockLost, LockTimeout, OutcomeUnknown, ReentryError, StaleSnapshot, UnknownTask, Unsupported
from .keys import as_key
from .leases import Leases
from .maintenance import Maintained
from .mutex import Mutex
from .mutexes import Mutexes
from .names import checked
from .operation import Operation, RowsOperation, fresh_nonce, listed, place_of, seconds
from .timeout import Timeout
from .transaction import ShortTransaction, Sleep, retried, run_one

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, sessionmaker

T = TypeVar("T")

Name = str | int
#: so many dead connections of the pool are passed over
_DEAD = 20
_held: contextvars.ContextVar[frozenset[Any]] = contextvars.ContextVar("sqlalchemy_locks_held", default=frozenset())


class Locks(Leases, Maintained):
    """Locks that open their own transactions, on the engine that the app already has.

    :param bind: an ``Engine``, or a ``sessionmaker`` bound to one: its class and options are then those of
        ``held.session``.
    :param owner: who acquires what is stored with an owner; the host, the process and a nonce when not given.

    >>> locks = sl.Locks(engine)
    >>> with locks.exclusive("invoice:42", timeout=5) as held:
    ...     held.session.add(Payment(invoice=42))
    """

    def __init__(self, bind: Engine | sessionmaker[Any], *, owner: str | None = None) -> None:
        from sqlalchemy.orm import sessionmaker

        maker = bind if isinstance(bind, sessionmaker) else sessionmaker(bind)
        engine = maker.kw.get("bind")
        if not isinstance(engine, Engine):
            raise TypeError(f"Locks takes an Engine, or a sessionmaker bound to one, not {bind!r}")
        if isinstance(engine.pool, StaticPool):
            raise Unsupported(
                "Locks can't work with a StaticPool, where everybody has the same connection and so the same "
                "transaction: use another pool, and on SQLite a file instead of :memory:"
            )
        self._engine = engine
        self._session_maker: Callable[..., Session] = maker
        self._sleep: Sleep = time.sleep
        self._sets_isolation = False
        self._owner = None if owner is None else checked(owner, "an owner")
        self._nonce = secrets.token_hex(4)
        self._mutex = Mutexes(self._run, lambda: self.owner)

    @property
    def owner(self) -> str:
        """Who acquires what is stored with an owner."""
        # asked for each time: a fork is another process
        return self._owner or f"{socket.gethostname()[:200]}:{os.getpid()}:{self._nonce}"

    @property
    def mutex(self) -> Mutexes:
        """The mutexes of the shipped table, made on first use."""
        return self._mutex

    def mutexes(self, mutex: Mutex) -> Mutexes:
        """As :attr:`mutex`, for mutexes on columns of your own, with a ``token`` among them; keep what it gives.

        :raises ValueError: without such a column: a release could not tell its own acquisition from another's.

        >>> imports = locks.mutexes(sl.Mutex(Import, id=Import.name, acquired=Import.locked, token=Import.nonce))
        >>> imports.acquire("prices")
        """
        return Mutexes(self._run, lambda: self.owner, mutex)

    def once_per(
        self,
        name: str,
        *,
        every: float | timedelta,
        windowed: bool = False,
        tz: str | None = None,
        queue: str | None = None,
    ) -> bool:
        """Whether it is this caller's turn to do what is to be done once a period: :class:`Timeout`, made on first use.

        :param every: the period, in whole seconds or as a ``timedelta``.
        :param windowed: :param tz: :param queue: see :class:`Timeout`.
        :raises OutcomeUnknown: when the connection died, and so did those of three more tries.

        >>> if locks.once_per("hourly-report", every=3600):
        ...     send_report()
        """
        return self._turn(Timeout(every=every, windowed=windowed, tz=tz), name, queue, fresh_nonce())

    def _turn(self, timeout: Timeout, name: str, queue: str | None, nonce: str) -> bool:
        operation = timeout.acquire(name, queue=queue)
        try:
            return bool(self._run(operation, nonce))
        except UnknownTask:
            self.run(timeout.create(name, queue=queue))
            return bool(self._run(operation, nonce))

    def exclusive(self, *names: Name, timeout: float | timedelta | None = None) -> Hold:
        """Hold keys alone while the block runs; a transaction holds them, and the block's end commits it.

        :param names: one or more keys, as :func:`sqlalchemy_locks.lock.exclusive` takes them; they are taken in
            one order everywhere, so that two callers can't deadlock.
        :param timeout: the longest wait for all of them together, in seconds (MySQL and MariaDB count whole
            seconds); ``None`` waits, ``0`` tries once.
        :return: a context manager; ``as held`` gives a :class:`Held`.
        :raises LockTimeout: when they were not free in time.
        :raises ReentryError: when this thread or task holds one of them already (on SQLite: any lock).
        :raises LockLost: at the end of the block, when the connection died inside it and nothing was committed.
        """
        return Hold(self, names, False, timeout)

    def shared(self, *names: Name, timeout: float | timedelta | None = None) -> Hold:
        """Hold keys together with other sharers while the block runs. Everything else as :meth:`exclusive`."""
        return Hold(self, names, True, timeout)

    @overload
    def run(self, operation: RowsOperation[tuple[T]]) -> list[T]: ...
    @overload
    def run(self, operation: RowsOperation[T]) -> list[T]: ...
    @overload
    def run(self, operation: Operation[tuple[T]]) -> T | None: ...
    @overload
    def run(self, operation: Operation[T]) -> T | None: ...
    def run(self, operation: Operation[Any]) -> Any:
        """Run one operation in a short transaction of its own, retried on transient errors.

        :param operation: any operation whose effect outlives its transaction.
        :return: what ``session.scalar`` would return for it. For one that gives rows, a list: of values or entities
            (detached), as ``session.scalars`` gives them, or of rows where a row is more than that.
        :raises Unsupported: for a lock, which would be gone when this returns: use :meth:`exclusive` or a session.
        """
        body = operation._body
        if body.held_by is not None:
            raise Unsupported(
                f"{body.name} ends with its {body.held_by}, so run() would give the lock back at once: use "
                "locks.exclusive() or locks.shared(), or execute it in a transaction of your own"
            )
        return self._run(operation, fresh_nonce())

    def _run(self, operation: Operation[Any], nonce: str, short: bool = False) -> Any:
        options: dict[str, Any] = {"locks_nonce": nonce, "locks_short": short}

        repeatable = operation._body.repeatable(operation)

        def attempt() -> Any:
            try:
                return self._run_once(operation, options, repeatable)
            except OutcomeUnknown:
                options["locks_again"] = True
                raise
            except Exception as error:
                if "locks_again" not in options:
                    raise
                # whatever this try met with, an earlier one may have been carried out
                raise OutcomeUnknown(
                    f"{operation.name}: an answer was lost, and the next try failed: it was done, or it was not"
                ) from error

        return retried(attempt, self._engine, self._sleep, repeatable=repeatable)

    def _run_once(self, operation: Operation[Any], options: Mapping[str, Any], repeatable: bool) -> Any:
        engine = self._engine
        given = operation.get_execution_options()
        every: Mapping[str, Any] = {**engine.get_execution_options(), **given} if given else engine._execution_options
        place = place_of(engine.dialect, every)
        # entities come of a session
        entity = isinstance(operation, RowsOperation) and operation._propagate_attrs["plugin_subject"] is not None
        whole = entity or options["locks_short"]
        if not whole and operation._body.statement(place) is not None:
            with engine.connect() as connection:
                for _ in range(0 if repeatable else _DEAD):
                    if not place.engine.hung_up(connection):
                        break
                    connection.invalidate()  # not sent yet, and so not lost
                return run_one(connection, operation, options)
        short = ShortTransaction(self._engine)
        wait = 0 if operation._body.impatient else every.get("locks_wait")
        try:
            short.open(wait=None if wait is None else seconds(wait, "locks_wait"))
        except LockTimeout:
            if not operation._body.impatient:
                raise
            return operation._body.refused
        try:
            short.use()
            value = self._rows(short, operation, options) if entity else operation.value(short.connection, options)
        except BaseException:
            short.abandon()
            raise
        short.commit()
        return value

    def _rows(self, short: ShortTransaction, operation: Operation[Any], options: Mapping[str, Any]) -> list[Any]:
        held = Held(short, lambda **named: self._session_maker(**named, expire_on_commit=False))
        found = listed(held.session.execute(operation, execution_options=options))
        held.session.commit()
        held.session.expunge_all()
        held.session.close()
        return found


class Held:
    """What a block holds while it runs."""

    def __init__(self, short: ShortTransaction, session_maker: Callable[..., Session]) -> None:
        self._short = short
        self._session_maker = session_maker
        self._session: Session | None = None
        self._lost = False

    @property
    def session(self) -> Session:
        """A session in the very transaction that holds the lock; what it did is committed when the block ends.

        Its own ``commit()`` flushes and commits nothing yet; its ``rollback()`` ends the transaction, and with
        it the lock.
        """
        if self._session is None:
            self.adopt(
                self._session_maker(bind=self._short.connection, binds=None, join_transaction_mode="rollback_only")
            )
            assert self._session is not None
        return self._session

    def adopt(self, session: Session) -> None:
        """Keep a session to the transaction that holds the lock, even one whose class routes elsewhere."""
        connection = self._short.connection
        session.get_bind = lambda *arguments, **named: connection  # type: ignore[method-assign]
        event.listen(session, "after_begin", self._stay)
        self._session = session

    def _stay(self, *_: Any) -> None:
        if not self._short.active:
            # what follows would be another transaction, which commits, and which no lock guards
            raise LockLost("the transaction that held the lock was ended inside its block: leave the block first")
        self._short.use()

    @property
    def lost(self) -> bool:
        """Whether the lock is known to be gone, without asking the server; :meth:`check` asks."""
        if not self._lost:
            self._lost = not self._short.active or self._short.facts.hung_up(self._short.connection)
        return self._lost

    def check(self) -> None:
        """Ask the server.

        :raises LockLost: when the transaction that holds the lock is over, or its connection is dead.
        """
        if self.lost:
            raise LockLost("the transaction that held the lock is over, or its connection died")
        try:
            self._short.check()
        except LockLost:
            self._lost = True
            raise


class Hold:
    """The context manager of :meth:`Locks.exclusive` and :meth:`Locks.shared`, for one thread or task at a time."""

    def __init__(self, locks: Locks, names: tuple[Name, ...], shared: bool, timeout: float | timedelta | None) -> None:
        if not names:
            raise ValueError("give at least one name to lock")
        self._locks = locks
        self._take, self._try = (lock.shared, lock.try_shared) if shared else (lock.exclusive, lock.try_exclusive)
        # by key: in one order for everybody, whatever their names sort like
        self._names = dict(sorted(((as_key(name), name) for name in names), key=itemgetter(0)))
        self._timeout = None if timeout is None else seconds(timeout, "timeout")
        self._entered: tuple[Held, frozenset[Any]] | None = None

    def __enter__(self) -> Held:
        if self._entered is not None:
            raise ReentryError("this block is entered already: make one for each use")
        mine = self._enter_thread()
        try:
            held = self._open()
        except BaseException:
            _held.set(_held.get() - mine)
            raise
        self._entered = held, mine
        return held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._entered is not None
        (held, mine), self._entered = self._entered, None
        _held.set(_held.get() - mine)
        self._close(held, error)

    def _enter_thread(self) -> frozenset[Any]:
        """Refuse what would wait for itself: this thread's, or this task's, own transaction."""
        try:
            task = id(asyncio.current_task())
        except RuntimeError:
            task = 0
        engine = self._locks._engine
        # on SQLite any two keys are one lock
        keys = [0] if place_of(engine.dialect, {}).engine.locking == "file" else list(self._names)
        mine = frozenset((threading.get_ident(), task, id(engine.pool), key) for key in keys)
        twice = mine & _held.get()
        if twice:
            name = self._names.get(next(iter(twice))[-1], "another lock of this database")
            raise ReentryError(f"this thread or task holds {name!r} already: taking it again would wait for itself")
        _held.set(_held.get() | mine)
        return mine

    def _open(self) -> Held:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        engine = self._locks._engine
        while True:
            try:
                return retried(lambda: self._attempt(deadline), engine, self._locks._sleep)
            except LockTimeout as error:
                # a limit that the database sets of itself ends the wait, and not the caller's patience
                if deadline is not None:
                    raise self._timed_out() from error

    def _attempt(self, deadline: float | None) -> Held:
        short = ShortTransaction(self._locks._engine)
        # Setting the level costs about a round trip's time, and most apps run at READ COMMITTED as it is. Where
        # the server would refuse another level anyway, it is set from the first refusal on.
        trusting = short.facts.refuses_stale and not self._locks._sets_isolation
        short.open(as_it_is=trusting, wait=None if deadline is None else max(0.0, deadline - time.monotonic()))
        try:
            for key in self._names:
                self._acquire(short, key, deadline)
        except StaleSnapshot:
            short.abandon()
            if not trusting:
                raise
            self._locks._sets_isolation = True
            return self._attempt(deadline)
        except BaseException:
            short.abandon()
            raise
        return Held(short, self._locks._session_maker)

    def _acquire(self, short: ShortTransaction, key: int, deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            # what is free is had, however long it took to come to ask for it
            if not short.connection.execute(self._try(key)).scalar():
                raise self._timed_out()
            return
        operation = self._take(key)
        if left is not None:
            operation = operation.execution_options(locks_wait=left)
        short.connection.execute(operation)

    def _timed_out(self) -> LockTimeout:
        names = ", ".join(repr(name) for name in self._names.values())
        within = "at the only try" if self._timeout == 0 else f"within {self._timeout:g} s"
        return LockTimeout(f"{names} {'was' if len(self._names) == 1 else 'were'} not free {within}")

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
            if session is not None and held._short.active:
                session.commit()
                session.close()
        except BaseException:
            held._short.abandon()
            raise
        held._short.commit()

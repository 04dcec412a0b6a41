"""Locks: the ready-made way. It opens the transaction, waits, retries and cleans up; it knows no SQL.

``AsyncLocks`` (``aio.py``) runs this very code in SQLAlchemy's greenlet, and awaits it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from sqlalchemy import Engine
from sqlalchemy.engine import Connection

from sqlalchemy_locks._validation import seconds, valid_name
from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.core.operation import (
    Operation,
    RowsOperation,
    ValueOperation,
    build_context,
    fresh_nonce,
    listed,
)
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.connections import connected, one_for_all
from sqlalchemy_locks.errors import (
    IdempotencyConflict,
    LockLost,
    LockTimeout,
    OutcomeUnknown,
    PoolTimeout,
    UnknownSemaphore,
    UnknownTask,
    Unsupported,
)
from sqlalchemy_locks.facade.exclusive import ExclusiveBlock, Held, LockHost, Name
from sqlalchemy_locks.facade.maintenance import Maintained
from sqlalchemy_locks.facade.mutexes import Mutexes
from sqlalchemy_locks.facade.semaphores import SemaphoreMethods
from sqlalchemy_locks.runtime.decorators import when_due
from sqlalchemy_locks.runtime.transaction import NotCommitted, ShortTransaction, Sleep, retried, run_one

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, sessionmaker

T = TypeVar("T")
P = ParamSpec("P")

#: errors that say that no try has done anything, an earlier one without an answer included
_NEVER_DONE = (UnknownTask, UnknownSemaphore, IdempotencyConflict)
#: so many dead connections of the pool are passed over
_DEAD = 20


class Locks(SemaphoreMethods, Maintained, LockHost):
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
        if one_for_all(engine.pool):
            raise Unsupported(
                f"Locks can't work with a {type(engine.pool).__name__}, where who asks again has the same connection "
                "and so the same transaction: use another pool, and on SQLite a file instead of :memory:"
            )
        self._engine = engine
        self._session_maker: Callable[..., Session] = maker
        self._sleep: Sleep = time.sleep
        self._sets_isolation = False
        self._owner = None if owner is None else valid_name(owner, "an owner")
        self._nonce = secrets.token_hex(4)
        #: the process that this was in when it was last asked, and the owner's name there
        self._process = 0, ""
        self._mutex = Mutexes(self._run, lambda: self.owner, on_event=self._tell)

    @property
    def owner(self) -> str:
        """Who acquires what is stored with an owner."""
        if self._owner is not None:
            return self._owner
        process, name = self._process
        if process != os.getpid():  # asked for each time: a fork is another process
            process = os.getpid()
            name = f"{socket.gethostname()[:200]}:{process}:{self._nonce}"
            self._process = process, name
        return name

    @property
    def engine_name(self) -> str:
        """The engine, as this library's sentences call it."""
        return backend_for(self._engine.dialect).name

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
        return Mutexes(self._run, lambda: self.owner, mutex, on_event=self._tell)

    def once_per(
        self,
        name: str,
        *,
        every: float | timedelta,
        windowed: bool = False,
        tz: str | None = None,
        queue: str | None = None,
    ) -> bool:
        """Acquire the :class:`Timeout` of a name, made on first use: whether it is this caller's turn.

        :param every: the period, in whole seconds or as a ``timedelta``.
        :param windowed: :param tz: :param queue: see :class:`Timeout`.
        :return: ``True`` at most once a period, among all processes.
        :raises OutcomeUnknown: when the connection died, and so did those of three more tries.

        >>> if locks.once_per("hourly-report", every=3600):
        ...     send_report()
        """
        mine = self._turn(Timeout(every=every, windowed=windowed, tz=tz), name, queue, fresh_nonce())
        if mine:
            self._tell("acquired", "timeout", (name,))
        return mine

    def _turn(self, timeout: Timeout, name: str, queue: str | None, nonce: str) -> bool:
        operation = timeout.acquire(name, queue=queue)
        try:
            return bool(self._run(operation, nonce))
        except UnknownTask:
            self.run(timeout.create(name, queue=queue))
            return bool(self._run(operation, nonce))

    def scheduled(
        self,
        name: str,
        *,
        every: float | timedelta,
        windowed: bool = False,
        tz: str | None = None,
        queue: str | None = None,
    ) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
        """Decorate a function that runs at most once a period: when :meth:`once_per`, asked at each call, says so.

        :param every: :param windowed: :param tz: :param queue: as for :meth:`once_per`.
        :return: a decorator. A call gives ``None`` when it isn't this caller's turn.
        :raises OutcomeUnknown: by a call, as :meth:`once_per`.

        >>> @locks.scheduled("daily-report", every=86400)
        ... def send_daily_report() -> None: ...
        """
        Timeout(every=every, windowed=windowed, tz=tz).acquire(name, queue=queue)  # refuses bad input before any call

        def due() -> bool:
            return self.once_per(name, every=every, windowed=windowed, tz=tz, queue=queue)

        return when_due(due, f"scheduled({name!r})")

    def exclusive(self, *names: Name, timeout: float | timedelta | None = None) -> ExclusiveBlock:
        """Hold keys alone while the block runs; a transaction holds them, and the block's end commits it.

        :param names: one or more keys, as :func:`sqlalchemy_locks.lock.exclusive` takes them; they are taken in
            one order everywhere, so that two callers can't deadlock.
        :param timeout: the longest wait for all of them together, in seconds (MySQL and MariaDB count whole
            seconds); ``None`` waits, ``0`` tries once.
        :return: a context manager; ``as held`` gives a :class:`Held`. It decorates functions, too: each call then has a
            block of its own.
        :raises LockTimeout: when they were not free in time; its ``holders`` are those who had them, where the engine
            tells it, and unless it was a try (``timeout=0``).
        :raises ReentryError: when this thread or task holds one of them already (on SQLite: any lock).
        :raises LockLost: at the end of the block, when the connection died inside it and nothing was committed.

        Of the threads or tasks of this process that want the same first key, one waits on a connection, and the others
        in memory, in turn.

        >>> with locks.exclusive("invoice:42", timeout=5) as held:
        ...     held.session.add(Payment(invoice=42))
        >>> @locks.exclusive("report")
        ... def report() -> None: ...
        """
        return ExclusiveBlock(self, names, False, timeout)

    def shared(self, *names: Name, timeout: float | timedelta | None = None) -> ExclusiveBlock:
        """Hold keys together with other sharers while the block runs. Everything else as :meth:`exclusive`.

        Each sharer waits on a connection of its own.

        >>> with locks.shared("prices"):
        ...     read_prices()
        """
        return ExclusiveBlock(self, names, True, timeout)

    @overload
    def run(self, operation: RowsOperation[tuple[T]]) -> list[T]: ...
    @overload
    def run(self, operation: RowsOperation[T]) -> list[T]: ...
    @overload
    def run(self, operation: ValueOperation[tuple[T]]) -> T | None: ...
    @overload
    def run(self, operation: ValueOperation[T]) -> T | None: ...
    def run(self, operation: Any) -> Any:
        """Run one operation in a short transaction of its own, retried on transient errors.

        :param operation: any operation whose effect outlives its transaction.
        :return: what ``session.scalar`` would return for it. For one that gives rows, a list: of values or entities
            (detached), as ``session.scalars`` gives them, or of rows where a row is more than that.
        :raises Unsupported: for a lock, which would be gone when this returns: use :meth:`exclusive` or a session.

        >>> locks.run(sl.lock.vacuum())
        0
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
            except OutcomeUnknown as error:
                if not operation._body.writes and error.__cause__ is not None:
                    raise error.__cause__ from None  # there was nothing to be done
                options["locks_again"] = True
                raise
            except _NEVER_DONE:
                raise  # an earlier try has met with the same
            except Exception as error:
                if "locks_again" not in options:
                    raise
                # whatever this try met with, an earlier one may have been carried out
                raise OutcomeUnknown(
                    f"{operation.name}: an answer was lost, and the next try failed: it was done, or it was not"
                ) from error

        def told(error: BaseException, count: int) -> None:
            self._tell("retried", operation.name, (), error=error, count=count)

        return retried(attempt, self._engine, self._sleep, repeatable=repeatable, told=told)

    def _run_once(self, operation: Operation[Any], options: Mapping[str, Any], repeatable: bool) -> Any:
        engine = self._engine
        given = operation.get_execution_options()
        every: Mapping[str, Any] = {**engine.get_execution_options(), **given} if given else engine._execution_options
        context = build_context(engine.dialect, every)
        # entities come of a session
        entity = isinstance(operation, RowsOperation) and operation._propagate_attrs["plugin_subject"] is not None
        whole = entity or options["locks_short"]
        within, wait = every.get("locks_checkout"), every.get("locks_wait")
        wait, began = None if wait is None else seconds(wait, "locks_wait"), time.monotonic()
        if not whole and operation._body.statement(context) is not None:
            bounded = wait is not None and not operation._body.sends_wait
            with self._connected(0 if repeatable else _DEAD, within) as connection:
                if context.backend.allows_autocommit(connection, bounded):
                    return run_one(connection, operation, options, wait)
        short = ShortTransaction(self._engine)
        try:
            short.open(writes=operation._body.writes, wait=0 if operation._body.impatient else wait, within=within)
        except PoolTimeout:
            raise
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
        try:
            short.commit(None if wait is None else max(0.0, wait - (time.monotonic() - began)))
        except LockLost as error:
            if isinstance(error, OutcomeUnknown):
                raise
            raise NotCommitted(str(error)) from error
        return value

    @contextlib.contextmanager
    def _connected(self, dead: int, within: float | None) -> Iterator[Connection]:
        """A connection of the pool; so many are replaced that the server has closed, as far as that is known."""
        while True:
            with connected(self._engine, within) as connection:
                if not dead or not backend_for(connection.dialect).server_closed(connection):
                    yield connection
                    return
                connection.invalidate()  # nothing was sent yet, and so nothing is lost
            dead -= 1

    def _rows(self, short: ShortTransaction, operation: Operation[Any], options: Mapping[str, Any]) -> list[Any]:
        held = Held(short, lambda **named: self._session_maker(**named, expire_on_commit=False))
        found = listed(held.session.execute(operation, execution_options=options))
        held.session.commit()
        held.session.expunge_all()
        held.session.close()
        return found

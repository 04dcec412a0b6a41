"""``Locks``: the ready-made locks. It opens transactions, waits, retries and cleans up; it contains no SQL.

``AsyncLocks`` (``async_locks.py``) runs the same code in SQLAlchemy's greenlet, and awaits it.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from sqlalchemy import Engine

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.core.operation import (
    RowsOperation,
    ValueOperation,
    fresh_nonce,
)
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.connections import one_for_all
from sqlalchemy_locks.errors import (
    UnknownTask,
    Unsupported,
)
from sqlalchemy_locks.facade.exclusive import ExclusiveBlock, LockHost, Name
from sqlalchemy_locks.facade.maintenance import Maintained
from sqlalchemy_locks.facade.mutexes import Mutexes
from sqlalchemy_locks.facade.run import OperationRunner
from sqlalchemy_locks.facade.semaphores import SemaphoreMethods
from sqlalchemy_locks.runtime.decorators import when_due
from sqlalchemy_locks.runtime.retry import Sleep, sleep_for

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, sessionmaker

T = TypeVar("T")
P = ParamSpec("P")


class Locks(SemaphoreMethods, Maintained, LockHost):
    """Locks that open their own transactions, on the engine that the app already has.

    :param bind: an ``Engine``, or a ``sessionmaker`` bound to one: its class and options are then those of
        ``held.session``.
    :param owner: stored with what is acquired; by default made of the host, the process and a nonce.

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
                f"Locks can't work with a {type(engine.pool).__name__}, which shares one connection, and so one "
                "transaction, between checkouts: use another pool, and on SQLite a file instead of :memory:"
            )
        self._engine = engine
        self._session_maker: Callable[..., Session] = maker
        self._sleep: Sleep = sleep_for(engine)
        self._sets_isolation = False
        self._owner = None if owner is None else valid_name(owner, "an owner")
        self._nonce = secrets.token_hex(4)
        #: the process of the last call of ``owner``, and the name for it
        self._process = 0, ""
        #: runs one operation in a transaction of its own
        self._run = OperationRunner(engine, maker, self._sleep, self._tell_retry).run
        self._mutex = Mutexes(self._run, lambda: self.owner, on_event=self._tell)

    @property
    def owner(self) -> str:
        """The owner that is stored with what is acquired."""
        if self._owner is not None:
            return self._owner
        process, name = self._process
        if process != os.getpid():  # a fork is another process
            process = os.getpid()
            name = f"{socket.gethostname()[:200]}:{process}:{self._nonce}"
            self._process = process, name
        return name

    @property
    def engine_name(self) -> str:
        """The engine's name in error messages and events."""
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
        """Hold keys exclusively while the block runs; a transaction holds them, and the block's end commits it.

        :param names: one or more keys, as :func:`sqlalchemy_locks.lock.exclusive` takes them; every block acquires them
            in the same order, so that two can't deadlock.
        :param timeout: the longest wait for all of them together, in seconds or as a ``timedelta`` (MySQL and MariaDB
            count whole seconds); ``None`` for no limit, ``0`` for a single attempt.
        :return: a context manager; ``as held`` gives a :class:`Held`. It decorates functions, too: each call then has a
            block of its own.
        :raises LockTimeout: when they could not be acquired in time; its ``holders`` are those of the keys, where the
            engine lists them, unless ``timeout`` is 0. :raises PoolTimeout: when no pooled connection was free in time.
        :raises ReentryError: when this thread or task holds one of them already (on SQLite: any lock).
        :raises LockLost: at the end of the block, when its transaction failed or ended inside it, or the connection
            died, so that nothing is committed.
        :raises OutcomeUnknown: at the end of the block, when the connection died during COMMIT.

        Of the threads or tasks of this process that want the same first key, one waits on a connection, and the others
        in memory, in FIFO order.

        >>> with locks.exclusive("invoice:42", timeout=5) as held:
        ...     held.session.add(Payment(invoice=42))
        >>> @locks.exclusive("report")
        ... def report() -> None: ...
        """
        return ExclusiveBlock(self, names, False, timeout)

    def shared(self, *names: Name, timeout: float | timedelta | None = None) -> ExclusiveBlock:
        """Hold keys together with other sharers while the block runs. All else as :meth:`exclusive`.

        Each sharer waits on a connection of its own.

        >>> with locks.shared("prices"):
        ...     read_prices()
        """
        return ExclusiveBlock(self, names, True, timeout)

    def _tell_retry(self, operation: str, error: BaseException, count: int) -> None:
        self._tell("retried", operation, (), error=error, count=count)

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
            (detached), as ``session.scalars`` gives them, or of rows of more than one value.
        :raises Unsupported: for a lock, which would be released when this returns: use :meth:`exclusive` or a session.
        :raises OutcomeUnknown: when the connection died, the operation can't be repeated, or no retry succeeded.

        >>> locks.run(sl.lock.vacuum())
        0
        """
        body = operation._body
        if body.held_by is not None:
            raise Unsupported(
                f"{body.name} ends with its {body.held_by}, so run() would release the lock when it returns: use "
                "locks.exclusive() or locks.shared(), or execute it in a transaction of your own"
            )
        return self._run(operation, fresh_nonce())

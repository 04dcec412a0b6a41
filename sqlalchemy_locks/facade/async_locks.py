"""``AsyncLocks``: ``Locks``, awaited.

Each method runs its synchronous twin in a greenlet (SQLAlchemy's ``greenlet_spawn``), where the drivers' waits become
``await``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

try:
    importlib.import_module("greenlet")
except ImportError as error:
    raise ImportError(
        "AsyncLocks need greenlet, which is not installed: the extra of each async driver brings it, e.g. pip install "
        "'sqlalchemy-locks[asyncpg]', [aiomysql] or [sqlite-async], and so does [fastapi]"
    ) from error

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn

from sqlalchemy_locks._validation import bounded_seconds
from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.core.operation import RowsOperation
from sqlalchemy_locks.core.transaction import IN_BLOCK
from sqlalchemy_locks.core.typing import ValueOperation
from sqlalchemy_locks.facade.async_lease import AsyncLeaseContext
from sqlalchemy_locks.facade.exclusive import Held, KeyBlock, Name
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.facade.maintenance import AsyncMaintenance
from sqlalchemy_locks.facade.mutexes import Mutexes
from sqlalchemy_locks.facade.sweep import DAY, Alive, check_alive
from sqlalchemy_locks.runtime.decorators import check_coroutine, in_async_block, refuse_truth
from sqlalchemy_locks.values import Grant, Released, Report

T = TypeVar("T")
P = ParamSpec("P")


AsyncAlive = Callable[[list[str]], Awaitable[Iterable[str]]]


def awaited(alive: Alive | AsyncAlive | None) -> Alive | None:
    """Return a plain function that calls ``alive``, and awaits it in the greenlet if it is a coroutine."""
    check_alive(alive)
    if alive is None:
        return None

    def ask(owners: list[str]) -> Iterable[str]:
        answer: Any = alive(owners)
        return await_only(answer) if inspect.isawaitable(answer) else answer

    return ask


class AsyncLocks:
    """As :class:`~sqlalchemy_locks.Locks`, with the same names, awaited.

    :param bind: an ``AsyncEngine``, or an ``async_sessionmaker`` bound to one.
    :param owner: as for ``Locks``.

    >>> locks = sl.AsyncLocks(async_engine)
    >>> async with locks.exclusive("invoice:42", timeout=5) as held:
    ...     held.session.add(Payment(invoice=42))
    """

    def __init__(self, bind: AsyncEngine | async_sessionmaker[Any], *, owner: str | None = None) -> None:
        maker = bind if isinstance(bind, async_sessionmaker) else async_sessionmaker(bind)
        engine = maker.kw.get("bind")
        if not isinstance(engine, AsyncEngine):
            raise TypeError(
                "AsyncLocks takes an AsyncEngine, or an async_sessionmaker bound to one (Locks an Engine), not "
                f"{type(bind).__name__}"
            )
        self._engine = engine
        self._session_maker = maker
        # the sync sessions inside the maker's async sessions, with the same class, options and listeners
        options = {key: value for key, value in maker.kw.items() if key not in ("bind", "binds", "sync_session_class")}
        session_class = maker.kw.get("sync_session_class") or maker.class_.sync_session_class
        self._sync = Locks(sessionmaker(engine.sync_engine, class_=session_class, **options), owner=owner)

    @property
    def owner(self) -> str:
        """As :attr:`sqlalchemy_locks.Locks.owner`."""
        return self._sync.owner

    @property
    def mutex(self) -> AsyncMutexes:
        """As :attr:`sqlalchemy_locks.Locks.mutex`."""
        return AsyncMutexes(self._sync.mutex)

    def mutexes(self, mutex: Mutex) -> AsyncMutexes:
        """As :meth:`sqlalchemy_locks.Locks.mutexes`."""
        return AsyncMutexes(self._sync.mutexes(mutex))

    @property
    def dispatch(self) -> Any:
        """The listeners to :class:`~sqlalchemy_locks.runtime.events.LockEvents`."""
        return self._sync.dispatch

    @property
    def engine_name(self) -> str:
        """As :attr:`sqlalchemy_locks.Locks.engine_name`."""
        return self._sync.engine_name

    async def once_per(
        self,
        name: str,
        *,
        every: float | timedelta,
        windowed: bool = False,
        tz: str | None = None,
        queue: str | None = None,
    ) -> bool:
        """As :meth:`sqlalchemy_locks.Locks.once_per`.

        >>> if await locks.once_per("hourly-report", every=3600, windowed=True):
        ...     await send_report()
        """
        return await greenlet_spawn(self._sync.once_per, name, every=every, windowed=windowed, tz=tz, queue=queue)

    def scheduled(
        self,
        name: str,
        *,
        every: float | timedelta,
        windowed: bool = False,
        tz: str | None = None,
        queue: str | None = None,
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Coroutine[Any, Any, T | None]]]:
        """As :meth:`sqlalchemy_locks.Locks.scheduled`, for coroutine functions.

        >>> @locks.scheduled("daily-report", every=86400, windowed=True)
        ... async def send_daily_report() -> None: ...
        """
        what = f"scheduled({name!r})"
        Timeout(every=every, windowed=windowed, tz=tz).acquire(name, queue=queue)  # refuses bad input before any call

        def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T | None]]:
            check_coroutine(function, what)

            @functools.wraps(function)
            async def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
                due = await self.once_per(name, every=every, windowed=windowed, tz=tz, queue=queue)
                return await function(*args, **kwargs) if due else None

            return run

        return decorate

    async def acquire(
        self,
        permits: Mapping[str, int],
        *,
        external_id: str | None = None,
        owner: str | None = None,
        ttl: float | timedelta | None = None,
        timeout: float | timedelta | None = None,
    ) -> Grant:
        """As :meth:`sqlalchemy_locks.Locks.acquire`."""
        return await greenlet_spawn(
            self._sync.acquire, permits, external_id=external_id, owner=owner, ttl=ttl, timeout=timeout
        )

    async def release(self, external_id: str | Grant) -> Released:
        """As :meth:`sqlalchemy_locks.Locks.release`."""
        return await greenlet_spawn(self._sync.release, external_id)

    async def renew(self, external_id: str | Grant) -> bool:
        """As :meth:`sqlalchemy_locks.Locks.renew`."""
        return await greenlet_spawn(self._sync.renew, external_id)

    def semaphore(
        self,
        permits: str | Mapping[str, int],
        *,
        count: int | None = None,
        ttl: float | timedelta = 60,
        timeout: float | timedelta | None = None,
        external_id: str | None = None,
        owner: str | None = None,
    ) -> AsyncLeaseContext:
        """As :meth:`sqlalchemy_locks.Locks.semaphore`, for ``async with``; ``check`` and ``lost.wait`` are awaited."""
        return AsyncLeaseContext(
            self._sync.semaphore(permits, count=count, ttl=ttl, timeout=timeout, external_id=external_id, owner=owner)
        )

    def lease(
        self, name: str, *, ttl: float | timedelta = 60, timeout: float | timedelta | None = None
    ) -> AsyncLeaseContext:
        """As :meth:`sqlalchemy_locks.Locks.lease`, for ``async with``."""
        return AsyncLeaseContext(self._sync.lease(name, ttl=ttl, timeout=timeout))

    async def sweep(
        self, *, stale_after: float | timedelta | None = DAY, alive: Alive | AsyncAlive | None = None
    ) -> int:
        """As :meth:`sqlalchemy_locks.Locks.sweep`; ``alive`` may be a coroutine function."""
        return await greenlet_spawn(self._sync.sweep, stale_after=stale_after, alive=awaited(alive))

    async def maintain(self, *, alive: Alive | AsyncAlive | None = None) -> Report:
        """As :meth:`sqlalchemy_locks.Locks.maintain`; ``alive`` may be a coroutine function."""
        return await greenlet_spawn(self._sync.maintain, alive=awaited(alive))

    def maintenance(
        self, *, alive: Alive | AsyncAlive | None = None, every: float | timedelta = 60
    ) -> AsyncMaintenance:
        """As :meth:`sqlalchemy_locks.Locks.maintenance`, for ``async with``."""
        return AsyncMaintenance(lambda: self.maintain(alive=alive), bounded_seconds(every, "every", zero=False))

    def exclusive(self, *names: Name, timeout: float | timedelta | None = None) -> AsyncKeyBlock:
        """As :meth:`sqlalchemy_locks.Locks.exclusive`, for ``async with``."""
        return AsyncKeyBlock(self, self._sync.exclusive(*names, timeout=timeout))

    def shared(self, *names: Name, timeout: float | timedelta | None = None) -> AsyncKeyBlock:
        """As :meth:`sqlalchemy_locks.Locks.shared`, for ``async with``."""
        return AsyncKeyBlock(self, self._sync.shared(*names, timeout=timeout))

    @overload
    async def run(self, operation: RowsOperation[tuple[T]]) -> list[T]: ...
    @overload
    async def run(self, operation: RowsOperation[T]) -> list[T]: ...
    @overload
    async def run(self, operation: ValueOperation[tuple[T]]) -> T | None: ...
    @overload
    async def run(self, operation: ValueOperation[T]) -> T | None: ...
    async def run(self, operation: Any) -> Any:
        """As :meth:`sqlalchemy_locks.Locks.run`."""
        return await greenlet_spawn(self._sync.run, operation)


class AsyncMutexes:
    """As :class:`sqlalchemy_locks.facade.mutexes.Mutexes`, awaited."""

    def __init__(self, mutexes: Mutexes) -> None:
        self._mutexes = mutexes

    async def acquire(self, id: Any, *, queue: Any = None, owner: str | None = None) -> bool:
        """As ``Mutexes.acquire``."""
        return await greenlet_spawn(self._mutexes.acquire, id, queue=queue, owner=owner)

    async def acquire_token(self, id: Any, *, queue: Any = None, owner: str | None = None) -> int | None:
        """As ``Mutexes.acquire_token``."""
        return await greenlet_spawn(self._mutexes.acquire_token, id, queue=queue, owner=owner)

    async def release(self, id: Any, *, queue: Any = None, owner: str | None = None) -> bool:
        """As ``Mutexes.release``."""
        return await greenlet_spawn(self._mutexes.release, id, queue=queue, owner=owner)


class AsyncHeld:
    """As :class:`sqlalchemy_locks.facade.exclusive.Held`, awaited."""

    def __init__(self, held: Held, locks: AsyncLocks) -> None:
        self._held = held
        self._locks = locks
        self._session: AsyncSession | None = None

    @property
    def session(self) -> AsyncSession:
        """An ``AsyncSession`` in the transaction that holds the lock; see ``Held.session``."""
        if self._session is None:
            connection = AsyncConnection(self._locks._engine, self._held._short.connection)
            session: AsyncSession = self._locks._session_maker(bind=connection, **IN_BLOCK)
            self._held._bind_session(session.sync_session)
            self._session = session
        return self._session

    @property
    def lost(self) -> bool:
        """As ``Held.lost``."""
        return self._held.lost

    async def check(self) -> None:
        """As ``Held.check``."""
        await greenlet_spawn(self._held.check)


class AsyncKeyBlock:
    """The context manager of :meth:`AsyncLocks.exclusive` and :meth:`AsyncLocks.shared`; a decorator, too.

    >>> @locks.exclusive("report")
    ... async def report() -> None: ...
    """

    def __init__(self, locks: AsyncLocks, block: KeyBlock) -> None:
        self._locks = locks
        self._block = block

    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        return in_async_block(
            function, self._block.display_name, lambda: AsyncKeyBlock(self._locks, self._block.copy())
        )

    __bool__ = refuse_truth

    async def __aenter__(self) -> AsyncHeld:
        return AsyncHeld(await greenlet_spawn(self._block.__enter__), self._locks)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await greenlet_spawn(self._block.__exit__, kind, error, trace)

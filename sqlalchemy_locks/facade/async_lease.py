"""Leases of ``AsyncLocks``: the blocks of ``lease.py``, awaited, and renewed by one task of their event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from sqlalchemy.util import greenlet_spawn

from sqlalchemy_locks.core.asyncio_waits import wait_for_future
from sqlalchemy_locks.errors import ReentryError
from sqlalchemy_locks.facade.lease import GrantView, LeaseContext
from sqlalchemy_locks.runtime.decorators import in_async_block, refuse_truth
from sqlalchemy_locks.runtime.renewal import LostEvent, RenewableLease, RenewalTask
from sqlalchemy_locks.values import Grant

T = TypeVar("T")
P = ParamSpec("P")


class AsyncLostEvent:
    """As :class:`LostEvent`, waited for by tasks."""

    def __init__(self, lost: LostEvent) -> None:
        self._lost = lost
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lost.on_set = self._notify

    def _notify(self) -> None:
        # it may be set in another thread, and the loop may be closed
        with contextlib.suppress(RuntimeError):
            self._future.get_loop().call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def is_set(self) -> bool:
        """As ``LostEvent.is_set``."""
        return self._lost.is_set()

    __bool__ = is_set

    async def wait(self, timeout: float | timedelta | None = None) -> bool:
        """As ``LostEvent.wait``."""
        for seconds in self._lost._waits(timeout):
            await wait_for_future(self._future, seconds)
        return self.is_set()

    def __repr__(self) -> str:
        return repr(self._lost)


class AsyncLease(GrantView):
    """As :class:`~sqlalchemy_locks.facade.lease.Lease`.

    >>> async with locks.lease("nightly-import", ttl=60) as grant:
    ...     await grant.check()
    """

    def __init__(self, grant: Grant, lost: LostEvent, check: Callable[[], Awaitable[None]]) -> None:
        super().__init__(grant)
        #: as ``Lease.lost``
        self.lost = AsyncLostEvent(lost)
        self._check = check

    async def check(self) -> None:
        """As ``Lease.check``."""
        await self._check()


class AsyncLeaseContext:
    """The context manager of ``AsyncLocks.semaphore`` and ``AsyncLocks.lease``; a decorator, too.

    >>> @locks.lease("nightly-import")
    ... async def nightly_import() -> None: ...
    """

    def __init__(self, context: LeaseContext) -> None:
        self._context = context
        self._entered: tuple[RenewalTask, RenewableLease] | None = None

    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        decorated = in_async_block(
            function, self._context.display_name, lambda: AsyncLeaseContext(self._context.copy())
        )
        self._context.copy()  # refuses a block that can't be used again
        return decorated

    __bool__ = refuse_truth

    async def __aenter__(self) -> AsyncLease:
        grant, renewable = await greenlet_spawn(self._context.enter)
        timer = self._context.timers.task()
        timer.add(renewable)
        self._entered = timer, renewable
        return AsyncLease(grant, renewable.lost, lambda: greenlet_spawn(self._context.check))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered is None:
            raise ReentryError("this block is not entered")
        (timer, renewable), self._entered = self._entered, None
        try:
            await timer.remove(renewable)
        finally:
            await greenlet_spawn(self._context.leave, error)

"""How leases are renewed: a thread, or a task of an event loop, over a pool beside the app's, which may be used up.

There is none when nothing is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections.abc import Callable, Mapping

from sqlalchemy.util import greenlet_spawn

from sqlalchemy_locks.core.side_pool import SidePool
from sqlalchemy_locks.facade.host import LockHost
from sqlalchemy_locks.runtime.renewal import RenewableLease, RenewalSchedule, clock
from sqlalchemy_locks.semaphore.renew_batch import renew_batch
from sqlalchemy_locks.values import Grant

THREAD_NAME = "sqlalchemy_locks.renewal"
#: the longest wait of the last block's end for a renewal that is under way, in seconds: cancelled, it would cost a
#: connection
_RENEWAL_END = 1.0


class LeaseRenewer:
    """Renews the leases of one timer, each batch in a short transaction."""

    def __init__(self, locks: LockHost) -> None:
        self._locks = locks
        self._pool: SidePool | None = None

    def renew_batch(self, grants: list[Grant]) -> Mapping[str, bool]:
        """Renew those that are held; see :class:`RenewalSchedule`."""
        if self._pool is None:
            self._pool = SidePool(self._locks._engine)
        held: Mapping[str, bool] = self._locks._runner(self._pool.connect).run(renew_batch(grants), short=True)
        return held

    def take_pool(self) -> SidePool | None:
        """Return the pool of its connections, to be disposed of: the next renewal makes another one."""
        pool, self._pool = self._pool, None
        return pool


class RenewalThread:
    """The thread that renews the leases of one ``Locks``, in one process."""

    def __init__(self, renewer: LeaseRenewer) -> None:
        self.process = os.getpid()
        self.schedule = RenewalSchedule(renewer.renew_batch)
        self._renewer = renewer
        self._changed = threading.Condition()
        self._runs = False
        #: when the thread looks again, by :func:`clock`
        self._wakes_at = math.inf

    def add(self, lease: RenewableLease) -> None:
        """Renew a lease from now on."""
        with self._changed:
            self.schedule.add(lease)
            if not self._runs:
                threading.Thread(target=self._work, name=THREAD_NAME, daemon=True).start()
                self._runs = True
            elif lease.due < self._wakes_at:
                self._changed.notify()

    def remove(self, lease: RenewableLease) -> None:
        """Stop renewing a lease; a renewal under way is not waited for."""
        with self._changed:
            self.schedule.remove(lease)
            if not self.schedule.leases:
                self._changed.notify()

    def wake(self) -> None:
        """Have the thread look again when the next renewal is due."""
        with self._changed:
            self._changed.notify()

    def _work(self) -> None:
        try:
            while self._wait():
                self.schedule.renew_due()
        except BaseException:
            with self._changed:
                self._runs = False
            raise
        finally:
            self._release_pool()

    def _wait(self) -> bool:
        """Wait for the next renewal; ``False`` when there is nothing to renew."""
        with self._changed:
            while pause := self.schedule.pause():
                self._wakes_at = clock() + pause
                self._changed.wait(min(pause, threading.TIMEOUT_MAX))
            self._wakes_at = -math.inf
            self._runs = pause is not None
            return self._runs

    def _release_pool(self) -> None:
        """Dispose of the pool, unless another thread has begun to use it."""
        with self._changed:
            pool = None if self._runs else self._renewer.take_pool()
        if pool is not None:
            pool.dispose()


class RenewalTask:
    """The task that renews the leases of one ``AsyncLocks``, in one event loop.

    :param on_end: called when it has ended: it is not used again.
    """

    def __init__(self, renewer: LeaseRenewer, on_end: Callable[[], object]) -> None:
        self.schedule = RenewalSchedule(renewer.renew_batch)
        self._renewer, self._on_end = renewer, on_end
        self._changed = asyncio.Event()
        #: the task has ended, or has leases to renew again
        self._settled = asyncio.Event()
        self._wakes_at = math.inf
        self._task = asyncio.create_task(self._work())

    def add(self, lease: RenewableLease) -> None:
        """Renew a lease from now on."""
        self.schedule.add(lease)
        self._settled.set()
        if lease.due < self._wakes_at:
            self._changed.set()

    async def remove(self, lease: RenewableLease) -> None:
        """Stop renewing a lease; after the last one, wait until the task has ended."""
        self.schedule.remove(lease)
        if self.schedule.leases:
            return
        self._changed.set()
        self._settled.clear()
        if self._task.done():
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._settled.wait(), _RENEWAL_END)
        if not (self.schedule.leases or self._task.done()):
            await self._cancel()

    async def _work(self) -> None:
        try:
            while True:
                pause = self.schedule.pause()
                if pause is None:
                    await self._release_pool()
                    if not self.schedule.leases:
                        return
                elif pause:
                    await self._wait(pause)
                else:
                    await greenlet_spawn(self.schedule.renew_due)
        finally:
            self._on_end()
            self._settled.set()

    async def _wait(self, pause: float) -> None:
        """Wait for the next renewal, or until something has changed."""
        self._wakes_at = clock() + pause
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), pause)
        self._wakes_at = -math.inf

    async def _release_pool(self) -> None:
        pool = self._renewer.take_pool()
        if pool is not None:
            await greenlet_spawn(pool.dispose)

    async def _cancel(self) -> None:
        self._on_end()  # a block that is entered meanwhile needs a task that goes on
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._release_pool()


class LeaseTimers:
    """The timers of one ``Locks``: a thread in each process, a task in each event loop."""

    def __init__(self, locks: LockHost) -> None:
        self._locks = locks
        self._thread = RenewalThread(LeaseRenewer(locks))
        self._tasks: dict[asyncio.AbstractEventLoop, RenewalTask] = {}

    @property
    def thread(self) -> RenewalThread:
        """The thread of this process; a forked one doesn't renew what its parent holds."""
        if self._thread.process != os.getpid():
            self._thread = RenewalThread(LeaseRenewer(self._locks))
        return self._thread

    def task(self) -> RenewalTask:
        """Return the task of the running event loop."""
        loop = asyncio.get_running_loop()
        task = self._tasks.get(loop)
        if task is None:
            task = self._tasks[loop] = RenewalTask(LeaseRenewer(self._locks), lambda: self._forget(loop, task))
        return task

    def _forget(self, loop: asyncio.AbstractEventLoop, task: RenewalTask | None) -> None:
        if self._tasks.get(loop) is task:
            del self._tasks[loop]

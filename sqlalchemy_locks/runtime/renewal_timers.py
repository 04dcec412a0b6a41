"""The timers that renew leases: a thread, or a task of an event loop. There is none when nothing is held.

Rows that others have locked are waited for in a second thread or task, so that they hold up nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections.abc import Callable

from sqlalchemy.util import greenlet_spawn

from sqlalchemy_locks.runtime.renewal import RenewableLease, RenewalSchedule, Renewer, clock

THREAD_NAME = "sqlalchemy_locks.renewal"
#: the longest wait of the last block's end for a renewal that is under way, in seconds: cancelled, it would cost a
#: connection
_RENEWAL_END = 1.0


class RenewalThread:
    """The thread that renews the leases of one ``Locks``, in one process."""

    def __init__(self, renewer: Renewer) -> None:
        self.process = os.getpid()
        self.schedule = RenewalSchedule(renewer)
        self._renewer = renewer
        self._changed = threading.Condition()
        self._runs = self._renews_passed_over = False
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
                self._begin_passed_over()
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

    def _begin_passed_over(self) -> None:
        with self._changed:
            if self._renews_passed_over or not self.schedule.passed_over():
                return
            self._renews_passed_over = True
        try:
            threading.Thread(target=self._work_on_passed_over, name=THREAD_NAME, daemon=True).start()
        except RuntimeError:  # the system refuses more threads
            self._renews_passed_over = False
            self.schedule.postpone_passed_over()

    def _work_on_passed_over(self) -> None:
        try:
            while self._is_wanted_for_passed_over():
                self.schedule.renew_passed_over()
                self.wake()
        except BaseException:
            self._renews_passed_over = False
            raise
        finally:
            self._release_pool()

    def _is_wanted_for_passed_over(self) -> bool:
        with self._changed:  # a batch that passes over another lease afterwards starts another thread
            self._renews_passed_over = self.schedule.passed_over()
            return self._renews_passed_over

    def _release_pool(self) -> None:
        """Dispose of the pool when no thread uses it."""
        with self._changed:
            in_use = self._runs or self._renews_passed_over
            pool = None if in_use else self._renewer.take_pool()
        if pool is not None:
            pool.dispose()


class RenewalTask:
    """The task that renews the leases of one ``AsyncLocks``, in one event loop.

    :param on_end: called when it has ended: it is not used again.
    """

    def __init__(self, renewer: Renewer, on_end: Callable[[], object]) -> None:
        self.schedule = RenewalSchedule(renewer)
        self._renewer, self._on_end = renewer, on_end
        self._changed = asyncio.Event()
        #: the task has ended, or has leases to renew again
        self._settled = asyncio.Event()
        self._wakes_at = math.inf
        self._passed_over: asyncio.Task[None] | None = None
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
                if pause is None and self._passed_over is None:
                    await self._release_pool()
                    if self.schedule.leases:
                        continue
                    return
                if pause != 0:
                    await self._wait(pause)
                    continue
                await greenlet_spawn(self.schedule.renew_due)
                if self._passed_over is None and self.schedule.passed_over():
                    self._passed_over = asyncio.create_task(self._work_on_passed_over())
        finally:
            self._on_end()
            self._settled.set()

    async def _wait(self, pause: float | None) -> None:
        """Wait for the next renewal, or until something has changed."""
        self._wakes_at = math.inf if pause is None else clock() + pause
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), None if pause == math.inf else pause)
        self._wakes_at = -math.inf

    async def _work_on_passed_over(self) -> None:
        try:
            while await greenlet_spawn(self.schedule.renew_passed_over):
                self._changed.set()
        finally:
            self._passed_over = None
            self._changed.set()

    async def _release_pool(self) -> None:
        pool = self._renewer.take_pool()
        if pool is not None:
            await greenlet_spawn(pool.dispose)

    async def _cancel(self) -> None:
        self._on_end()  # a block that is entered meanwhile needs a task that goes on
        for task in (self._passed_over, self._task):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        await self._release_pool()

"""How leases are renewed in the database: over a pool beside the app's, which handlers may use up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from sqlalchemy_locks.core.side_pool import SidePool
from sqlalchemy_locks.facade.host import LockHost
from sqlalchemy_locks.runtime.renewal_timers import RenewalTask, RenewalThread
from sqlalchemy_locks.semaphore.renew_batch import renew_batch
from sqlalchemy_locks.values import Grant


class LeaseRenewer:
    """Renews the leases of one timer, each batch in a short transaction."""

    def __init__(self, locks: LockHost) -> None:
        self._locks = locks
        self._pool: SidePool | None = None

    def renew_batch(self, grants: list[Grant]) -> Mapping[str, bool]:
        """Renew those that are held; see :class:`~sqlalchemy_locks.runtime.renewal.Renewer`."""
        if self._pool is None:
            self._pool = SidePool(self._locks._engine)
        held: Mapping[str, bool] = self._locks._runner(self._pool.connect).run(renew_batch(grants), short=True)
        return held

    def take_pool(self) -> SidePool | None:
        """Return the pool of its connections, to be disposed of: the next renewal makes another one."""
        pool, self._pool = self._pool, None
        return pool


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

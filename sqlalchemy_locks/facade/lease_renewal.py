"""How leases are renewed in the database: over a pool beside the app's, which handlers may use up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from typing import Any

from sqlalchemy_locks import semaphore
from sqlalchemy_locks.core.operation import Operation
from sqlalchemy_locks.core.side_pool import SidePool
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.facade.host import ROW_TIMEOUT, LockHost
from sqlalchemy_locks.facade.run import OperationRunner
from sqlalchemy_locks.runtime.renewal_timers import RenewalTask, RenewalThread
from sqlalchemy_locks.semaphore.renew_batch import renew_batch
from sqlalchemy_locks.values import Grant

#: the longest wait for the row of one lease, as a part of its time to live
_ROW_WAIT = 1 / 24


class LeaseRenewer:
    """Renews the leases of one timer, each time in a short transaction."""

    def __init__(self, locks: LockHost) -> None:
        self._locks = locks
        self._pool: SidePool | None = None
        self._runner: OperationRunner | None = None

    def renew_batch(self, grants: list[Grant]) -> Collection[str]:
        """Return the tokens of those that were renewed; the others are locked, or not held."""
        renewed: Collection[str] = self._run(renew_batch(grants), None)
        return renewed

    def renew_alone(self, grant: Grant, ttl: float) -> bool:
        """Return whether a grant is held, and so was renewed; wait for its row, but not for long."""
        one_writer = backend_for(self._locks._engine.dialect).single_writer
        return bool(self._run(semaphore.renew(grant), ROW_TIMEOUT if one_writer else min(ROW_TIMEOUT, ttl * _ROW_WAIT)))

    def take_pool(self) -> SidePool | None:
        """Return the pool of its connections, to be disposed of: the next renewal makes another one."""
        pool, self._pool, self._runner = self._pool, None, None
        return pool

    def _run(self, operation: Operation[Any], wait: float | None) -> Any:
        if self._pool is None or self._runner is None:
            self._pool = SidePool(self._locks._engine)
            self._runner = self._locks._runner(self._pool.connect)
        return self._runner.run(operation, short=True, wait=wait)


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

"""Maintenance: the sweeps and clean-ups that are due, each run by one process of a fleet.

Each task has a period, which a ``Timeout`` of the shipped table guards: the first process that asks in a period runs
the task, and the others skip it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from sqlalchemy_locks import lock, semaphore
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.core.asyncio_waits import wait_for_event
from sqlalchemy_locks.core.operation import Operation, cluster_behind
from sqlalchemy_locks.errors import LockError, NotInstalled, ReentryError
from sqlalchemy_locks.facade.host import LockHost
from sqlalchemy_locks.facade.sweep import DAY, Alive, check_alive, sweep
from sqlalchemy_locks.values import Report

#: the queue of the timeouts that guard the tasks
QUEUE = "sqlalchemy_locks.maintenance"
_log = logging.getLogger("sqlalchemy_locks")


class MaintenanceTask(NamedTuple):
    """A task that runs once in each period; ``run`` returns how many rows it has handled.

    :param every: the period, in seconds.
    """

    name: str
    every: float
    run: Callable[[LockHost, Alive | None], int]


def _until_none(make: Callable[[], Operation[Any]]) -> Callable[[LockHost, Alive | None], int]:
    """Return a clean-up that runs an operation until its batch is empty.

    :param make: makes the operation when it is due.
    """

    def run(locks: LockHost, alive: Alive | None) -> int:
        operation, done = make(), 0
        while removed := locks._run(operation):
            done += removed
        return done

    return run


def _expire_tasks() -> Operation[Any]:
    from sqlalchemy_locks.captures.state_transition import StateTransition  # not loaded before it is needed

    return StateTransition().expire()


TASKS = (
    MaintenanceTask("tasks", 60, _until_none(_expire_tasks)),
    MaintenanceTask("orphans", 300, lambda locks, alive: sweep(locks, DAY, alive)),
    MaintenanceTask("requests", 4 * 3600, _until_none(lambda: semaphore.clean(older_than=7 * DAY))),
    MaintenanceTask("leases", DAY, _until_none(lambda: semaphore.clean_leases(older_than=7 * DAY))),
    MaintenanceTask("history", DAY, _until_none(lambda: semaphore.clean_history(older_than=30 * DAY))),
    # executed once: while apps make new keys, it would always have some to delete
    # not in a cluster, where it is refused, since it would end holders on other nodes
    MaintenanceTask(
        "keys", DAY, lambda locks, alive: 0 if cluster_behind(locks._engine) else locks._run(lock.vacuum())
    ),
)


def run_due_tasks(locks: LockHost, alive: Alive | None) -> Report:
    """Run the tasks that are due; ``Locks.maintain`` documents it."""
    check_alive(alive)
    done = dict[str, int]()
    first: Exception | None = None
    for task in TASKS:
        try:
            if locks._acquire_period(Timeout(every=task.every), task.name, QUEUE):
                done[task.name] = task.run(locks, alive)
        except NotInstalled:
            raise  # no task has its tables
        except Exception as error:
            if first is not None:
                _log.error("a further task of maintenance failed: %s", error, exc_info=_trace(error))
            first = first or error
    if first is not None:
        raise first
    return Report(done)


class Maintenance:
    """The context manager of ``Locks.maintenance``: a thread.

    :param maintain: runs the due tasks.
    :param every: how often, in seconds.
    """

    def __init__(self, maintain: Callable[[], Report], every: float) -> None:
        self._maintain = maintain
        self._every = every
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Maintenance:
        self._stopped.clear()
        self._thread = threading.Thread(target=self._work, name="sqlalchemy_locks.maintenance", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self, patience: float | None = None) -> None:
        """Stop after the round that is under way.

        :param patience: how long to wait for its end, in seconds; ``None`` for no limit.
        """
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(patience)

    def _work(self) -> None:
        while True:
            try:
                _log_report(self._maintain())
            except Exception as error:
                _log_failure(error)
            if self._stopped.wait(self._every):
                return


class AsyncMaintenance:
    """The context manager of ``AsyncLocks.maintenance``: a task."""

    def __init__(self, maintain: Callable[[], Any], every: float) -> None:
        self._maintain = maintain
        self._every = every
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncMaintenance:
        self._stopped = asyncio.Event()
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is None:
            raise ReentryError("this block is not entered")
        self._stopped.set()
        await self._task

    async def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                _log_report(await self._maintain())
            except Exception as error:
                _log_failure(error)
            await wait_for_event(self._stopped, self._every)


def _log_report(report: Report) -> None:
    if report:
        _log.info("maintenance: %s", ", ".join(f"{task} {count}" for task, count in report.done.items() if count))


def _log_failure(error: Exception) -> None:
    _log.error("a round of maintenance failed, and is tried again when it is due: %s", error, exc_info=_trace(error))


def _trace(error: Exception) -> Exception | None:
    # not for an error of this library, whose message says what to do
    return None if isinstance(error, LockError) else error

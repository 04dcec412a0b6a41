"""Maintenance: the sweeps and clean-ups that are due, each run by one of a fleet.

The pattern: "Distributed Counting Semaphore with MySQL", its last part. Each task has a period, and a ``Timeout`` of
the shipped table guards it: whoever asks first in a period does it, and everybody else passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

from sqlalchemy_locks import lock, semaphore
from sqlalchemy_locks._validation import bounded_seconds
from sqlalchemy_locks.captures.state_transition import StateTransition
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.core.operation import Operation, fresh_nonce
from sqlalchemy_locks.facade.semaphores import DAY, Alive
from sqlalchemy_locks.values import Report

#: of the timeouts that guard the tasks
QUEUE = "sqlalchemy_locks.maintenance"
#: a task that has failed is due again after so many seconds
AGAIN = 60
_log = logging.getLogger("sqlalchemy_locks")


@dataclass(frozen=True)
class MaintenanceTask:
    """Something to be done once a period, in seconds; it tells how many rows it was about."""

    name: str
    every: float
    do: Callable[[Any, Alive | None], int]


def _until_none(operation: Operation[Any]) -> Callable[[Any, Alive | None], int]:
    """A clean-up that goes batch by batch."""

    def do(locks: Any, alive: Alive | None) -> int:
        done = 0
        while removed := locks.run(operation):
            done += removed
        return done

    return do


TASKS = (
    MaintenanceTask("tasks", 60, _until_none(StateTransition().expire())),
    MaintenanceTask("orphans", 300, lambda locks, alive: locks.sweep(stale_after=DAY, alive=alive)),
    MaintenanceTask("requests", 4 * 3600, _until_none(semaphore.clean(older_than=7 * DAY))),
    MaintenanceTask("leases", DAY, _until_none(semaphore.clean_leases(older_than=7 * DAY))),
    MaintenanceTask("history", DAY, lambda locks, alive: locks.run(semaphore.clean_history(older_than=30 * DAY))),
    MaintenanceTask("keys", DAY, lambda locks, alive: locks.run(lock.vacuum())),
)


class Maintained:
    """The maintenance part of ``Locks``."""

    _run: Callable[..., Any]
    _turn: Callable[..., bool]

    def maintain(self, *, alive: Alive | None = None) -> Report:
        """Do every sweep and clean-up that is due, and that nobody else has done in its period.

        Every minute captured tasks of the shipped table end whose own ``timeout`` has passed. Every 5 minutes requests
        are released that have expired, whose owner is dead (``alive``, as for :meth:`sweep`), or that have no time to
        live and are older than a day. Every 4 hours those are deleted that were released 7 days ago; every day
        semaphores of leases that were not used since, changes of capacity that are 30 days old, and keys of locks that
        nobody holds. Stalled jobs are given back by the workers of their queue.

        :return: a :class:`~sqlalchemy_locks.Report`: for each task that was due, how many rows it was about.

        A task that fails doesn't keep the others from being done; its error is raised when they are. Its turn is given
        back: it is due again after a minute, for whoever of the fleet asks first.

        >>> locks.maintain().done
        {'tasks': 0, 'orphans': 0, 'requests': 0, 'leases': 0, 'history': 0, 'keys': 0}
        """
        done: dict[str, int] = {}
        failed: list[Exception] = []
        for task in TASKS:
            try:
                self._do(task, alive, done)
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return Report(done)

    def _do(self, task: MaintenanceTask, alive: Alive | None, done: dict[str, int]) -> None:
        turn, nonce = Timeout(every=task.every), fresh_nonce()
        if not self._turn(turn, task.name, QUEUE, nonce):
            return
        try:
            done[task.name] = task.do(self, alive)
        except BaseException:
            # a turn that was not used: soon it is somebody's again, but not at once, since what failed for one of a
            # fleet will fail for the next
            with contextlib.suppress(Exception):
                self._run(turn._give_back(task.name, QUEUE, nonce, min(task.every, AGAIN)), nonce)
            raise

    def maintenance(self, *, alive: Alive | None = None, every: float | timedelta = 60) -> Maintenance:
        """Have :meth:`maintain` called in the background while the block runs.

        :param every: how often to look whether something is due, in seconds or as a ``timedelta``.

        What goes wrong is logged under ``sqlalchemy_locks``, and tried again when it is due again.

        >>> with locks.maintenance():
        ...     serve()
        """
        return Maintenance(lambda: self.maintain(alive=alive), bounded_seconds(every, "every", zero=False))


class Maintenance:
    """The context manager of ``Locks.maintenance``: a thread."""

    def __init__(self, round_: Callable[[], Report], every: float) -> None:
        self._round = round_
        self._every = every
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Maintenance:
        self._over.clear()
        self._thread = threading.Thread(target=self._work, name="sqlalchemy_locks.maintenance", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self, patience: float | None = None) -> None:
        """Have the round that is under way be the last.

        :param patience: how long to wait for it, in seconds; ``None``: until it is over.
        """
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(patience)

    def _work(self) -> None:
        while True:
            try:
                told(self._round())
            except Exception:
                failed()
            if self._over.wait(self._every):
                return


class AsyncMaintenance:
    """The context manager of ``AsyncLocks.maintenance``: a task."""

    def __init__(self, round_: Callable[[], Any], every: float) -> None:
        self._round = round_
        self._every = every
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncMaintenance:
        self._over = asyncio.Event()
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._over.set()
        await self._task

    async def _work(self) -> None:
        while not self._over.is_set():
            try:
                told(await self._round())
            except Exception:
                failed()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), self._every)


def told(report: Report) -> None:
    if report:
        _log.info("maintenance: %s", ", ".join(f"{task} {count}" for task, count in report.done.items() if count))


def failed() -> None:
    _log.exception("a round of maintenance failed; it is tried again when it is due")

"""Heartbeats: a thread of each worker reports that its jobs are running, and requeues those of workers that are dead.

It has a connection of its own, so that nothing delays it: not a fetch that waits, nor handlers that hold all
connections of the app's pool or block the event loop.

A worker judges itself before it judges others. Each heartbeat locks the table as those of all other workers do, also
where there is no job: if it was late, so may theirs have been. Jobs are requeued only when heartbeats were in time for
``stalled_after`` seconds, in which every live worker could send one, and as of the instant of the last of them, however
late the statement is executed.

A heartbeat skips rows that another session has locked, as a handler may lock that of its own job. Its worker tries them
again at short intervals. Others don't touch a locked row, and requeue a job only when its row was free each time that
they looked for half of ``stalled_after``: long enough for a heartbeat after the transaction that had locked it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.util import greenlet_spawn

from sqlalchemy_locks.dialects.connections import engine_with_own_pool
from sqlalchemy_locks.runtime.renewal import clock
from sqlalchemy_locks.runtime.retry import sleep_for
from sqlalchemy_locks.sql.clock import utc
from sqlalchemy_locks.workers.config import WorkerConfig
from sqlalchemy_locks.workers.database import WorkerDatabase, is_temporary, log

#: how many silent jobs are looked at, and requeued in one transaction
_LOOK_AT, _SWEEP_BATCH = 10_000, 1000
#: the pause after a heartbeat that failed, or skipped a locked row: the first one in seconds, and the longest as a part
#: of the interval
_FIRST_RETRY, _LONGEST_RETRY = 0.1, 0.25
#: how much earlier than its interval says a heartbeat may be sent, so that those of several workers spread
_JITTER = 0.1
#: how late a heartbeat may be, as a part of ``stalled_after``, before those of other workers may have been too late
_LATE = 0.25
#: how long a worker that ends waits for a heartbeat under way, in seconds
_END = 0.5

#: for each run of a worker, by process and host, what returns its jobs as pairs; those of another process are copies of
#: a fork
_runs: dict[tuple[int, str], Callable[[], Sequence[Any]]] = {}


class Heartbeats:
    """The heartbeats of one run of a worker.

    :param host: ``processing_host`` of this run.
    :param jobs: returns the rows of all jobs that the worker owns.
    :param unfinished: returns those of some jobs that wait or run.
    :param on_locked: called with the rows of those whose heartbeat could not be written, after each attempt.
    :param on_lost: called with the rows of those that no longer run, and of those among them that have another owner,
        or were returned to the queue, rather than completed.
    :param on_change: called when jobs may be started again, and when jobs were requeued.
    :param on_error: called with a permanent error, after which no heartbeat is sent.
    :param on_stalled: called with the number of jobs that were requeued.
    """

    def __init__(
        self,
        config: WorkerConfig,
        host: str,
        jobs: Callable[[], Sequence[Any]],
        *,
        unfinished: Callable[[Sequence[Any]], Sequence[Any]],
        on_locked: Callable[[Sequence[Any]], object],
        on_lost: Callable[[Sequence[Any], Sequence[Any]], object],
        on_change: Callable[[], object],
        on_error: Callable[[BaseException], object],
        on_stalled: Callable[[int], object],
    ) -> None:
        self.config, self._host, self._jobs = config, host, jobs
        self._unfinished, self._on_locked, self._on_lost = unfinished, on_locked, on_lost
        self._on_change, self._on_error, self._on_stalled = on_change, on_error, on_stalled
        #: when the last heartbeat was sent that succeeded, by :func:`clock`
        self.confirmed_at = -float("inf")
        #: heartbeats that were sent before don't prove that the jobs are owned
        self._required_at = -float("inf")
        #: some jobs are no longer owned, and it isn't known which
        self._unclear = False
        #: the rows that it couldn't write, and how often it was tried again
        self._locked: Sequence[Any] = ()
        self._retries = 0
        #: when the last heartbeat ended, and since when none was late
        self._contact_at = self._contact_since = -float("inf")
        self._swept_at = self._due_at = -float("inf")
        #: jobs of silent workers, and since when their rows were free each time
        self._silent: dict[tuple[Any, Any], float] = {}
        #: those to be requeued, unless a heartbeat has come since this instant of the server
        self._stalled: list[tuple[Any, Any]] = []
        self._silent_since: Any = None
        self._failures = 0
        self._wake = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None

    def age(self) -> float:
        """Return how long ago the last heartbeat was sent that succeeded, in seconds."""
        return clock() - self.confirmed_at

    def recent(self) -> bool:
        """Whether jobs may be started: no other worker can have taken them yet."""
        if self._unclear or self.confirmed_at < self._required_at:
            return False
        return self.age() <= 2 * self.config.heartbeat

    def may_be_lost(self) -> bool:
        """Whether another worker may have taken the jobs."""
        return self.config.stalled_after is not None and self.age() > self.config.stalled_after

    def require_heartbeat(self) -> None:
        """Start no job until a heartbeat has been sent from now on."""
        self._required_at = clock()
        self._wake.set()

    def start(self) -> None:
        """Send heartbeats from now on."""
        _runs[os.getpid(), self._host] = lambda: self.config.queue._jobs.pairs(self._jobs())
        self._thread = threading.Thread(target=self._work, name="sqlalchemy_locks.heartbeats", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Send no more heartbeats; wait for one that is being sent for ``_END`` seconds at most."""
        self._ended = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_END)
        _runs.pop((os.getpid(), self._host), None)

    def _work(self) -> None:
        """Run the thread; with an async driver in an event loop of its own, which the app's can't block."""
        try:
            engine = engine_with_own_pool(self.config.engine)
        except Exception as error:
            self._on_error(error)
            return
        database = WorkerDatabase(self.config, sleep_for(engine), engine)
        if not engine.dialect.is_async:
            self._repeat(lambda: self.beat(database))
            engine.dispose()
            return
        loop = asyncio.new_event_loop()
        try:
            self._repeat(lambda: loop.run_until_complete(greenlet_spawn(self.beat, database)))
            loop.run_until_complete(greenlet_spawn(engine.dispose))
        finally:
            loop.close()

    def _repeat(self, beat: Callable[[], float]) -> None:
        while not self._ended:
            self._wake.clear()
            pause = beat()
            if not self._ended:
                self._wake.wait(pause)

    def beat(self, database: WorkerDatabase) -> float:
        """Send a heartbeat, and sweep if it is time; return the pause until the next one, in seconds."""
        config = self.config
        asked_at = clock()
        try:
            if asked_at < self._due_at and self._required_at <= self.confirmed_at and not self._unclear:
                more = False
                self._retries += 1
                if locked := self._unfinished(self._locked):
                    self._report(database, locked)
                else:
                    self._locked = ()
            else:
                more = self._beat(database, asked_at)
                self._due_at = asked_at + config.heartbeat * random.uniform(1 - _JITTER, 1)
        except Exception as error:
            if not is_temporary(error):
                return self._fail(error)
            log(logging.WARNING, "A heartbeat could not be sent: %s", error)
            self._failures += 1
            return self._retry_pause(self._failures - 1)
        except BaseException as error:
            # of a listener, for instance: the thread would end silently
            return self._fail(error)
        self._failures = 0
        if more or self._required_at > asked_at:
            self._due_at = clock()
            return 0.0
        pause = max(0.0, self._due_at - clock())
        if self._locked:
            return min(pause, self._retry_pause(self._retries))
        self._retries = 0
        return pause

    def _fail(self, error: BaseException) -> float:
        self._ended = True
        self._on_error(error)
        return 0.0

    def _retry_pause(self, attempts: int) -> float:
        return float(min(_FIRST_RETRY * 2 ** min(attempts, 30), _LONGEST_RETRY * self.config.heartbeat))

    def _beat(self, database: WorkerDatabase, asked_at: float) -> bool:
        """Send a heartbeat, and sweep if it is time; return whether there is more to sweep."""
        config = self.config
        sweeps = config.stalled_after is not None and asked_at >= self._swept_at + config.sweep_interval
        now = utc(database.perform(config.queue._server_time())) if sweeps else None
        jobs = self._jobs()
        recent = self.recent()
        self._report(database, jobs)
        contact_at = clock()
        late = contact_at - self._contact_at - config.heartbeat
        if late > _LATE * (config.stalled_after or 0):
            self._contact_since = contact_at
            self._silent.clear()
            self._stalled.clear()
        self._contact_at = contact_at
        self.confirmed_at = asked_at
        if not recent:
            self._on_change()
        # a job is looked at for the other half of it
        if now is None or config.stalled_after is None or contact_at - self._contact_since < config.stalled_after / 2:
            return False
        return self._sweep(database, now, asked_at)

    def _report(self, database: WorkerDatabase, jobs: Sequence[Any]) -> None:
        """Send the heartbeat of these jobs (rows), and find those that are no longer owned."""
        owned, locked = database.perform(self.config.queue._report_running(list(jobs)))
        if owned != len(jobs):
            self._unclear = True
            self._find_lost(database, jobs)
        if locked:
            pairs, found = set(locked), self.config.queue._jobs.pairs(jobs)
            locked = self._unfinished([job for job, pair in zip(jobs, found, strict=True) if pair in pairs])
        self._locked = locked
        self._on_locked(self._locked)
        if self._unclear:
            self._unclear = False
            self._on_change()  # jobs may be started again

    def _find_lost(self, database: WorkerDatabase, jobs: Sequence[Any]) -> None:
        """Report the jobs that no longer run, and those of them that weren't completed by their own handlers."""
        found = database.look_at(jobs)
        if gone := [*found.ended, *found.lost]:
            self._on_lost(gone, found.lost)

    def _sweep(self, database: WorkerDatabase, now: datetime, asked_at: float) -> bool:
        """Requeue jobs of workers that are silent; return whether there are more of them.

        :param now: the server's time before the heartbeat, and ``asked_at`` this machine's.
        """
        config = self.config
        if not self._stalled:
            self._look(database, now, asked_at)
        stalled, self._stalled = self._stalled, []
        found = 0
        if stalled:
            found = database.perform(config.queue._requeue_silent(stalled[:_SWEEP_BATCH], self._silent_since))
            self._stalled = stalled[_SWEEP_BATCH:]
        if found:
            log(logging.WARNING, "%d jobs were requeued: their worker sent no heartbeat", found)
            self._on_stalled(found)
            self._on_change()
        if self._stalled:
            return True
        self._swept_at = clock()
        return False

    def _look(self, database: WorkerDatabase, now: datetime, asked_at: float) -> None:
        """Look for jobs of silent workers, and note which of them are to be requeued."""
        config, process = self.config, os.getpid()
        assert config.stalled_after is not None
        half = config.stalled_after / 2
        look = config.queue._silent_jobs(now - timedelta(seconds=half), queue=config.name, limit=_LOOK_AT)
        # if this look fails, it isn't known whether their rows are free
        before, self._silent = self._silent, {}
        found, looked_at = database.perform(look), clock()
        # a job with a run's host that the run doesn't know of is requeued: the reply to its capture was lost
        known = {pair for (of, _), pairs in list(_runs.items()) if of == process for pair in pairs()}
        self._silent = {pair: before.get(pair, looked_at) for pair in found if pair not in known}
        self._stalled = [pair for pair, since in self._silent.items() if asked_at - since >= half]
        self._silent_since = now - timedelta(seconds=config.stalled_after)

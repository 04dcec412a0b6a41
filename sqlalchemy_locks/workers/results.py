"""The jobs that a worker has finished, until the database knows.

They leave the lists when the database has confirmed it, not before. Jobs whose row another session has locked are
reported later: a worker doesn't wait for a row lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sqlalchemy_locks.core.operation import Operation
from sqlalchemy_locks.queue.acknowledge import skip_locked
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.workers.config import WorkerConfig
from sqlalchemy_locks.workers.database import UNSTORABLE, WorkerDatabase, is_about_values, log

#: how long a completed job may wait to be reported together with others, in seconds
MAX_ACK_DELAY = 1.0
#: how often reporting jobs whose rows were locked is tried again, in seconds: a job that seems to have stalled when its
#: row is unlocked belongs to whichever session changes it first
_DEFERRED_INTERVAL = 0.25


def failure_operation(queue: Queue, job: Any, error: str, pause: float | None) -> Operation[Any]:
    """Return the operation that fails a job, or marks it as dead where there is no pause."""
    return queue.fail(job, error=error, retry=False) if pause is None else queue.fail(job, error=error, retry_in=pause)


class Failure(NamedTuple):
    """How an attempt failed."""

    #: the text that is stored
    text: str
    #: until the next attempt, in seconds; ``None``: there is none
    pause: float | None
    error: BaseException

    def is_last(self, queue: Queue, job: Any) -> bool:
        """Return whether the job (its row) is dead after this attempt."""
        attempts, most = (queue._jobs.value(job, role) for role in ("attempts", "max_attempts"))
        return bool(self.pause is None or attempts >= most)


class PendingAcks:
    """Finished jobs that the database doesn't know of yet.

    :param lock: of the worker's lists; handlers' threads add to ``completed`` and ``failed``, one thread sends, and the
        heartbeats' thread reads.
    :param on_dead: called with the row and the error of a job that won't be tried again.
    """

    def __init__(
        self,
        config: WorkerConfig,
        database: WorkerDatabase,
        lock: threading.Lock,
        on_dead: Callable[[Any, BaseException], object],
    ) -> None:
        self.config, self._database, self._lock, self._on_dead = config, database, lock, on_dead
        self.completed: deque[Any] = deque()
        self.failed: deque[tuple[Any, Failure]] = deque()
        #: finished while another session had locked their rows, with their failures if they have failed
        self.deferred: list[tuple[Any, Failure | None]] = []
        #: when the first of those in ``completed`` was finished
        self._completed_at = 0.0
        self._deferred_due = float("inf")

    def add_completed(self, job: Any) -> None:
        """Add a job whose handler has returned; the caller holds the lock."""
        if not self.completed:
            self._completed_at = time.monotonic()
        self.completed.append(job)

    def jobs(self) -> list[Any]:
        """Return every job that is still this worker's to report; the caller holds the lock."""
        return [*self.completed, *(job for job, _ in (*self.failed, *self.deferred))]

    def due_in(self) -> float:
        """Return how long nothing has to be sent, in seconds."""
        due = self._deferred_due
        if self.completed:
            due = min(due, self._completed_at + MAX_ACK_DELAY)
        return due - time.monotonic()

    def send_completed(self, *, now: bool) -> None:
        """Report completed jobs: now, or when there is a batch of them or the oldest has waited long enough."""
        with self._lock:
            jobs = list(self.completed)
        if jobs and (now or len(jobs) >= self.config.batch or time.monotonic() >= self._completed_at + MAX_ACK_DELAY):
            self.confirm(jobs, self._complete(jobs))

    def confirm(self, jobs: list[Any], completed: int) -> None:
        """Remove the first ones of ``completed``, which were sent; of so many the database has changed the rows."""
        locked = self._locked(jobs, completed)
        with self._lock:
            for _ in jobs:
                self.completed.popleft()
            self._completed_at = time.monotonic()
        self._defer([(job, None) for job in locked])

    def send_failed(self) -> None:
        """Report failed jobs."""
        while self.failed:
            job, failure = self.failed[0]
            locked = self._locked([job], self._fail(job, failure))
            with self._lock:
                self.failed.popleft()
            self._defer([(job, failure) for job in locked])

    def send_deferred(self) -> None:
        """Report jobs whose rows were locked, if it is time to try again."""
        if time.monotonic() < self._deferred_due:
            return
        self._deferred_due = time.monotonic() + _DEFERRED_INTERVAL
        if done := [job for job, failure in self.deferred if failure is None]:
            kept = {id(job) for job in self._locked(done, self._complete(done))}
            with self._lock:
                self.deferred = [each for each in self.deferred if each[1] is not None or id(each[0]) in kept]
        for job, failure in list(self.deferred):
            if failure is not None and not self._locked([job], self._fail(job, failure)):
                with self._lock:
                    self.deferred.remove((job, failure))
        if not self.deferred:
            self._deferred_due = float("inf")

    def wait_for_locked(self) -> None:
        """Report the deferred jobs, waiting for their rows to be unlocked: the last step of a worker that stops."""
        queue = self.config.queue
        while self.deferred:
            job, failure = self.deferred[0]
            self._database.perform(
                queue.complete(job) if failure is None else failure_operation(queue, job, failure.text, failure.pause)
            )
            with self._lock:
                self.deferred.pop(0)

    def _complete(self, jobs: list[Any]) -> int:
        completed: int = self._database.perform(skip_locked(self.config.queue.complete(jobs)))
        return completed

    def _fail(self, job: Any, failure: Failure) -> int:
        queue = self.config.queue
        try:
            operation = failure_operation(queue, job, failure.text, failure.pause)
            failed: int = self._database.perform(skip_locked(operation))
        except Exception as unstorable:
            if not is_about_values(unstorable):
                raise
            log(logging.WARNING, "An error could not be stored: %s", unstorable)
            failed = self._database.perform(skip_locked(failure_operation(queue, job, UNSTORABLE, failure.pause)))
        if failed and failure.is_last(queue, job):
            self._on_dead(job, failure.error)
        return failed

    def _locked(self, jobs: list[Any], changed: int) -> Sequence[Any]:
        """Return those of the jobs that are still owned though the database has changed only so many."""
        if changed == len(jobs):
            return []
        found = self._database.look_at(jobs)
        if found.lost:
            log(
                logging.WARNING,
                "%d jobs had another owner, or had been returned to the queue, before this worker finished them",
                len(found.lost),
            )
        return found.running

    def _defer(self, jobs: list[tuple[Any, Failure | None]]) -> None:
        if jobs:
            log(
                logging.WARNING,
                "%d finished jobs are reported later: their rows are locked by other sessions",
                len(jobs),
            )
            with self._lock:
                self.deferred += jobs
            self._deferred_due = min(self._deferred_due, time.monotonic() + _DEFERRED_INTERVAL)

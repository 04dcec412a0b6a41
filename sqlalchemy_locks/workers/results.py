"""The jobs that a worker has finished, until the database knows.

They leave the lists when the database has confirmed it, not before. Jobs whose row another session has locked are
reported later: a worker doesn't wait for a row lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sqlalchemy_locks.core.operation import Operation
from sqlalchemy_locks.errors import Discard, Retry
from sqlalchemy_locks.queue.acknowledge import skip_locked
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.workers.config import WorkerConfig, default_pause
from sqlalchemy_locks.workers.database import WorkerDatabase, format_error, log
from sqlalchemy_locks.workers.running_job import RunningJob

#: how long a completed job may wait to be reported together with others, in seconds
MAX_ACK_DELAY = 1.0
#: how often reporting jobs whose rows were locked is tried again, in seconds: a job that seems to have stalled when its
#: row is unlocked belongs to whichever session changes it first
_DEFERRED_INTERVAL = 0.25
#: what is stored instead of an error that the database can't store
UNSTORABLE = "the error could not be stored: see the log of the worker"


def failure_operation(queue: Queue, job: RunningJob, error: str, pause: float | None) -> Operation[Any]:
    """Return the operation that fails a job, or marks it as dead where there is no pause."""
    if pause is None:
        return queue.fail(job._pair, error=error, retry=False)
    return queue.fail(job._pair, error=error, retry_in=pause)


class Undecodable(Exception):
    """A job can't be decoded, in this attempt or another."""


class Failure(NamedTuple):
    """How an attempt failed."""

    #: the text that is stored
    text: str
    #: until the next attempt, in seconds; ``None``: there is none
    pause: float | None
    error: BaseException

    def is_last(self, job: RunningJob) -> bool:
        """Return whether the job is dead after this attempt."""
        return bool(self.pause is None or job._value("attempts") >= job._value("max_attempts"))


class PendingAcks:
    """Finished jobs that the database doesn't know of yet.

    :param lock: of the worker's lists; handlers' threads add to ``completed`` and ``failed``, one thread sends, and the
        heartbeats' thread reads.
    :param on_dead: called with a job that won't be tried again, and its error.
    """

    def __init__(
        self,
        config: WorkerConfig,
        database: WorkerDatabase,
        lock: threading.Lock,
        on_dead: Callable[[RunningJob, BaseException], object],
    ) -> None:
        self.config, self._database, self._lock, self._on_dead = config, database, lock, on_dead
        self.completed: deque[RunningJob] = deque()
        self.failed: deque[tuple[RunningJob, Failure]] = deque()
        #: finished while another session had locked their rows, with their failures if they have failed
        self.deferred: list[tuple[RunningJob, Failure | None]] = []
        #: when the first of those in ``completed`` was finished
        self._completed_at = 0.0
        self._deferred_due = float("inf")

    def add_completed(self, job: RunningJob) -> None:
        """Add a job whose handler has returned; the caller holds the lock."""
        if not self.completed:
            self._completed_at = time.monotonic()
        self.completed.append(job)

    def jobs(self) -> list[RunningJob]:
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

    def confirm(self, jobs: list[RunningJob], completed: int) -> None:
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
        for job, failure in list(self.deferred):
            changed = self._complete([job]) if failure is None else self._fail(job, failure)
            if not self._locked([job], changed):
                with self._lock:
                    self.deferred.remove((job, failure))
        if not self.deferred:
            self._deferred_due = float("inf")

    def wait_for_locked(self) -> None:
        """Report the deferred jobs, waiting for their rows to be unlocked: the last step of a worker that stops."""
        queue = self.config.queue
        while self.deferred:
            job, failure = self.deferred[0]
            if failure is None:
                self._database.perform(queue.complete(job._pair))
            else:
                self._database.perform(failure_operation(queue, job, failure.text, failure.pause))
            with self._lock:
                self.deferred.pop(0)

    def _complete(self, jobs: list[RunningJob]) -> int:
        completing = self.config.queue.complete([job._pair for job in jobs])
        completed: int = self._database.perform(skip_locked(completing))
        return completed

    def _fail(self, job: RunningJob, failure: Failure) -> int:
        queue = self.config.queue
        try:
            failing = failure_operation(queue, job, failure.text, failure.pause)
            failed: int = self._database.perform(skip_locked(failing))
        except Exception as error:
            # whatever it is: an encoding, a packet that is too large, and then perhaps a lost connection
            log(logging.WARNING, "An error could not be stored, and is left out: %s", error)
            failing = failure_operation(queue, job, UNSTORABLE, failure.pause)
            failed = self._database.perform(skip_locked(failing))
        if failed and failure.is_last(job):
            self._on_dead(job, failure.error)
        return failed

    def _locked(self, jobs: list[RunningJob], changed: int) -> Sequence[RunningJob]:
        """Return those of the jobs that are still owned though the database has changed only so many."""
        if changed == len(jobs):
            return []
        owned = self._database.look_at([job._pair for job in jobs])
        if owned.lost:
            log(
                logging.WARNING,
                "%d jobs had another owner, or had been returned to the queue, before this worker finished them",
                len(owned.lost),
            )
        return [job for job in jobs if job._pair in owned.running]

    def _defer(self, jobs: list[tuple[RunningJob, Failure | None]]) -> None:
        if jobs:
            log(
                logging.WARNING,
                "%d finished jobs are reported later: their rows are locked by other sessions",
                len(jobs),
            )
            with self._lock:
                self.deferred += jobs
            self._deferred_due = min(self._deferred_due, time.monotonic() + _DEFERRED_INTERVAL)


def failure_of(config: WorkerConfig, job: RunningJob, error: BaseException) -> Failure:
    """Return what is stored of an attempt that raised, and log it."""
    name, attempt = job._value("external_id"), job._value("attempts")
    if isinstance(error, Discard):
        log(logging.WARNING, "The job %s of the queue %r was discarded: %s", name, config.name, error)
        return Failure(_text_of(error), None, error)
    if isinstance(error, Undecodable):
        log(
            logging.ERROR, "The job %s of the queue %r can't be decoded, and is dead", name, config.name, exc_info=error
        )
        return Failure(format_error(error), None, error)
    most = job._value("max_attempts")
    pause = error.pause if isinstance(error, Retry) else None
    if pause is None:
        try:
            pause = config.retry_pause(attempt)
        except (Exception, SystemExit, asyncio.CancelledError) as wrong:
            log(logging.ERROR, "retry_in failed, and the default is used: %s", wrong, exc_info=wrong)
            pause = default_pause(attempt)
    if isinstance(error, Retry):
        if attempt < most:
            message = "The job %s of the queue %r is tried again in %.1f s: %s"
            log(logging.INFO, message, name, config.name, pause, error)
        else:
            message = "The job %s of the queue %r is dead, after attempt %d: %s"
            log(logging.WARNING, message, name, config.name, attempt, error)
        return Failure(_text_of(error), pause, error)
    message = "The job %s of the queue %r failed, in attempt %d of %d"
    log(logging.WARNING, message, name, config.name, attempt, most, exc_info=error)
    return Failure(format_error(error), pause, error)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return format_error(error)

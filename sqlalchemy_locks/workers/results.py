"""The jobs that a worker has finished, until the database has confirmed their results.

A job leaves the list only then. If another session has locked its row, it stays in the list and is reported again
later: a worker that runs doesn't wait for a row lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from sqlalchemy_locks.core.operation import Operation
from sqlalchemy_locks.errors import Discard, Retry
from sqlalchemy_locks.queue.acknowledge import DEAD, RUNNING, skip_locked_rows
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.workers.config import WorkerConfig
from sqlalchemy_locks.workers.database import WorkerDatabase, format_error, log
from sqlalchemy_locks.workers.running_job import RunningJob

#: after how many seconds a job whose row was locked is reported again: if it seems to have stalled when its row is
#: unlocked, it belongs to the session that changes it first
LOCKED_INTERVAL = 0.25
#: how long a finished job waits for others that can be reported with it while all handlers run, in seconds
_LINGER = 0.02
#: what is stored instead of an error that the database can't store
UNSTORABLE = "the error could not be stored: see the log of the worker"


class Undecodable(Exception):
    """A job can't be decoded, neither in this attempt nor in a later one."""


class Failure(NamedTuple):
    """How an attempt failed."""

    #: the text that is stored
    text: str
    #: the job may be tried again
    retry: bool
    #: until the next attempt, in seconds; ``None``: the default
    pause: float | None
    error: BaseException

    def is_last(self, job: RunningJob) -> bool:
        """Return whether the job is dead after this attempt."""
        return bool(not self.retry or job._value("attempts") >= job._value("max_attempts"))

    def operation(self, queue: Queue, job: RunningJob, text: str | None = None) -> Operation[Any]:
        """Return the operation that reports it. :param text: what is stored instead of its own text."""
        return queue.fail(job._pair, error=text or self.text, retry_in=self.pause, retry=self.retry)


class PendingAcks:
    """Finished jobs that the database doesn't know of yet.

    :param lock: of the worker's lists; handlers' threads add to ``finished``, and one thread sends.
    :param on_dead: called with a job that won't be tried again, and its error.
    """

    def __init__(
        self,
        config: WorkerConfig,
        database: WorkerDatabase,
        lock: threading.Lock,
        on_dead: Callable[[RunningJob, BaseException], object],
    ) -> None:
        self._queue, self._database, self._lock, self._on_dead = config.queue, database, lock, on_dead
        #: in the order in which they finished, each with its failure if it has failed
        self.finished: dict[RunningJob, Failure | None] = {}

    def due_in(self) -> float:
        """Return how long nothing has to be sent, in seconds."""
        with self._lock:
            due = min((max(job._locked_until, job._ended_at + _LINGER) for job in self.finished), default=float("inf"))
        return due - time.monotonic()

    def completed(self, *, waits: bool = False) -> list[RunningJob]:
        """Return the completed jobs that can be reported now; ``waits`` as for :meth:`send_completed`."""
        return [job for job, failure in self._due(waits) if failure is None]

    def send_completed(self, *, waits: bool = False) -> None:
        """Report completed jobs, except those whose rows were locked a moment ago.

        :param waits: wait for locked rows, as a worker that stops does it in the end.
        """
        jobs = self.completed(waits=waits)
        if not jobs:
            return
        try:
            self._complete(jobs, waits)
        except Exception as error:
            if self._database.may_pass(error):
                raise
            self._send_each(jobs, lambda job: self._complete([job], waits))

    def send_failed(self, *, waits: bool = False) -> None:
        """Report failed jobs likewise, one by one."""
        failures = {job: failure for job, failure in self._due(waits) if failure is not None}
        self._send_each(failures, lambda job: self.confirm([job], self._fail(job, failures[job], waits)))

    def _complete(self, jobs: list[RunningJob], waits: bool) -> None:
        completing = self._queue.complete([job._pair for job in jobs])
        self.confirm(jobs, self._perform(completing, waits))

    def _send_each(self, jobs: Iterable[RunningJob], send: Callable[[RunningJob], None]) -> None:
        """Report jobs one by one: a row that the database refuses to change keeps no other back."""
        refused: Exception | None = None
        for job in jobs:
            try:
                send(job)
            except Exception as error:
                if self._database.may_pass(error):
                    raise
                refused = refused or error
        if refused is not None:
            raise refused

    def _due(self, waits: bool) -> list[tuple[RunningJob, Failure | None]]:
        now = time.monotonic()
        with self._lock:
            return [(job, failure) for job, failure in self.finished.items() if waits or job._locked_until <= now]

    def _perform(self, operation: Operation[Any], waits: bool) -> int:
        number: int = self._database.perform(operation if waits else skip_locked_rows(operation))
        return number

    def _fail(self, job: RunningJob, failure: Failure, waits: bool) -> int:
        try:
            return self._perform(failure.operation(self._queue, job), waits)
        except Exception as error:
            # whatever it is: an encoding, a packet that is too large, and then perhaps a lost connection
            log(logging.WARNING, "An error could not be stored, and is left out: %s", error)
            return self._perform(failure.operation(self._queue, job, UNSTORABLE), waits)

    def confirm(self, jobs: list[RunningJob], changed: int) -> None:
        """Remove jobs that were reported. :param changed: how many of their rows the database has changed."""
        states: dict[Any, str] = {}
        locked: list[RunningJob] = []
        lost: list[RunningJob] = []
        if changed < len(jobs):
            states = self._database.states([job._pair for job in jobs])
            locked = [job for job in jobs if states.get(job._pair) == RUNNING]
            lost = [job for job in jobs if job._pair not in states]
        for job in locked:
            job._locked_until = time.monotonic() + LOCKED_INTERVAL
        with self._lock:
            failures = {job: self.finished.pop(job) for job in jobs if job not in locked}
        for job, failure in failures.items():
            # the reply to an earlier report may have been lost
            if failure is not None and failure.is_last(job) and (changed or states.get(job._pair) == DEAD):
                self._on_dead(job, failure.error)
        if locked:
            log(logging.WARNING, "%d finished jobs are reported later: other sessions lock their rows", len(locked))
        if lost:
            log(
                logging.WARNING,
                "Jobs that had another owner, or were in the queue again, before this worker finished them: %d",
                len(lost),
            )


def failure_of(config: WorkerConfig, job: RunningJob, error: BaseException) -> Failure:
    """Return the failure of an attempt that raised, and log it."""
    attempt, most = job._value("attempts"), job._value("max_attempts")
    expected = isinstance(error, (Discard, Retry))
    retry = not isinstance(error, (Discard, Undecodable))
    pause = _pause_after(config, error, attempt) if retry else None
    failure = Failure(_text_of(error) if expected else format_error(error), retry, pause, error)
    last = failure.is_last(job)
    log(
        logging.INFO if expected and not last else logging.WARNING,
        "The job %s of the queue %r failed, in attempt %d of %d, and %s: %s",
        job._value("external_id"),
        config.name,
        attempt,
        most,
        "is dead" if last else "is tried again",
        _text_of(error),
        exc_info=None if expected else error,
    )
    return failure


def _pause_after(config: WorkerConfig, error: BaseException, attempt: int) -> float | None:
    """Return the pause until the next attempt, in seconds; ``None``: the default."""
    if isinstance(error, Retry) and error.pause is not None:
        return error.pause
    try:
        return config.retry_pause(attempt)
    except (Exception, SystemExit, asyncio.CancelledError) as wrong:
        log(logging.ERROR, "retry_in failed, and the default is used: %s", wrong, exc_info=wrong)
        return None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return format_error(error)

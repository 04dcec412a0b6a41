"""The jobs that one worker has finished, until the database has been told so.

They leave the lists when it has been told, and not before. What somebody else holds is told of later: a worker waits
for nobody's row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from sqlalchemy_locks.core.operation import Operation
from sqlalchemy_locks.queue.acknowledge import skip_locked
from sqlalchemy_locks.runtime.retry import Sleep
from sqlalchemy_locks.workers.config import WorkerConfig
from sqlalchemy_locks.workers.database import UNSTORABLE, database_away, perform, say

#: how long a finished job may wait for others to be told of with it, in seconds
HELD_BACK = 1.0
#: how often it tries to tell of finished jobs whose rows somebody holds, in seconds: if they were held for so long that
#: they seem to have stalled, whoever comes first has them
_PUT_OFF = 0.25


class PendingAcks:
    """What has ended, and what the database is told of it."""

    def __init__(self, terms: WorkerConfig[Any, Any], sleep: Sleep) -> None:
        self.terms, self._sleep = terms, sleep
        self._lock = threading.Lock()
        #: for a free hand
        self.waiting: deque[Any] = deque()
        self.completed: deque[Any] = deque()
        self.failed: deque[tuple[Any, str]] = deque()
        #: finished, with their errors if they have failed, while somebody else holds their rows
        self.later: list[tuple[Any, str | None]] = []
        self.stopping = False
        #: when the first of those in ``completed`` was finished
        self._finished = 0.0
        self._later_at = float("inf")

    def _tell_completed(self) -> None:
        """Finished jobs leave the lists when the database has been told, and not before."""
        with self._lock:
            done = list(self.completed)
        # those that are about to finish are told with them, but nothing waits for them long
        due = not self.waiting or self.stopping or len(done) >= self.terms.batch
        if done and (due or time.monotonic() >= self._finished + HELD_BACK):
            self._told(done, self._perform(skip_locked(self.terms.queue.complete(done))))

    def _told(self, done: list[Any], ended: int) -> None:
        held = self._held(done, ended)
        with self._lock:
            for _ in done:
                self.completed.popleft()
            self._finished = time.monotonic()
        self._put_off([(job, None) for job in held])

    def _tell_failed(self) -> None:
        while self.failed:
            job, error = self.failed[0]
            held = self._held([job], self._fail(job, error))
            self.failed.popleft()
            self._put_off([(job, error) for job in held])

    def _fail(self, job: Any, error: str) -> Any:
        try:
            return self._perform(skip_locked(self.terms.queue.fail(job, error=error)))
        except Exception as unstorable:
            if database_away(unstorable):
                raise
            say(logging.WARNING, "an error could not be stored: %s", unstorable)
            return self._perform(skip_locked(self.terms.queue.fail(job, error=UNSTORABLE)))

    def _held(self, jobs: list[Any], ended: int) -> list[Any]:
        """Of those that were told of, and of which only so many were ended: those that somebody holds for now."""
        if ended == len(jobs):
            return []
        ours = self._still_ours(jobs)
        held = [job for job in jobs if id(job) in ours]
        if ended + len(held) < len(jobs):
            say(
                logging.WARNING,
                "%d jobs were ended already when this worker finished them, or had been taken from it",
                len(jobs) - ended - len(held),
            )
        return held

    def _still_ours(self, jobs: list[Any]) -> set[int]:
        finished = self.terms.queue._jobs.finished
        pairs = {tuple(pair) for pair in self._perform(self.terms.queue._still_ours(finished(jobs)))}
        return {id(job) for job in jobs if finished([job])["locks_pairs"][0] in pairs}

    def _put_off(self, held: list[tuple[Any, str | None]]) -> None:
        if held:
            say(logging.WARNING, "%d finished jobs are told of later: somebody holds their rows", len(held))
            self.later += held
            self._later_at = min(self._later_at, time.monotonic() + _PUT_OFF)

    def _tell_later(self) -> None:
        if time.monotonic() < self._later_at:
            return
        self._later_at = time.monotonic() + _PUT_OFF
        if done := [job for job, error in self.later if error is None]:
            held = self._held(done, self._perform(skip_locked(self.terms.queue.complete(done))))
            kept = {id(job) for job in held}
            self.later = [(job, error) for job, error in self.later if error is not None or id(job) in kept]
        for job, error in list(self.later):
            if error is not None and not self._held([job], self._fail(job, error)):
                self.later.remove((job, error))
        if not self.later:
            self._later_at = float("inf")

    def _wait_for_others(self) -> None:
        """The last thing: what is finished is told of, however long somebody holds it."""
        while self.later:
            job, error = self.later[0]
            queue = self.terms.queue
            self._perform(queue.complete(job) if error is None else queue.fail(job, error=error))
            self.later.pop(0)

    def _perform(self, operation: Operation[Any]) -> Any:
        self._again = False

        def again() -> None:
            self._again = True

        return perform(self.terms.engine, operation, self._sleep, again)

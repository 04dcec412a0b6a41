"""What a worker decides, and what it asks of the database; ``worker.py`` and ``async_worker.py`` only wait and run.

Everything here is synchronous: ``AsyncWorker`` calls it in SQLAlchemy's greenlet. One caller at a time.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy_locks.core.operation import build_context, fresh_nonce
from sqlalchemy_locks.runtime.retry import Sleep
from sqlalchemy_locks.workers.config import WorkerConfig
from sqlalchemy_locks.workers.database import answered, described, passes, say
from sqlalchemy_locks.workers.fetch_cursor import FetchCursor
from sqlalchemy_locks.workers.results import HELD_BACK, PendingAcks

#: how long it rests when the database can't be had, in seconds: at first, and at most
_FIRST_REST, LONGEST_REST = 0.1, 5.0
#: how many stalled jobs are given back at once
_SWEPT = 1000
#: for how long at most looks go on from where one from the head has ended, in seconds: what seems to be a dear look may
#: have waited for something else
_PASSED = 1.0
#: how often a worker that ends tries to say so
_LAST_TRIES = 5

Step = Callable[[], None]


class WorkerState(PendingAcks):
    """The jobs that one worker has: waiting for a free hand, running, finished."""

    def __init__(self, terms: WorkerConfig[Any, Any], sleep: Sleep) -> None:
        super().__init__(terms, sleep)
        self.running: dict[int, Any] = {}
        self._beat = self._swept = -float("inf")
        self._full = False
        self._rest = 0.0
        #: who this is, as no other worker is, not even the same one when it runs again
        self.host = f"{terms.host}:{fresh_nonce()[:8]}"
        #: a capture's answer was lost: there may be jobs that are this worker's, and that it does not know
        self._unsure = False
        #: when it is asked for once more, since what was lost may have been captured after all
        self._look_again = float("inf")
        #: the last fetch has told what is finished, too
        self._exchanged = False
        backend = build_context(terms.engine.dialect, {}).backend
        self._head, self._frees_passed = (
            FetchCursor(backend.keeps_passed, min(terms.heartbeat, _PASSED)),
            backend.frees_passed,
        )

    # what happens between the turns, in whatever thread

    def take(self) -> Any:
        """A job to run, if there is one, a hand is free, and the database was told lately that this worker lives."""
        with self._lock:
            return self._take()

    def _take(self) -> Any:
        terms = self.terms  # a worker may be told to stop while a turn waits for the database
        if self.stopping or terms._stopped or not self.waiting or len(self.running) >= terms.concurrency:
            return None
        if time.monotonic() > self._beat + 2 * terms.heartbeat:
            return None  # after a stop of the process, or of the database, jobs may be others' already
        job = self.waiting.popleft()
        self.running[id(job)] = job
        return job

    def done(self, job: Any, error: BaseException | None) -> bool:
        """A handler has returned, or raised; whether there should be a turn now. It never raises."""
        if error is None:
            with self._lock:
                return self._complete(job)
        told = described(error)
        with self._lock:
            self.failed.append((job, told))
            self.running.pop(id(job), None)
        say(logging.WARNING, "a job of the queue %r failed", self.terms.name, exc_info=error)
        return True

    def done_and_take(self, job: Any) -> tuple[bool, Any]:
        """A handler has returned: as :meth:`done`, and then :meth:`take`."""
        with self._lock:
            return self._complete(job), self._take()

    def _complete(self, job: Any) -> bool:
        if not self.completed:
            self._finished = time.monotonic()
        self.completed.append(job)
        self.running.pop(id(job), None)
        return len(self.completed) >= self.terms.batch or not self.waiting

    # the turns

    def turn(self) -> None:
        """Tell the database what is finished, and ask for more; it never raises for the database's troubles.

        What fails keeps nothing else from being said: jobs that run stay this worker's while no others can be had.
        """
        steps = (
            self._keep,
            self._tell_failed,
            self._fetch,
            self._tell_the_rest,  # where nothing was fetched, be it that nothing can be
            self._tell_later,
            self._regain,
            self._hand_back,
            self._sweep,
        )
        if self._failing(steps):
            self._rest = min(LONGEST_REST, max(_FIRST_REST, 2 * self._rest))
        else:
            self._rest = 0.0

    def _failing(self, steps: Sequence[Step], wrong: list[Exception] | None = None) -> list[Step]:
        """Take the steps one after the other; those that have to be taken again.

        :param wrong: where errors are put that will not pass by themselves; without it they are raised.
        """
        failing: list[Step] = []
        unanswered = 0
        for number, step in enumerate(steps):
            try:
                step()
            except Exception as error:
                if not passes(error):
                    if wrong is None:
                        raise
                    wrong.append(error)
                    continue  # the other steps are right, perhaps
                say(logging.WARNING, "the database can't be had: %s", error)
                failing.append(step)
                unanswered += not answered(error)
                if unanswered > 1:
                    # one may have asked for too much; after two each further one would only wait as long
                    return [*failing, *steps[number + 1 :]]
        return failing

    def _tell_the_rest(self) -> None:
        if not self._exchanged:
            self._tell_completed()

    def _hand_back(self) -> None:
        if self.stopping:
            self.give_back()

    def pause(self) -> float:
        """How long nothing has to be done, in seconds, unless a handler finishes or jobs are put."""
        now = time.monotonic()
        beat = self._beat + self.terms.heartbeat - now
        if self._rest:
            return min(self._rest, beat) if beat > 0 else self._rest
        free = len(self.running) < self.terms.concurrency and not self.waiting and not self.stopping
        if self.failed or (self.completed and not self.waiting) or (free and self._full) or self._sweep_due():
            return 0.0
        times = [beat, self.terms.poll if free else self.terms.heartbeat, self._later_at - now]
        if self.completed:
            times.append(self._finished + HELD_BACK - now)
        elif self.waiting:
            times.append(HELD_BACK)  # nobody says so when the first of them is finished
        return max(0.0, min(times))

    def give_back(self) -> None:
        """What was not begun goes back untried, so that others need not wait for it to stall."""
        self.stopping = True
        if self.waiting:
            self._perform(self.terms.queue.release(list(self.waiting)))
            self.waiting.clear()

    def _give_back_regained(self) -> None:
        """By itself, so that what is known goes back even where it can't be found out what else there is."""
        self._regain()
        self.give_back()

    def close(self) -> None:
        """The last turn: what is finished is told; what still runs is given up, and may run again elsewhere."""
        self.stopping = True
        wrong: list[Exception] = []
        steps: Sequence[Step] = (
            self._tell_completed,
            self._tell_failed,
            self.give_back,
            self._give_up,
            self._tell_completed,  # whose handler returned after the first step, and before what ran was given up
            self._tell_failed,
            self._give_back_regained,
            self._wait_for_others,
        )
        for _ in range(_LAST_TRIES):
            steps = self._failing(steps, wrong)
            if not steps:
                break
            self._sleep(_FIRST_REST)
        else:
            say(logging.ERROR, "jobs could not be given back: they come back when they have stalled")
        if wrong:
            raise wrong[0]

    def _give_up(self) -> None:
        with self._lock:
            given_up = list(self.running.values())
        if given_up:
            self._perform(self.terms.queue.release(given_up))

    def _keep(self) -> None:
        """Say that this worker lives; what was taken from it in spite of that is not begun any more."""
        with self._lock:
            mine = self._all()
        if not mine:
            self._beat = time.monotonic()
        elif time.monotonic() >= self._beat + self.terms.heartbeat:
            beat = time.monotonic()
            if self._perform(self.terms.queue.heartbeat(mine)) != len(mine):
                self._beat = -float("inf")  # nothing is begun until it is known whose it is
                self._drop_lost()
            self._beat = beat

    def _all(self) -> list[Any]:
        """Every job that is this worker's."""
        ended = [job for job, _ in (*self.failed, *self.later)]
        return [*self.waiting, *self.running.values(), *self.completed, *ended]

    def _drop_lost(self) -> None:
        with self._lock:
            asked = list(self.waiting)
        ours = self._still_ours(asked) if asked else set()
        with self._lock:
            self.waiting = deque(job for job in self.waiting if id(job) in ours)
        if lost := len(asked) - len(ours):
            say(logging.WARNING, "%d jobs are not begun: they had been taken from this worker", lost)

    def sweep(self) -> None:
        """Only the sweep, for a worker whose jobs are held; it never raises for the database's troubles."""
        try:
            while self._sweep_due():
                self._sweep()
        except Exception as error:
            if not passes(error):
                raise
            say(logging.WARNING, "the database can't be had: %s", error)

    def _sweep_due(self) -> bool:
        every = self.terms.stalled_after
        return every is not None and not self.stopping and time.monotonic() >= self._swept + every / 4

    def _sweep(self) -> None:
        """One piece, so that a heartbeat is never late for it; of this queue, since others have other terms."""
        every = self.terms.stalled_after
        if every is not None and self._sweep_due():
            found = self._perform(self.terms.queue.requeue_stalled(every, queue=self.terms.name, limit=_SWEPT))
            if found:
                self._full = True  # there are jobs to be had
                say(logging.WARNING, "%d jobs were given back whose worker gave no sign of life", found)
            if found < _SWEPT:
                self._swept = time.monotonic()

    def _fetch(self) -> None:
        """Ask for more, if a hand is free, and tell what is finished in the same breath."""
        self._exchanged = False
        if self.stopping or self.terms._stopped or self.waiting or len(self.running) >= self.terms.concurrency:
            return
        terms = self.terms
        with self._lock:
            done = list(self.completed)
        asked, after = time.monotonic(), self._head.after()
        operation = terms.queue._exchange(done, terms.batch, queue=terms.name, host=self.host, after=after)
        self._unsure, unsure = True, self._unsure
        jobs, ended = self._perform(operation)
        self._unsure = unsure or self._again
        with self._lock:
            if not self.running:
                self._beat = asked
            self.waiting.extend(jobs)
        position = terms.queue._jobs.position(jobs[-1]) if len(jobs) == terms.batch else None
        # if it was asked again, it is not the look that took the time
        self._head.looked(after, position, 0.0 if self._again else time.monotonic() - asked)
        # where a look gives up the sooner the more others look, there may be more as long as there were any
        there_may_be = bool(jobs) and not self._frees_passed
        self._full = position is not None or after is not None or there_may_be
        self._exchanged = True
        self._told(done, ended)

    def _regain(self) -> None:
        """What a capture has taken whose answer was lost is this worker's, since nobody else has its name.

        It is asked for at once, and once more: the server may go on with a statement that nobody waits for any more.
        """
        if not self._unsure and time.monotonic() < self._look_again and not (self.stopping and self._looks_again):
            return
        terms = self.terms
        found = self._perform(terms.queue._running(queue=terms.name, host=self.host))
        finished = terms.queue._jobs.finished
        with self._lock:
            known = set(finished(self._all())["locks_pairs"])
            regained = [job for job in found if known.isdisjoint(finished([job])["locks_pairs"])]
            self.waiting.extend(regained)
        if regained:
            self._beat = -float("inf")  # they are not begun until the database was told that this worker lives
        self._look_again = time.monotonic() + terms.heartbeat if self._unsure else float("inf")
        self._unsure = False

    @property
    def _looks_again(self) -> bool:
        return self._look_again < float("inf")

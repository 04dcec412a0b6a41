"""What a worker decides, and what it sends to the database; ``threaded.py`` and ``asynchronous.py`` only wait and run.

Everything here is synchronous: ``AsyncWorker`` calls it in SQLAlchemy's greenlet. One thread at a time calls what talks
to the database; handlers' threads call :meth:`WorkerState.take` and :meth:`WorkerState.done`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy_locks.core.operation import fresh_nonce
from sqlalchemy_locks.runtime.retry import Sleep
from sqlalchemy_locks.workers.config import StopRequest, WorkerConfig
from sqlalchemy_locks.workers.database import WorkerDatabase, format_error, is_about_statement, is_temporary, log
from sqlalchemy_locks.workers.fetch_cursor import FetchCursor
from sqlalchemy_locks.workers.results import MAX_ACK_DELAY, PendingAcks

#: the pause while the database is unavailable, in seconds: the first one, and the longest
_FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
#: how many stalled jobs are requeued in one transaction
_SWEEP_BATCH = 1000
#: the longest time without a fetch from the head of the queue, in seconds: a search that was slow may have waited for
#: something else
_LONGEST_WITHOUT_HEAD = 1.0
#: how often a worker that stops tries to report and release its jobs
_CLOSE_ATTEMPTS = 5


class WorkerState:
    """The jobs of one run of a worker: waiting for a free slot, running, finished."""

    def __init__(self, config: WorkerConfig, stop: StopRequest, sleep: Sleep) -> None:
        self.config, self._stop = config, stop
        self.database = WorkerDatabase(config, sleep)
        self._lock = threading.Lock()
        self.acks = PendingAcks(config, self.database, self._lock)
        self.sweeper = StalledSweeper(config, self.database)
        self.cursor = FetchCursor(config.backend.keeps_dead_index_entries, min(config.heartbeat, _LONGEST_WITHOUT_HEAD))
        #: ``processing_host`` of this run; no other run of any worker has the same
        self.host = f"{config.host}:{fresh_nonce()[:8]}"
        self.waiting: deque[Any] = deque()
        self.running: dict[int, Any] = {}
        #: no job is captured or started any more
        self.stopping = False
        self._deadline = float("inf")
        #: when the database last learned that this worker is alive
        self._heartbeat_at = -float("inf")
        #: the last fetch left jobs in the queue, as far as it is known
        self._more_jobs = False
        #: the pause while the database is unavailable, in seconds
        self._error_pause = 0.0
        #: the reply to a capture was lost: this worker may own jobs that it doesn't know of
        self._reply_lost = False
        #: when to look for them a second time, since the capture may have taken effect after the first look
        self._search_again_at = float("inf")
        #: the last fetch has reported the completed jobs
        self._fetched = False

    # between turns, in any thread

    def take(self) -> Any:
        """Return a job to run: if there is one, a slot is free, and the last heartbeat is recent; else ``None``."""
        with self._lock:
            return self._take()

    def done(self, job: Any, error: BaseException | None) -> bool:
        """Note that a handler has returned or raised; never raises.

        :return: whether a turn is due now.
        """
        if error is None:
            with self._lock:
                return self._complete(job)
        text = format_error(error)
        with self._lock:
            self.acks.failed.append((job, text))
            self.running.pop(id(job), None)
        log(logging.WARNING, "A job of the queue %r failed", self.config.name, exc_info=error)
        return True

    def done_and_take(self, job: Any) -> tuple[bool, Any]:
        """Note that a handler has returned, as :meth:`done` does, then :meth:`take` another job."""
        with self._lock:
            return self._complete(job), self._take()

    def _take(self) -> Any:
        config = self.config
        # a stop may be requested while a turn waits for the database
        if self.stopping or self._stop.requested or not self.waiting or len(self.running) >= config.concurrency:
            return None
        if time.monotonic() > self._heartbeat_at + 2 * config.heartbeat:
            return None  # after the process or the database was stopped, the jobs may have other owners already
        job = self.waiting.popleft()
        self.running[id(job)] = job
        return job

    def _complete(self, job: Any) -> bool:
        self.acks.add_completed(job)
        self.running.pop(id(job), None)
        return len(self.acks.completed) >= self.config.batch or not self.waiting

    # the turns

    def keep_going(self) -> bool:
        """Whether another turn is due: until a stop is requested, then while handlers run and ``grace`` isn't over."""
        if not self._stop.requested:
            return True
        if not self.stopping:
            self.stopping = True
            self._deadline = time.monotonic() + self.config.grace
        return bool(self.running) and time.monotonic() < self._deadline

    def turn(self) -> None:
        """Report to the database what is due, and fetch jobs; survives an unavailable database.

        A step that fails doesn't keep the others from being taken: running jobs stay this worker's although no others
        can be captured.
        """
        steps = (
            self._send_heartbeat,
            self.acks.send_failed,
            self._fetch,
            self._send_completed,  # if nothing was fetched, for whatever reason
            self.acks.send_deferred,
            self._find_lost_captures,
            self._release_waiting_if_stopping,
            self._sweep,
        )
        if self._take_steps(steps):
            self._error_pause = min(LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * self._error_pause))
        else:
            self._error_pause = 0.0

    def pause(self) -> float:
        """Return how long nothing is due, in seconds, unless a handler finishes or jobs are put."""
        pause = self._idle_time()
        return min(pause, max(0.0, self._deadline - time.monotonic())) if self.stopping else pause

    def _idle_time(self) -> float:
        now, acks = time.monotonic(), self.acks
        heartbeat = self._heartbeat_at + self.config.heartbeat - now
        if self._error_pause:
            return min(self._error_pause, heartbeat) if heartbeat > 0 else self._error_pause
        free = len(self.running) < self.config.concurrency and not self.waiting and not self.stopping
        if acks.failed or (acks.completed and not self.waiting) or (free and self._more_jobs) or self._sweep_due():
            return 0.0
        times = [heartbeat, self.config.poll if free else self.config.heartbeat, acks.due_in()]
        if self.waiting and not acks.completed:
            times.append(MAX_ACK_DELAY)  # the first job to be completed wakes no turn
        return max(0.0, min(times))

    def close(self) -> None:
        """Report what is finished, and release all other jobs: those that still run may run again elsewhere."""
        self.stopping = True
        errors: list[Exception] = []
        steps: Sequence[Callable[[], None]] = (
            self._send_all_completed,
            self.acks.send_failed,
            self.release_waiting,
            self._release_running,
            # those whose handlers returned between the first step and the release of what ran
            self._send_all_completed,
            self.acks.send_failed,
            self._release_lost_captures,
            self.acks.wait_for_locked,
        )
        for _ in range(_CLOSE_ATTEMPTS):
            steps = self._take_steps(steps, errors)
            if not steps:
                break
            self.database.sleep(_FIRST_PAUSE)
        else:
            log(logging.ERROR, "Jobs could not be released: they are requeued when they have stalled")
        if errors:
            raise errors[0]

    def _take_steps(
        self, steps: Sequence[Callable[[], None]], errors: list[Exception] | None = None
    ) -> list[Callable[[], None]]:
        """Take steps one after the other, and return those that have to be taken again.

        :param errors: collects errors that retries don't mend; without it they are raised.
        """
        failed: list[Callable[[], None]] = []
        without_reply = 0
        for number, step in enumerate(steps):
            try:
                step()
            except Exception as error:
                if not is_temporary(error):
                    if errors is None:
                        raise
                    errors.append(error)
                    continue  # the other steps may succeed
                log(logging.WARNING, "Database unavailable: %s", error)
                failed.append(step)
                without_reply += not is_about_statement(error)
                if without_reply > 1:
                    # one step may have asked for too much; after two, each further one would only wait as long
                    return [*failed, *steps[number + 1 :]]
        return failed

    def jobs(self) -> list[Any]:
        """Return every job that this worker owns, as far as it knows."""
        return [*self.waiting, *self.running.values(), *self.acks.jobs()]

    def _send_heartbeat(self) -> None:
        """Report that this worker is alive; jobs that were taken from it nevertheless are not started any more."""
        with self._lock:
            jobs = self.jobs()
        if not jobs:
            self._heartbeat_at = time.monotonic()
        elif time.monotonic() >= self._heartbeat_at + self.config.heartbeat:
            sent_at = time.monotonic()
            if self.database.perform(self.config.queue.heartbeat(jobs)) != len(jobs):
                self._heartbeat_at = -float("inf")  # no job is started until it is known which are still owned
                self._drop_lost_jobs()
            self._heartbeat_at = sent_at

    def _drop_lost_jobs(self) -> None:
        with self._lock:
            waiting = list(self.waiting)
        owned = self.database.owned(waiting)
        kept = {id(job) for job in owned}
        with self._lock:
            self.waiting = deque(job for job in self.waiting if id(job) in kept)
        if lost := len(waiting) - len(owned):
            log(logging.WARNING, "%d jobs are not started: they have another owner by now", lost)

    def _fetch(self) -> None:
        """Capture jobs if a slot is free, and report the completed ones in the same transaction."""
        config = self.config
        self._fetched = False
        if self.stopping or self._stop.requested or self.waiting or len(self.running) >= config.concurrency:
            return
        with self._lock:
            completed = list(self.acks.completed)
        started, after = time.monotonic(), self.cursor.after()
        operation = config.queue._fetch(completed, config.batch, queue=config.name, host=self.host, after=after)
        self._reply_lost, reply_lost = True, self._reply_lost
        jobs, changed = self.database.perform(operation)
        self._reply_lost = reply_lost or self.database.retried
        with self._lock:
            if not self.running:
                self._heartbeat_at = started
            self.waiting.extend(jobs)
        last = config.queue._jobs.position(jobs[-1]) if len(jobs) == config.batch else None
        # a retry took its time for another reason than the search
        self.cursor.advance(after, last, 0.0 if self.database.retried else time.monotonic() - started)
        # where a search stops early because others capture, too, there may be more jobs than it has found
        stopped_early = bool(jobs) and not config.backend.releases_skipped_rows
        self._more_jobs = last is not None or after is not None or stopped_early
        self._fetched = True
        self.acks.confirm(completed, changed)

    def _send_completed(self) -> None:
        if not self._fetched:
            self.acks.send_completed(now=not self.waiting or self.stopping)

    def _send_all_completed(self) -> None:
        self.acks.send_completed(now=True)

    def _find_lost_captures(self) -> None:
        """Find the jobs of a capture whose reply was lost, by the host name that only this run has.

        It searches immediately and once more after a heartbeat: the server may go on with a statement whose client has
        given up.
        """
        search_again = self._search_again_at < float("inf") and (
            self.stopping or time.monotonic() >= self._search_again_at
        )
        if not self._reply_lost and not search_again:
            return
        queue = self.config.queue
        found = self.database.perform(queue._running_on(self.host, queue=self.config.name))
        with self._lock:
            known = set(queue._jobs.owned_rows(self.jobs())["locks_pairs"])
            lost = [job for job in found if known.isdisjoint(queue._jobs.owned_rows([job])["locks_pairs"])]
            self.waiting.extend(lost)
        if lost:
            self._heartbeat_at = -float("inf")  # they are not started before the next heartbeat
        self._search_again_at = time.monotonic() + self.config.heartbeat if self._reply_lost else float("inf")
        self._reply_lost = False

    def _release_waiting_if_stopping(self) -> None:
        if self.stopping:
            self.release_waiting()

    def release_waiting(self) -> None:
        """Release the jobs that were not started, so that other workers needn't wait until they have stalled."""
        self.stopping = True
        if self.waiting:
            self.database.perform(self.config.queue.release(list(self.waiting)))
            self.waiting.clear()

    def _release_lost_captures(self) -> None:
        # a step of its own, so that known jobs are released even where the search for others fails
        self._find_lost_captures()
        self.release_waiting()

    def _release_running(self) -> None:
        with self._lock:
            running = list(self.running.values())
        if running:
            self.database.perform(self.config.queue.release(running))

    def _sweep_due(self) -> bool:
        return not self.stopping and self.sweeper.due()

    def _sweep(self) -> None:
        # one batch at a time, so that no heartbeat is late for it
        if self._sweep_due() and self.sweeper.requeue_batch():
            self._more_jobs = True


class StalledSweeper:
    """Requeues the stalled jobs of a worker's queue, four times in each ``stalled_after``.

    Only those of its own queue: the workers of other queues may have other intervals.
    """

    def __init__(self, config: WorkerConfig, database: WorkerDatabase) -> None:
        self.config, self._database = config, database
        self._swept_at = -float("inf")

    def due(self) -> bool:
        config = self.config
        return config.stalled_after is not None and time.monotonic() >= self._swept_at + config.sweep_interval

    def requeue_batch(self) -> int:
        """Requeue up to a batch of stalled jobs, and return how many."""
        config = self.config
        assert config.stalled_after is not None
        operation = config.queue.requeue_stalled(config.stalled_after, queue=config.name, limit=_SWEEP_BATCH)
        found: int = self._database.perform(operation)
        if found:
            log(logging.WARNING, "%d jobs were requeued: their worker sent no heartbeat", found)
        if found < _SWEEP_BATCH:
            self._swept_at = time.monotonic()
        return found

    def run(self) -> None:
        """Requeue all stalled jobs if it is time; survives an unavailable database."""
        try:
            while self.due():
                self.requeue_batch()
        except Exception as error:
            if not is_temporary(error):
                raise
            log(logging.WARNING, "Database unavailable: %s", error)

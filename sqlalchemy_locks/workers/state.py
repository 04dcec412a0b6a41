"""What a worker decides, and what it sends to the database; ``threaded.py`` and ``asynchronous.py`` only wait and run.

Everything here is synchronous: ``AsyncWorker`` calls it in a greenlet. One thread at a time calls what talks
to the database; handlers' threads call :meth:`WorkerState.take` and :meth:`WorkerState.done`, the heartbeats' thread
:meth:`WorkerState.lose_all`.

A captured job waits until its attempt is counted, is then ready, and runs when a slot is free. The attempt counts when
the handler begins: so many jobs are counted at a time as there are free slots. Where handlers take less time than a
round trip to the database, first attempts are counted ahead, by the batch, and by the capture itself; never the last
attempt of a job, so that none is dead that hasn't begun.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.queue.acknowledge import skip_locked
from sqlalchemy_locks.queue.fetch import decoders
from sqlalchemy_locks.queue.jobs import BEGUN
from sqlalchemy_locks.queue.liveness import ReadHeartbeat
from sqlalchemy_locks.runtime.retry import Sleep
from sqlalchemy_locks.sql.clock import utc
from sqlalchemy_locks.workers.config import StopRequest, WorkerConfig
from sqlalchemy_locks.workers.database import WorkerDatabase, is_temporary, log, was_answered
from sqlalchemy_locks.workers.events import JobReports, ObservedWorker
from sqlalchemy_locks.workers.fetch_cursor import FetchCursor
from sqlalchemy_locks.workers.heartbeats import Heartbeats
from sqlalchemy_locks.workers.results import MAX_ACK_DELAY, PendingAcks, Undecodable, failure_of
from sqlalchemy_locks.workers.running_job import RunningJob

#: the pause while the database is unavailable, in seconds: the first one, and the longest
_FIRST_PAUSE, LONGEST_ERROR_PAUSE = 0.1, 5.0
#: the longest time without a fetch from the head of the queue, in seconds: a search that was slow may have waited for
#: something else
_LONGEST_WITHOUT_HEAD = 1.0
#: how many jobs of silent workers are requeued in one transaction
_REQUEUE = 1000
#: how often a worker that stops tries to report and release its jobs
_CLOSE_ATTEMPTS = 5
#: in how short a time all ready jobs have to be done before more of them are counted ahead, in seconds
_PACE = 0.05
#: how often a job whose row was locked is tried again, in seconds
_LOCKED_INTERVAL = 0.25


class WorkerState:
    """The jobs of one run of a worker: captured, ready, running, finished.

    :param worker: the target of listeners.
    :param wake: ends the pause between two cycles.
    :param until_empty: end when no job is due and none runs.
    :param loop: that of the app, under asyncio.
    """

    def __init__(
        self,
        worker: ObservedWorker,
        config: WorkerConfig,
        stop: StopRequest,
        sleep: Sleep,
        wake: Callable[[], object] = lambda: None,
        *,
        until_empty: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.config, self._stop, self._wake = config, stop, wake
        self.database = WorkerDatabase(config, sleep)
        self._lock = threading.Lock()
        self.cursor = FetchCursor(config.backend.partial_ready_index, min(config.heartbeat, _LONGEST_WITHOUT_HEAD))
        self.heartbeats = Heartbeats(
            config, on_lost=self.lose_all, on_change=self._changed, on_error=self.fail, loop=loop
        )
        self.reports = JobReports(worker, config, lambda: self.heartbeats.host)
        self.acks = PendingAcks(
            config, self.database, self._lock, lambda job, error: self.reports.emit_job("dead", job, error=error)
        )
        self._decoders = decoders(config.queue._jobs, config.engine.dialect)
        #: captured, and not counted yet
        self.waiting: deque[RunningJob] = deque()
        #: counted, and to be run when a slot is free
        self.ready: deque[RunningJob] = deque()
        self.running: dict[int, RunningJob] = {}
        #: no job is captured or started any more
        self.stopping = False
        self._deadline = float("inf")
        #: a permanent error, which no retry would avoid; the worker raises it when it has ended
        self.error: BaseException | None = None
        #: the last fetch left jobs in the queue, as far as it is known
        self._more_jobs = False
        #: the pause while the database is unavailable, in seconds
        self._error_pause = 0.0
        #: the outcome of a fetch is unknown: this worker may own jobs that it doesn't know of
        self._reply_lost = False
        #: when to compare the jobs that it has with those in the database, and when to requeue those of silent workers
        self._compare_at = time.monotonic() + self._interval
        self._requeue_at = -float("inf")
        #: the last fetch has reported the completed jobs
        self._fetched = False
        self._until_empty = until_empty
        #: the last fetch found no job, and none ran meanwhile
        self._empty = False
        #: how many jobs may be counted ahead, and when jobs became ready for the last time
        self._ahead = 0
        self._ready_at = -float("inf")
        #: jobs whose rows were locked stay uncounted until then
        self._locked_until = -float("inf")

    @property
    def _interval(self) -> float:
        """How often the worker compares its jobs with those in the database, in seconds."""
        return self.config.stalled_after or 300.0

    # between cycles, in any thread

    def take(self) -> RunningJob | None:
        """Return a job to run: if there is one, a slot is free, and the last heartbeat is recent; else ``None``."""
        with self._lock:
            return self._take()

    def call(self, job: RunningJob, handler: Callable[[RunningJob], Any]) -> Any:
        """Decode a job and call its handler; whatever is raised is an error of the job."""
        try:
            job._decode(self._decoders)
        except Exception as error:
            raise Undecodable("the job can't be decoded") from error
        self.reports.emit_job("begun", job)
        return handler(job)

    def done(self, job: RunningJob, error: BaseException | None) -> bool:
        """Note that a handler has returned or raised; never raises.

        :return: whether a cycle is due now.
        """
        return self.done_and_take(job, error, following=False)[0]

    def done_and_take(
        self, job: RunningJob, error: BaseException | None, *, following: bool = True
    ) -> tuple[bool, RunningJob | None]:
        """Note that a handler has returned or raised, then :meth:`take` another job."""
        failure = None if error is None else failure_of(self.config, job, error)
        self.reports.emit_job("completed" if error is None else "failed", job, error=error)
        with self._lock:
            if failure is None:
                self.acks.add_completed(job)
            else:
                self.acks.failed.append((job, failure))
            self.running.pop(id(job), None)
            due = failure is not None or not self.ready or len(self.acks.completed) >= self.config.batch
            return due, self._take() if following else None

    def lose_all(self) -> None:
        """Note that the jobs have other owners: those of a worker whose row is gone."""
        with self._lock:
            dropped = len(self.waiting) + len(self.ready)
            self.waiting.clear()
            self.ready.clear()
            for job in self.running.values():
                job._taken = True
            running = len(self.running)
        log(
            logging.WARNING,
            "This worker was silent, and has lost its jobs: %d that were running (job.lost), %d that were not started",
            running,
            dropped,
        )
        self._changed()

    def fail(self, error: BaseException) -> None:
        """End the worker for a permanent error; running handlers have the grace of a stop."""
        if self.error is None:
            self.error = error
            # an error of this library is a sentence that says what to do
            log(logging.ERROR, "The worker ends: %s", error, exc_info=None if isinstance(error, LockError) else error)
        self._stop.request()
        self._wake()

    def _changed(self) -> None:
        self._more_jobs = True  # requeued jobs are waiting
        self._wake()

    def _take(self) -> RunningJob | None:
        # a stop may be requested while a cycle waits for the database
        if self.stopping or self._stop.requested or not self.ready or len(self.running) >= self.config.concurrency:
            return None
        if not self.heartbeats.recent():
            return None  # after the process or the database was stopped, the jobs may have other owners already
        job = self.ready.popleft()
        self.running[id(job)] = job
        return job

    # the cycles

    def keep_going(self) -> bool:
        """Whether another cycle is due: until a stop is requested, then while handlers run within ``grace``."""
        if not self._stop.requested:
            return not (self._until_empty and self._empty and not self.running)
        if not self.stopping:
            self.stopping = True
            self._deadline = self._stop.at + self.config.grace
        return bool(self.running) and time.monotonic() < self._deadline

    def cycle(self) -> None:
        """Report to the database what is due, and fetch jobs; survives an unavailable database.

        A step that fails doesn't keep the others from being taken: running jobs stay this worker's although no others
        can be captured.
        """
        steps = (
            self.acks.send_failed,
            self._fetch,
            self._count_attempts,
            self._send_completed,  # if nothing was fetched, for whatever reason
            self.acks.send_deferred,
            self._compare_if_due,
            self._requeue_silent,
            self._release_if_stopping,
        )
        errors: list[BaseException] = []
        failed = self._take_steps(steps, errors)
        for error in errors:
            self.fail(error)
        if failed or errors:
            self._error_pause = min(LONGEST_ERROR_PAUSE, max(_FIRST_PAUSE, 2 * self._error_pause))
        else:
            self._error_pause = 0.0

    @property
    def idle(self) -> bool:
        """Whether a job could be started."""
        free = len(self.running) < self.config.concurrency and not (self.waiting or self.ready or self.stopping)
        return free and self.heartbeats.recent()  # which wakes this worker when it is

    def pause(self) -> float:
        """Return how long nothing is due, in seconds, unless a handler finishes or jobs are put."""
        pause = self._idle_time()
        return min(pause, max(0.0, self._deadline - time.monotonic())) if self.stopping else pause

    def _idle_time(self) -> float:
        acks, now = self.acks, time.monotonic()
        if self._error_pause:
            return self._error_pause
        free = self.idle
        with self._lock:
            countable = bool(self._countable())
        if (
            acks.failed
            or (acks.completed and not self.ready)
            or (countable and now >= self._locked_until)
            or (free and (self._more_jobs or (self._until_empty and self._empty)))
        ):
            return 0.0
        times = [self.config.poll if free else self.config.heartbeat, acks.due_in(), self._compare_at - now]
        if countable:
            times.append(self._locked_until - now)
        if self.config.stalled_after is not None:
            times.append(max(_FIRST_PAUSE, self._requeue_at - now))
        if self.ready and not acks.completed:
            times.append(MAX_ACK_DELAY)  # the first job to be completed wakes no cycle
        return max(0.0, min(times))

    def close(self) -> None:
        """Report what is finished, and release all other jobs: those that still run may run again elsewhere."""
        self.stopping = True
        if self.running:
            message = "The worker of the queue %r ended while %d of its handlers ran: their jobs may run again"
            log(logging.WARNING, message, self.config.name, len(self.running))
        errors: list[BaseException] = [] if self.error is None else [self.error]
        steps: Sequence[Callable[[], None]] = (
            self._send_all_completed,
            self.acks.send_failed,
            self._release_waiting,
            self._release_running,
            # those whose handlers returned between the first step and the release of what ran
            self._send_all_completed,
            self.acks.send_failed,
            self._compare,
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

    def _take_steps(self, steps: Sequence[Callable[[], None]], errors: list[BaseException]) -> list[Callable[[], None]]:
        """Take steps one after the other, and return those that have to be taken again.

        :param errors: collects permanent errors.
        """
        failed: list[Callable[[], None]] = []
        without_reply = 0
        for number, step in enumerate(steps):
            try:
                step()
            except Exception as error:
                if not is_temporary(error):
                    errors.append(error)
                    continue  # the other steps may succeed
                log(logging.WARNING, "Database unavailable: %s", error)
                failed.append(step)
                without_reply += not was_answered(error)
                if without_reply > 1:
                    # one step may have asked for too much; after two, each further one would only wait as long
                    return [*failed, *steps[number + 1 :]]
        return failed

    def _fetch(self) -> None:
        """Capture jobs if a slot is free, and report the completed ones in the same transaction."""
        config, host = self.config, self.heartbeats.host
        self._fetched = self._empty = False
        with self._lock:
            running, completed = len(self.running), list(self.acks.completed)
            busy = self.stopping or self._stop.requested or self.waiting or self.ready or self._runs_suspect()
        if busy or running >= config.concurrency or not self.heartbeats.recent():
            return
        ahead = self._pace()
        limit = min(config.batch, config.concurrency - running + config.prefetch)
        self._more_jobs = False  # what is noted from now on stays noted
        started, after = time.monotonic(), self.cursor.after()
        operation = config.queue._fetch(
            [job._pair for job in completed], limit, queue=config.name, host=host, after=after, ahead=limit <= ahead
        )
        self._reply_lost, reply_lost = True, self._reply_lost
        rows, changed = self.database.perform(operation)
        self._reply_lost = reply_lost or self.database.retried
        self._receive(rows, host)
        last = config.queue._jobs.position(rows[-1]) if len(rows) == limit else None
        # a retry took its time for another reason than the search
        self.cursor.advance(after, last, 0.0 if self.database.retried else time.monotonic() - started)
        # where a search stops early because others capture, too, there may be more jobs than it has found
        stopped_early = bool(rows) and not config.backend.releases_skipped_rows
        if last is not None or after is not None or stopped_early:
            self._more_jobs = True
        self._fetched = True
        with self._lock:
            unfinished = self.waiting or self.ready or running or self.acks.failed
            self._empty = not (unfinished or self._more_jobs or self._reply_lost)
        self.acks.confirm(completed, changed)

    def _receive(self, rows: Sequence[Sequence[Any]], host: str) -> None:
        """Keep captured jobs; return them where the worker has begun again under another host meanwhile."""
        jobs = [RunningJob(self.config.queue._jobs, row, self.heartbeats.may_be_lost) for row in rows]
        with self._lock:
            current = host == self.heartbeats.host
            if current:
                for job in jobs:
                    (self.ready if job._is_counted and not job._is_suspect else self.waiting).append(job)
                if self.ready:
                    self._ready_at = time.monotonic()
        if not current:
            self._release(jobs)

    def _pace(self) -> int:
        """Return how many jobs may be counted ahead: more and more while handlers take hardly any time."""
        if time.monotonic() - self._ready_at <= _PACE:
            self._ahead = min(self.config.batch, max(2 * self._ahead, 2 * self.config.concurrency))
        else:
            self._ahead = 0
        return self._ahead

    def _runs_suspect(self) -> bool:
        return any(job._is_suspect for job in (*self.ready, *self.running.values()))

    def _countable(self) -> list[RunningJob]:
        """Return the waiting jobs whose handlers may begin; the caller holds the lock."""
        free = self.config.concurrency - len(self.running) - len(self.ready)
        if self.stopping or self._stop.requested or not self.waiting or free <= 0 or self._runs_suspect():
            return []
        first = self.waiting[0]
        if first._is_suspect:
            # alone in its process: whatever ran beside it would end with it
            return [] if self.ready or self.running else [first]
        jobs: list[RunningJob] = []
        for job in self.waiting:
            is_last = job._value("attempts") + 1 >= job._value("max_attempts")
            if job._is_suspect or (len(jobs) >= free and (is_last or len(jobs) >= self._ahead)):
                break
            jobs.append(job)
        return jobs

    def _count_attempts(self) -> None:
        """Count the attempts of waiting jobs whose handlers are about to begin."""
        if time.monotonic() < self._locked_until or not self.heartbeats.recent():
            return
        with self._lock:
            if self.waiting and not self.ready:
                self._pace()
            jobs = self._countable()
        if not jobs:
            return
        counted = self._counted(jobs)
        with self._lock:
            present = set(map(id, self.waiting))
            begun = [job for job in jobs if job in counted and id(job) in present]
            self.waiting = deque(job for job in self.waiting if job not in counted)
            self.ready.extend(begun)
            self._ready_at = time.monotonic()
            if self.ready and self.ready[0]._is_suspect:
                others, self.waiting = list(self.waiting), deque()
            else:
                others = []
        self._release([*others, *(job for job in counted if id(job) not in present)])

    def _counted(self, jobs: list[RunningJob]) -> set[RunningJob]:
        """Count attempts in the database, and return the jobs of those that are counted.

        Jobs of other owners are dropped. Those whose rows are locked, perhaps since they are being requeued, wait.
        """
        uncounted = [job for job in jobs if not job._is_counted]
        pairs = [job._pair for job in uncounted]
        if pairs and self.database.perform(self.config.queue._begin(pairs)) == len(pairs):
            for job in uncounted:
                job._count()
            return set(jobs)
        counted = set(jobs) - set(uncounted)
        owned = self.database.look_at([*pairs, *map(_begun, pairs)]) if pairs else None
        for job, pair in zip(uncounted, pairs, strict=True):
            assert owned is not None
            if _begun(pair) in owned.running:
                job._count()
                counted.add(job)
            elif pair in owned.running:
                self._locked_until = time.monotonic() + _LOCKED_INTERVAL
            else:
                log(logging.WARNING, "A job is not started: it has another owner by now")
                with self._lock:
                    if job in self.waiting:
                        self.waiting.remove(job)
        return counted

    def _send_completed(self) -> None:
        if not self._fetched:
            self.acks.send_completed(now=not self.ready or self.stopping)

    def _send_all_completed(self) -> None:
        self.acks.send_completed(now=True)

    def _compare_if_due(self) -> None:
        if self._reply_lost or time.monotonic() >= self._compare_at:
            self._compare()

    def _compare(self) -> None:
        """Compare the jobs that this worker has with those that it has in the database.

        Those that it doesn't know return to the queue: the reply to their capture was lost. It looks at once, again
        after a heartbeat, and from time to time, since the server may continue a statement whose client has given up.
        """
        queue, host = self.config.queue, self.heartbeats.host
        pairs = {tuple(pair) for pair in self.database.perform(queue._running_on(host, queue=self.config.name))}
        with self._lock:
            owned = [*self.waiting, *self.ready, *self.running.values()]
            known = {job._pair for job in (*owned, *self.acks.jobs())}
        unknown = pairs - known - set(map(_begun, known))
        if unknown:
            self.database.perform(skip_locked(queue.release(sorted(unknown))))
            self._more_jobs = True
        if not self.stopping:
            self._lose([job for job in owned if job._pair not in pairs and _begun(job._pair) not in pairs])
        self._compare_at = time.monotonic() + (self.config.heartbeat if self._reply_lost else self._interval)
        if self._reply_lost and self._until_empty:
            self._more_jobs = True  # whether the queue is empty is known after a fetch that was answered
        self._reply_lost = False

    def _lose(self, jobs: Sequence[RunningJob]) -> None:
        """Note which of the jobs, which no longer run, have another owner, rather than were ended by their handlers."""
        lost = self.database.look_at([job._pair for job in jobs]).lost
        taken = [job for job in jobs if job._pair in lost]
        with self._lock:
            for job in taken:
                job._taken = True
            self.waiting = deque(job for job in self.waiting if job not in taken)
            self.ready = deque(job for job in self.ready if job not in taken)
        if taken:
            log(logging.WARNING, "%d jobs were lost: they have another owner by now (job.lost)", len(taken))

    def _requeue_silent(self) -> None:
        """Requeue the jobs of silent workers, if this one may judge others."""
        config = self.config
        if config.stalled_after is None or self.stopping or time.monotonic() < self._requeue_at:
            return
        if not self.heartbeats.steady():
            return
        # of a heartbeat in time: however late the statement is executed, it judges by an instant at which others could
        # send one, too
        heartbeat_at = self.database.perform(config.queue._of_worker(ReadHeartbeat, self.heartbeats.host))
        if heartbeat_at is None or not self.heartbeats.steady():
            return
        instant: Any = utc(heartbeat_at)
        silent_since = instant - timedelta(seconds=config.stalled_after)
        operation = config.queue._requeue_silent(silent_since, queue=config.name, limit=_REQUEUE)
        number = self.database.perform(operation)
        if number:
            log(logging.WARNING, "%d jobs were requeued: their worker sent no heartbeat", number)
            self.reports.emit_stalled(number)
            self._more_jobs = True
        if number < _REQUEUE:
            self._requeue_at = time.monotonic() + config.requeue_interval

    def _release_if_stopping(self) -> None:
        if self.stopping:
            self._release_waiting()

    def _release_waiting(self) -> None:
        """Release the jobs that were not started, so that other workers needn't wait until they have stalled."""
        with self._lock:  # a slot that has seen no stop takes its job first
            self.stopping = True
            jobs = [*self.waiting, *self.ready]
        self._release(jobs)
        with self._lock:
            self.waiting.clear()
            self.ready.clear()

    def _release_running(self) -> None:
        with self._lock:
            running = list(self.running.values())
            for job in running:
                job._taken = True  # before another worker may begin it
        self._release(running)

    def _release(self, jobs: Sequence[RunningJob]) -> None:
        """Return jobs to the queue; those whose rows are locked are returned when they have stalled."""
        if jobs:
            pairs = {job._pair for job in jobs}
            # whose attempt may be counted, though no reply has said so
            pairs |= set(map(_begun, pairs))
            self.database.perform(skip_locked(self.config.queue.release(sorted(pairs))))


def _begun(pair: tuple[Any, int]) -> tuple[Any, int]:
    """Return a job's id and claim once its attempt is counted."""
    return pair[0], pair[1] | BEGUN

"""The decisions of a worker, and its statements; ``threaded.py`` and ``asynchronous.py`` only wait, and run handlers.

Everything here is synchronous: ``AsyncWorker`` calls it in a greenlet. One thread at a time calls the methods that use
the database. Handlers' threads call :meth:`WorkerState.done`, and the heartbeats' thread :meth:`WorkerState.lose_all`.

A captured job waits until its attempt is counted, is then ready, and runs when a slot is free. The attempt counts when
the handler begins: a cycle counts as many as there are free slots. It counts prefetched jobs ahead, too, if their
handlers are expected to begin within a tenth of a second and it is not their last attempt; a reclaim gives such an
attempt back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.queue.acknowledge import RUNNING, skip_locked_rows
from sqlalchemy_locks.queue.fetch import decoders
from sqlalchemy_locks.queue.jobs import BEGUN, COUNTED_AHEAD, ORDER
from sqlalchemy_locks.queue.liveness import STALLED_AFTER, ReadHeartbeat
from sqlalchemy_locks.sql.clock import utc
from sqlalchemy_locks.workers.config import StopRequest, WorkerConfig
from sqlalchemy_locks.workers.database import WorkerDatabase, log, was_answered
from sqlalchemy_locks.workers.events import JobReports, ObservedWorker
from sqlalchemy_locks.workers.heartbeats import Heartbeats
from sqlalchemy_locks.workers.results import LOCKED_INTERVAL, PendingAcks, Undecodable, failure_of
from sqlalchemy_locks.workers.running_job import RunningJob

#: the pause while the database is unavailable, in seconds: the first one, and the longest
_FIRST_PAUSE, LONGEST_ERROR_PAUSE = 0.1, 5.0
#: how many jobs of silent workers are requeued in one transaction
_REQUEUE = 1000
#: attempts are counted ahead if their handlers are expected to begin within so many seconds
_AHEAD = 0.1
#: within how many seconds one slot runs all ready jobs
_ONE_SLOT = 0.001
#: the bits of a claim, by when its attempt was counted: not yet, when its handler could begin, or ahead
_COUNT_STATES = (0, BEGUN, BEGUN | COUNTED_AHEAD)
#: how often a worker that stops tries to report and release its jobs
_CLOSE_ATTEMPTS = 5


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
        wake: Callable[[], object] = lambda: None,
        *,
        until_empty: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.config, self._stop, self._wake = config, stop, wake
        self.database = WorkerDatabase(config)
        self._lock = threading.Lock()
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
        #: the heartbeats begin with the first cycle
        self._starting = False
        #: how long handlers take, in seconds: about the slowest of the last hundred
        self._handler_time = float("inf")
        #: how long they take on average, of about the last hundred
        self._mean_time: float | None = None
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
        #: where the last search ended, and until when searches continue there instead of at the head
        self._after: tuple[Any, ...] | None = None
        self._from_head_at = -float("inf")
        self._until_empty = until_empty
        #: the last fetch found no job, and none ran meanwhile
        self._empty = False

    @property
    def _interval(self) -> float:
        """How often the worker compares its jobs with those in the database, in seconds."""
        return self.config.stalled_after or STALLED_AFTER

    # between cycles, in any thread

    def take(self) -> RunningJob | None:
        """Return a job to run: if there is one, a slot is free, and the last heartbeat is recent; else ``None``."""
        with self._lock:
            return self._take()

    def _take(self) -> RunningJob | None:
        # a stop may be requested while a cycle waits for the database
        if self.stopping or self._stop.requested or not self.ready or len(self.running) >= self.config.concurrency:
            return None
        if not self.heartbeats.recent():
            return None  # after the process or the database was stopped, the jobs may have other owners already
        job = self.ready.popleft()
        self.running[id(job)] = job
        return job

    def slots_to_wake(self) -> int:
        """Return how many idle slots a cycle should wake: one, if it can run all ready jobs within a millisecond.

        This is only for jobs that were counted ahead. Other jobs lose an attempt in a crash, so they begin now.
        """
        with self._lock:
            free, now = self.config.concurrency - len(self.running), time.monotonic()
            took = max((now - job._began_at for job in self.running.values() if job._began_at), default=0.0)
            usual = self._handler_time if self._mean_time is None else self._mean_time
            soon = len(self.ready) * max(took, usual) <= _ONE_SLOT
            return min(free, 1) if soon and all(job._pair[1] & COUNTED_AHEAD for job in self.ready) else free

    def call(self, job: RunningJob, handler: Callable[[RunningJob], Any]) -> Any:
        """Decode a job and call its handler; whatever is raised is an error of the job."""
        try:
            job._decode(self._decoders)
        except Exception as error:
            raise Undecodable("the job can't be decoded") from error
        job._began_at = time.monotonic()
        self.reports.emit_job("begun", job)
        return handler(job)

    def done(self, job: RunningJob, error: BaseException | None) -> RunningJob | None:
        """Note that a handler has returned or raised, and :meth:`take` another job; never raises."""
        failure = None if error is None else failure_of(self.config, job, error)
        self.reports.emit_job("completed" if error is None else "failed", job, error=error)
        job._ended_at = time.monotonic()
        took = job._ended_at - job._began_at
        with self._lock:
            if job._began_at:  # it was decoded
                usual = 0.95 * self._handler_time if self._handler_time < float("inf") else 0.0
                self._handler_time = max(took, usual, 1e-6)
                # the mean, not the slowest: a handler that had to wait for the processor says nothing about the next
                mean = took if self._mean_time is None else self._mean_time
                self._mean_time = mean + (took - mean) / 100
            self.acks.finished[job] = failure
            self.running.pop(id(job), None)
            return self._take()

    def lose_all(self) -> None:
        """Note that the jobs have other owners: those of a worker whose row is gone."""
        with self._lock:
            dropped = len(self.waiting) + len(self.ready)
            self.waiting.clear()
            self.ready.clear()
            for job in self.running.values():
                job._disowned = True
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

    # the cycles

    def start(self) -> None:
        """Send heartbeats, from the first cycle on."""
        self._starting = True

    def _start_heartbeats(self) -> None:
        """Start the heartbeats once the engine has connected.

        SQLAlchemy initializes a dialect at the first connection; only connections of the same pool wait for that.
        """
        if self._starting:
            self.database.connect_once()
            self.heartbeats.start()
            self._starting = False

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

        The other steps are taken even if one fails: the worker keeps its running jobs when it can't capture others.
        """
        steps = (
            self._start_heartbeats,
            self.acks.send_failed,
            self._fetch,
            self.acks.send_completed,
            self._compare_if_due,
            self._requeue_silent,
            self._release_if_stopping,
            self._count_attempts,  # the last one: the handlers begin after it
        )
        errors: list[BaseException] = []
        failed = self._take_steps(steps, errors)
        for error in errors:
            self.fail(error)
        with self._lock:
            busy = self.ready or self.running
        if failed or errors or not busy or time.monotonic() >= self.database.kept_until:
            self.database.return_connection()
        if failed or errors:
            self._error_pause = min(LONGEST_ERROR_PAUSE, max(_FIRST_PAUSE, 2 * self._error_pause))
        else:
            self._error_pause = 0.0

    @property
    def idle(self) -> bool:
        """Whether a job could be started."""
        with self._lock:
            busy = self.waiting or self.ready or self.stopping or self._runs_suspect()
            free = len(self.running) < self.config.concurrency and not busy
        return free and self.heartbeats.recent()  # heartbeats wake this worker when they are recent again

    def pause(self) -> float:
        """Return how long nothing is due, in seconds, unless a handler finishes or jobs are put."""
        pause = self._idle_time()
        return min(pause, max(0.0, self._deadline - time.monotonic())) if self.stopping else pause

    def _idle_time(self) -> float:
        now = time.monotonic()
        if self._error_pause:
            return self._error_pause
        free = self.idle
        if free and (self._more_jobs or (self._until_empty and self._empty)):
            return 0.0
        times = [self.config.poll if free else self.config.heartbeat, self.acks.due_in(), self._compare_at - now]
        times.append(self.database.kept_until - now)
        with self._lock:
            if self._countable()[0]:
                return 0.0
            if self.ready and len(self.running) < self.config.concurrency:
                times.append(10 * _ONE_SLOT)  # their handlers take longer than usual
            times += [job._locked_until - now for job in self.waiting if job._locked_until > now]
        if self.config.stalled_after is not None:
            times.append(max(_FIRST_PAUSE, self._requeue_at - now))
        return max(0.0, min(times))

    def close(self) -> None:
        """Report what is finished, and release all other jobs: those that still run may run again elsewhere."""
        self.stopping = True
        self.database.return_connection()  # whatever ends this
        if self.running:
            message = "The worker of the queue %r ended while %d of its handlers ran: their jobs may run again"
            log(logging.WARNING, message, self.config.name, len(self.running))
        errors: list[BaseException] = [] if self.error is None else [self.error]
        steps: Sequence[Callable[[], None]] = (
            self.acks.send_completed,
            self.acks.send_failed,
            self._release_waiting,
            self._release_running,
            # jobs whose handlers returned between the first step and the release
            self.acks.send_completed,
            self.acks.send_failed,
            self._compare,
            partial(self.acks.send_completed, waits=True),
            partial(self.acks.send_failed, waits=True),
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
                if not self.database.may_pass(error):
                    errors.append(error)
                    continue  # the other steps may succeed
                log(logging.WARNING, "Database unavailable: %s", error)
                failed.append(step)
                without_reply += not was_answered(error)
                if without_reply > 1:
                    # one step may have asked for too much; after a second, the next would only wait as long
                    return [*failed, *steps[number + 1 :]]
        return failed

    def _fetch(self) -> None:
        """Capture jobs if a slot is free."""
        config, host = self.config, self.heartbeats.host
        self._empty = False
        with self._lock:
            running = len(self.running)
            busy = self.stopping or self._stop.requested or self.waiting or self.ready or self._runs_suspect()
        if busy or running >= config.concurrency or not self.heartbeats.recent():
            return
        limit = min(config.batch, config.concurrency - running + config.prefetch)
        self._more_jobs = False  # before the capture: another thread may set it meanwhile
        rows = self._capture(limit, host, limit - config.concurrency + running)
        self._receive(rows, host)
        # a search may stop early where other sessions capture at the same time: the queue may have more jobs
        if len(rows) == limit or (rows and not config.backend.releases_skipped_rows):
            self._more_jobs = True
        with self._lock:
            unfinished = self.waiting or self.ready or running or any(self.acks.finished.values())
            self._empty = not (unfinished or self._more_jobs or self._reply_lost)

    def _capture(self, limit: int, host: str, beyond: int) -> Sequence[Sequence[Any]]:
        """Capture jobs, and complete finished ones in the same statement where the engine can.

        :param beyond: how many of them can't be started immediately.
        """
        config, queue = self.config, self.config.queue
        self._reply_lost, reply_lost = True, self._reply_lost
        if config.backend.writable_ctes and queue._jobs.target is None:
            completed = self.acks.completed()
            # only with prefetch: without it, all handlers begin now, and their attempts are counted then
            ahead = 0 < beyond <= self._startable_soon()
            self.database.keeps_connection = self._startable_soon() > 0
            pairs, after = [job._pair for job in completed], self._position()
            fetching = queue._complete_and_fetch(
                pairs, limit, batch=config.batch, queue=config.name, host=host, ahead=ahead, after=after
            )
            began_at = time.monotonic()
            try:
                rows, number = self.database.perform(fetching)
            except Exception as error:
                if not completed or self.database.may_pass(error):
                    raise
                self.acks.send_completed()  # reports one by one: the database refuses one of these jobs
            else:
                retried = self.database.was_retried
                self.acks.confirm(completed, number)  # if it fails, the worker finds the captured jobs by its host
                self._reply_lost = reply_lost or retried
                self._advance(after, rows[-1] if len(rows) == limit else None, time.monotonic() - began_at)
                return rows  # type: ignore[no-any-return]
        rows = self.database.perform(queue._fetch(limit, queue=config.name, host=host))
        self._reply_lost = reply_lost or self.database.was_retried
        return rows  # type: ignore[no-any-return]

    def _position(self) -> tuple[Any, ...] | None:
        """Return the position in the order to search from; ``None``: from the head."""
        return self._after if time.monotonic() < self._from_head_at else None

    def _advance(self, after: tuple[Any, ...] | None, last: Sequence[Any] | None, took: float) -> None:
        """Note a search.

        While another session has an old snapshot, each search from the head of PostgreSQL's index reads the entries of
        all jobs that were captured since. So the next searches start where this one ended, for ten times as long as a
        search from the head takes, at most for ``poll`` seconds. Jobs that sort before that position, for instance of a
        higher priority, wait until then.

        :param last: the last job that was captured; ``None`` if there were fewer than asked for.
        :param took: how long it took, in seconds.
        """
        if after is None:
            self._from_head_at = time.monotonic() + min(10 * took, self.config.poll)
        elif last is None:
            self._more_jobs = True  # there may be some before the position
        keys = self.config.queue._jobs.keys
        self._after = None if last is None else tuple(last[keys[role]] for role in ORDER)

    def _startable_soon(self) -> int:
        """Return how many more handlers will begin soon than can begin now, estimated from how long they take."""
        return int(_AHEAD * self.config.concurrency / self._handler_time)

    def _receive(self, rows: Sequence[Sequence[Any]], host: str) -> None:
        """Keep captured jobs; return them to the queue if the worker has got another host meanwhile."""
        own, may_be_lost = self.config.queue._jobs, self.heartbeats.may_be_lost
        captured = own.captured(self.config.name, host)
        jobs = [RunningJob(own, row, captured, may_be_lost) for row in rows]
        with self._lock:
            current = host == self.heartbeats.host
            if current:
                for job in jobs:
                    # a job is ready if its attempt was counted with its capture
                    (self.ready if job._pair[1] & BEGUN else self.waiting).append(job)
        if not current:
            self._release(jobs)

    def _runs_suspect(self) -> bool:
        return any(job._is_suspect for job in (*self.ready, *self.running.values()))

    def _countable(self) -> tuple[list[RunningJob], bool]:
        """Return the waiting jobs whose handlers may begin, and whether that is soon rather than now.

        The caller holds the lock.
        """
        free = self.config.concurrency - len(self.running) - len(self.ready)
        now = time.monotonic()
        jobs = [job for job in self.waiting if job._locked_until <= now]
        if self.stopping or self._stop.requested or not jobs or self._runs_suspect() or not self.heartbeats.recent():
            return [], False
        if jobs[0]._is_suspect:
            # A suspect runs alone: if it kills the process, no other job and no unsent report must be lost with it.
            return ([] if self.ready or self.running or self.acks.finished else jobs[:1]), False
        harmless = list(takewhile(lambda job: not job._is_suspect, jobs))
        if free > 0:
            return harmless[:free], False
        soon = harmless[: max(0, self._startable_soon() - len(self.ready))]
        # up to the first one whose next attempt is its last
        return list(takewhile(lambda job: job._value("attempts") + 1 < job._value("max_attempts"), soon)), True

    def _count_attempts(self) -> None:
        """Count the attempts of waiting jobs whose handlers are about to begin."""
        with self._lock:
            jobs, ahead = self._countable()
        if not jobs:
            return
        counted = self._counted(jobs, ahead)
        with self._lock:
            begun = [job for job in self.waiting if job in counted]
            self.waiting = deque(job for job in self.waiting if job not in counted)
            self.ready.extend(begun)
            others: list[RunningJob] = []
            if begun and begun[0]._is_suspect:
                others, self.waiting = list(self.waiting), deque()
        # also the jobs that were lost meanwhile, because the worker was silent
        self._release([*others, *(job for job in counted if job not in begun)])

    def _counted(self, jobs: list[RunningJob], ahead: bool) -> list[RunningJob]:
        """Count attempts in the database, and return the jobs whose attempts are counted.

        Jobs of other owners are dropped. Jobs whose rows are locked wait: another worker may be requeueing them.
        """
        bits = BEGUN | COUNTED_AHEAD if ahead else BEGUN
        states: dict[Any, str] = {_with_bits(job._pair, bits): RUNNING for job in jobs}
        if self.database.perform(self.config.queue._begin([job._pair for job in jobs], ahead=ahead)) < len(jobs):
            # an earlier count, ahead or not, may have succeeded without a reply
            states = self.database.states([_with_bits(job._pair, each) for job in jobs for each in _COUNT_STATES])
        counted = []
        for job in jobs:
            state = next((bits for bits in _COUNT_STATES if states.get(_with_bits(job._pair, bits)) == RUNNING), None)
            if state:
                job._count(state)
                counted.append(job)
            elif state is not None:
                job._locked_until = time.monotonic() + LOCKED_INTERVAL
            else:
                log(logging.WARNING, "A job is not started: it has another owner by now")
                with self._lock:
                    if job in self.waiting:
                        self.waiting.remove(job)
        return counted

    def _compare_if_due(self) -> None:
        if self._reply_lost or time.monotonic() >= self._compare_at:
            self._compare()

    def _compare(self) -> None:
        """Compare the jobs that this worker knows with the running jobs of its host in the database.

        Jobs that it doesn't know return to the queue: the reply to their capture was lost. After a lost reply it
        compares at once, and again after a heartbeat: the server may continue a statement whose client has given up.
        Otherwise it compares from time to time.
        """
        queue, host = self.config.queue, self.heartbeats.host
        pairs = {tuple(pair) for pair in self.database.perform(queue._running_on(host, queue=self.config.name))}
        with self._lock:
            owned = [*self.waiting, *self.ready, *self.running.values()]
            claims = {_captured(job._pair) for job in (*owned, *self.acks.finished)}
        orphans = [pair for pair in pairs if _captured(pair) not in claims]
        if orphans:
            self.database.perform(skip_locked_rows(queue.release(sorted(orphans))))
            self._more_jobs = True
        if not self.stopping:
            captured = set(map(_captured, pairs))
            self._lose([job for job in owned if _captured(job._pair) not in captured])
        self._compare_at = time.monotonic() + (self.config.heartbeat if self._reply_lost else self._interval)
        if self._reply_lost and self._until_empty:
            self._more_jobs = True  # only a fetch that was answered can tell that the queue is empty
        self._reply_lost = False

    def _lose(self, jobs: Sequence[RunningJob]) -> None:
        """Note which jobs have another owner, of those that no longer run in the database; handlers ended the rest."""
        states = self.database.states([job._pair for job in jobs])
        losses = [job for job in jobs if job._pair not in states]
        with self._lock:
            for job in losses:
                job._disowned = True
            self.waiting = deque(job for job in self.waiting if job not in losses)
            self.ready = deque(job for job in self.ready if job not in losses)
        if losses:
            log(logging.WARNING, "Jobs lost (job.lost), which have another owner by now: %d", len(losses))

    def _requeue_silent(self) -> None:
        """Requeue the jobs of silent workers, if this one may judge others."""
        config = self.config
        if config.stalled_after is None or self.stopping or time.monotonic() < self._requeue_at:
            return
        heartbeats = self.heartbeats
        # the first heartbeat is read before this worker may judge others: it tells the server's clock
        if not (heartbeats.steady() if heartbeats.knows_clock else heartbeats.recent()):
            return
        sent_at = heartbeats.confirmed_at
        # Others are judged by the instant of this worker's own heartbeat, at which every live worker could send one,
        # however late the statement is executed.
        heartbeat_at = self.database.perform(config.queue._of_worker(ReadHeartbeat, heartbeats.host))
        if heartbeat_at is None or heartbeats.confirmed_at != sent_at:
            return
        instant: Any = utc(heartbeat_at)
        if heartbeats.clock_was_set(instant, sent_at) or not heartbeats.steady():
            return
        operation = config.queue._requeue_silent(config.stalled_after, instant, queue=config.name, limit=_REQUEUE)
        number = self.database.perform(operation)
        if number:
            log(logging.WARNING, "Jobs requeued, whose worker sent no heartbeat: %d", number)
            self.reports.emit("stalled", count=number)
            self._more_jobs = True
        if number < _REQUEUE:
            self._requeue_at = time.monotonic() + config.requeue_interval

    def _release_if_stopping(self) -> None:
        if self.stopping:
            self._release_waiting()

    def _release_waiting(self) -> None:
        """Release the jobs that were not started, so that other workers needn't wait until they have stalled."""
        with self._lock:  # a slot that hasn't seen the stop has taken its job before
            jobs = [*self.waiting, *self.ready]
        self._release(jobs)
        with self._lock:
            self.waiting.clear()
            self.ready.clear()

    def _release_running(self) -> None:
        with self._lock:
            running = list(self.running.values())
            for job in running:
                job._disowned = True  # before another worker may begin it
        self._release(running)

    def _release(self, jobs: Sequence[RunningJob]) -> None:
        """Return jobs to the queue; those whose rows are locked are returned when they have stalled."""
        if jobs:
            # their attempts may be counted, though no reply has said so
            pairs = {_with_bits(job._pair, each) for job in jobs for each in _COUNT_STATES}
            self.database.perform(skip_locked_rows(self.config.queue.release(sorted(pairs))))


def _with_bits(pair: tuple[Any, int], bits: int) -> tuple[Any, int]:
    """Return a job's id and claim once its attempt is counted."""
    return pair[0], pair[1] | bits


def _captured(pair: tuple[Any, int]) -> tuple[Any, int]:
    """Return a job's id and claim as they were before its attempt was counted."""
    return pair[0], pair[1] & ~(BEGUN | COUNTED_AHEAD)

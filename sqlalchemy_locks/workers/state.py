"""What a worker decides, and what it sends to the database; ``threaded.py`` and ``asynchronous.py`` only wait and run.

Everything here is synchronous: ``AsyncWorker`` calls it in a greenlet. One thread at a time calls what talks
to the database; handlers' threads call :meth:`WorkerState.take` and :meth:`WorkerState.done`, the heartbeats' thread
:meth:`WorkerState.jobs` and :meth:`WorkerState.drop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.core.operation import fresh_nonce
from sqlalchemy_locks.errors import Discard, LockError, Retry
from sqlalchemy_locks.queue.acknowledge import skip_locked
from sqlalchemy_locks.runtime.renewal import clock
from sqlalchemy_locks.runtime.retry import Sleep
from sqlalchemy_locks.sql.clock import utc
from sqlalchemy_locks.workers.config import StopRequest, WorkerConfig, default_pause
from sqlalchemy_locks.workers.database import (
    WorkerDatabase,
    format_error,
    is_about_no_job,
    is_about_statement,
    is_temporary,
    is_wrong_statement,
    log,
)
from sqlalchemy_locks.workers.events import JobReports, ObservedWorker
from sqlalchemy_locks.workers.fetch_cursor import FetchCursor
from sqlalchemy_locks.workers.heartbeats import Heartbeats
from sqlalchemy_locks.workers.results import MAX_ACK_DELAY, Failure, PendingAcks
from sqlalchemy_locks.workers.running_job import RunningJob

#: the pause while the database is unavailable, in seconds: the first one, and the longest
_FIRST_PAUSE, LONGEST_ERROR_PAUSE = 0.1, 5.0
#: the longest time without a fetch from the head of the queue, in seconds: a search that was slow may have waited for
#: something else
_LONGEST_WITHOUT_HEAD = 1.0
#: how many jobs of silent workers are counted
_MOST_SILENT = 1000
#: how often a worker that stops tries to report and release its jobs
_CLOSE_ATTEMPTS = 5


class WorkerState:
    """The jobs of one run of a worker: waiting for a free slot, running, finished.

    :param worker: the target of listeners.
    :param wake: ends the pause between two cycles.
    :param until_empty: end when no job is due and none runs.
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
    ) -> None:
        self.config, self._stop, self._wake = config, stop, wake
        self.database = WorkerDatabase(config, sleep)
        self._lock = threading.Lock()
        self.cursor = FetchCursor(config.backend.keeps_dead_index_entries, min(config.heartbeat, _LONGEST_WITHOUT_HEAD))
        #: ``processing_host`` of this run; no other run of any worker has the same
        self.host = f"{config.host}:{fresh_nonce()[:8]}"
        self.reports = JobReports(worker, config, self.host)
        self.acks = PendingAcks(
            config, self.database, self._lock, lambda job, error: self.reports.emit_job("dead", job, error=error)
        )
        self.heartbeats = Heartbeats(
            config,
            self.host,
            self.jobs,
            unfinished=self.unfinished,
            on_locked=self.withhold,
            on_lost=self.drop,
            on_change=self._changed,
            on_error=self.fail,
            on_stalled=self.reports.emit_stalled,
        )
        self.waiting: deque[Any] = deque()
        #: waiting, too, and not to be started: another session, which may be requeueing them, has locked their rows
        self.withheld: list[Any] = []
        self.running: dict[int, RunningJob] = {}
        #: those that were still running at the end, and whose rows were locked
        self._running_locked: list[Any] = []
        #: no job is captured or started any more
        self.stopping = False
        self._deadline = float("inf")
        #: a permanent error, which no retry would avoid; the worker raises it when it has ended
        self.error: BaseException | None = None
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
        #: the last fetch failed, perhaps over a job that can't be decoded: the next one reads its jobs one by one
        self._suspicious = False
        self._until_empty = until_empty
        #: the last fetch found no job, and none ran meanwhile
        self._empty = False

    # between cycles, in any thread

    def take(self) -> RunningJob | None:
        """Return a job to run: if there is one, a slot is free, and the last heartbeat is recent; else ``None``."""
        with self._lock:
            return self._take()

    def put_back(self, job: RunningJob) -> None:
        """Note that a job which was taken is not begun: it waits again, and is released with those that wait."""
        with self._lock:
            self.running.pop(id(job), None)
            self.waiting.appendleft(job._row)

    def done(self, job: RunningJob, error: BaseException | None) -> bool:
        """Note that a handler has returned or raised; never raises.

        :return: whether a cycle is due now.
        """
        if error is None:
            self._report("completed", job)
            with self._lock:
                return self._complete(job)
        failure = failure_of(self.config, job._row, error)
        self._report("failed", job, error)
        with self._lock:
            self.acks.failed.append((job._row, failure))
            self.running.pop(id(job), None)
        return True

    def done_and_take(self, job: RunningJob) -> tuple[bool, RunningJob | None]:
        """Note that a handler has returned, as :meth:`done` does, then :meth:`take` another job."""
        self._report("completed", job)
        with self._lock:
            return self._complete(job), self._take()

    def drop(self, gone: Sequence[Any], lost: Sequence[Any]) -> None:
        """Don't start the jobs (rows) in ``gone``; set ``job.lost`` for the running ones in ``lost``."""
        absent, taken = {id(row) for row in gone}, {id(row) for row in lost}
        with self._lock:
            before = len(self.waiting) + len(self.withheld)
            self.waiting = deque(row for row in self.waiting if id(row) not in absent)
            self.withheld = [row for row in self.withheld if id(row) not in absent]
            dropped = before - len(self.waiting) - len(self.withheld)
            running = [job for job in self.running.values() if id(job._row) in taken and not job._taken]
            for job in self.running.values():
                job._gone = job._gone or id(job._row) in absent
                job._taken = job._taken or id(job._row) in taken
        if dropped:
            log(logging.WARNING, "%d jobs are not started: they have another owner by now", dropped)
        if running:
            log(
                logging.WARNING,
                "%d running jobs were lost: they have another owner by now, or were returned to the queue (job.lost)",
                len(running),
            )

    def fail(self, error: BaseException) -> None:
        """End the worker for a permanent error; running handlers have the grace of a stop."""
        if self.error is None:
            self.error = error
            # an error of this library is a sentence that says what to do
            log(logging.ERROR, "The worker ends: %s", error, exc_info=None if isinstance(error, LockError) else error)
        self._stop.request()
        self._wake()

    def withhold(self, locked: Sequence[Any]) -> None:
        """Don't start the jobs (rows) in ``locked`` until a call that leaves them out."""
        ids = set(map(id, locked))
        with self._lock:
            if not ids and not self.withheld:
                return
            jobs, before = [*self.withheld, *self.waiting], len(self.withheld)
            self.withheld = [row for row in jobs if id(row) in ids]
            self.waiting = deque(row for row in jobs if id(row) not in ids)
            fewer = len(self.withheld) < before
        if fewer:
            self._changed()

    def unfinished(self, rows: Sequence[Any]) -> list[Any]:
        """Return those of the jobs (rows) that wait or run."""
        with self._lock:
            ids = {id(row) for row in (*self.waiting, *self.withheld, *(job._row for job in self.running.values()))}
        return [row for row in rows if id(row) in ids]

    def _report(self, what: str, job: RunningJob, error: BaseException | None = None) -> None:
        if self.reports.has_listeners:
            self.reports.emit_job(what, job._row, took=self.reports.run_time(job), error=error)

    def _changed(self) -> None:
        self._more_jobs = True  # requeued jobs are waiting
        self._wake()

    def _take(self) -> RunningJob | None:
        config = self.config
        # a stop may be requested while a cycle waits for the database
        if self.stopping or self._stop.requested or not self.waiting or len(self.running) >= config.concurrency:
            return None
        if not self.heartbeats.recent():
            return None  # after the process or the database was stopped, the jobs may have other owners already
        job = RunningJob(self.waiting.popleft(), self.heartbeats.may_be_lost)
        self.running[id(job)] = job
        return job

    def _complete(self, job: RunningJob) -> bool:
        self.acks.add_completed(job._row)
        self.running.pop(id(job), None)
        return len(self.acks.completed) >= self.config.batch or not self.waiting

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
            self._send_completed,  # if nothing was fetched, for whatever reason
            self.acks.send_deferred,
            self._find_lost_captures,
            self._release_waiting_if_stopping,
        )
        errors: list[BaseException] = []
        failed = self._take_steps(steps, errors)
        for error in errors:
            self.fail(error)
        if failed or errors:
            self._lengthen_pause()
        else:
            self._error_pause = 0.0

    def _lengthen_pause(self) -> None:
        self._error_pause = min(LONGEST_ERROR_PAUSE, max(_FIRST_PAUSE, 2 * self._error_pause))

    def held_failed(self, error: Exception, *, captured: bool) -> float:
        """Log an error of a slot with a transaction of its own; return the pause, which grows while captures fail.

        :param captured: it had captured a job.
        """
        if captured:
            log(logging.WARNING, "A held job is released: %s", error)
            return self.config.poll
        with self._lock:
            before = self._error_pause
            self._lengthen_pause()
        if not before:  # once for all slots
            log(logging.WARNING, "Database unavailable: %s", error)
        return self._error_pause

    def held_succeeded(self) -> None:
        """Note that a slot with a transaction of its own could capture."""
        self._error_pause = 0.0

    @property
    def idle(self) -> bool:
        """Whether a job could be started."""
        free = len(self.running) < self.config.concurrency and not self.waiting and not self.stopping
        return free and self.heartbeats.recent()  # which wakes this worker when it is

    def pause(self) -> float:
        """Return how long nothing is due, in seconds, unless a handler finishes or jobs are put."""
        pause = self._idle_time()
        return min(pause, max(0.0, self._deadline - time.monotonic())) if self.stopping else pause

    def _idle_time(self) -> float:
        acks = self.acks
        if self._error_pause:
            return self._error_pause
        free = self.idle
        if (
            acks.failed
            or (acks.completed and not self.waiting)
            or (free and (self._more_jobs or (self._until_empty and self._empty)))
        ):
            return 0.0
        times = [self.config.poll if free else self.config.heartbeat, acks.due_in()]
        times.append(self._search_again_at - time.monotonic())
        if self.waiting and not acks.completed:
            times.append(MAX_ACK_DELAY)  # the first job to be completed wakes no cycle
        return max(0.0, min(times))

    def close(self) -> None:
        """Report what is finished, and release all other jobs: those that still run may run again elsewhere."""
        self.stopping = True
        self.warn_of_running(len(self.running))
        errors: list[BaseException] = [] if self.error is None else [self.error]
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
            self._wait_for_locked,
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
        if self._until_empty:
            with contextlib.suppress(Exception):
                self._warn_of_silent()

    def warn_of_running(self, count: int) -> None:
        """Log that handlers have not returned within the grace, which is too short, or were cancelled."""
        if count:
            message = "The worker of the queue %r ended while %d of its handlers ran: their jobs may run again"
            log(logging.WARNING, message, self.config.name, count)

    def _warn_of_silent(self) -> None:
        """Log that jobs of silent workers are left, which only a worker that stays can judge."""
        config = self.config
        if config.stalled_after is None:
            return
        now: Any = utc(self.database.perform(config.queue._server_time()))
        since = now - timedelta(seconds=config.stalled_after)
        # without locks, which would hide them from the sweep of a worker that stays
        look = config.queue._silent_jobs(since, queue=config.name, limit=_MOST_SILENT, unlocked=False)
        if silent := self.database.perform(look):
            log(
                logging.WARNING,
                "%d jobs of the queue %r have had no heartbeat for %g s: their workers are dead, or their rows are "
                "locked. A worker that stays, or queue.requeue_stalled(), requeues those of dead workers",
                len(silent),
                config.name,
                config.stalled_after,
            )

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
                without_reply += not is_about_statement(error)
                if without_reply > 1:
                    # one step may have asked for too much; after two, each further one would only wait as long
                    return [*failed, *steps[number + 1 :]]
        return failed

    def jobs(self) -> list[Any]:
        """Return the rows of every job that this worker owns, as far as it knows."""
        with self._lock:
            return self._jobs()

    def _jobs(self) -> list[Any]:
        running = [job._row for job in self.running.values() if not job._gone]
        return [*self.waiting, *self.withheld, *running, *self.acks.jobs()]

    def _fetch(self) -> None:
        """Capture jobs if a slot is free, and report the completed ones in the same transaction."""
        config = self.config
        self._fetched = self._empty = False
        if self.stopping or self._stop.requested or self.waiting or not self.heartbeats.recent():
            return
        with self._lock:
            running, completed = len(self.running), list(self.acks.completed)
        if running >= config.concurrency:
            return
        limit = min(config.batch, config.concurrency - running + config.prefetch)
        asked_at = clock()
        if self._suspicious:
            self._fetch_unread(limit)
            return
        self._more_jobs = False  # what is noted from now on stays noted
        started, after = time.monotonic(), self.cursor.after()
        operation = config.queue._fetch(completed, limit, queue=config.name, host=self.host, after=after)
        self._reply_lost, reply_lost = True, self._reply_lost
        try:
            jobs, changed = self.database.perform(operation)
        except Exception as error:
            refused = isinstance(error, DBAPIError) and is_about_statement(error)
            self._suspicious = refused or not is_temporary(error)
            if is_temporary(error) or is_wrong_statement(error):
                raise
            log(logging.WARNING, "A fetch failed, and jobs are read one by one: %s", error)
            self._more_jobs = True
            return
        self._reply_lost = reply_lost or self.database.retried
        with self._lock:
            if clock() - asked_at > config.heartbeat:
                self.heartbeats.require_heartbeat()
            self.waiting.extend(jobs)
        last = config.queue._jobs.position(jobs[-1]) if len(jobs) == limit else None
        # a retry took its time for another reason than the search
        self.cursor.advance(after, last, 0.0 if self.database.retried else time.monotonic() - started)
        # where a search stops early because others capture, too, there may be more jobs than it has found
        stopped_early = bool(jobs) and not config.backend.releases_skipped_rows
        if last is not None or after is not None or stopped_early:
            self._more_jobs = True
        self._fetched = True
        with self._lock:
            left = self.waiting or self.withheld or running or self.acks.failed
            self._empty = not (left or self._more_jobs or self._reply_lost)
        self.acks.confirm(completed, changed)

    def _fetch_unread(self, limit: int) -> None:
        """Capture jobs without reading them, after a fetch that failed: one of them may be impossible to decode."""
        config = self.config
        if self._reply_lost:
            return  # they are searched first: the fetch that failed may have captured them
        self._reply_lost = True
        found = self.database.perform(config.queue._capture_unread(limit, queue=config.name, host=self.host))
        self._suspicious = False
        self._more_jobs = bool(found)
        self._reply_lost = self._more_jobs or self.database.retried

    def _send_completed(self) -> None:
        if not self._fetched:
            self.acks.send_completed(now=not self.waiting or self.stopping)

    def _send_all_completed(self) -> None:
        self.acks.send_completed(now=True)

    def _find_lost_captures(self) -> None:
        """Find the jobs of a capture whose reply was lost, by the host name that only this run has.

        It searches immediately and again after a heartbeat: the server may continue a statement whose client has
        given up.
        """
        search_again = self._search_again_at < float("inf") and (
            self.stopping or time.monotonic() >= self._search_again_at
        )
        if not self._reply_lost and not search_again:
            return
        queue = self.config.queue
        found = [tuple(pair) for pair in self.database.perform(queue._running_on(self.host, queue=self.config.name))]
        with self._lock:
            known = set(queue._jobs.pairs(self._jobs()))
        if unknown := [pair for pair in found if pair not in known]:
            self._suspicious = False
            if self.stopping:
                locked = self._release(unknown)
                with self._lock:
                    self.withheld += locked
            else:
                self._add_waiting(unknown)
        self._search_again_at = time.monotonic() + self.config.heartbeat if self._reply_lost else float("inf")
        self._reply_lost = False
        if self._until_empty:
            self._more_jobs = True  # whether the queue is empty is known after a fetch that was answered

    def _add_waiting(self, pairs: list[Any]) -> None:
        """Read jobs that this worker has captured, and keep them waiting; those that can't be decoded are dead.

        One that can't be read for the moment, such as within the app's ``statement_timeout``, has used an attempt.
        """
        queue = self.config.queue
        try:
            rows = self.database.perform(queue._read(pairs))
        except Exception as error:
            if is_about_no_job(error):
                raise  # the next cycle finds them again, or the worker ends and releases them
            temporary = is_temporary(error)
            if len(pairs) > 1:
                for pair in pairs:
                    self._add_waiting([pair])
                return
            if not self.database.look_at(pairs).running:
                return
            # its id and claim can be read, and the whole row can't
            state = "an attempt has failed" if temporary else "it is dead"
            log(logging.ERROR, "A job can't be read, and %s: internal_id %s", state, pairs[0][0], exc_info=error)
            self.database.perform(queue.fail(pairs, error=format_error(error), retry=temporary))
            if not temporary:
                self.reports.emit_unread(error)
            return
        with self._lock:
            self.heartbeats.require_heartbeat()  # they are not started before the next heartbeat, which includes them
            self.waiting.extend(rows)

    def _release_waiting_if_stopping(self) -> None:
        if self.stopping:
            self.release_waiting()

    def release_waiting(self) -> None:
        """Release the jobs that were not started, so that other workers needn't wait until they have stalled.

        Those whose rows are locked stay withheld.
        """
        with self._lock:  # a slot that has seen no stop takes its job first
            self.stopping = True
            jobs = [*self.waiting, *self.withheld]
        locked = self._release(jobs)
        with self._lock:
            self.waiting.clear()
            self.withheld = locked

    def _release_lost_captures(self) -> None:
        # a step of its own, so that known jobs are released even where the search for others fails
        self._find_lost_captures()
        self.release_waiting()

    def _release_running(self) -> None:
        with self._lock:
            running = [job._row for job in self.running.values()]
            for job in self.running.values():
                job._taken = True  # before another worker may begin it
        self._running_locked = self._release(running)

    def _release(self, jobs: Sequence[Any]) -> list[Any]:
        """Release jobs (rows); return those of them whose rows another session has locked."""
        if not jobs or self.database.perform(skip_locked(self.config.queue.release(jobs))) == len(jobs):
            return []
        return self.database.look_at(jobs).running

    def _wait_for_locked(self) -> None:
        """Release the jobs whose rows were locked, waiting for them to be unlocked: the last step."""
        for jobs in (self.withheld, self._running_locked):
            while jobs:
                self.database.perform(self.config.queue.release(jobs[0]))
                with self._lock:
                    jobs.pop(0)


def failure_of(config: WorkerConfig, job: Any, error: BaseException) -> Failure:
    """Return what is stored of an attempt of a job (its row) that raised, and log it."""
    name = config.queue._jobs.value(job, "external_id")
    if isinstance(error, Discard):
        log(logging.WARNING, "The job %s of the queue %r was discarded: %s", name, config.name, error)
        return Failure(_text_of(error), None, error)
    attempt: int = config.queue._jobs.value(job, "attempts")
    attempts: int = config.queue._jobs.value(job, "max_attempts")
    pause = error.pause if isinstance(error, Retry) else None
    if pause is None:
        try:
            pause = config.retry_pause(attempt)
        except (Exception, SystemExit, asyncio.CancelledError) as wrong:
            log(logging.ERROR, "retry_in failed, and the default is used: %s", wrong, exc_info=wrong)
            pause = default_pause(attempt)
    if isinstance(error, Retry):
        if attempt < attempts:
            message = "The job %s of the queue %r is tried again in %.1f s: %s"
            log(logging.INFO, message, name, config.name, pause, error)
        else:
            message = "The job %s of the queue %r is dead, after attempt %d: %s"
            log(logging.WARNING, message, name, config.name, attempt, error)
        return Failure(_text_of(error), pause, error)
    message = "The job %s of the queue %r failed, in attempt %d of %d"
    log(logging.WARNING, message, name, config.name, attempt, attempts, exc_info=error)
    return Failure(format_error(error), pause, error)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return format_error(error)

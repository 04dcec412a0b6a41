"""What a worker decides, and what it asks of the database; ``worker.py`` and ``async_worker.py`` only wait and run.

Everything here is synchronous: ``AsyncWorker`` calls it in SQLAlchemy's greenlet. One caller at a time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.engine import Connection, Result
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import StaticPool

from .capture import counted
from .errors import LockError, LockLost, LockTimeout, MustRollback, NotWritable, Unsupported
from .names import checked
from .operation import Operation, place_of, seconds
from .queue import DEFAULT_QUEUE, Queue
from .transaction import ShortTransaction, Sleep, retried

T = TypeVar("T")
# asyncpg's command_timeout; an OSError from Python 3.11 on
DriverTimeout = asyncio.TimeoutError
log = logging.getLogger("sqlalchemy_locks.worker")

#: how long it rests when the database can't be had, in seconds: at first, and at most
_FIRST_REST, LONGEST_REST = 0.1, 5.0
#: what is stored for an error that the database can't store
UNSTORABLE = "the error could not be stored: the worker's log has it"
#: how long a finished job may wait for others to be told of with it, in seconds
_HELD_BACK = 1.0
#: how many stalled jobs are given back at once
_SWEPT = 1000
#: what every way of waiting can wait, in seconds
_YEAR = 366 * 86400.0


class Terms:
    """How a worker works; the parameters are those of :class:`~sqlalchemy_locks.Worker`."""

    def __init__(
        self,
        queue: Queue,
        engine: Any,
        *,
        name: str = DEFAULT_QUEUE,
        concurrency: int = 4,
        batch: int = 10,
        heartbeat: float | timedelta = 15,
        poll: float | timedelta = 1,
        stalled_after: float | timedelta | None = 300,
        grace: float | timedelta = 30,
        hold: bool = False,
        host: str | None = None,
    ) -> None:
        if not isinstance(queue, Queue):
            raise TypeError(f"a worker takes a Queue, not {queue!r}")
        if not isinstance(engine, Engine):
            raise TypeError(f"a worker needs bind=, an engine, not {engine!r}")
        if isinstance(engine.pool, StaticPool):
            raise Unsupported("a worker can't work with a StaticPool, where everybody has the same connection")
        self.queue, self.engine, self.hold = queue, engine, bool(hold)
        self.name = checked(name, "a queue")
        self.concurrency, self.batch = counted(concurrency, "concurrency"), counted(batch, "batch")
        self.heartbeat = _bounded(heartbeat, "heartbeat", zero=False)
        self.poll = _bounded(poll, "poll", zero=False)
        self.stalled_after = None if stalled_after is None else _bounded(stalled_after, "stalled_after", zero=False)
        self.grace = _bounded(grace, "grace")
        if self.stalled_after is not None and self.stalled_after < 2 * self.heartbeat:
            raise ValueError(
                "stalled_after must be at least twice the heartbeat, or jobs are taken from workers that are alive"
            )
        self._host = None if host is None else checked(host, "a host")
        if self.hold and place_of(engine.dialect, {}).engine.locking == "file":
            raise Unsupported(
                "hold=True is refused on SQLite, where an open transaction that has written keeps everybody else from "
                "writing: leave it out, and a job whose worker died comes back after stalled_after"
            )

    @property
    def host(self) -> str:
        """Who works; asked when jobs are captured, since a process that was forked is another."""
        return self._host or f"{socket.gethostname()}:{os.getpid()}"


def _bounded(value: float | timedelta, name: str, *, zero: bool = True) -> float:
    given = seconds(value, name, zero=zero)
    if given > _YEAR:
        raise ValueError(f"{name} must be at most a year, not {value!r} seconds")
    return given


class Shift:
    """The jobs that one worker has: waiting for a free hand, running, finished."""

    def __init__(self, terms: Terms, sleep: Sleep) -> None:
        self.terms, self._sleep = terms, sleep
        self.waiting: deque[Any] = deque()
        self.running: dict[int, Any] = {}
        self.completed: deque[Any] = deque()
        self.failed: deque[tuple[Any, str]] = deque()
        self.stopping = False
        self._lock = threading.Lock()
        self._beat = self._swept = -float("inf")
        self._full = False
        self._rest = 0.0
        #: when the first of those in ``completed`` was finished
        self._finished = 0.0

    # what happens between the turns, in whatever thread

    def take(self) -> Any:
        """A job to run, if there is one, a hand is free, and the database was told lately that this worker lives."""
        with self._lock:
            if self.stopping or not self.waiting or len(self.running) >= self.terms.concurrency:
                return None
            if time.monotonic() > self._beat + 2 * self.terms.heartbeat:
                return None  # after a stop of the process, or of the database, jobs may be others' already
            job = self.waiting.popleft()
            self.running[id(job)] = job
            return job

    def done(self, job: Any, error: BaseException | None) -> bool:
        """A handler has returned, or raised; whether there should be a turn now. It never raises."""
        told = None if error is None else described(error)
        with self._lock:
            if told is not None:
                self.failed.append((job, told))
            else:
                if not self.completed:
                    self._finished = time.monotonic()
                self.completed.append(job)
            self.running.pop(id(job), None)
            # of the first one too, so that somebody looks when it has waited long enough
            full = len(self.completed) >= self.terms.batch
            due = told is not None or full or not self.waiting or len(self.completed) == 1
        if error is not None:
            say(logging.WARNING, "a job of the queue %r failed", self.terms.name, exc_info=error)
        return due

    # the turns

    def turn(self) -> None:
        """Tell the database what is finished, and ask for more; it never raises for the database's troubles."""
        try:
            self._settle()
            if self.stopping:
                self.give_back()
            self._keep()
            self._sweep()
            self._fetch()
            self._rest = 0.0
        except Exception as error:
            if not _passes(error):
                raise
            self._rest = min(LONGEST_REST, max(_FIRST_REST, 2 * self._rest))
            say(logging.WARNING, "the database can't be had: %s", error)

    def pause(self) -> float:
        """How long nothing has to be done, in seconds, unless a handler finishes or jobs are put."""
        if self._rest:
            return self._rest
        now = time.monotonic()
        free = len(self.running) < self.terms.concurrency and not self.waiting and not self.stopping
        if self.failed or (self.completed and not self.waiting) or (free and self._full) or self._sweep_due():
            return 0.0
        times = [self._beat + self.terms.heartbeat - now, self.terms.poll if free else self.terms.heartbeat]
        if self.completed:
            times.append(self._finished + _HELD_BACK - now)
        return max(0.0, min(times))

    def give_back(self) -> None:
        """What was not begun goes back untried, so that others need not wait for it to stall."""
        self.stopping = True
        if self.waiting:
            self._perform(self.terms.queue.release(list(self.waiting)))
            self.waiting.clear()

    def close(self) -> None:
        """The last turn: what is finished is told; what still runs is given up, and may run again elsewhere."""
        self.stopping = True
        tries, wrong = 5, None
        for step in (self._settle, self.give_back, self._give_up):
            while tries:
                try:
                    step()
                    break
                except Exception as error:
                    if not _passes(error):
                        wrong = wrong or error
                        break  # the other steps are right, perhaps
                    tries -= 1
                    say(logging.WARNING, "the database can't be had: %s", error)
                    self._sleep(_FIRST_REST)
        if not tries:
            say(logging.ERROR, "jobs could not be given back: they come back when they have stalled")
        if wrong is not None:
            raise wrong

    def _give_up(self) -> None:
        with self._lock:
            given_up = list(self.running.values())
        if given_up:
            self._perform(self.terms.queue.release(given_up))

    def _settle(self) -> None:
        """Finished jobs leave the lists when the database has been told, and not before."""
        with self._lock:
            done = list(self.completed)
        # those that are about to finish are told with them, but nothing waits for them long
        due = not self.waiting or self.stopping or len(done) >= self.terms.batch
        if done and (due or time.monotonic() >= self._finished + _HELD_BACK):
            self._told(len(done), self._perform(self.terms.queue.complete(done)))
            with self._lock:
                for _ in done:
                    self.completed.popleft()
                self._finished = time.monotonic()
        while self.failed:
            job, error = self.failed[0]
            self._told(1, self._fail(job, error))
            self.failed.popleft()

    def _fail(self, job: Any, error: str) -> Any:
        try:
            return self._perform(self.terms.queue.fail(job, error=error))
        except Exception as unstorable:
            if _database_away(unstorable):
                raise
            say(logging.WARNING, "an error could not be stored: %s", unstorable)
            return self._perform(self.terms.queue.fail(job, error=UNSTORABLE))

    def _told(self, expected: int, ours: int) -> None:
        if ours != expected:
            say(
                logging.WARNING,
                "%d jobs were ended already when this worker finished them, or had been taken from it",
                expected - ours,
            )

    def _keep(self) -> None:
        """Say that this worker lives; what was taken from it in spite of that is not begun any more."""
        with self._lock:
            failed = [job for job, _ in self.failed]
            mine = [*self.waiting, *self.running.values(), *self.completed, *failed]
        if not mine:
            self._beat = time.monotonic()
        elif time.monotonic() >= self._beat + self.terms.heartbeat:
            beat = time.monotonic()
            if self._perform(self.terms.queue.heartbeat(mine)) != len(mine):
                self._beat = -float("inf")  # nothing is begun until it is known whose it is
                self._drop_lost()
            self._beat = beat

    def _drop_lost(self) -> None:
        with self._lock:
            asked = list(self.waiting)
        lost = {id(job) for job in asked if not self._perform(self.terms.queue.heartbeat(job))}
        with self._lock:
            self.waiting = deque(job for job in self.waiting if id(job) not in lost)
        if lost:
            say(logging.WARNING, "%d jobs are not begun: they had been taken from this worker", len(lost))

    def sweep(self) -> None:
        """Only the sweep, for a worker whose jobs are held; it never raises for the database's troubles."""
        try:
            while self._sweep_due():
                self._sweep()
        except Exception as error:
            if not _passes(error):
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
                say(logging.WARNING, "%d jobs were given back whose worker gave no sign of life", found)
            if found < _SWEPT:
                self._swept = time.monotonic()

    def _fetch(self) -> None:
        if self.stopping or self.waiting or len(self.running) >= self.terms.concurrency:
            return
        terms = self.terms
        asked = time.monotonic()
        jobs = self._perform(terms.queue.capture(terms.batch, queue=terms.name, host=terms.host), rows)
        self._full = len(jobs) == terms.batch
        with self._lock:
            if not self.running:
                self._beat = asked
            self.waiting.extend(jobs)

    def _perform(self, operation: Operation[Any], read: Callable[[Result[Any]], Any] = Result.scalar) -> Any:
        return perform(self.terms.engine, operation, read, self._sleep)


def rows(result: Result[Any]) -> list[Any]:
    """All rows of a result."""
    return list(result)


def perform(engine: Engine, operation: Operation[Any], read: Callable[[Result[Any]], T], sleep: Sleep) -> T:
    """Run an operation that can be repeated: what it may have done twice, a claim or a stall takes care of."""

    def attempt() -> T:
        place = place_of(engine.dialect, engine.get_execution_options())
        if place.engine.one_trip and operation._body.statement(place) is not None:
            with engine.connect() as connection, place.engine.autocommitted(connection):
                return read(connection.execute(operation))
        with transaction(engine) as short:
            return read(short.connection.execute(operation))

    return retried(attempt, engine, sleep, repeatable=True)


def say(level: int, message: str, *values: Any, exc_info: BaseException | None = None) -> None:
    """Log; a handler of logs that raises, and an error that can't be told, end no worker."""
    with suppress(Exception):
        log.log(level, message, *values, exc_info=exc_info)


def described(error: BaseException) -> str:
    """An error with its traceback, as far as it lets itself be told."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:
        return f"{type(error).__name__}: it raises another error when it is to be told"


def ended(connection: Connection, queue: Queue, job: Any, error: BaseException | None) -> None:
    """Complete or fail a job in the transaction that captured it."""
    if error is None:
        connection.execute(queue.complete(job))
        return
    try:
        with connection.begin_nested():
            connection.execute(queue.fail(job, error=described(error)))
    except Exception as unstorable:
        if _database_away(unstorable):
            raise
        say(logging.WARNING, "an error could not be stored: %s", unstorable)
        connection.execute(queue.fail(job, error=UNSTORABLE))


def _database_away(error: Exception) -> bool:
    """Whether it is not the values of a statement that the database refused."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(error, (OperationalError, LockError, PoolTimeout, DriverTimeout, OSError))


def _passes(error: Exception) -> bool:
    """Whether it is the database that can't be had for the moment, rather than a mistake that will not mend itself."""
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or not isinstance(error, (ProgrammingError, DataError, IntegrityError))
    return isinstance(error, (LockTimeout, LockLost, MustRollback, NotWritable, PoolTimeout, DriverTimeout, OSError))


@contextmanager
def transaction(engine: Engine) -> Iterator[ShortTransaction]:
    """A short transaction, committed if nothing was raised."""
    short = ShortTransaction(engine)
    short.open()
    try:
        yield short
    except BaseException:
        short.abandon()
        raise
    short.commit()

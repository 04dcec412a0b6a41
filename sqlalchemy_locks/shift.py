"""What a worker decides, and what it asks of the database; ``worker.py`` and ``async_worker.py`` only wait and run.

Everything here is synchronous: ``AsyncWorker`` calls it in SQLAlchemy's greenlet. One caller at a time.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.engine import Result
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import StaticPool

from .capture import counted
from .errors import LockLost, LockTimeout, MustRollback, Unsupported
from .names import checked
from .operation import Operation, place_of, seconds
from .queue import DEFAULT_QUEUE, Queue
from .transaction import ShortTransaction, Sleep, retried

T = TypeVar("T")
log = logging.getLogger("sqlalchemy_locks.worker")

#: how long it rests when the database can't be had, in seconds: at first, and at most
_FIRST_REST, _LONGEST_REST = 0.1, 5.0


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
        self.heartbeat = seconds(heartbeat, "heartbeat", zero=False)
        self.poll = seconds(poll, "poll", zero=False)
        self.stalled_after = None if stalled_after is None else seconds(stalled_after, "stalled_after", zero=False)
        self.grace = seconds(grace, "grace")
        if self.stalled_after is not None and self.stalled_after < 2 * self.heartbeat:
            raise ValueError(
                "stalled_after must be at least twice the heartbeat, or jobs are taken from workers that are alive"
            )
        self.host = checked(host or f"{socket.gethostname()}:{os.getpid()}", "a host")
        if self.hold and place_of(engine.dialect, {}).engine.locking == "file":
            raise Unsupported(
                "hold=True is refused on SQLite, where an open transaction that has written keeps everybody else from "
                "writing: leave it out, and a job whose worker died comes back after stalled_after"
            )


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

    # what happens between the turns, in whatever thread

    def take(self) -> Any:
        """A job to run, if there is one and a hand is free."""
        with self._lock:
            if self.stopping or not self.waiting or len(self.running) >= self.terms.concurrency:
                return None
            job = self.waiting.popleft()
            self.running[id(job)] = job
            return job

    def done(self, job: Any, error: BaseException | None) -> None:
        """A handler has returned, or raised."""
        told = None if error is None else "".join(traceback.format_exception(error))
        if error is not None:
            log.warning("a job of the queue %r failed", self.terms.name, exc_info=error)
        with self._lock:
            self.completed.append(job) if told is None else self.failed.append((job, told))
            self.running.pop(id(job), None)

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
            self._rest = min(_LONGEST_REST, max(_FIRST_REST, 2 * self._rest))
            log.warning("the database can't be had: %s", error)

    def pause(self) -> float:
        """How long nothing has to be done, in seconds, unless a handler finishes or jobs are put."""
        if self._rest:
            return self._rest
        if self.failed or (not self.waiting and (self.completed or (self._full and not self.stopping))):
            return 0.0 if len(self.running) < self.terms.concurrency else 0.01
        until_beat = self._beat + self.terms.heartbeat - time.monotonic()
        idle = not self.waiting and len(self.running) < self.terms.concurrency and not self.stopping
        return max(0.0, min(until_beat, self.terms.poll if idle else self.terms.heartbeat))

    def give_back(self) -> None:
        """What was not begun goes back untried, so that others need not wait for it to stall."""
        self.stopping = True
        if self.waiting:
            self._perform(self.terms.queue.release(list(self.waiting)))
            self.waiting.clear()

    def close(self) -> None:
        """The last turn: what is finished is told; what still runs is given up, and may run again elsewhere."""
        for _ in range(5):
            try:
                self._settle()
                self.give_back()
                if self.running:
                    self._perform(self.terms.queue.release(list(self.running.values())))
                return
            except Exception as error:
                if not _passes(error):
                    raise
                log.warning("the database can't be had: %s", error)
                self._sleep(_FIRST_REST)
        log.error("jobs could not be given back: they come back when they have stalled")

    def _settle(self) -> None:
        """Finished jobs leave the lists when the database has been told, and not before."""
        with self._lock:
            done = list(self.completed)
        if done:
            if self.waiting and len(done) < self.terms.batch and not self.stopping:
                return  # together with those that are about to finish
            self._told(len(done), self._perform(self.terms.queue.complete(done)))
            for _ in done:
                self.completed.popleft()
        while self.failed:
            job, error = self.failed[0]
            self._told(1, self._perform(self.terms.queue.fail(job, error=error)))
            self.failed.popleft()

    def _told(self, expected: int, ours: int) -> None:
        if ours != expected:
            log.warning("%d jobs had been taken from this worker before it finished them", expected - ours)

    def _keep(self) -> None:
        """Say that this worker lives; what was taken from it in spite of that is not begun any more."""
        with self._lock:
            mine = [*self.waiting, *self.running.values(), *self.completed]
        if not mine:
            self._beat = time.monotonic()
        elif time.monotonic() >= self._beat + self.terms.heartbeat:
            beat = time.monotonic()
            if self._perform(self.terms.queue.heartbeat(mine)) != len(mine):
                self._drop_lost()
            self._beat = beat

    def _drop_lost(self) -> None:
        with self._lock:
            asked, self.waiting = self.waiting, deque()
        self.waiting.extend(job for job in asked if self._perform(self.terms.queue.heartbeat(job)))

    def sweep(self) -> None:
        """Only the sweep, for a worker whose jobs are held; it never raises for the database's troubles."""
        try:
            self._sweep()
        except Exception as error:
            if not _passes(error):
                raise
            log.warning("the database can't be had: %s", error)

    def _sweep(self) -> None:
        every = self.terms.stalled_after
        if every is not None and not self.stopping and time.monotonic() >= self._swept + every / 4:
            found = self._perform(self.terms.queue.requeue_stalled(every))
            if found:
                log.warning("%d jobs were given back whose worker gave no sign of life", found)
            self._swept = time.monotonic()

    def _fetch(self) -> None:
        if self.stopping or self.waiting or len(self.running) >= self.terms.concurrency:
            return
        terms = self.terms
        asked = time.monotonic()
        jobs = self._perform(terms.queue.capture(terms.batch, queue=terms.name, host=terms.host), rows)
        if not self.running:
            self._beat = asked
        self._full = len(jobs) == terms.batch
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


def _passes(error: Exception) -> bool:
    """Whether it is the database that can't be had for the moment, rather than a mistake that will not mend itself."""
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or not isinstance(error, (ProgrammingError, DataError, IntegrityError))
    return isinstance(error, (LockTimeout, LockLost, MustRollback, PoolTimeout, OSError))


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

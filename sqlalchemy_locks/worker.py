"""Worker: takes jobs from a queue, runs a handler for each, and says how it went; for ever, or until it is stopped.

Promised: a handler's exception fails its job and nothing else; a worker that dies, or loses its database, loses no
job; SIGTERM ends it after what it has begun. How it decides is in ``shift.py``.
"""

from __future__ import annotations

import contextlib
import queue as lines
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from .operation import place_of
from .put import CHANNEL
from .queue import DEFAULT_QUEUE, Queue
from .shift import Shift, Terms, log, rows, transaction

Handler = Callable[[Any], object]


class Worker:
    """Works on the jobs of a queue, in threads.

    :param queue: a :class:`Queue`. :param bind: the engine that it captures with; one connection of its pool at a
        time is used (with ``hold=True`` one for each handler), and on PostgreSQL one more of its own, to listen.
    :param handler: called with each job, a row (of a class of your own too: put what you need into the payload, or
        load it). If it returns, the job is completed; what it raises is stored, and the job fails.
    :param name: the queue's name.
    :param concurrency: how many handlers run at once, each in a thread.
    :param batch: how many jobs are captured, and completed, at once.
    :param heartbeat: how often it says that it lives, in seconds.
    :param poll: how often an idle worker looks for jobs, in seconds. On PostgreSQL jobs that are put wake it at once.
    :param stalled_after: give back jobs of any worker that was not heard of for so long; at least twice the
        heartbeat. ``None``: somebody else does (``Queue.requeue_stalled``).
    :param grace: how long handlers may go on when the worker is stopped, in seconds. What runs longer is given back.
    :param hold: keep the transaction that captures a job open while its handler runs: a crash then gives the job
        back at once, without counting the attempt. Refused on SQLite.
    :param host: what is stored as ``processing_host``; by default the machine's name and the process's number.
    :raises Unsupported: see ``hold``.

    >>> sl.Worker(queue, handler, bind=engine, concurrency=4, batch=10, heartbeat=15).run()
    """

    def __init__(
        self,
        queue: Queue,
        handler: Handler,
        *,
        bind: Engine,
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
        if not callable(handler):
            raise TypeError(f"a worker's handler is a function of one job, not {handler!r}")
        self._handler = handler
        self._terms = Terms(
            queue,
            bind,
            name=name,
            concurrency=concurrency,
            batch=batch,
            heartbeat=heartbeat,
            poll=poll,
            stalled_after=stalled_after,
            grace=grace,
            hold=hold,
            host=host,
        )
        self._stop, self._wake = threading.Event(), threading.Event()

    def run(self) -> None:
        """Work until :meth:`stop`, SIGTERM or SIGINT (the signals only in the main thread)."""
        with _signals(self.stop), self._listening():
            if self._terms.hold:
                self._holding()
            else:
                self._working()
        self._stop.clear()

    def stop(self, *_: Any) -> None:
        """Begin nothing more, from any thread; :meth:`run` returns when what runs has ended, or ``grace`` is over."""
        self._stop.set()
        self._wake.set()

    def _working(self) -> None:
        shift = Shift(self._terms, time.sleep)
        line: lines.SimpleQueue[Any] = lines.SimpleQueue()
        for _ in range(self._terms.concurrency):
            # daemons, so that a handler that never returns does not keep the process
            threading.Thread(target=self._hand, args=(shift, line), daemon=True).start()
        try:
            while not self._stop.is_set():
                self._turn(shift, line, shift.pause)
            shift.stopping = True
            deadline = time.monotonic() + self._terms.grace
            while shift.running and time.monotonic() < deadline:
                self._turn(shift, line, lambda: min(shift.pause(), max(0.0, deadline - time.monotonic())))
        finally:
            shift.stopping = True
            for _ in range(self._terms.concurrency):
                line.put(None)
            shift.close()

    def _turn(self, shift: Shift, line: lines.SimpleQueue[Any], pause: Callable[[], float]) -> None:
        self._wake.clear()
        shift.turn()
        while (job := shift.take()) is not None:
            line.put(job)
        self._wake.wait(pause())

    def _hand(self, shift: Shift, line: lines.SimpleQueue[Any]) -> None:
        while (job := line.get()) is not None:
            error: BaseException | None = None
            try:
                self._handler(job)
            except BaseException as raised:
                # SystemExit too: a thread that ended would leave its job running for ever
                error = raised
            shift.done(job, error)
            if not shift.waiting or len(shift.completed) >= self._terms.batch or error is not None:
                self._wake.set()
            elif (following := shift.take()) is not None:
                line.put(following)

    def _holding(self) -> None:
        threads = [threading.Thread(target=self._hold, daemon=True) for _ in range(self._terms.concurrency)]
        for thread in threads:
            thread.start()
        shift = Shift(self._terms, time.sleep)
        while not self._stop.is_set():
            shift.sweep()
            self._stop.wait((self._terms.stalled_after or 3600) / 4)
        deadline = time.monotonic() + self._terms.grace
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _hold(self) -> None:
        """One hand: a transaction for each job."""
        terms = self._terms
        rest = 0.0
        while not self._stop.is_set():
            try:
                found = hold_one(terms, self._handler)
                rest = 0.0 if found else terms.poll
            except Exception as error:
                log.warning("a held job is given back: %s", error)
                rest = terms.poll
            if rest:
                self._wake.wait(rest)
                self._wake.clear()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """On PostgreSQL: a thread that is told when jobs are put."""
        engine = self._terms.engine
        if not place_of(engine.dialect, {}).engine.listens or not self._terms.queue.notify:
            yield
            return
        over, mine = threading.Event(), socket.socketpair()
        thread = threading.Thread(target=self._listen, args=(over, mine[1]), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            mine[0].close()  # which ends its wait
            thread.join(2)
            mine[1].close()

    def _listen(self, over: threading.Event, end: socket.socket) -> None:
        engine, topic = self._terms.engine, self._terms.queue.topic(self._terms.name)
        facts = place_of(engine.dialect, {}).engine
        while not over.is_set():
            try:
                connection = engine.raw_connection()
                driver: Any = connection.driver_connection
                connection.detach()  # the pool has it no more
                with contextlib.closing(connection):
                    driver.autocommit = True
                    driver.cursor().execute(f"LISTEN {CHANNEL}")
                    self._wake.set()
                    while not over.is_set():
                        if driver in select.select([driver, end], [], [])[0] and topic in facts.heard(driver):
                            self._wake.set()
            except (DBAPIError, OSError, facts.driver_errors(engine.dialect)) as error:
                log.debug("not listening, but polling: %s", error)
                over.wait(self._terms.poll)


def hold_one(terms: Terms, handler: Handler) -> bool:
    """Capture one job, run its handler and end it, all in one transaction; whether there was a job."""
    with transaction(terms.engine) as short:
        connection = short.connection
        jobs = rows(connection.execute(terms.queue.capture(1, queue=terms.name, host=terms.host)))
        if not jobs:
            return False
        short.use()
        try:
            handler(jobs[0])
        except Exception as error:
            log.warning("a job of the queue %r failed", terms.name, exc_info=error)
            told = "".join(traceback.format_exception(error))
            connection.execute(terms.queue.fail(jobs[0], error=told))
        else:
            connection.execute(terms.queue.complete(jobs[0]))
    return True


@contextlib.contextmanager
def _signals(stop: Callable[..., None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

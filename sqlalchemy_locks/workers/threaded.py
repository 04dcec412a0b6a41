"""Worker: takes jobs from a queue, runs a handler for each, and says how it went; for ever, or until it is stopped.

Promised: a handler's exception fails its job and nothing else; a worker that dies, or loses its database, loses no
job; SIGTERM ends it after what it has begun. How it decides is in ``shift.py``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import queue as lines
import select
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from sqlalchemy import Engine

from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.dialects.connections import unattended
from sqlalchemy_locks.queue.enqueue import CHANNEL
from sqlalchemy_locks.workers.config import WorkerConfig
from sqlalchemy_locks.workers.database import ended, hears, rows, say, transaction
from sqlalchemy_locks.workers.state import LONGEST_REST, WorkerState

Handler = Callable[[Any], object]


class WakeEvent:
    """Wakes one thread that waits; unlike an Event, a signal's handler may ring it whatever its thread is doing."""

    def __init__(self) -> None:
        self._line: lines.SimpleQueue[None] = lines.SimpleQueue()

    def ring(self) -> None:
        if self._line.empty():
            self._line.put(None)

    def wait(self, longest: float) -> None:
        with contextlib.suppress(lines.Empty):
            self._line.get(timeout=longest)

    def clear(self) -> None:
        with contextlib.suppress(lines.Empty):
            while True:
                self._line.get_nowait()


class Worker(WorkerConfig[Handler, Engine]):
    """Works on the jobs of a queue, in threads.

    :param queue: a :class:`Queue`.
    :param bind: the engine that it captures with, where it isn't the one that the queue was given; one connection of
        its pool at a time is used (with ``hold=True`` one for each handler), and on PostgreSQL one more of its own, to
        listen.
    :param handler: called with each job, a row (of a class of your own too: put what you need into the payload, or
        load it). If it returns, the job is completed; what it raises is stored, and the job fails.
    :param name: the queue's name.
    :param concurrency: how many handlers run at once, each in a thread.
    :param batch: how many jobs are captured, and completed, at once.
    :param heartbeat: how often it says that it lives, in seconds.
    :param poll: how often an idle worker looks for jobs, in seconds. On PostgreSQL jobs that are put wake it at once.
    :param stalled_after: give back jobs of any worker of this queue that was not heard of for so long; at least twice
        the heartbeat of each of them. ``None``: somebody else does (``Queue.requeue_stalled``).
    :param grace: how long handlers may go on when the worker is stopped, in seconds. What runs longer is given back.
    :param hold: keep the transaction that captures a job open while its handler runs: a crash then gives the job
        back at once, without counting the attempt. Refused on SQLite.
    :param host: what ``processing_host`` begins with; by default the machine's name and the process's number. Each run
        adds a nonce, by which it knows its own jobs again when the answer to a capture was lost.
    :raises Unsupported: see ``hold``.
    :raises TypeError: for a coroutine function, which :class:`AsyncWorker` awaits, and without any engine.

    >>> queue = sl.Queue(bind=engine)
    >>> worker = sl.Worker(queue, handler, concurrency=4, batch=10, heartbeat=15)
    """

    def _refuse(self, handler: Any) -> None:
        if not callable(handler):
            raise TypeError(f"a worker's handler is a function of one job, not {handler!r}")
        if is_coroutine_function(handler):
            raise TypeError(f"a Worker doesn't await its handler, and {handler!r} has to be: use an AsyncWorker")

    def _engine_of(self, bind: Any) -> Engine:
        if not isinstance(bind, Engine):
            raise TypeError(f"a Worker needs an Engine, not {bind!r}")
        return bind

    def _prepare(self) -> None:
        self._stopped = False
        self._bell = WakeEvent()
        self._hands = [WakeEvent() for _ in range(self.concurrency)] if self.hold else []

    def run(self) -> None:
        """Work until :meth:`stop`, SIGTERM or SIGINT (the signals only in the main thread).

        >>> def handle(job): worker.stop()
        >>> worker = sl.Worker(sl.Queue(), handle, bind=engine, name="mail")
        >>> worker.run()
        """
        try:
            with _signals(self.stop), self._listening():
                if self.hold:
                    self._holding()
                else:
                    self._working()
        finally:
            self._stopped = False

    def stop(self, *_: Any) -> None:
        """Begin nothing more, from any thread; :meth:`run` returns when what runs has ended, or ``grace`` is over.

        >>> def handle(job): worker.stop()
        >>> worker = sl.Worker(sl.Queue(), handle, bind=engine, name="mail")
        >>> worker.run()  # returns when its first job is done
        """
        self._stopped = True
        self._ring()

    def _ring(self) -> None:
        self._bell.ring()
        for bell in self._hands:
            bell.ring()

    def _working(self) -> None:
        shift = WorkerState(self, time.sleep)
        line: lines.SimpleQueue[Any] = lines.SimpleQueue()
        for _ in range(self.concurrency):
            # daemons, so that a handler that never returns does not keep the process
            threading.Thread(target=self._hand, args=(shift, line), daemon=True).start()
        try:
            while not self._stopped:
                self._turn(shift, line, shift.pause)
            shift.stopping = True
            deadline = time.monotonic() + self.grace
            while shift.running and time.monotonic() < deadline:
                self._turn(shift, line, lambda: min(shift.pause(), max(0.0, deadline - time.monotonic())))
        finally:
            shift.stopping = True
            for _ in range(self.concurrency):
                line.put(None)
            shift.close()

    def _turn(self, shift: WorkerState, line: lines.SimpleQueue[Any], pause: Callable[[], float]) -> None:
        self._bell.clear()
        if self._stopped and not shift.stopping:
            return  # that was its ring
        shift.turn()
        while (job := shift.take()) is not None:
            line.put(job)
        self._bell.wait(pause())

    def _hand(self, shift: WorkerState, line: lines.SimpleQueue[Any]) -> None:
        """One thread: a job, and those after it while there are any."""
        while (job := line.get()) is not None:
            while job is not None:
                error: BaseException | None = None
                try:
                    handle(self.handler, job)
                except BaseException as raised:
                    # SystemExit too: a thread that ended would leave its job running for ever
                    error = raised
                if error is None:
                    due, job = shift.done_and_take(job)
                else:
                    due, job = shift.done(job, error), shift.take()
                if due:
                    self._bell.ring()

    def _holding(self) -> None:
        over = threading.Event()
        threads = [threading.Thread(target=self._hold, args=(bell, over), daemon=True) for bell in self._hands]
        try:
            for thread in threads:
                thread.start()
            shift = WorkerState(self, time.sleep)
            while not self._stopped:
                self._bell.clear()
                shift.sweep()
                if not self._stopped:
                    self._bell.wait((self.stalled_after or 3600) / 4)
            deadline = time.monotonic() + self.grace
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        finally:
            over.set()  # for those that outlive the grace: this run's end is no other run's
            self._ring()

    def _hold(self, bell: WakeEvent, over: threading.Event) -> None:
        """One hand: a transaction for each job."""

        def ends() -> bool:
            return self._stopped or over.is_set()

        while not ends():
            bell.clear()
            try:
                with unattended(self.engine):  # a handler may outlive the grace
                    found = hold_one(self, ends)
            except Exception as error:
                say(logging.WARNING, "a held job is given back: %s", error)
                found = False
            if not found and not ends():
                bell.wait(self.poll)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """On PostgreSQL: a thread that is told when jobs are put."""
        engine = self.engine
        if not build_context(engine.dialect, {}).backend.listens or not self.queue.notify:
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
        engine, topic = self.engine, self.queue.topic(self.name)
        backend = build_context(engine.dialect, {}).backend
        while not over.is_set():
            try:
                with unattended(engine):
                    heard = hears(engine)
                if not heard:
                    return
                connection = engine.raw_connection()
                driver: Any = connection.driver_connection
                connection.detach()  # the pool has it no more
                with contextlib.closing(connection):
                    driver.autocommit = True
                    driver.cursor().execute(f"LISTEN {CHANNEL}")
                    self._ring()
                    while not over.is_set():
                        if driver in select.select([driver, end], [], [])[0] and topic in backend.heard(driver):
                            self._ring()
            except Exception as error:
                # whatever it is (a pool that has no connection to spare, a server that goes down): later, perhaps
                say(logging.DEBUG, "not listening, but polling: %s", error)
                over.wait(min(self.poll, LONGEST_REST))


def handle(handler: Handler, job: Any) -> None:
    """Run a handler.

    :raises TypeError: if it gives something back that would have to be awaited: its work isn't done.
    """
    given = handler(job)
    if given is not None and isinstance(given, Awaitable):
        if inspect.iscoroutine(given):
            given.close()
        raise TypeError(f"the handler returned {given!r}, which a Worker doesn't await: use an AsyncWorker")


def is_coroutine_function(handler: Any) -> bool:
    """Whether what a call of it gives has to be awaited; of an object with ``__call__``, and a ``partial``, too."""
    while isinstance(handler, partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


def hold_one(terms: Worker, ends: Callable[[], bool]) -> bool:
    """Capture one job, run its handler and end it, all in one transaction; whether there was a job.

    :param ends: whether nothing may be begun.
    """
    with transaction(terms.engine) as short:
        connection = short.connection
        jobs = rows(connection.execute(terms.queue.capture(1, queue=terms.name, host=terms.host)))
        if not jobs:
            return False
        if ends():
            connection.execute(terms.queue.release(jobs))
            return False
        short.use()
        error: BaseException | None = None
        try:
            handle(terms.handler, jobs[0])
        except BaseException as raised:
            # SystemExit too: a hand that ended would leave its worker with one less
            error = raised
            say(logging.WARNING, "a job of the queue %r failed", terms.name, exc_info=error)
        ended(connection, terms.queue, jobs[0], error)
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

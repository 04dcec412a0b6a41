"""Worker: captures jobs from a queue, runs a handler for each, and reports the results, until it is stopped.

Guarantees: a handler's exception fails its job and nothing else; a worker that dies, or loses its database, loses no
job; on SIGTERM it finishes the jobs that it has started. What it decides is in ``state.py``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import queue as queues
import select
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

from sqlalchemy import Engine

from sqlalchemy_locks.core.roles import DEFAULT_QUEUE
from sqlalchemy_locks.dialects.connections import unattended
from sqlalchemy_locks.queue.enqueue import CHANNEL
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.workers.config import StopRequest, WorkerConfig, bound_engine
from sqlalchemy_locks.workers.database import WorkerDatabase, log, supports_listen
from sqlalchemy_locks.workers.held_job import HeldJob
from sqlalchemy_locks.workers.state import LONGEST_PAUSE, StalledSweeper, WorkerState

Handler = Callable[[Any], object]


class WakeEvent:
    """Wakes one waiting thread; unlike ``threading.Event``, it can be set by a signal handler at any moment."""

    def __init__(self) -> None:
        self._queue: queues.SimpleQueue[None] = queues.SimpleQueue()

    def set(self) -> None:
        if self._queue.empty():
            self._queue.put(None)

    def wait(self, timeout: float) -> None:
        with contextlib.suppress(queues.Empty):
            self._queue.get(timeout=timeout)

    def clear(self) -> None:
        with contextlib.suppress(queues.Empty):
            while True:
                self._queue.get_nowait()


class Worker:
    """Runs the jobs of a queue in threads.

    :param queue: a :class:`Queue`.
    :param handler: called with each job, a row (for a queue on your own class, too: put what you need into the payload,
        or load it). If it returns, the job is completed; if it raises, the error is stored and the job fails.
    :param bind: the engine that it captures with, if it isn't the queue's; it uses one pooled connection at a time
        (with ``hold=True`` one for each running handler), and on PostgreSQL another one to listen.
    :param name: the queue's name.
    :param concurrency: how many handlers run at the same time, each in a thread.
    :param batch: how many jobs are captured, and completed, in one transaction.
    :param heartbeat: how often it reports that it is alive, in seconds.
    :param poll: how often an idle worker looks for jobs, in seconds. On PostgreSQL a notification wakes it immediately.
    :param stalled_after: requeue the jobs of any worker of this queue whose last heartbeat is older, in seconds; at
        least twice the heartbeat of each of them. ``None``: something else does (``Queue.requeue_stalled``).
    :param grace: how long running handlers may go on after a stop, in seconds. Jobs that run longer are released.
    :param hold: keep the transaction that captures a job open while its handler runs: after a crash the job is back
        immediately, and the attempt doesn't count. Refused on SQLite.
    :param host: the start of ``processing_host``; by default the machine's name and the process's number. Each run
        appends a nonce, by which it finds its own jobs when the reply to a capture was lost.
    :raises Unsupported: see ``hold``; and for a pool that shares one connection between checkouts.
    :raises TypeError: for a coroutine function, which :class:`AsyncWorker` awaits, and without any engine.

    >>> queue = sl.Queue(bind=engine)
    >>> worker = sl.Worker(queue, handler, concurrency=4, batch=10, heartbeat=15)
    """

    def __init__(
        self,
        queue: Queue,
        handler: Handler,
        *,
        bind: Engine | None = None,
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
        if is_coroutine_function(handler):
            raise TypeError(f"a Worker doesn't await its handler, and {handler!r} has to be: use an AsyncWorker")
        engine = bound_engine(queue, bind)
        if not isinstance(engine, Engine):
            raise TypeError(f"a Worker needs an Engine, not {engine!r}")
        self.handler = handler
        self.config = WorkerConfig(
            queue,
            engine,
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
        self._stop = StopRequest()
        self._wake = WakeEvent()
        self._slot_wakes = [WakeEvent() for _ in range(self.config.concurrency)] if self.config.hold else []

    def run(self) -> None:
        """Work until :meth:`stop`, SIGTERM or SIGINT (the signals only in the main thread).

        >>> def handle(job): worker.stop()
        >>> worker = sl.Worker(sl.Queue(), handle, bind=engine, name="mail")
        >>> worker.run()
        """
        try:
            with _signals(self.stop), self._listening():
                if self.config.hold:
                    self._run_holding()
                else:
                    self._run()
        finally:
            self._stop.requested = False

    def stop(self, *_: Any) -> None:
        """Start no more jobs; callable from any thread. :meth:`run` returns when running handlers have returned, or
        after ``grace`` seconds.

        >>> def handle(job): worker.stop()
        >>> worker = sl.Worker(sl.Queue(), handle, bind=engine, name="mail")
        >>> worker.run()  # returns when its first job is done
        """
        self._stop.requested = True
        self._wake_all()

    def _wake_all(self) -> None:
        self._wake.set()
        for wake in self._slot_wakes:
            wake.set()

    def _run(self) -> None:
        state = WorkerState(self.config, self._stop, time.sleep)
        jobs: queues.SimpleQueue[Any] = queues.SimpleQueue()
        for _ in range(self.config.concurrency):
            # daemon threads: a handler that never returns must not keep the process alive
            threading.Thread(target=self._run_slot, args=(state, jobs), daemon=True).start()
        try:
            while self._turn(state, jobs):
                pass
        finally:
            state.stopping = True
            for _ in range(self.config.concurrency):
                jobs.put(None)
            state.close()

    def _turn(self, state: WorkerState, jobs: queues.SimpleQueue[Any]) -> bool:
        self._wake.clear()
        if not state.keep_going():  # checked after clear(), which may have removed the wake-up of a stop
            return False
        state.turn()
        while (job := state.take()) is not None:
            jobs.put(job)
        self._wake.wait(state.pause())
        return True

    def _run_slot(self, state: WorkerState, jobs: queues.SimpleQueue[Any]) -> None:
        """Run a job, and those after it while there are any."""
        while (job := jobs.get()) is not None:
            while job is not None:
                error: BaseException | None = None
                try:
                    call_handler(self.handler, job)
                except BaseException as raised:
                    # SystemExit too: if the thread ended, its job would run forever
                    error = raised
                if error is None:
                    due, job = state.done_and_take(job)
                else:
                    due, job = state.done(job, error), state.take()
                if due:
                    self._wake.set()

    def _run_holding(self) -> None:
        config, ended = self.config, threading.Event()
        threads = [
            threading.Thread(target=self._run_holding_slot, args=(wake, ended), daemon=True)
            for wake in self._slot_wakes
        ]
        try:
            for thread in threads:
                thread.start()
            sweeper = StalledSweeper(config, WorkerDatabase(config, time.sleep))
            while self._sweep(sweeper):
                pass
            deadline = time.monotonic() + config.grace
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        finally:
            ended.set()  # for slots that outlive the grace, and may outlive the next run as well
            self._wake_all()

    def _sweep(self, sweeper: StalledSweeper) -> bool:
        self._wake.clear()
        if not self._stop.requested:
            sweeper.run()
            self._wake.wait(self.config.sweep_interval)
        return not self._stop.requested

    def _run_holding_slot(self, wake: WakeEvent, ended: threading.Event) -> None:
        def stopped() -> bool:
            return self._stop.requested or ended.is_set()

        while not stopped():
            wake.clear()
            try:
                with unattended(self.config.engine):  # a handler may outlive the grace
                    found = self._run_held_job(stopped)
            except Exception as error:
                log(logging.WARNING, "A held job is released: %s", error)
                found = False
            if not found and not stopped():
                wake.wait(self.config.poll)

    def _run_held_job(self, stopped: Callable[[], bool]) -> bool:
        held = HeldJob(self.config)
        job = held.capture(stopped)
        if job is None:
            return False
        error: BaseException | None = None
        try:
            call_handler(self.handler, job)
        except BaseException as raised:
            # SystemExit too: the worker would lose the thread of this slot
            error = raised
        held.finish(job, error)
        return True

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """On PostgreSQL: listen in a thread for jobs that are put."""
        if not self.config.listens:
            yield
            return
        ended, (near, far) = threading.Event(), socket.socketpair()
        thread = threading.Thread(target=self._listen, args=(ended, far), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            near.close()  # ends the thread's select()
            thread.join(2)
            far.close()

    def _listen(self, ended: threading.Event, end: socket.socket) -> None:
        config, topic = self.config, self.config.queue.topic(self.config.name)
        while not ended.is_set():
            try:
                with unattended(config.engine):
                    supported = supports_listen(config.engine)
                if not supported:
                    return
                connection = config.engine.raw_connection()
                driver: Any = connection.driver_connection
                connection.detach()  # it doesn't return to the pool
                with contextlib.closing(connection):
                    driver.autocommit = True
                    driver.cursor().execute(f"LISTEN {CHANNEL}")
                    self._wake_all()  # jobs may have been put before it listened
                    while not ended.is_set():
                        readable = select.select([driver, end], [], [])[0]
                        if driver in readable and topic in config.backend.read_notifications(driver):
                            self._wake_all()
            except Exception as error:
                # whatever it is (an exhausted pool, a server that shuts down), a later attempt may succeed
                log(logging.DEBUG, "Polling instead of listening: %s", error)
                ended.wait(min(config.poll, LONGEST_PAUSE))


def call_handler(handler: Handler, job: Any) -> None:
    """Run a handler.

    :raises TypeError: if it returns an awaitable: its work isn't done.
    """
    returned = handler(job)
    if returned is not None and isinstance(returned, Awaitable):
        if inspect.iscoroutine(returned):
            returned.close()
        raise TypeError(f"the handler returned {returned!r}, which a Worker doesn't await: use an AsyncWorker")


def is_coroutine_function(handler: Any) -> bool:
    """Whether a call of it returns a coroutine; also for a ``partial``, and for an object with ``__call__``."""
    while isinstance(handler, partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


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

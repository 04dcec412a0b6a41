"""Worker: captures jobs from a queue, runs a handler for each, and reports the results, until it is stopped.

Guarantees: a handler's exception fails its job and nothing else; a worker that dies, or loses its database, loses no
job; on SIGTERM it finishes the jobs that it has started. Its decisions are in ``state.py``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import queue as queues
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Engine

from sqlalchemy_locks._validation import UNFINISHED, is_coroutine_function, is_unfinished
from sqlalchemy_locks.errors import ReentryError
from sqlalchemy_locks.queue.enqueue import CHANNEL
from sqlalchemy_locks.workers.base import BaseWorker
from sqlalchemy_locks.workers.config import CLOSE_WITHIN, StopRequest
from sqlalchemy_locks.workers.database import log, supports_listen
from sqlalchemy_locks.workers.running_job import RunningJob
from sqlalchemy_locks.workers.state import LONGEST_ERROR_PAUSE, WorkerState

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
        while not self._queue.empty():
            self.wait(0)


class Worker(BaseWorker[Handler, Engine]):
    """Runs the jobs of a queue in threads.

    :param queue: a :class:`Queue`.
    :param handler: called with each job: the columns of its row as attributes (for a queue on your own class, too: put
        what you need into the payload, or load it), and ``lost``, whether the job may have another owner by now. If the
        handler returns, the job is completed; if it raises, the error is stored and the job fails. See
        :class:`~sqlalchemy_locks.Retry` and :class:`~sqlalchemy_locks.Discard`.
    :param bind: the engine that it captures with, if it isn't the queue's; it uses one pooled connection at a time,
        and on PostgreSQL another one to listen. Heartbeats have a pool of their own, of one
        connection.
    :param name: the queue's name.
    :param concurrency: how many handlers run at the same time, each in a thread.
    :param batch: how many jobs are captured in one transaction at most.
    :param prefetch: how many jobs it captures beyond those that it can start immediately. For handlers that take less
        time than a round trip to the database. Meanwhile other workers can't run these jobs, even if they are idle.
    :param heartbeat: how often it reports that it is alive, in seconds; over a connection of its own.
    :param poll: how often an idle worker looks for jobs, in seconds. On PostgreSQL a notification wakes it immediately.
    :param stalled_after: requeue the jobs of every worker of this queue whose last heartbeat is older than this, in
        seconds, and jobs that were captured as long ago without a worker. At least twice the ``heartbeat`` of each of
        these workers. ``None``: this worker requeues none, and something else calls ``Queue.requeue_stalled``.
    :param grace: how long running handlers may continue after a stop, in seconds. Jobs that run longer are released.
        :meth:`run` returns within this time and 5 s, even if the database doesn't reply.
    :param retry_in: the pause after an attempt that failed, in seconds; or a function that returns it, called with the
        number of the attempt. By default 5 s, doubled with each attempt, up to an hour, 10 % more or less.
    :param host: the start of ``processing_host``; by default the machine's name and the process's number. Each run
        appends a nonce, by which it finds its own jobs when the reply to a capture was lost.
    :raises Unsupported: for a pool that shares one connection between checkouts.
    :raises TypeError: for a coroutine function, which :class:`AsyncWorker` awaits; for a generator function; and
        without any engine.
    :raises ValueError: for ``stalled_after`` below twice the heartbeat; for a queue on a table of your own without one
        of workers (``Queue(workers=)``).

    >>> queue = sl.Queue(bind=engine)
    >>> worker = sl.Worker(queue, handler, concurrency=4, batch=10, heartbeat=15)
    """

    _engine_class, _handler_kind = Engine, "function"

    def _make_events(self) -> None:
        self._wake = WakeEvent()
        #: wakes the thread that waits for the others
        self._progress = WakeEvent()

    def _check(self, handler: Any) -> None:
        super()._check(handler)
        if is_coroutine_function(handler):
            raise TypeError(f"a Worker doesn't await its handler, and {handler!r} must be awaited: use an AsyncWorker")
        if any(map(_is_generator_function, (handler, type(handler).__call__))):
            raise TypeError(
                f"a worker's handler can't be a generator function: calling it runs none of its code: {handler!r}"
            )

    def run(self, *, until_empty: bool = False) -> None:
        """Work until :meth:`stop`, SIGTERM or SIGINT (the signals only in the main thread; a second one has its default
        effect).

        :param until_empty: return when no job is due and no handler runs, for tests and cron; jobs that are scheduled,
            or will be tried again later, are left.
        :raises ReentryError: when it is running already.

        >>> def handle(job): worker.stop()
        >>> worker = sl.Worker(sl.Queue(), handle, bind=engine, name="mail")
        >>> worker.run()
        """
        if not self._is_running.acquire(blocking=False):
            raise ReentryError("this worker is running already: make another one")
        try:
            with _signals(self.stop), self._listening(until_empty):
                self._run_within_grace(until_empty)
        finally:
            self._stop = StopRequest()
            self._is_running.release()

    def stop(self, *_: Any) -> None:
        """Start no more jobs; callable from any thread. :meth:`run` returns when running handlers have returned, or
        after ``grace`` seconds, and at most 5 s later if the database doesn't reply.

        >>> def handle(job): worker.stop()
        >>> worker = sl.Worker(sl.Queue(), handle, bind=engine, name="mail")
        >>> worker.run()  # returns when its first job is done
        """
        self._stop.request()
        self._wake_all()

    def _wake_all(self) -> None:
        self._wake.set()
        self._progress.set()

    def _run_within_grace(self, until_empty: bool) -> None:
        """Run in another thread, since a call of the database may never return, and wait here."""
        stop, ended = self._stop, threading.Event()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self._run(stop, until_empty)
            except BaseException as error:
                errors.append(error)
            finally:
                ended.set()
                self._progress.set()

        threading.Thread(target=run, name="sqlalchemy_locks.worker", daemon=True).start()
        try:
            while not self._wait(stop, ended):
                pass
        finally:
            stop.request()  # of a thread that hasn't ended
            self._wake_all()
            if self._state is not None:
                self._state.heartbeats.end()  # while they go on, nobody requeues the jobs of that thread
        if errors:
            raise errors[0]

    def _wait(self, stop: StopRequest, ended: threading.Event) -> bool:
        self._progress.clear()
        if ended.is_set():  # checked after clear(), which may have removed the wake-up
            return True
        wait = stop.at + self.config.grace + CLOSE_WITHIN - time.monotonic()
        if wait <= 0:
            log(logging.ERROR, "The database doesn't reply: the worker's jobs are requeued when they have stalled")
            return True
        self._progress.wait(min(wait, threading.TIMEOUT_MAX))
        return False

    def _run(self, stop: StopRequest, until_empty: bool) -> None:
        state = WorkerState(self, self.config, stop, self._wake_all, until_empty=until_empty)
        self._state = state
        jobs: queues.SimpleQueue[RunningJob | None] = queues.SimpleQueue()
        for _ in range(self.config.concurrency):
            # daemon threads: a handler that never returns must not keep the process alive
            threading.Thread(target=self._run_slot, args=(state, jobs), daemon=True).start()
        state.start()
        try:
            while self._cycle(state, jobs):
                pass
        finally:
            state.stopping = True
            for _ in range(self.config.concurrency):
                jobs.put(None)
            try:
                state.close()
            finally:
                state.heartbeats.end()

    def _cycle(self, state: WorkerState, jobs: queues.SimpleQueue[RunningJob | None]) -> bool:
        self._wake.clear()
        if not state.keep_going():  # checked after clear(), which may have removed the wake-up of a stop
            return False
        state.cycle()
        for _ in range(state.slots_to_wake()):
            if (job := state.take()) is None:
                break
            jobs.put(job)
        if pause := state.pause():
            self._wake.wait(pause)
        return True

    def _run_slot(self, state: WorkerState, jobs: queues.SimpleQueue[RunningJob | None]) -> None:
        """Run a job, and those after it while there are any ready."""
        try:
            while (job := jobs.get()) is not None:
                while job is not None:
                    error: BaseException | None = None
                    try:
                        refuse_unfinished(state.call(job, self.handler))
                    except BaseException as raised:
                        # SystemExit too: if the thread ended, its job would run forever
                        error = raised
                    job = state.done(job, error)
                self._wake.set()
        except BaseException as error:
            # raised outside of a handler, by another thread: without this, the worker would run on with a slot less
            state.fail(error)

    @contextlib.contextmanager
    def _listening(self, until_empty: bool) -> Iterator[None]:
        """On PostgreSQL: listen in a thread for jobs that are put."""
        if until_empty or not self.config.listens:
            yield
            return
        ended, (near, far) = threading.Event(), socket.socketpair()
        thread = threading.Thread(target=self._listen, args=(ended, far), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            near.close()  # wakes the thread
            thread.join(0.5)  # it may be connecting to a server that doesn't reply
            if not thread.is_alive():
                far.close()

    def _listen(self, ended: threading.Event, end: socket.socket) -> None:
        config, topic = self.config, self.config.queue._jobs.topic(self.config.name)
        while not ended.is_set():
            try:
                if not supports_listen(config.engine):
                    return
                connection = config.engine.raw_connection()
                driver: Any = connection.driver_connection
                connection.detach()  # it doesn't return to the pool, which would log the traceback of a lost connection
                # select() refuses descriptors above 1023
                with contextlib.closing(driver), selectors.DefaultSelector() as selector:
                    driver.autocommit = True
                    driver.cursor().execute(f"LISTEN {CHANNEL}")
                    self._wake_all()  # jobs may have been put before it listened
                    for source in (driver, end):
                        selector.register(source, selectors.EVENT_READ)
                    while not ended.is_set():
                        readable = [key.fileobj for key, _ in selector.select()]
                        if driver in readable and topic in config.backend.read_notifications(driver):
                            self._wake_all()
            except Exception as error:
                # whatever it is (an exhausted pool, a server that shuts down), a later attempt may succeed
                log(logging.DEBUG, "Polling instead of listening: %s", error)
                ended.wait(min(config.poll, LONGEST_ERROR_PAUSE))


def _is_generator_function(handler: Any) -> bool:
    return inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler)  # both unwrap a partial


def refuse_unfinished(returned: Any, kinds: tuple[type[Any], ...] = UNFINISHED) -> None:
    """:raises TypeError: if a handler has returned code that has yet to run, such as a coroutine or a generator."""
    if returned is not None and is_unfinished(returned, kinds):
        raise TypeError(f"the handler returned {returned!r}, whose code has not run: use an AsyncWorker to await it")


@contextlib.contextmanager
def _signals(stop: Callable[..., None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    stopped = False

    def on_signal(number: int, _: Any) -> None:
        nonlocal stopped
        if stopped:  # a second signal has the effect that it had before the worker ran: usually it ends the process
            signal.signal(number, before[number])
            signal.raise_signal(number)
            if before[number] == signal.SIG_DFL:
                os._exit(128 + number)  # the kernel ignores the signal's default effect for a container's first process
        stopped = True
        stop()

    before: dict[int, Any] = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

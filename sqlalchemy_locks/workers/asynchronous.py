"""AsyncWorker: as ``Worker``, with handlers that are awaited. ``state.py`` has the decisions of both.

Calls of the database run in a greenlet, one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from sqlalchemy_locks._validation import is_coroutine_function
from sqlalchemy_locks.core.asyncio_waits import shielded
from sqlalchemy_locks.errors import ReentryError
from sqlalchemy_locks.queue.enqueue import CHANNEL
from sqlalchemy_locks.workers.base import BaseWorker
from sqlalchemy_locks.workers.config import CLOSE_WITHIN, StopRequest
from sqlalchemy_locks.workers.database import log, supports_listen
from sqlalchemy_locks.workers.running_job import RunningJob
from sqlalchemy_locks.workers.state import LONGEST_ERROR_PAUSE, WorkerState

AsyncHandler = Callable[[Any], Awaitable[object]]


#: the workers that run: a loop has one handler of each signal, which stops all workers of the loop
_running: set[AsyncWorker] = set()
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: the signal handlers from before the first worker of a loop; restored when its last worker ends
_replaced: dict[asyncio.AbstractEventLoop, dict[int, Any]] = {}


class AsyncWorker(BaseWorker[AsyncHandler, AsyncEngine]):
    """Runs the jobs of a queue in tasks of one event loop.

    It differs from :class:`~sqlalchemy_locks.Worker` in this: ``handler`` is a coroutine function, ``bind`` an
    ``AsyncEngine``, ``concurrency`` the number of tasks; a handler that outlives ``grace`` is cancelled before its
    job is released.

    >>> async def handle(job): worker.stop()
    >>> worker = sl.AsyncWorker(sl.Queue(), handle, bind=async_engine, concurrency=4)
    """

    _engine_class, _handler_kind = AsyncEngine, "coroutine function"

    #: the worker itself cancels its tasks
    _cancelling = False
    #: the cycle that is under way
    _cycle_task: asyncio.Task[None] | None = None

    def _check(self, handler: Any) -> None:
        super()._check(handler)
        if _is_plain_function(handler):
            raise TypeError(
                f"an AsyncWorker awaits its handler, and {handler!r} is no coroutine function: use a Worker"
            )

    def _make_events(self) -> None:
        self._wake = asyncio.Event()

    async def run(self, *, until_empty: bool = False) -> None:
        """Work until :meth:`stop`, SIGTERM or SIGINT (the signals only where the loop supports signal handlers, and the
        process has no handler of its own, as in a web server; a second one ends the process).

        :param until_empty: return when no job is due and no handler runs, for tests and cron; jobs that are scheduled,
            or will be tried again later, are left.
        :raises ReentryError: when it is running already.

        >>> async def handle(job): worker.stop()
        >>> worker = sl.AsyncWorker(sl.Queue(), handle, bind=async_engine, name="mail")
        >>> await worker.run()
        """
        if not self._is_running.acquire(blocking=False):
            raise ReentryError("this worker is running already: make another one")
        self._cancelling, self._runner, self._loop = False, asyncio.current_task(), asyncio.get_running_loop()
        self._cancelled_before, self._context = _cancellations(self._runner), contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            async with self._signals(), self._listening(until_empty):
                try:
                    await self._run(until_empty)
                finally:
                    self._stop = StopRequest()
        finally:
            self._make_events()  # the events of this run belong to its event loop
            self._is_running.release()

    def stop(self) -> None:
        """Start no more jobs; to be called in the worker's loop. :meth:`run` returns when running handlers have
        returned, or after ``grace`` seconds, and at most 5 s later if the database doesn't reply.

        >>> async def handle(job): worker.stop()
        >>> worker = sl.AsyncWorker(sl.Queue(), handle, bind=async_engine, name="mail")
        >>> await worker.run()  # returns when its first job is done
        """
        self._stop.request()
        self._wake.set()
        if self._cycle_task is not None:
            self._abort_after_grace(self._cycle_task)

    def _abort_after_grace(self, cycle: asyncio.Task[None]) -> None:
        """Abandon a cycle after the grace: the statement that it waits for may never return."""
        delay = self._stop.at + self.config.grace - time.monotonic()
        self._loop.call_later(max(0.0, delay), self._abort, cycle)

    def _abort(self, cycle: asyncio.Task[None]) -> None:
        if not cycle.done() and self._state is not None:
            self._state.database.abort()
            cycle.cancel()

    def _wake_from_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            # after a permanent error of the heartbeats a cycle under way ends within the grace, too
            self._loop.call_soon_threadsafe(self.stop if self._stop.requested else self._wake.set)

    async def _run(self, until_empty: bool) -> None:
        state = self._state = WorkerState(
            self, self.config, self._stop, self._wake_from_thread, until_empty=until_empty, loop=self._loop
        )
        state.start()
        closed = False
        try:
            while await self._cycle(state):
                pass
            if not self._stop.requested:
                closed = await self._query(state.close)  # which may wait for the locked row of a finished job
        finally:
            state.stopping = self._cancelling = True
            for task in self._tasks:
                task.cancel()
            try:
                if not closed:
                    await shielded(self._close(state), raise_cancelled=True)
            finally:
                # its thread may need this loop
                await shielded(asyncio.to_thread(state.heartbeats.end))

    async def _close(self, state: WorkerState) -> None:
        """Wait for the cancelled handlers, then report and release the jobs, as far as the database replies in time."""
        deadline = self._loop.time() + CLOSE_WITHIN
        if self._tasks:
            await asyncio.wait([*self._tasks], timeout=CLOSE_WITHIN)
        closing = asyncio.create_task(greenlet_spawn(state.close))
        await asyncio.wait({closing}, timeout=max(0.5, deadline - self._loop.time()))
        if closing.done():
            closing.result()
            return
        log(logging.ERROR, "The database doesn't reply: the worker's jobs are requeued when they have stalled")
        state.database.abort()
        closing.cancel()
        await asyncio.wait({closing}, timeout=0.5)

    async def _cycle(self, state: WorkerState) -> bool:
        self._wake.clear()
        if not state.keep_going():
            return False
        await self._query(state.cycle)
        while (job := state.take()) is not None:
            self._begin(state, job)
        await _wait(self._wake, state.pause())
        return True

    async def _query(self, work: Callable[[], None]) -> bool:
        """Run a cycle, and return whether it has ended: a stop abandons a cycle that gets no reply."""
        cycle = self._cycle_task = asyncio.create_task(greenlet_spawn(work))
        if self._stop.requested:
            self._abort_after_grace(cycle)
        try:
            await asyncio.wait({cycle})
        except asyncio.CancelledError:
            cycle.cancel()
            await shielded(_end(cycle))
            raise
        finally:
            self._cycle_task = None
        if cycle.cancelled():
            return False
        cycle.result()
        return True

    def _begin(self, state: WorkerState, job: RunningJob) -> None:
        """Run a job in a task and a context of its own; the handler may cancel this task at any time."""
        task = self._context.copy().run(asyncio.create_task, self._call(state, job))
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, state, job))

    async def _call(self, state: WorkerState, job: RunningJob) -> None:
        error: BaseException | None = None
        try:
            await state.call(job, self.handler)
        except BaseException as raised:
            error = raised
        self._report(state, job, error)

    def _done(self, state: WorkerState, job: RunningJob, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if id(job) in state.running:  # the task was cancelled before it began
            self._report(state, job, asyncio.CancelledError())

    def _report(self, state: WorkerState, job: RunningJob, error: BaseException | None) -> None:
        # Python 3.10 doesn't count cancellations: before run() is resumed, its cancellation can't be noticed there
        cancelled = self._cancelling or _cancellations(self._runner) > self._cancelled_before
        if isinstance(error, asyncio.CancelledError) and cancelled:
            return  # by the worker's cancellation, rather than by something in a handler: the job is released
        if (following := state.done(job, error)) is None:
            self._wake.set()
        else:
            self._begin(state, following)

    @contextlib.asynccontextmanager
    async def _listening(self, until_empty: bool) -> AsyncIterator[None]:
        """On PostgreSQL: listen in a task for jobs that are put."""
        if until_empty or not self.config.listens:
            yield
            return
        listener = asyncio.create_task(self._listen())
        try:
            yield
        finally:
            listener.cancel()
            # it may be connecting to a server that doesn't reply
            await shielded(_end(listener, 0.5), raise_cancelled=True)

    async def _listen(self) -> None:
        while True:
            try:
                if not await greenlet_spawn(supports_listen, self.config.engine):
                    return
                await self._listen_until_lost()
            except Exception as error:
                log(logging.DEBUG, "Polling instead of listening: %s", error)
            await asyncio.sleep(min(self.config.poll, LONGEST_ERROR_PAUSE))

    async def _listen_until_lost(self) -> None:
        """Listen until the connection is lost."""
        topic = self.config.queue._jobs.topic(self.config.name)
        connection = await greenlet_spawn(self.config.engine.raw_connection)
        driver: Any = connection.driver_connection
        connection.detach()  # it doesn't return to the pool
        try:
            if hasattr(driver, "add_listener"):  # asyncpg

                def on_notification(_: Any, pid: int, channel: str, payload: str) -> None:
                    if payload == topic:
                        self._wake.set()

                lost = asyncio.Event()
                driver.add_termination_listener(lambda _: lost.set())
                await driver.add_listener(CHANNEL, on_notification)
                self._wake.set()  # jobs may have been put before it listened
                await lost.wait()
            else:
                await driver.set_autocommit(True)
                await driver.execute(f"LISTEN {CHANNEL}")
                self._wake.set()
                async for notification in driver.notifies():
                    if notification.payload == topic:
                        self._wake.set()
        finally:
            if hasattr(driver, "terminate"):
                driver.terminate()  # close() would wait for the server
            else:
                await driver.close()

    @contextlib.asynccontextmanager
    async def _signals(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        if not any(worker._loop is loop for worker in _running):
            before = _replaced[loop] = {}
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if _is_default(handler):
                    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                        loop.add_signal_handler(number, _on_signal, loop, number)
                        before[number] = handler
        _running.add(self)
        try:
            yield
        finally:
            _running.discard(self)
            if not any(worker._loop is loop for worker in _running):
                for replaced, handler in _replaced.pop(loop).items():
                    loop.remove_signal_handler(replaced)
                    signal.signal(replaced, handler)


def _cancellations(task: Any) -> int:
    """Return how often a task was cancelled; Python 3.10 doesn't count."""
    return task.cancelling() if hasattr(task, "cancelling") else 0


async def _end(task: asyncio.Task[None], timeout: float | None = None) -> None:
    """Wait for a cancelled task."""
    await asyncio.wait({task}, timeout=timeout)
    if task.done() and not task.cancelled():
        task.exception()  # retrieved, so that it isn't logged


def _is_default(handler: Any) -> bool:
    """Whether a signal has its default effect; a server, such as uvicorn, has a handler of its own."""
    # asyncio.run() cancels its task at SIGINT
    runner = getattr(asyncio, "Runner", ())
    of_asyncio = isinstance(handler, partial) and isinstance(getattr(handler.func, "__self__", None), runner)
    return of_asyncio or handler in (signal.SIG_DFL, signal.default_int_handler)


def _on_signal(loop: asyncio.AbstractEventLoop, number: int) -> None:
    workers = [worker for worker in _running if worker._loop is loop]
    if any(worker._stop.requested for worker in workers):  # the second one ends the process
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        os._exit(128 + number)  # the kernel ignores the signal's default effect for a container's first process
    for worker in workers:
        worker.stop()


async def _wait(event: asyncio.Event, timeout: float) -> None:
    """Wait for the event, for ``timeout`` seconds at most. The timeout itself sets the event.

    Not by ``wait_for``: until Python 3.11 it loses a cancellation that arrives when the event has just been set.
    """
    timer = asyncio.get_running_loop().call_later(timeout, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


def _is_plain_function(handler: Any) -> bool:
    """Return whether this is a function or method whose result can't be awaited; a decorated coroutine's can be."""
    while isinstance(handler, partial):
        handler = handler.func
    return inspect.isroutine(handler) and not (
        is_coroutine_function(handler) or is_coroutine_function(inspect.unwrap(handler))
    )

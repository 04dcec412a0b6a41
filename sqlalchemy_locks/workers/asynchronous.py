"""AsyncWorker: as ``Worker``, with handlers that are awaited. What it decides is in ``state.py``, for both.

What talks to the database runs in SQLAlchemy's greenlet, one call at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import await_only, greenlet_spawn

from sqlalchemy_locks.core.roles import DEFAULT_QUEUE
from sqlalchemy_locks.queue.enqueue import CHANNEL
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.runtime.cancellation import shielded
from sqlalchemy_locks.workers.config import StopRequest, WorkerConfig, bound_engine
from sqlalchemy_locks.workers.database import WorkerDatabase, log, supports_listen
from sqlalchemy_locks.workers.held_job import HeldJob
from sqlalchemy_locks.workers.state import LONGEST_PAUSE, StalledSweeper, WorkerState
from sqlalchemy_locks.workers.threaded import is_coroutine_function

AsyncHandler = Callable[[Any], Awaitable[object]]
#: what the signals stop, by loop: a loop has one handler of each signal, and maybe several workers
_stops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Callable[[], None]]] = weakref.WeakKeyDictionary()


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class AsyncWorker:
    """Runs the jobs of a queue in tasks of one event loop.

    It differs from :class:`~sqlalchemy_locks.Worker` in this: ``handler`` is a coroutine function, ``bind`` an
    ``AsyncEngine``, ``concurrency`` the number of tasks; a handler that outlives ``grace`` is cancelled before its
    job is released.

    >>> async def handle(job): worker.stop()
    >>> worker = sl.AsyncWorker(sl.Queue(), handle, bind=async_engine, concurrency=4)
    """

    def __init__(
        self,
        queue: Queue,
        handler: AsyncHandler,
        *,
        bind: AsyncEngine | None = None,
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
            raise TypeError(f"a worker's handler is a coroutine function of one job, not {handler!r}")
        if _is_plain_function(handler):
            raise TypeError(
                f"an AsyncWorker awaits its handler, and {handler!r} is no coroutine function: use a Worker"
            )
        engine = bound_engine(queue, bind)
        if not isinstance(engine, AsyncEngine):
            raise TypeError(f"an AsyncWorker needs an AsyncEngine, not {engine!r}")
        self.handler = handler
        self.config = WorkerConfig(
            queue,
            engine.sync_engine,
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
        #: the worker itself cancels its tasks
        self._cancelling = False
        self._wake = asyncio.Event()
        self._slot_wakes = [asyncio.Event() for _ in range(self.config.concurrency)] if self.config.hold else []

    async def run(self) -> None:
        """Work until :meth:`stop`, SIGTERM or SIGINT (the signals only where the loop supports signal handlers).

        >>> async def handle(job): worker.stop()
        >>> worker = sl.AsyncWorker(sl.Queue(), handle, bind=async_engine, name="mail")
        >>> await worker.run()
        """
        self._cancelling, self._runner = False, asyncio.current_task()
        async with self._signals(), self._listening():
            try:
                await (self._run_holding() if self.config.hold else self._run())
            finally:
                self._stop.requested = False

    def stop(self) -> None:
        """Start no more jobs; to be called in the worker's loop. :meth:`run` returns when running handlers have
        returned, or after ``grace`` seconds.

        >>> async def handle(job): worker.stop()
        >>> worker = sl.AsyncWorker(sl.Queue(), handle, bind=async_engine, name="mail")
        >>> await worker.run()  # returns when its first job is done
        """
        self._stop.requested = True
        self._wake_all()

    def _wake_all(self) -> None:
        self._wake.set()
        for wake in self._slot_wakes:
            wake.set()

    def _is_cancelled(self) -> bool:
        """Whether the worker is being cancelled, rather than something in a handler."""
        # Python 3.10 doesn't tell that run() was cancelled before it is resumed
        cancelling = getattr(self._runner, "cancelling", None)
        return self._cancelling or (cancelling is not None and cancelling() > 0)

    async def _run(self) -> None:
        state = WorkerState(self.config, self._stop, _sleep)
        tasks: set[asyncio.Task[None]] = set()
        try:
            while await self._turn(state, tasks):
                pass
        finally:
            state.stopping = self._cancelling = True
            for task in tasks:
                task.cancel()
            await shielded(_close(state, tasks), raise_cancelled=True)

    async def _turn(self, state: WorkerState, tasks: set[asyncio.Task[None]]) -> bool:
        self._wake.clear()
        if not state.keep_going():
            return False
        await greenlet_spawn(state.turn)
        while (job := state.take()) is not None:
            task = asyncio.create_task(self._run_slot(state, job))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await _wait(self._wake, state.pause())
        return True

    async def _run_slot(self, state: WorkerState, job: Any) -> None:
        """Run a job, and those after it while there are any."""
        following: Any = job
        while following is not None:
            error: BaseException | None = None
            try:
                await self.handler(following)
            except BaseException as raised:
                if isinstance(raised, asyncio.CancelledError) and self._is_cancelled():
                    raise  # the job no longer runs, and is released
                error = raised
            if state.done(following, error):
                self._wake.set()
            if isinstance(error, asyncio.CancelledError):
                return  # the handler may have cancelled this very task
            following = state.take()

    async def _run_holding(self) -> None:
        config = self.config
        sweeper = StalledSweeper(config, WorkerDatabase(config, _sleep))
        slots = [asyncio.create_task(self._run_holding_slot(wake)) for wake in self._slot_wakes]
        try:
            while await self._sweep(sweeper):
                pass
            await asyncio.wait(slots, timeout=config.grace)
        finally:
            self._cancelling = True
            for slot in slots:
                slot.cancel()
            await shielded(_join(slots), raise_cancelled=True)

    async def _sweep(self, sweeper: StalledSweeper) -> bool:
        self._wake.clear()
        if not self._stop.requested:
            await greenlet_spawn(sweeper.run)
        if not self._stop.requested:
            await _wait(self._wake, self.config.sweep_interval)
        return not self._stop.requested

    async def _run_holding_slot(self, wake: asyncio.Event) -> None:
        while not self._stop.requested:
            wake.clear()
            try:
                found = await self._run_held_job()
            except Exception as error:
                log(logging.WARNING, "A held job is released: %s", error)
                found = False
            if not found and not self._stop.requested:
                await _wait(wake, self.config.poll)

    async def _run_held_job(self) -> bool:
        held = HeldJob(self.config)
        job = await greenlet_spawn(held.capture, lambda: self._stop.requested)
        if job is None:
            return False
        error: BaseException | None = None
        try:
            await self.handler(job)
        except BaseException as raised:
            if isinstance(raised, asyncio.CancelledError) and self._is_cancelled():
                await greenlet_spawn(held.abandon)
                raise
            error = raised
        await greenlet_spawn(held.finish, job, error)
        return True

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        """On PostgreSQL: listen in a task for jobs that are put."""
        if not self.config.listens:
            yield
            return
        listener = asyncio.create_task(self._listen())
        try:
            yield
        finally:
            listener.cancel()
            await shielded(_join([listener]), raise_cancelled=True)

    async def _listen(self) -> None:
        while True:
            try:
                if not await greenlet_spawn(supports_listen, self.config.engine):
                    return
                await self._listen_until_lost()
            except Exception as error:
                log(logging.DEBUG, "Polling instead of listening: %s", error)
            await asyncio.sleep(min(self.config.poll, LONGEST_PAUSE))

    async def _listen_until_lost(self) -> None:
        """Listen until the connection is lost."""
        topic, backend = self.config.queue.topic(self.config.name), self.config.backend
        loop = asyncio.get_running_loop()
        lost = asyncio.Event()
        connection = await greenlet_spawn(self.config.engine.raw_connection)
        driver: Any = connection.driver_connection
        connection.detach()  # it doesn't return to the pool
        try:

            def on_readable() -> None:
                try:
                    if topic in backend.read_notifications(driver):
                        self._wake_all()
                except Exception:
                    loop.remove_reader(driver.fileno())
                    lost.set()

            def on_notification(_: Any, pid: int, channel: str, payload: str) -> None:
                if payload == topic:
                    self._wake_all()

            if hasattr(driver, "add_listener"):  # asyncpg, which reads by itself
                driver.add_termination_listener(lambda _: lost.set())
                await driver.add_listener(CHANNEL, on_notification)
                self._wake_all()  # jobs may have been put before it listened
                await lost.wait()
            else:
                await driver.set_autocommit(True)
                await driver.execute(f"LISTEN {CHANNEL}")
                loop.add_reader(driver.fileno(), on_readable)
                self._wake_all()
                try:
                    await lost.wait()
                finally:
                    if not driver.closed:
                        loop.remove_reader(driver.fileno())
        finally:
            await driver.close()

    @contextlib.asynccontextmanager
    async def _signals(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        stops = _stops.setdefault(loop, [])
        if not stops:
            for number in _SIGNALS:
                with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                    loop.add_signal_handler(number, _stop_all, stops)
        stops.append(self.stop)
        try:
            yield
        finally:
            stops.remove(self.stop)
            if not stops:
                for number in _SIGNALS:
                    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                        loop.remove_signal_handler(number)


async def _join(tasks: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


async def _close(state: WorkerState, tasks: Iterable[asyncio.Task[None]]) -> None:
    await _join(tasks)
    await greenlet_spawn(state.close)


def _stop_all(stops: list[Callable[[], None]]) -> None:
    for stop in list(stops):
        stop()


async def _wait(event: asyncio.Event, timeout: float) -> None:
    """Wait for the event, for ``timeout`` seconds at most; afterwards the event may be set though nothing set it.

    Not by ``wait_for``: until Python 3.11 it loses a cancellation that arrives when the event has just been set.
    """
    timer = asyncio.get_running_loop().call_later(timeout, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


def _sleep(delay: float) -> None:
    await_only(asyncio.sleep(delay))


def _is_plain_function(handler: Any) -> bool:
    """Whether it is a function or method whose result can't be awaited; what it wraps may be a coroutine function."""
    while isinstance(handler, partial):
        handler = handler.func
    return inspect.isroutine(handler) and not (
        is_coroutine_function(handler) or is_coroutine_function(inspect.unwrap(handler))
    )

"""AsyncWorker: as ``Worker``, with handlers that are awaited. How it decides is in ``shift.py``, for both.

The database's part runs in SQLAlchemy's greenlet, one piece at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import await_only, greenlet_spawn

from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.queue.enqueue import CHANNEL
from sqlalchemy_locks.runtime.cancellation import shielded
from sqlalchemy_locks.runtime.transaction import ShortTransaction
from sqlalchemy_locks.workers.config import WorkerConfig
from sqlalchemy_locks.workers.database import ended, hears, rows, say
from sqlalchemy_locks.workers.state import LONGEST_REST, WorkerState
from sqlalchemy_locks.workers.threaded import is_coroutine_function

AsyncHandler = Callable[[Any], Awaitable[object]]
#: of each loop, what is to be stopped by its signals: it has one handler of each, and perhaps several workers
_stopped: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Callable[[], None]]] = weakref.WeakKeyDictionary()


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class AsyncWorker(WorkerConfig[AsyncHandler, AsyncEngine]):
    """Works on the jobs of a queue, in tasks of one event loop.

    Everything is as with :class:`~sqlalchemy_locks.Worker`, but for: ``handler`` is a coroutine function, ``bind`` an
    ``AsyncEngine``, ``concurrency`` the number of tasks; a handler that outlives ``grace`` is cancelled before its
    job is given back.

    >>> async def handle(job): worker.stop()
    >>> worker = sl.AsyncWorker(sl.Queue(), handle, bind=async_engine, concurrency=4)
    """

    def _refuse(self, handler: Any) -> None:
        if not callable(handler):
            raise TypeError(f"a worker's handler is a coroutine function of one job, not {handler!r}")
        if _is_plain(handler):
            raise TypeError(
                f"an AsyncWorker awaits its handler, and {handler!r} is no coroutine function: use a Worker"
            )

    def _engine_of(self, bind: Any) -> Engine:
        if not isinstance(bind, AsyncEngine):
            raise TypeError(f"an AsyncWorker needs an AsyncEngine, not {bind!r}")
        return bind.sync_engine

    def _prepare(self) -> None:
        self._stopped = False
        #: it is this worker that cancels its tasks
        self._cancelling = False
        self._wake = asyncio.Event()
        self._hands = [asyncio.Event() for _ in range(self.concurrency)] if self.hold else []

    async def run(self) -> None:
        """Work until :meth:`stop`, SIGTERM or SIGINT (the signals only where the loop can have them).

        >>> async def handle(job): worker.stop()
        >>> worker = sl.AsyncWorker(sl.Queue(), handle, bind=async_engine, name="mail")
        >>> await worker.run()
        """
        shift = WorkerState(self, _sleep)
        self._cancelling, self._runner = False, asyncio.current_task()
        async with self._signals(), self._listening():
            try:
                await (self._holding(shift) if self.hold else self._working(shift))
            finally:
                self._stopped = False

    def stop(self) -> None:
        """Begin nothing more; :meth:`run` returns when what runs has finished, or ``grace`` is over. From its loop.

        >>> async def handle(job): worker.stop()
        >>> worker = sl.AsyncWorker(sl.Queue(), handle, bind=async_engine, name="mail")
        >>> await worker.run()  # returns when its first job is done
        """
        self._stopped = True
        self._ring()

    def _ring(self) -> None:
        self._wake.set()
        for hand in self._hands:
            hand.set()

    def _ending(self) -> bool:
        """Whether what is cancelled is this worker, rather than something in a handler."""
        # Python 3.10 can't tell that run() was cancelled, until it is told itself
        cancelling = getattr(self._runner, "cancelling", None)
        return self._cancelling or (cancelling is not None and cancelling() > 0)

    async def _working(self, shift: WorkerState) -> None:
        tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        try:
            while not self._stopped:
                await self._turn(shift, tasks, shift.pause)
            shift.stopping = True
            deadline = loop.time() + self.grace
            while shift.running and loop.time() < deadline:
                await self._turn(shift, tasks, lambda: min(shift.pause(), max(0.0, deadline - loop.time())))
        finally:
            shift.stopping = self._cancelling = True
            for task in tasks:
                task.cancel()
            await shielded(_closed(shift, tasks), raise_cancelled=True)

    async def _turn(self, shift: WorkerState, tasks: set[asyncio.Task[None]], pause: Callable[[], float]) -> None:
        self._wake.clear()
        await greenlet_spawn(shift.turn)
        while (job := shift.take()) is not None:
            task = asyncio.create_task(self._hand(shift, job))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await _rung(self._wake, pause())

    async def _hand(self, shift: WorkerState, job: Any) -> None:
        """One task: a job, and those after it while there are any."""
        following: Any = job
        while following is not None:
            error: BaseException | None = None
            try:
                await self.handler(following)
            except BaseException as raised:
                if isinstance(raised, asyncio.CancelledError) and self._ending():
                    raise  # its job runs no more, and is given back
                error = raised
            if shift.done(following, error):
                self._wake.set()
            if isinstance(error, asyncio.CancelledError):
                return  # if it was this task that the handler cancelled, it is good for nothing more
            following = shift.take()

    async def _holding(self, shift: WorkerState) -> None:
        hands = [asyncio.create_task(self._hold(hand)) for hand in self._hands]
        try:
            while not self._stopped:
                self._wake.clear()
                await greenlet_spawn(shift.sweep)
                if self._stopped:
                    break
                await _rung(self._wake, (self.stalled_after or 3600) / 4)
            await asyncio.wait(hands, timeout=self.grace)
        finally:
            self._cancelling = True
            for hand in hands:
                hand.cancel()
            await shielded(_all(hands), raise_cancelled=True)

    async def _hold(self, wake: asyncio.Event) -> None:
        while not self._stopped:
            wake.clear()
            try:
                found = await self._hold_one()
            except Exception as error:
                say(logging.WARNING, "a held job is given back: %s", error)
                found = False
            if not found and not self._stopped:
                await _rung(wake, self.poll)

    async def _hold_one(self) -> bool:
        """As ``worker.hold_one``: the same transaction, left open while the handler is awaited."""
        short = ShortTransaction(self.engine)
        await greenlet_spawn(short.open)
        try:
            captured: Any = self.queue.capture(1, queue=self.name, host=self.host)
            jobs = await greenlet_spawn(lambda: rows(short.connection.execute(captured)))
            if jobs and self._stopped:
                released = self.queue.release(jobs)
                await greenlet_spawn(lambda: short.connection.execute(released))
            elif jobs:
                await greenlet_spawn(short.use)
                error: BaseException | None = None
                try:
                    await self.handler(jobs[0])
                except BaseException as raised:
                    if isinstance(raised, asyncio.CancelledError) and self._ending():
                        raise  # which gives the job back
                    error = raised
                    say(logging.WARNING, "a job of the queue %r failed", self.name, exc_info=error)
                await greenlet_spawn(ended, short.connection, self.queue, jobs[0], error)
        except BaseException:
            await greenlet_spawn(short.abandon)
            raise
        await greenlet_spawn(short.commit)
        return bool(jobs)

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        """On PostgreSQL: a task that is told when jobs are put."""
        backend = build_context(self.engine.dialect, {}).backend
        if not backend.listens or not self.queue.notify:
            yield
            return
        listener = asyncio.create_task(self._listen())
        try:
            yield
        finally:
            listener.cancel()
            await shielded(_all([listener]), raise_cancelled=True)

    async def _listen(self) -> None:
        while True:
            try:
                if not await greenlet_spawn(hears, self.engine):
                    return
                await self._listen_once()
            except Exception as error:
                say(logging.DEBUG, "not listening, but polling: %s", error)
            await asyncio.sleep(min(self.poll, LONGEST_REST))

    async def _listen_once(self) -> None:
        """Until the connection is lost."""
        engine, topic = self.engine, self.queue.topic(self.name)
        backend = build_context(engine.dialect, {}).backend
        loop = asyncio.get_running_loop()
        lost = asyncio.Event()
        connection = await greenlet_spawn(engine.raw_connection)
        driver: Any = connection.driver_connection
        connection.detach()  # the pool has it no more
        try:

            def heard() -> None:
                try:
                    if topic in backend.heard(driver):
                        self._ring()
                except Exception:
                    loop.remove_reader(driver.fileno())
                    lost.set()

            def told(_: Any, pid: int, channel: str, what: str) -> None:
                if what == topic:
                    self._ring()

            if hasattr(driver, "add_listener"):  # asyncpg, which reads by itself
                driver.add_termination_listener(lambda _: lost.set())
                await driver.add_listener(CHANNEL, told)
                self._ring()
                await lost.wait()
            else:
                await driver.set_autocommit(True)
                await driver.execute(f"LISTEN {CHANNEL}")
                loop.add_reader(driver.fileno(), heard)
                self._ring()
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
        stops = _stopped.setdefault(loop, [])
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


async def _all(tasks: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


async def _closed(shift: WorkerState, tasks: Iterable[asyncio.Task[None]]) -> None:
    await _all(tasks)
    await greenlet_spawn(shift.close)


def _stop_all(stops: list[Callable[[], None]]) -> None:
    for stop in list(stops):
        stop()


async def _rung(event: asyncio.Event, longest: float) -> None:
    """Wait for the event, or for so long, in seconds; the event may be set afterwards without that anybody did.

    Not by ``wait_for``: until Python 3.11 it forgets that it was cancelled, if it was when the event had been set.
    """
    timer = asyncio.get_running_loop().call_later(longest, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


def _sleep(delay: float) -> None:
    await_only(asyncio.sleep(delay))


def _is_plain(handler: Any) -> bool:
    """Whether it is a function, or a method, that can't be awaited; what it wraps may be."""
    while isinstance(handler, partial):
        handler = handler.func
    return inspect.isroutine(handler) and not (
        is_coroutine_function(handler) or is_coroutine_function(inspect.unwrap(handler))
    )

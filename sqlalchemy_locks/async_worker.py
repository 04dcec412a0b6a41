"""AsyncWorker: as ``Worker``, with handlers that are awaited. How it decides is in ``shift.py``, for both.

The database's part runs in SQLAlchemy's greenlet, one piece at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import await_only, greenlet_spawn

from .operation import place_of
from .put import CHANNEL
from .queue import DEFAULT_QUEUE, Queue
from .shift import Shift, Terms, log, rows
from .transaction import ShortTransaction

AsyncHandler = Callable[[Any], Awaitable[object]]


class AsyncWorker:
    """Works on the jobs of a queue, in tasks of one event loop.

    Everything is as with :class:`~sqlalchemy_locks.Worker`, but for: ``handler`` is a coroutine function, ``bind`` an
    ``AsyncEngine``, ``concurrency`` the number of tasks; a handler that outlives ``grace`` is cancelled before its
    job is given back.

    >>> await sl.AsyncWorker(queue, handler, bind=async_engine, concurrency=4).run()
    """

    def __init__(
        self,
        queue: Queue,
        handler: AsyncHandler,
        *,
        bind: AsyncEngine,
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
        if not isinstance(bind, AsyncEngine):
            raise TypeError(f"an AsyncWorker needs bind=, an AsyncEngine, not {bind!r}")
        self._handler = handler
        self._terms = Terms(
            queue,
            bind.sync_engine,
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
        self._stopped = False
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Work until :meth:`stop`, SIGTERM or SIGINT (the signals only where the loop can have them)."""
        shift = Shift(self._terms, _sleep)
        async with self._signals(), self._listening():
            try:
                await (self._holding(shift) if self._terms.hold else self._working(shift))
            finally:
                self._stopped = False

    def stop(self) -> None:
        """Begin nothing more; :meth:`run` returns when what runs has finished, or ``grace`` is over. From its loop."""
        self._stopped = True
        self._wake.set()

    async def _working(self, shift: Shift) -> None:
        tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        try:
            while not self._stopped:
                await self._turn(shift, tasks, shift.pause)
            shift.stopping = True
            deadline = loop.time() + self._terms.grace
            while shift.running and loop.time() < deadline:
                await self._turn(shift, tasks, lambda: min(shift.pause(), max(0.0, deadline - loop.time())))
        finally:
            shift.stopping = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await greenlet_spawn(shift.close)

    async def _turn(self, shift: Shift, tasks: set[asyncio.Task[None]], pause: Callable[[], float]) -> None:
        self._wake.clear()
        await greenlet_spawn(shift.turn)
        while (job := shift.take()) is not None:
            task = asyncio.create_task(self._hand(shift, job))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), pause())

    async def _hand(self, shift: Shift, job: Any) -> None:
        """One task: a job, and those after it while there are any."""
        following: Any = job
        while following is not None:
            try:
                await self._handler(following)
            except asyncio.CancelledError:
                raise  # its job runs no more, and is given back
            except BaseException as error:
                shift.done(following, error)
            else:
                shift.done(following, None)
            if not shift.waiting or shift.failed or len(shift.completed) >= self._terms.batch:
                self._wake.set()
            following = shift.take()

    async def _holding(self, shift: Shift) -> None:
        hands = [asyncio.create_task(self._hold()) for _ in range(self._terms.concurrency)]
        try:
            while not self._stopped:
                await greenlet_spawn(shift.sweep)
                self._wake.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), (self._terms.stalled_after or 3600) / 4)
            await asyncio.wait(hands, timeout=self._terms.grace)
        finally:
            for hand in hands:
                hand.cancel()
            await asyncio.gather(*hands, return_exceptions=True)

    async def _hold(self) -> None:
        while not self._stopped:
            try:
                found = await self._hold_one()
            except Exception as error:
                log.warning("a held job is given back: %s", error)
                found = False
            if not found and not self._stopped:
                await asyncio.sleep(self._terms.poll)

    async def _hold_one(self) -> bool:
        """As ``worker.hold_one``: the same transaction, left open while the handler is awaited."""
        terms = self._terms
        short = ShortTransaction(terms.engine)
        await greenlet_spawn(short.open)
        try:
            captured = terms.queue.capture(1, queue=terms.name, host=terms.host)
            jobs = await greenlet_spawn(lambda: rows(short.connection.execute(captured)))
            if jobs:
                await greenlet_spawn(short.use)
                try:
                    await self._handler(jobs[0])
                except Exception as error:
                    log.warning("a job of the queue %r failed", terms.name, exc_info=error)
                    ended = terms.queue.fail(jobs[0], error="".join(traceback.format_exception(error)))
                else:
                    ended = terms.queue.complete(jobs[0])
                await greenlet_spawn(short.connection.execute, ended)
        except BaseException:
            await greenlet_spawn(short.abandon)
            raise
        await greenlet_spawn(short.commit)
        return bool(jobs)

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        """On PostgreSQL: a task that is told when jobs are put."""
        facts = place_of(self._terms.engine.dialect, {}).engine
        if not facts.listens or not self._terms.queue.notify:
            yield
            return
        listener = asyncio.create_task(self._listen())
        try:
            yield
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def _listen(self) -> None:
        while True:
            try:
                await self._listen_once()
            except Exception as error:
                log.debug("not listening, but polling: %s", error)
            await asyncio.sleep(self._terms.poll)

    async def _listen_once(self) -> None:
        """Until the connection is lost."""
        engine, topic = self._terms.engine, self._terms.queue.topic(self._terms.name)
        facts = place_of(engine.dialect, {}).engine
        loop = asyncio.get_running_loop()
        lost = asyncio.Event()
        connection = await greenlet_spawn(engine.raw_connection)
        driver: Any = connection.driver_connection
        connection.detach()  # the pool has it no more
        try:

            def heard() -> None:
                try:
                    if topic in facts.heard(driver):
                        self._wake.set()
                except Exception:
                    loop.remove_reader(driver.fileno())
                    lost.set()

            def told(_: Any, pid: int, channel: str, what: str) -> None:
                if what == topic:
                    self._wake.set()

            if hasattr(driver, "add_listener"):  # asyncpg, which reads by itself
                driver.add_termination_listener(lambda _: lost.set())
                await driver.add_listener(CHANNEL, told)
                self._wake.set()
                await lost.wait()
            else:
                await driver.set_autocommit(True)
                await driver.execute(f"LISTEN {CHANNEL}")
                loop.add_reader(driver.fileno(), heard)
                self._wake.set()
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
        mine = []
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self.stop)
                mine.append(number)
        try:
            yield
        finally:
            for number in mine:
                loop.remove_signal_handler(number)


def _sleep(delay: float) -> None:
    await_only(asyncio.sleep(delay))

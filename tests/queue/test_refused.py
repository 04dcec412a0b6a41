"""What a worker says while something else is refused, what goes back that it was not told of, and how it stops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.workers.state import WorkerState
from tests.conditional.test_lost_replies import final, in_the_clear
from tests.faults.drivers import asynchronous, clear, sync, through_an_async_proxy
from tests.faults.proxy import Proxy
from tests.fixtures.parties import PATIENCE, async_connected, until
from tests.fixtures.queues import MakeEngine
from tests.queue.test_exchange import other, queue, shift_of, work
from tests.workers.test_workers import counts, put

__all__ = ["other"]

CAPTURE, COMPLETE, FAIL = "claim + 1", "completed_at=", "failed_at=CASE"


@contextmanager
def refusing(engine: Engine, *parts: str) -> Iterator[None]:
    """The database refuses statements with this in them, as it does what takes longer than it may."""

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if any(part in statement.replace("`", "") for part in parts):
            raise OperationalError(statement, {}, Exception("canceling statement due to statement timeout"))

    event.listen(engine, "before_cursor_execute", look)
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", look)


def silent(engine: Engine, shift: WorkerState) -> None:
    """As if nothing had been said of its jobs for an hour."""
    with engine.begin() as connection:
        job = build_context(connection.dialect, {}).tables.job
        for id, beat in connection.execute(select(job.c.internal_id, job.c.heartbeat_at)).all():
            if beat is not None:
                connection.execute(
                    update(job).where(job.c.internal_id == id).values(heartbeat_at=beat - timedelta(hours=1))
                )
    shift._beat -= 3600


def stalled(engine: Engine) -> int:
    with engine.begin() as connection:
        number: int = connection.scalar(queue.requeue_stalled(1800))
        return number


def three_taken(engine: Engine) -> tuple[WorkerState, list[Any]]:
    put(engine, *range(10), max_attempts=1)
    shift = shift_of(engine, batch=3, concurrency=4, heartbeat=600)
    shift.turn()
    jobs = [shift.take(), shift.take(), shift.take()]
    assert None not in jobs
    return shift, jobs


def test_where_nothing_can_be_captured_what_is_done_is_told_and_what_runs_is_kept(engine: Engine) -> None:
    shift, jobs = three_taken(engine)
    shift.done(jobs[0], None)
    silent(engine, shift)
    with refusing(engine, CAPTURE):
        shift.turn()
    assert shift._rest > 0  # it was refused
    assert counts(engine) == {"all": 10, "completed": 1, "dead": 0, "running": 2, "waiting": 7}
    assert stalled(engine) == 0
    shift.done(jobs[1], RuntimeError("wrong"))
    shift.done(jobs[2], None)
    with refusing(engine, CAPTURE):
        shift.turn()
    assert counts(engine) == {"all": 10, "completed": 2, "dead": 1, "running": 0, "waiting": 7}
    while counts(engine)["waiting"]:
        shift.turn()
        work(shift)
    shift.close()
    assert counts(engine) == {"all": 10, "completed": 9, "dead": 1, "running": 0, "waiting": 0}


def test_where_nothing_can_be_said_of_what_has_ended_the_rest_is_kept(engine: Engine) -> None:
    shift, jobs = three_taken(engine)
    shift.done(jobs[0], None)
    shift.done(jobs[1], RuntimeError("wrong"))
    silent(engine, shift)
    with refusing(engine, COMPLETE, FAIL):
        shift.turn()
        assert counts(engine)["running"] == 3
    assert stalled(engine) == 0
    with refusing(engine, FAIL):
        shift.turn()
    assert counts(engine) == {"all": 10, "completed": 1, "dead": 0, "running": 5, "waiting": 4}
    shift.turn()
    assert counts(engine) == {"all": 10, "completed": 1, "dead": 1, "running": 4, "waiting": 4}


def test_a_rest_is_no_longer_than_until_the_next_heartbeat(engine: Engine) -> None:
    put(engine, 1)
    shift = shift_of(engine, heartbeat=1)
    with refusing(engine, CAPTURE):
        for _ in range(8):
            shift.turn()
    assert shift._rest == 5
    assert shift.pause() <= 1
    shift._beat = -float("inf")  # nothing can be said at all: the rest is not cut short again and again
    assert shift.pause() == 5


def test_at_the_end_each_thing_is_said_that_can_be(engine: Engine) -> None:
    shift, jobs = three_taken(engine)
    shift._sleep = lambda _: None
    shift.done(jobs[0], None)
    shift.done(jobs[1], RuntimeError("wrong"))
    with refusing(engine, COMPLETE):
        shift.close()
    # what was done was not told, what failed was, and what ran was given back
    assert counts(engine) == {"all": 10, "completed": 0, "dead": 1, "running": 1, "waiting": 8}


# what a worker has captured and was not told of, when it ends


def nowhere(proxy: Proxy) -> Callable[[], None]:
    """Whoever comes anew doesn't reach the server, until it is told otherwise."""
    server = proxy._server
    proxy._server = ("127.0.0.1", 1)

    def again() -> None:
        proxy._server = server

    return again


@sync
@pytest.mark.parametrize("how", ["close", "turn"])
def test_what_it_was_not_told_of_goes_back_at_the_end(
    servers: Any, other: Engine, name: str, driver: str, how: str
) -> None:
    put(other, *range(4), max_attempts=1)
    with in_the_clear(servers, name, driver) as (engine, proxy):
        shift = shift_of(engine, batch=2)
        shift._sleep = lambda _: None
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")
        back: list[Callable[[], None]] = []
        proxy.lose_answer(final(name), lambda: back.append(nowhere(proxy)))
        shift.turn()
        assert (proxy.losses, len(shift.waiting), counts(other)["running"]) == (1, 0, 2)
        back[0]()
        if how == "close":
            shift.close()
        else:
            shift.stopping = True
            shift.turn()  # as it does while handlers still run
    assert counts(other) == {"all": 4, "completed": 0, "dead": 0, "running": 0, "waiting": 4}


@asynchronous
def test_what_a_cancelled_worker_was_not_told_of_goes_back(servers: Any, other: Engine, name: str, driver: str) -> None:
    put(other, *range(4), max_attempts=1)

    running: list[int] = []

    async def handler(job: Any) -> None:
        raise AssertionError(job)

    async def body(engine: AsyncEngine, proxy: Proxy) -> None:
        worker = sl.AsyncWorker(queue, handler, bind=engine, batch=2, stalled_after=None, host="one of a kind")
        loop, told = asyncio.get_running_loop(), threading.Event()

        def cancel() -> None:
            task.cancel()
            loop.call_soon(told.set)

        def meanwhile() -> None:
            running.append(counts(other)["running"])
            loop.call_soon_threadsafe(cancel)
            assert told.wait(PATIENCE)

        # asyncpg sends the values when the statement is prepared already
        proxy.lose_answer(b"one of a kind" if name == "postgresql15" else final(name), meanwhile)
        task = asyncio.create_task(worker.run())
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE)
        assert running == [2]

    async def main() -> None:
        async with through_an_async_proxy(servers, name, driver, **clear(driver)) as (engine, proxy):
            await body(engine, proxy)

    asyncio.run(main())
    assert counts(other) == {"all": 4, "completed": 0, "dead": 0, "running": 0, "waiting": 4}


# what is begun by a worker that was told to stop


def test_nothing_is_begun_after_a_stop_whatever_a_turn_waits_for(engine: Engine) -> None:
    put(engine, *range(4))
    worker = sl.Worker(queue, print, bind=engine, batch=2, heartbeat=3600, stalled_after=None)
    shift = WorkerState(worker, time.sleep)
    shift.turn()
    first = shift.take()
    worker.stop()  # by a signal, say, or by another thread, while the worker's own waits for the database
    assert shift.take() is None
    shift.done(first, None)
    shift.waiting.clear()
    shift.turn()
    assert not shift.waiting  # nor is more asked for
    assert counts(engine)["waiting"] == 2


@pytest.mark.parametrize(("name", "driver"), [("postgresql15", None), ("mysql", None), ("postgresql15", "asyncpg")])
def test_what_is_held_when_a_worker_is_stopped_is_not_begun(
    servers: Any, engine_to: MakeEngine, name: str, driver: str | None
) -> None:
    engine = engine_to(name)
    put(engine, *range(3), max_attempts=1)
    begun: list[Any] = []
    worker: Any

    def stop(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if CAPTURE in statement.replace("`", ""):
            worker.stop()

    async def handler(job: Any) -> None:
        begun.append(job)

    async def main() -> None:
        nonlocal worker
        async with async_connected(servers.installed(name, driver)) as bind:
            event.listen(bind.sync_engine, "after_cursor_execute", stop)
            worker = sl.AsyncWorker(queue, handler, bind=bind, concurrency=1, hold=True)
            await asyncio.wait_for(worker.run(), PATIENCE)

    if driver is None:
        event.listen(engine, "after_cursor_execute", stop)
        worker = sl.Worker(queue, begun.append, bind=engine, concurrency=1, hold=True)
        worker.run()
    else:
        asyncio.run(main())
    assert begun == []
    with engine.connect() as connection:
        job = build_context(connection.dialect, {}).tables.job
        assert connection.execute(select(job.c.attempts, job.c.started_at)).all() == [(0, None)] * 3


def test_a_hand_that_outlives_its_worker_begins_nothing_more(engine_to: MakeEngine) -> None:
    """And leaves nothing open, though its engine was disposed of before."""
    engine = engine_to("postgresql15")
    put(engine, 1, 2)
    begun: list[Any] = []
    hands: list[threading.Thread] = []
    go = threading.Event()

    def handler(job: Any) -> None:
        begun.append(job.payload)
        hands.append(threading.current_thread())
        if len(begun) == 1:
            worker.stop()
            assert go.wait(PATIENCE)

    worker = sl.Worker(queue, handler, bind=engine, concurrency=1, hold=True, grace=0)
    pool = engine.pool
    worker.run()
    engine.dispose()
    go.set()
    until(lambda: len(begun) > 1 or not hands[0].is_alive())
    assert begun == [1]
    assert pool.checkedin() == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("later", range(6))
def test_a_cancellation_is_heard_though_somebody_rings_with_it(
    servers: Any, engine_to: MakeEngine, later: int, hold: bool
) -> None:
    name, driver = ("postgresql15", "asyncpg") if hold else ("sqlite", "aiosqlite")
    engine_to(name)

    async def handler(job: Any) -> None:
        raise AssertionError(job)

    async def main() -> None:
        async with async_connected(servers.installed(name, driver)) as bind:
            own = sl.Queue(notify=False)
            worker = sl.AsyncWorker(own, handler, bind=bind, poll=3600, heartbeat=3600, stalled_after=None, hold=hold)
            rings = [*worker._hands, worker._wake]
            task = asyncio.create_task(worker.run())
            while not all(ring._waiters for ring in rings):  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            worker._ring()
            for _ in range(later):  # up to when it is awake
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, PATIENCE)

    asyncio.run(main())

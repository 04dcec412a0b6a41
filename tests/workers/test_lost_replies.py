"""A lost reply: the worker finds the jobs that it captured."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

import sqlalchemy_locks as sl
from sqlalchemy_locks.runtime.renewal import clock
from sqlalchemy_locks.workers.heartbeats import Heartbeats
from tests.conditional.test_lost_replies import final, in_the_clear
from tests.faults.drivers import asynchronous, clear, sync, through_an_async_proxy
from tests.faults.proxy import Proxy
from tests.fixtures.parties import PATIENCE
from tests.fixtures.queues import MakeEngine, put
from tests.fixtures.worker_states import beat, counts, fetched, finish_all, queue, state_of, worker_engine


@sync
def test_a_lost_reply_loses_no_job(servers: Any, direct: Engine, name: str, driver: str) -> None:
    put(direct, *range(8), max_attempts=1)
    with in_the_clear(servers, name, driver) as (engine, proxy):
        state = state_of(engine, batch=2, host="same")
        state.cycle()
        done = finish_all(state)
        proxy.lose_answer(final(name))
        state.cycle()
        assert proxy.losses == 1
        while state.waiting or counts(direct)["waiting"]:
            beat(state)
            done += finish_all(state)
            state.cycle()
        done += finish_all(state)
        state.close()
    # each ran once, in its only attempt, those of the lost reply included
    assert sorted(done) == list(range(8))
    assert counts(direct) == {"all": 8, "completed": 8, "dead": 0, "running": 0, "waiting": 0}


@pytest.mark.parametrize("lost", ["then a retry finds none", "for good"])
def test_a_capture_without_reading_whose_reply_was_lost_is_found(engine_to: MakeEngine, lost: str) -> None:
    """As after a fetch that has failed, of which a job may be impossible to decode."""
    engine = engine_to("sqlite")
    put(engine, 0)
    state = state_of(engine)
    state._suspicious = True
    perform = state.database.perform

    def perform_and_lose(operation: Any) -> Any:
        found = perform(operation)
        if operation._impl is queue._counting:
            assert found == 1
            if lost == "for good":
                state.database.perform = perform  # type: ignore[method-assign]
                raise sl.OutcomeUnknown("the reply was lost")
            found, state.database.retried = perform(operation), True
            assert found == 0
        return found

    state.database.perform = perform_and_lose  # type: ignore[method-assign]
    state.cycle()
    state.cycle()
    assert [job.payload for job in state.waiting] == [0]


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb", "sqlite"])
def test_only_jobs_of_the_same_run_are_found(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name)
    put(engine, *range(6))
    mine, others = state_of(engine, batch=2, host="same"), state_of(engine, batch=2, host="same")
    mine.cycle()
    others.cycle()
    assert mine.take() is not None  # one of its jobs runs
    lost = fetched(engine, [], 1, host=mine.host).jobs
    mine._reply_lost = True
    mine.cycle()
    assert mine.take() is None  # before the next heartbeat
    assert [job.payload for job in mine.waiting] == [1, lost[0].payload]
    assert [job.payload for job in others.waiting] == [2, 3]
    for _ in range(2):
        mine.cycle()
    assert len(mine.waiting) == 2


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
def test_a_late_capture_is_found(engine_to: MakeEngine, name: str) -> None:
    """The server commits the capture after the worker has searched for its jobs."""
    engine = worker_engine(engine_to, name)
    state = state_of(engine, batch=2)
    state._reply_lost = True
    state.cycle()
    assert not state.waiting
    put(engine, 0, max_attempts=1)
    assert len(fetched(engine, [], 1, host=state.host).jobs) == 1
    state.cycle()
    assert not state.waiting
    state._search_again_at = time.monotonic()
    state.cycle()
    assert [job.payload for job in state.waiting] == [0]
    state.close()
    assert counts(engine)["waiting"] == 1


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
@pytest.mark.parametrize("dies", [True, False], ids=["connection", "statement"])
def test_job_that_cannot_be_read_for_the_moment_is_not_dead(
    engine_to: MakeEngine, monkeypatch: pytest.MonkeyPatch, name: str, dies: bool
) -> None:
    """Neither when its connection dies, nor at the app's limit of a statement, which uses an attempt."""
    engine = worker_engine(engine_to, name)
    state = state_of(engine, batch=2)
    put(engine, 0, 1, max_attempts=2)
    assert len(fetched(engine, [], 2, host=state.host).jobs) == 2
    state._reply_lost = True
    perform, broken = state.database.perform, True

    def breaks(operation: Any) -> Any:
        if broken and operation._impl is queue._read_owned:
            raise OperationalError("SELECT", None, Exception("too late"), connection_invalidated=dies)
        return perform(operation)

    monkeypatch.setattr(state.database, "perform", breaks)
    state.cycle()
    assert counts(engine) == {"all": 2, "completed": 0, "dead": 0, "running": 2 * dies, "waiting": 2 * (not dies)}
    broken = False
    state.cycle()
    assert sorted(job.payload for job in state.waiting) == ([0, 1] if dies else [])
    state.close()
    assert counts(engine)["waiting"] == 2


def test_a_late_capture_is_released_at_a_stop(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15")
    state = state_of(engine, batch=2)
    state._reply_lost = True
    state.cycle()
    put(engine, 0, max_attempts=1)
    assert len(fetched(engine, [], 1, host=state.host).jobs) == 1
    state.close()
    assert counts(engine) == {"all": 1, "completed": 0, "dead": 0, "running": 0, "waiting": 1}


def refuse_connections(proxy: Proxy) -> Callable[[], None]:
    """Let new connections fail until the returned function is called."""
    server = proxy._server
    proxy._server = ("127.0.0.1", 1)

    def again() -> None:
        proxy._server = server

    return again


@sync
@pytest.mark.parametrize("how", ["close", "cycle"])
def test_unknown_captures_are_released_at_the_end(
    servers: Any, direct: Engine, name: str, driver: str, how: str
) -> None:
    put(direct, *range(4), max_attempts=1)
    with in_the_clear(servers, name, driver) as (engine, proxy):
        state = state_of(engine, batch=2)
        state.database.sleep = lambda _: None
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")
        back: list[Callable[[], None]] = []
        proxy.lose_answer(final(name), lambda: back.append(refuse_connections(proxy)))
        state.cycle()
        assert (proxy.losses, len(state.waiting), counts(direct)["running"]) == (1, 0, 2)
        back[0]()
        if how == "close":
            state.close()
        else:
            state.stopping = True
            state.cycle()  # a cycle while handlers still run
    assert counts(direct) == {"all": 4, "completed": 0, "dead": 0, "running": 0, "waiting": 4}


@asynchronous
def test_a_cancelled_worker_releases_unknown_captures(
    servers: Any, direct: Engine, name: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a heartbeat's reply would be lost instead
    monkeypatch.setattr(Heartbeats, "start", lambda self: setattr(self, "confirmed_at", clock()))
    put(direct, *range(4), max_attempts=1)

    running: list[int] = []

    async def handler(job: Any) -> None:
        raise AssertionError(job)

    async def body(engine: AsyncEngine, proxy: Proxy) -> None:
        worker = sl.AsyncWorker(queue, handler, bind=engine, batch=2, stalled_after=None, host="one of a kind")
        loop, done = asyncio.get_running_loop(), threading.Event()

        def cancel() -> None:
            task.cancel()
            loop.call_soon(done.set)

        def meanwhile() -> None:
            running.append(counts(direct)["running"])
            loop.call_soon_threadsafe(cancel)
            assert done.wait(PATIENCE)

        # asyncpg sends the values once the statement is prepared
        proxy.lose_answer(b"one of a kind" if name == "postgresql15" else final(name), meanwhile)
        task = asyncio.create_task(worker.run())
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE)
        assert running == [2]

    async def main() -> None:
        async with through_an_async_proxy(servers, name, driver, **clear(driver)) as (engine, proxy):
            await body(engine, proxy)

    asyncio.run(main())
    assert counts(direct) == {"all": 4, "completed": 0, "dead": 0, "running": 0, "waiting": 4}

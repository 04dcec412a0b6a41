"""A lost reply: the worker finds the jobs that it captured."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

import sqlalchemy_locks as sl
from sqlalchemy_locks.runtime.renewal import clock
from sqlalchemy_locks.workers.heartbeats import Heartbeats
from tests.conditional.test_lost_replies import final, in_the_clear
from tests.faults.drivers import ASYNC, ONE, clear, sync
from tests.faults.proxy import Proxy
from tests.fixtures.parties import PATIENCE, async_connected, installed
from tests.fixtures.queues import put
from tests.fixtures.worker_states import counts, finish_all, queue, state_of


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
            done += finish_all(state)
            state.cycle()
        done += finish_all(state)
        state.close()
    # each ran once, in its only attempt, those of the lost reply included
    assert sorted(done) == list(range(8))
    assert counts(direct) == {"all": 8, "completed": 8, "dead": 0, "running": 0, "waiting": 0}


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


@pytest.mark.parametrize(("name", "driver"), ASYNC)
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
        with Proxy(installed(servers, name, driver)) as proxy:
            async with async_connected(proxy.url, **ONE, **clear(driver)) as engine:
                await body(engine, proxy)

    asyncio.run(main())
    assert counts(direct) == {"all": 4, "completed": 0, "dead": 0, "running": 0, "waiting": 4}

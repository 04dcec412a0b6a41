"""Both kinds of workers: what they capture, how many handlers they run, what they refuse."""

from __future__ import annotations

import asyncio
from inspect import signature
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import create_async_engine

import sqlalchemy_locks as sl
from tests.conftest import Servers
from tests.fixtures.parties import PATIENCE, async_connected, until
from tests.fixtures.queues import ASYNC, MakeEngine, put
from tests.fixtures.worker_states import all_ended, counts, queue, running


def test_jobs_of_other_queues_are_not_captured(lite: Engine) -> None:
    """The engine may be bound to the queue."""
    put(lite, "mine", queue="mail")
    put(lite, "other")
    done: list[str] = []
    with running(sl.Worker(sl.Queue(bind=lite), lambda job: done.append(job.payload), name="mail", poll=0.05)):
        until(lambda: counts(lite)["completed"] == 1)
    assert done == ["mine"]


@pytest.mark.parametrize(("name", "driver"), ASYNC)
def test_async_workers(engine_to: MakeEngine, servers: Servers, name: str, driver: str) -> None:
    engine = engine_to(name)
    put(engine, *range(50), max_attempts=1)

    async def work() -> int:
        now = most = 0

        async def handler(job: Any) -> None:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1
            if job.payload == 7:
                raise RuntimeError("seven")

        async with async_connected(servers.installed(name, driver)) as bind:
            worker = sl.AsyncWorker(queue, handler, bind=bind, concurrency=3, poll=0.05)
            task = asyncio.create_task(worker.run())
            await all_ended(engine, 50)
            worker.stop()
            await asyncio.wait_for(task, PATIENCE)
        return most

    assert asyncio.run(work()) <= 3
    assert counts(engine) == {"all": 50, "completed": 49, "dead": 1, "running": 0, "waiting": 0}


def test_both_kinds_of_workers_have_the_same_parameters() -> None:
    def parameters(kind: Any) -> list[tuple[str, Any, Any]]:
        return [(each.name, each.kind, each.default) for each in signature(kind).parameters.values()]

    assert parameters(sl.Worker) == parameters(sl.AsyncWorker)


def test_invalid_parameters_are_refused(engine_to: MakeEngine) -> None:
    engine = engine_to("sqlite")

    def handler(_: Any) -> None:
        pass

    with pytest.raises(TypeError, match="takes a Queue"):
        sl.Worker(handler, handler, bind=engine)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"a worker needs an engine: give it to the worker, bind=engine, or to the queue"
    ):
        sl.Worker(queue, handler)
    with pytest.raises(TypeError, match="Worker takes an Engine, and .*: AsyncWorker was given Engine"):
        sl.AsyncWorker(sl.Queue(bind=engine), awaited_handler)
    with pytest.raises(TypeError, match="and AsyncWorker an AsyncEngine: Worker was given AsyncEngine"):
        sl.Worker(queue, handler, bind=create_async_engine("sqlite+aiosqlite://"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="host has 240 characters at most"):
        sl.Worker(queue, handler, bind=engine, host="h" * 241)
    with pytest.raises(TypeError, match="an Engine"):
        sl.Worker(queue, handler, bind="sqlite://")  # type: ignore[arg-type]
    for bad in (
        {"concurrency": 0},
        {"batch": 0},
        {"heartbeat": 0},
        {"stalled_after": 20},
        {"name": ""},
        {"poll": 1e10},
    ):
        with pytest.raises(ValueError, match="is from 1 to|at least|at most|more than|must not be"):
            sl.Worker(queue, handler, bind=engine, **bad)  # type: ignore[arg-type]


async def awaited_handler(_: Any) -> None:
    pass

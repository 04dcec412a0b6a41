"""How workers end: each of them when they are told to together, and with every job told of that has ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sqlalchemy_locks as sl
from sqlalchemy_locks.workers.state import WorkerState
from tests.conftest import Servers
from tests.fixtures.parties import PATIENCE, async_connected, cancelled_at_every_await
from tests.fixtures.queues import MakeEngine
from tests.workers.test_workers import counts, put

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("which", ["postgresql15/asyncpg", "postgresql15/psycopg", "mysql/aiomysql"])
def test_a_worker_that_is_cancelled_at_every_await(
    engine_to: MakeEngine, servers: Servers, which: str, hold: bool
) -> None:
    name, driver = which.split("/")
    engine = engine_to(name)
    put(engine, *range(5))

    async def main() -> None:
        began = asyncio.Event()

        async def handler(_: object) -> None:
            began.set()
            await asyncio.sleep(3600)

        async with async_connected(servers.installed(name, driver)) as bind:
            worker = sl.AsyncWorker(
                sl.Queue(), handler, bind=bind, concurrency=2, heartbeat=3600, stalled_after=None, hold=hold
            )
            task = asyncio.create_task(worker.run())
            await began.wait()
            await cancelled_at_every_await(task)
            assert task.cancelled()

    asyncio.run(main())
    assert counts(engine) == {"all": 5, "completed": 0, "dead": 0, "running": 0, "waiting": 5}


@pytest.mark.parametrize("error", [None, KeyError("the handler's")])
def test_what_ends_while_the_worker_does_is_told(engine_to: MakeEngine, error: Exception | None) -> None:
    engine = engine_to("sqlite")
    put(engine, "runs", "waits", max_attempts=1)
    shift = WorkerState(sl.Worker(sl.Queue(), print, bind=engine, concurrency=1), time.sleep)
    shift.turn()
    job = shift.take()
    give_back = shift.give_back

    def ends_meanwhile() -> None:
        give_back()
        if shift.running:
            shift.done(job, error)

    shift.give_back = ends_meanwhile  # type: ignore[method-assign]
    shift.close()
    ended = {"completed": 1, "dead": 0} if error is None else {"completed": 0, "dead": 1}
    assert counts(engine) == {"all": 2, "running": 0, "waiting": 1, **ended}


SIGNALLED = """
import asyncio, signal, sys
from sqlalchemy.ext.asyncio import create_async_engine
import sqlalchemy_locks as sl

async def main():
    engine = create_async_engine(sys.argv[1])
    queue, began = sl.Queue(bind=engine), [asyncio.Event() for _ in range(3)]

    async def handler(job):
        began[job.payload].set()

    workers = [sl.AsyncWorker(queue, handler, name=f"q{number}") for number in range(3)]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    for number, event in enumerate(began):
        async with engine.begin() as connection:
            await connection.execute(queue.put(number, queue=f"q{number}"))
        await event.wait()
    workers[2].stop()
    await tasks[2]
    print("one has ended", flush=True)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)
    await engine.dispose()
    print("all have ended", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)

asyncio.run(main())
"""


def test_a_signal_stops_all_workers_of_a_loop(servers: Servers, engine_to: MakeEngine) -> None:
    engine_to("postgresql15")
    ran = subprocess.run(
        [sys.executable, "-c", SIGNALLED, servers.installed("postgresql15", "asyncpg")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ran.stdout == "one has ended\nall have ended True\n", ran.stderr

"""How a worker stops: by ``stop()``, a signal or a cancellation, with no job lost or started afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DataError
from sqlalchemy.ext.asyncio import AsyncEngine

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers
from tests.fixtures.forks import main
from tests.fixtures.parties import PATIENCE, async_connected, cancelled_at_every_await, later, until
from tests.fixtures.queues import MakeEngine, put
from tests.fixtures.worker_states import counts, queue, run_async, running, state_for
from tests.workers.test_liveness import ROOT, WORKER


def test_a_job_that_outlives_the_grace_is_lost_before_it_is_released(engine: Engine) -> None:
    put(engine, 1)
    begun, go_on, lost = threading.Event(), threading.Event(), []

    def handler(job: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        lost.append(job.lost)

    worker = sl.Worker(queue, handler, bind=engine, concurrency=1, grace=0)
    with running(worker) as thread:
        assert begun.wait(PATIENCE)
        worker.stop()
        thread.join(PATIENCE)
    assert counts(engine)["waiting"] == 1
    go_on.set()
    until(lambda: lost)
    assert lost == [True]


def test_a_stop_releases_waiting_jobs(engine: Engine) -> None:
    put(engine, *range(10))
    begun, go_on = threading.Event(), threading.Event()

    def handler(_: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    worker = sl.Worker(queue, handler, bind=engine, concurrency=1, batch=10, prefetch=10, grace=2 * PATIENCE)
    with running(worker) as thread:
        assert begun.wait(PATIENCE)
        worker.stop()
        until(lambda: counts(engine)["waiting"] == 9)
        assert thread.is_alive()
        go_on.set()
    assert counts(engine) == {"all": 10, "completed": 1, "dead": 0, "running": 0, "waiting": 9}
    with engine.begin() as connection:
        # the attempt doesn't count
        assert {job.attempts for job in connection.execute(queue.capture(10))} == {1}


def test_a_job_that_is_just_being_taken_is_not_released(engine_to: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot has seen no stop, and hasn't yet taken the job that the worker releases for a stop."""
    engine = engine_to("postgresql15")
    put(engine, 1)
    state = state_for(sl.Worker(queue, print, bind=engine, heartbeat=3600, stalled_after=None))
    state.cycle()
    releases: list[Future[None]] = []

    def recent() -> bool:
        releases.append(later(state._release_waiting))
        with contextlib.suppress(FutureTimeout):
            releases[0].result(0.3)
        return True

    monkeypatch.setattr(state.heartbeats, "recent", recent)
    job = state.take()
    assert job is not None
    releases[0].result(PATIENCE)
    assert counts(engine)["running"] == 1
    state.done(job, None)
    state.close()
    assert counts(engine)["completed"] == 1


def test_async_handlers_are_cancelled_after_the_grace(
    engine_to: MakeEngine, servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_to("postgresql15")
    put(engine, 1, 2)

    async def work() -> bool:
        begun, cancelled = asyncio.Event(), False

        async def handler(_: Any) -> None:
            nonlocal cancelled
            begun.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled = True
                raise

        async with async_connected(servers.installed("postgresql15", "asyncpg")) as bind:
            worker = sl.AsyncWorker(queue, handler, bind=bind, concurrency=1, grace=0.1)
            task = asyncio.create_task(worker.run())
            await begun.wait()
            worker.stop()
            await asyncio.wait_for(task, PATIENCE)
        return cancelled

    assert asyncio.run(work())
    assert "ended while 1 of its handlers ran" in caplog.text
    assert counts(engine)["waiting"] == 2


@pytest.mark.parametrize("error", [None, KeyError("the handler's")])
def test_jobs_that_finish_during_close_are_reported(engine_to: MakeEngine, error: Exception | None) -> None:
    engine = engine_to("sqlite")
    put(engine, "runs", "waits", max_attempts=1)
    state = state_for(sl.Worker(sl.Queue(), print, bind=engine, concurrency=1))
    state.cycle()
    job = state.take()
    give_back = state._release_waiting

    def ends_meanwhile() -> None:
        give_back()
        if state.running:
            state.done(job, error)

    state._release_waiting = ends_meanwhile  # type: ignore[method-assign]
    state.close()
    ended = {"completed": 1, "dead": 0} if error is None else {"completed": 0, "dead": 1}
    assert counts(engine) == {"all": 2, "running": 0, "waiting": 1, **ended}


def test_a_permanent_error_still_releases_jobs(lite: Engine) -> None:
    class Wrong(sl.Queue):
        def complete(self, jobs: Any) -> Any:
            raise DataError("UPDATE", {}, ValueError("never"))

    put(lite, *range(5))
    state = state_for(sl.Worker(Wrong(), print, bind=lite, concurrency=2, batch=5))
    state.cycle()
    first, _ = state.take(), state.take()
    state.done(first, None)
    with pytest.raises(DataError):
        state.close()
    assert counts(lite)["waiting"] == 4


def test_no_job_starts_after_a_stop(engine: Engine) -> None:
    put(engine, *range(4))
    worker = sl.Worker(queue, print, bind=engine, batch=2, heartbeat=3600, stalled_after=None)
    state = state_for(worker)
    state.cycle()
    first = state.take()
    worker.stop()  # by another thread while the worker waits for the database
    assert state.take() is None
    state.done(first, None)
    state.waiting.clear()
    state.cycle()
    assert not state.waiting  # and no job is fetched
    assert counts(engine)["waiting"] == 2


@pytest.mark.parametrize("which", ["postgresql15/asyncpg", "postgresql15/psycopg", "mysql/aiomysql"])
def test_cancellation_at_any_await_releases_jobs(engine_to: MakeEngine, servers: Servers, which: str) -> None:
    name, driver = which.split("/")
    engine = engine_to(name)
    put(engine, *range(5))

    async def main() -> None:
        began = asyncio.Event()

        async def handler(_: object) -> None:
            began.set()
            await asyncio.sleep(3600)

        async with async_connected(servers.installed(name, driver)) as bind:
            worker = sl.AsyncWorker(sl.Queue(), handler, bind=bind, concurrency=2, heartbeat=3600, stalled_after=None)
            task = asyncio.create_task(worker.run())
            await began.wait()
            await cancelled_at_every_await(task)
            assert task.cancelled()

    asyncio.run(main())
    assert counts(engine) == {"all": 5, "completed": 0, "dead": 0, "running": 0, "waiting": 5}


def test_a_cancelled_worker_releases_its_jobs(engine_to: MakeEngine, servers: Servers) -> None:
    engine = engine_to("sqlite")
    put(engine, *range(4), max_attempts=1)
    begun = asyncio.Event()

    async def handler(_: Any) -> None:
        begun.set()
        await asyncio.sleep(3600)

    async def body(bind: AsyncEngine) -> None:
        task = asyncio.create_task(sl.AsyncWorker(queue, handler, bind=bind, concurrency=2).run())
        await begun.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for each in others:  # as asyncio.run() does at its end
            if each is task or "_call" in repr(each):
                each.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_async(servers, "sqlite", "aiosqlite", body)
    assert counts(engine) == {"all": 4, "completed": 0, "dead": 0, "running": 0, "waiting": 4}


@pytest.mark.parametrize("later", range(3))
def test_a_cancellation_during_a_wake_up_is_not_lost(servers: Any, engine_to: MakeEngine, later: int) -> None:
    name, driver = "sqlite", "aiosqlite"
    engine_to(name)

    async def handler(job: Any) -> None:
        raise AssertionError(job)

    async def main() -> None:
        async with async_connected(servers.installed(name, driver)) as bind:
            own = sl.Queue(notify=False)
            worker = sl.AsyncWorker(own, handler, bind=bind, poll=3600, heartbeat=3600, stalled_after=None)
            task = asyncio.create_task(worker.run())
            while not worker._wake._waiters:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            worker._wake.set()
            for _ in range(later):  # until the worker is resumed
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, PATIENCE)

    asyncio.run(main())


INTERRUPTED = """
import os, signal, sys, threading
from sqlalchemy import create_engine
import sqlalchemy_locks as sl

sent = False

def look(frame, what, arg):
    # when the main thread starts to wait, holding the lock of what it waits for, if that has one
    global sent
    waits = what == "call" and frame.f_code is threading.Condition.wait.__code__
    gets = what == "c_call" and getattr(arg, "__name__", "") == "get" and "SimpleQueue" in repr(arg)
    if (waits or gets) and armed and not sent:
        sent = True
        os.kill(os.getpid(), signal.SIGTERM)

worker = sl.Worker(sl.Queue(), print, bind=create_engine(sys.argv[1]), poll=3600)
armed = False
# the last method that the main thread calls before it waits
last = sl.Worker._wait

def begin(*given):
    global armed
    armed = True
    return last(*given)

sl.Worker._wait = begin
sys.setprofile(look)
worker.run()
sys.setprofile(None)
print("ended", sent)
"""


@pytest.mark.parametrize("name", ["sqlite"])
def test_a_signal_at_any_moment_stops_run(servers: Servers, engine_to: MakeEngine, name: str, tmp_path: Path) -> None:
    engine_to(name)
    assert main(INTERRUPTED, tmp_path, servers.installed(name, PLAIN[name])) == (0, "ended True\n", "")


def test_a_stop_before_the_wait_is_not_missed(lite: Engine) -> None:
    worker = sl.Worker(queue, print, bind=lite, poll=3600, heartbeat=3600, stalled_after=None)
    cycle = worker._cycle

    def late(*given: Any) -> bool:
        worker.stop()  # before the wake-up event is cleared
        return cycle(*given)

    worker._cycle = late  # type: ignore[method-assign]
    with running(worker) as thread:
        thread.join(PATIENCE)
        assert not thread.is_alive()


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


@pytest.mark.parametrize("ended", [0, 2], ids=["that which handles signals has ended", "the last has ended"])
def test_a_signal_stops_all_workers_of_a_loop(
    servers: Servers, engine_to: MakeEngine, ended: int, tmp_path: Path
) -> None:
    engine_to("postgresql15")
    script = SIGNALLED.replace("s[2]", f"s[{ended}]")
    status, *said = main(script, tmp_path, servers.installed("postgresql15", "asyncpg"))
    assert (status, said[0]) == (0, "one has ended\nall have ended True\n"), said


SERVED = """
import asyncio, contextlib, signal, sys
import uvicorn
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import create_async_engine
import sqlalchemy_locks as sl

engine = create_async_engine(sys.argv[1])
queue = sl.Queue(bind=engine)

async def handler(job):
    print("began", flush=True)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.sleep(0.1)
    print("done", flush=True)

@contextlib.asynccontextmanager
async def lifespan(app):
    worker = sl.AsyncWorker(queue, handler)
    running = asyncio.create_task(worker.run())
    yield
    worker.stop()
    await running
    await engine.dispose()
    print("shut down", flush=True)

async def main():
    async with engine.begin() as connection:
        await connection.execute(queue.put(1))
    server = uvicorn.Server(uvicorn.Config(FastAPI(lifespan=lifespan), port=0, log_level="error"))
    with contextlib.suppress(KeyboardInterrupt):
        await server.serve()

signal.signal(signal.SIGTERM, lambda *_: print("raised again by uvicorn", flush=True))
asyncio.run(main())
"""


def test_a_worker_in_a_server_leaves_the_signals_to_it(servers: Servers, engine_to: MakeEngine, tmp_path: Path) -> None:
    engine_to("postgresql15")
    status, *said = main(SERVED, tmp_path, servers.installed("postgresql15", "asyncpg"))
    assert (status, said[0]) == (0, "began\ndone\nshut down\nraised again by uvicorn\n"), said


def test_a_worker_runs_once_at_a_time(lite: Engine) -> None:
    worker = sl.Worker(queue, print, bind=lite, poll=0.05)
    with running(worker):
        until(lambda: worker._is_running.locked())
        with pytest.raises(sl.ReentryError, match="running already"):
            worker.run(until_empty=True)
    worker.run(until_empty=True)


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_second_signal_ends_a_containers_first_process(servers: Servers, lite: Engine, kind: str) -> None:
    """The kernel ignores its signals' default effects."""
    as_first = ["unshare", "--pid", "--fork", "--kill-child"]
    with contextlib.suppress(OSError):
        if subprocess.run([*as_first, "true"], capture_output=True).returncode == 0:
            put(lite, 1, queue=kind)
            url = servers.installed("sqlite", "pysqlite" if kind == "threads" else "aiosqlite")
            command = [*as_first, *WORKER, url, kind, kind, "endless"]
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "begun\n"
                (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                deadline = time.monotonic() + PATIENCE
                while process.poll() is None and time.monotonic() < deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(first), signal.SIGTERM)
                    time.sleep(0.05)
                assert process.poll() == 128 + signal.SIGTERM
            return
    pytest.skip("this user may not make a namespace of processes")

"""Workers lose no job in a crash or stop; on every engine, in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from inspect import signature
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, func, or_, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import StaticPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.dialects import backend_for
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.forks import FORKS
from tests.fixtures.parties import PATIENCE, async_connected, later, until
from tests.fixtures.queues import KINDS, MakeEngine, put
from tests.fixtures.worker_states import counts, queue, running
from tests.fixtures.workers import engine_to as patient_engine
from tests.fixtures.workers import seen, work

#: 20,000 and 8 for a full test
JOBS = int(os.environ.get("LOCKS_TEST_JOBS", "400"))
WORKERS = int(os.environ.get("LOCKS_TEST_WORKERS", "5"))


LONGEST = 300 if JOBS <= 5000 else 1000


class Process:
    """A worker in its own process."""

    def __init__(self, url: str, **options: Any) -> None:
        self._reader, writer = FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(target=work, args=(url, writer), kwargs=options, daemon=True)
        self._process.start()
        writer.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def receive(self) -> Any:
        return self._reader.recv()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def exit_code(self) -> int | None:
        self._process.join(PATIENCE)
        return self._process.exitcode

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        assert self.exit_code() is not None


@pytest.fixture
def processes() -> Iterator[Callable[..., Process]]:
    with ExitStack() as started:

        def start(url: str, **options: Any) -> Process:
            process = Process(url, **options)
            started.callback(process.kill)
            return process

        yield start


@contextmanager
def fresh_database(servers: Servers, name: str) -> Iterator[tuple[Engine, str]]:
    """A new database with a table for the jobs that handlers have seen."""
    url = servers.fresh(name, PLAIN[name])
    install(url)
    engine = patient_engine(url)
    try:
        seen.create(engine)
        yield engine, url
    finally:
        engine.dispose()


def age_heartbeats(engine: Engine, *workers: Process) -> None:
    """Set the last heartbeat of these workers to a day ago.

    Waiting until they have stalled would take longer than a busy machine delays the heartbeat of a live worker.
    """
    a_day_ago = datetime.now(timezone.utc) - timedelta(days=1)
    for _ in range(1000):
        try:
            with engine.begin() as connection:
                worker = build_context(connection.dialect, {}).tables.worker
                of_these = or_(*(worker.c.host.startswith(f"{each.pid}:") for each in workers))
                connection.execute(update(worker).where(of_these).values(heartbeat_at=a_day_ago))
            return
        except DBAPIError as error:
            if not backend_for(engine.dialect).is_conflict(error):
                raise


def until_idle(engine: Engine) -> None:
    """Wait until every job is completed, or none was for three seconds."""
    completed, since = -1, time.monotonic()
    while completed < JOBS and time.monotonic() < since + 3:
        if (now := counts(engine)["completed"]) != completed:
            completed, since = now, time.monotonic()
        time.sleep(0.05)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", KINDS)
def test_killed_and_suspended_workers_lose_no_job(
    servers: Servers, name: str, processes: Callable[..., Process]
) -> None:
    with fresh_database(servers, name) as (engine, url):
        workers = [processes(url) for _ in range(WORKERS)]
        assert [worker.receive() for worker in workers] == ["ready"] * WORKERS
        for first in range(0, JOBS, 1000):
            put(engine, *range(first, min(first + 1000, JOBS)))
        until(lambda: counts(engine)["completed"] > JOBS / 4, patience=LONGEST)
        for worker in workers[:2]:
            worker.kill()
        stopped = workers[2]
        stopped.send(signal.SIGSTOP)
        # Its jobs have stalled, and have other owners when it is resumed. If it was suspended inside a transaction, they
        # have to wait for that; on SQLite every writer has.
        aging = later(age_heartbeats, engine, *workers[:3])
        until_idle(engine)
        stopped.send(signal.SIGCONT)
        aging.result(PATIENCE)
        until(lambda: counts(engine)["completed"] == JOBS, patience=LONGEST)
        for worker in workers[2:]:
            worker.send(signal.SIGTERM)
        assert [worker.exit_code() for worker in workers[2:]] == [0] * (WORKERS - 2)
        assert counts(engine) == {"all": JOBS, "completed": JOBS, "dead": 0, "running": 0, "waiting": 0}
        with engine.connect() as connection:
            job = build_context(connection.dialect, {}).tables.job
            done = connection.execute(select(seen.c.job, func.count()).group_by(seen.c.job)).all()
            attempts = {row.payload: row.attempts for row in connection.execute(select(job))}
    assert {job for job, _ in done} == set(range(JOBS))
    # a job runs once for each capture at most
    assert all(number <= attempts[job] for job, number in done)
    # only jobs of the killed and the suspended workers ran twice: a batch and two running ones each
    assert sum(number - 1 for _, number in done) <= 3 * 12


def test_jobs_of_other_queues_are_not_captured(lite: Engine) -> None:
    """The engine may be bound to the queue."""
    put(lite, "mine", queue="mail")
    put(lite, "other")
    done: list[str] = []
    with running(sl.Worker(sl.Queue(bind=lite), lambda job: done.append(job.payload), name="mail", poll=0.05)):
        until(lambda: counts(lite)["completed"] == 1)
    assert done == ["mine"]


ASYNC = [
    ("postgresql15", "asyncpg"),
    ("mysql", "aiomysql"),
    ("sqlite", "aiosqlite"),
]


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
            while (counted := await asyncio.to_thread(counts, engine))["completed"] + counted["dead"] < 50:
                await asyncio.sleep(0.02)
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

    with pytest.raises(sl.Unsupported, match="StaticPool"):
        sl.Worker(queue, handler, bind=create_engine("sqlite://", poolclass=StaticPool))
    with pytest.raises(TypeError, match="handler"):
        sl.Worker(queue, None, bind=engine)  # type: ignore[arg-type]
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

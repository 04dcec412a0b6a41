"""What wakes a worker, and when it reports."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

import sqlalchemy_locks as sl
from tests.conftest import Servers
from tests.fixtures.parties import PATIENCE, async_connected, later, until
from tests.fixtures.queues import MakeEngine, put
from tests.fixtures.worker_states import counts, queue, running, state_of


@contextmanager
def awaiting(url: str, handler: Callable[[Any], Any], poll: float = 3600) -> Iterator[None]:
    """Run an ``AsyncWorker`` in a loop of its own."""
    stop: list[Callable[[], Any]] = []

    async def work() -> None:
        async with async_connected(url) as bind:
            worker = sl.AsyncWorker(queue, handler, bind=bind, poll=poll)
            stop.append(partial(asyncio.get_running_loop().call_soon_threadsafe, worker.stop))
            await worker.run()

    ended = later(lambda: asyncio.run(work()))
    until(lambda: stop, unless=ended)
    try:
        yield
    finally:
        stop[0]()
        ended.result(PATIENCE)


def listening(
    engine_to: MakeEngine, servers: Servers, driver: str, handle: Callable[[], Any], poll: float = 3600
) -> AbstractContextManager[Any]:
    """A worker at work, of the kind and on the server that the driver's name tells."""
    driver, _, yugabytedb = driver.partition(" to ")

    async def handler(_: Any) -> None:
        handle()

    if driver in ("psycopg", "psycopg2"):
        bind = engine_to("yugabytedb-advisory" if yugabytedb else "postgresql15", driver)
        return running(sl.Worker(queue, lambda job: handle(), bind=bind, poll=poll))
    return awaiting(servers.installed("postgresql15", driver.removeprefix("async ")), handler, poll)


@contextmanager
def open_files(count: int) -> Iterator[None]:
    """Give later files and sockets higher numbers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * count)), hard))
    with ExitStack() as files:
        for _ in range(count):
            files.enter_context(open(os.devnull))
        yield


@pytest.mark.parametrize(
    ("driver", "beside"),
    [
        ("psycopg", 0),
        ("psycopg", 1100),
        ("psycopg2", 0),
        ("psycopg2", 1100),
        ("asyncpg", 0),
        ("async psycopg", 0),
        ("async psycopg", 1100),
        ("psycopg2 to YugabyteDB", 0),
    ],
)
def test_put_wakes_an_idle_worker(engine_to: MakeEngine, servers: Servers, driver: str, beside: int) -> None:
    """It polls once an hour: only NOTIFY can wake it, in a process with many open files, too."""
    engine = engine_to("yugabytedb-advisory" if driver.endswith("YugabyteDB") else "postgresql15", "psycopg2")
    done = threading.Event()
    with open_files(beside), listening(engine_to, servers, driver, done.set):
        wait_until_idle(engine, done)
        ways: list[dict[str, Any]] = [{}, {"unique": "a"}, {"external_id": uuid4()}]
        for number, options in enumerate(ways):
            done.clear()
            put(engine, number, **options)
            assert done.wait(PATIENCE)


def wait_until_idle(engine: Engine, done: threading.Event) -> None:
    """Wait until only a notification wakes a worker: it fetches once more when it listens."""
    listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN %' AND datname = current_database()"
    with engine.connect() as connection:
        autocommit = connection.execution_options(isolation_level="AUTOCOMMIT")
        until(lambda: autocommit.scalar(text(listening)))
    put(engine, 0)
    assert done.wait(PATIENCE)
    until(lambda: counts(engine)["completed"] == 1)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg", "async psycopg"])
def test_a_lost_listener_logs_no_traceback(
    engine_to: MakeEngine, servers: Servers, driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_to("postgresql15")
    at_work = listening(engine_to, servers, driver, lambda: None, poll=0.05)
    found = "FROM pg_stat_activity WHERE query LIKE 'LISTEN %' AND datname = current_database()"
    with engine.connect() as connection:
        autocommit = connection.execution_options(isolation_level="AUTOCOMMIT")

        def listener() -> Any:
            return autocommit.scalar(text(f"SELECT pid {found}"))

        until(lambda: listener() is None)  # the server may not have ended that of an earlier test yet
        with at_work:
            until(listener)
            first = listener()
            caplog.clear()
            autocommit.execute(text(f"SELECT pg_terminate_backend({first})"))
            until(lambda: listener() not in (None, first))
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_a_completed_job_is_reported_within_a_second(lite: Engine) -> None:
    put(lite, *range(6))
    go_on = threading.Event()

    def handler(job: Any) -> None:
        if job.payload:
            assert go_on.wait(2 * PATIENCE)

    terms = {"heartbeat": 3600, "poll": 3600, "stalled_after": None}
    with running(sl.Worker(queue, handler, bind=lite, concurrency=2, batch=6, **terms)):
        try:
            until(lambda: counts(lite)["completed"] == 1)
        finally:
            go_on.set()


def test_small_batches_occupy_all_slots_immediately(lite: Engine) -> None:
    """Nothing but the fetch of the first job causes that of the next one."""
    put(lite, *range(4))
    together = threading.Barrier(4)
    terms = {"heartbeat": 3600, "poll": 3600, "stalled_after": None}

    def handler(_: Any) -> None:
        together.wait(PATIENCE)

    with running(sl.Worker(queue, handler, bind=lite, concurrency=4, batch=1, **terms)):
        until(lambda: counts(lite)["completed"] == 4)


def test_no_turn_is_due_while_all_slots_are_busy(lite: Engine) -> None:
    put(lite, 1, 2)
    state = state_of(lite, concurrency=2, batch=2, stalled_after=None, heartbeat=3600)
    state.cycle()
    assert state.take() is not None
    assert state.take() is not None
    state.cycle()
    assert state.pause() > 5

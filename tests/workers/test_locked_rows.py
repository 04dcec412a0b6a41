"""A finished job whose row another session has locked: the worker continues, and reports it later."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, select, text

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.workers import asynchronous
from sqlalchemy_locks.workers.results import failure_of
from sqlalchemy_locks.workers.state import WorkerState
from tests.conftest import Servers
from tests.fixtures.parties import PATIENCE, async_connected, later, until
from tests.fixtures.queues import MakeEngine, put, silenced
from tests.fixtures.worker_states import counts, fetched, finish_all, queue, state_of, worker_engine

#: engines with row locks
ENGINES = ["postgresql15", "mysql", "mariadb"]


@contextmanager
def locking(engine: Engine, *jobs: Any) -> Iterator[Connection]:
    """Lock the rows of these jobs in another transaction."""
    with engine.connect() as connection:
        job = build_context(connection.dialect, {}).tables.job
        for each in jobs:
            connection.execute(select(job.c.claim).where(job.c.internal_id == each.internal_id).with_for_update()).one()
        yield connection
        connection.rollback()


def later_cycle(state: WorkerState) -> None:
    """Take a turn when the jobs whose rows were locked are due."""
    for job in state.acks.finished:
        job._locked_until = -float("inf")
    state.cycle()


@pytest.mark.parametrize("error", [None, ValueError("no")])
@pytest.mark.parametrize("name", ENGINES)
def test_a_locked_row_delays_its_own_report_only(
    engine_to: MakeEngine, name: str, error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = worker_engine(engine_to, name)
    put(engine, *range(6), max_attempts=1)
    state = state_of(engine, batch=2, concurrency=2)
    state.cycle()
    locked = state.ready[0]
    with locking(engine_to(name), locked):
        assert finish_all(state) == [0, 1]
        if error is not None:
            state.acks.finished[locked] = failure_of(state.config, locked, error)
        state.cycle()
        assert counts(engine)["completed"] == 1
        assert finish_all(state) == [2, 3]  # the next batch was captured
        later_cycle(state)
        assert counts(engine)["completed"] == 3
        assert state.pause() <= 1
        assert [job.payload for job in state.acks.finished] == [0]
        assert "other sessions lock their rows" in caplog.text
        assert "before this worker finished them" not in caplog.text
    later_cycle(state)
    assert not state.acks.finished
    assert finish_all(state) == [4, 5]
    state.close()
    dead = int(error is not None)
    assert counts(engine) == {"all": 6, "completed": 6 - dead, "dead": dead, "running": 0, "waiting": 0}


@pytest.mark.parametrize("name", ENGINES)
def test_a_job_completed_by_the_locker_is_not_reported(
    engine_to: MakeEngine, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = worker_engine(engine_to, name)
    put(engine, 0, 1)
    state = state_of(engine, batch=2, concurrency=2)
    state.cycle()
    mine = list(state.ready)
    with locking(engine_to(name), *mine) as connection:
        finish_all(state)
        state.cycle()
        assert len(state.acks.finished) == 2
        connection.execute(queue.complete(mine[0]))
        connection.commit()
    with caplog.at_level(logging.WARNING, "sqlalchemy_locks.worker"):
        caplog.clear()
        later_cycle(state)
    assert not state.acks.finished
    assert caplog.text == ""
    assert counts(engine)["completed"] == 2


@pytest.mark.parametrize("name", ENGINES)
def test_a_locked_job_of_another_owner_is_dropped(engine_to: MakeEngine, name: str) -> None:
    """Its row is locked, and its claim is another worker's."""
    engine = worker_engine(engine_to, name)
    put(engine, 0, 1)
    state = state_of(engine, batch=2, concurrency=2)
    state.cycle()
    with engine.begin() as connection:
        silenced(connection)
        assert connection.scalar(queue.requeue_stalled(3600)) == 2
    (other, _) = fetched(engine, [], 2)
    with locking(engine_to(name), other):
        finish_all(state)
        state.cycle()
        assert not state.acks.finished
    assert counts(engine)["running"] == 2


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_run_until_empty_waits_for_the_locked_row_of_a_finished_job(
    servers: Servers, engine_to: MakeEngine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asynchronous, "CLOSE_WITHIN", 0.1)
    engine = engine_to("postgresql15")
    put(engine, 0)
    with engine_to("postgresql15").connect() as other:
        job = build_context(engine.dialect, {}).tables.job

        def handler(each: Any) -> None:
            other.execute(select(job).where(job.c.internal_id == each.internal_id).with_for_update())

        async def work() -> None:
            async def awaited(each: Any) -> None:
                handler(each)

            async with async_connected(servers.installed("postgresql15", "asyncpg")) as bind:
                await sl.AsyncWorker(queue, awaited, bind=bind).run(until_empty=True)

        run = sl.Worker(queue, handler, bind=engine).run
        ended = later(run, until_empty=True) if kind == "sync" else later(asyncio.run, work())
        waits = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%job%'")
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as third:
            until(lambda: third.scalar(waits))
        time.sleep(1)  # longer than a stop would wait
        assert not ended.done()
        other.rollback()
        ended.result(PATIENCE)
    assert counts(engine)["completed"] == 1

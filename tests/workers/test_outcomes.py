"""The outcomes that a handler may raise, the events of listeners, and workers that end when the queue is empty."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine, NullPool, event, select
from sqlalchemy.ext.asyncio import create_async_engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.integrations import prometheus
from tests.conftest import Servers
from tests.fixtures.queues import KINDS, MakeEngine, put, silenced
from tests.fixtures.worker_states import beat, counts, errors, queue, state_for, state_of, sweep


def pauses(engine: Engine) -> list[float]:
    """Return the seconds until each waiting job is due, from its creation."""
    with engine.connect() as connection:
        job = build_context(connection.dialect, {}).tables.job
        found = select(job.c.run_at, job.c.created_at).where(job.c.started_at.is_(None)).order_by(job.c.internal_id)
        return [(due - made).total_seconds() for due, made in connection.execute(found)]


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_a_handler_may_ask_for_a_retry_or_discard(engine: Engine) -> None:
    put(engine, *range(4), max_attempts=2)

    def handler(job: Any) -> None:
        if job.payload == 0:
            raise sl.Retry(in_=timedelta(hours=1))
        if job.payload == 1:
            raise sl.Discard("the recipient has left")
        if job.payload == 2:
            raise ValueError

    sl.Worker(queue, handler, bind=engine, retry_in=lambda attempt: 7200 * attempt).run(until_empty=True)
    assert counts(engine) == {"all": 4, "completed": 1, "dead": 1, "running": 0, "waiting": 2}
    assert errors(engine) == ["the recipient has left"]
    asked, policy = pauses(engine)
    assert 3600 <= asked < 5400
    assert 7200 <= policy < 9000


class Unreadable(sl.Discard):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_what_fails_around_a_handler_ends_no_slot(engine_to: MakeEngine) -> None:
    """An error without a text, and a policy that exits, or is cancelled."""
    engine = engine_to("postgresql15")
    put(engine, *range(3), max_attempts=2)
    seen: list[Any] = []

    def handler(job: Any) -> None:
        seen.append(job.payload)
        if job.payload == 0:
            raise Unreadable
        if job.payload == 1:
            raise ValueError

    def exits(attempt: int) -> float:
        raise SystemExit

    worker = sl.Worker(queue, handler, bind=engine, retry_in=exits, concurrency=1)
    worker.run(until_empty=True)
    assert sorted(seen) == [0, 1, 2]
    assert counts(engine) == {"all": 3, "completed": 1, "dead": 1, "running": 0, "waiting": 1}


def test_a_worker_runs_in_one_event_loop_after_another(engine_to: MakeEngine, servers: Servers) -> None:
    engine = engine_to("postgresql15")
    bind = create_async_engine(servers.installed("postgresql15", "asyncpg"), poolclass=NullPool)
    done: list[Any] = []

    async def handler(job: Any) -> None:
        done.append(job.payload)

    worker = sl.AsyncWorker(queue, handler, bind=bind, concurrency=2)
    for number in range(3):
        put(engine, number)
        asyncio.run(worker.run(until_empty=True))
    assert done == [0, 1, 2]


def test_a_wrong_retry_policy_fails_no_worker(lite: Engine, caplog: pytest.LogCaptureFixture) -> None:
    put(lite, 1)

    def handler(_: Any) -> None:
        raise ValueError

    sl.Worker(queue, handler, bind=lite, retry_in=lambda attempt: -attempt).run(until_empty=True)
    assert "the default is used" in caplog.text
    assert 4 < pauses(lite)[0] < 60
    with pytest.raises(ValueError, match="retry_in must be at least 0"):
        sl.Worker(queue, handler, bind=lite, retry_in=-1)
    with pytest.raises(ValueError, match="in_ must be at least 0"):
        sl.Retry(in_=-1)


def test_until_empty_runs_jobs_that_handlers_put(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15")
    put(engine, 3)
    put(engine, "later", run_in=3600)

    def handler(job: Any) -> None:
        if job.payload:
            put(engine, job.payload - 1)

    sl.Worker(queue, handler, bind=engine, poll=0.05).run(until_empty=True)
    assert counts(engine) == {"all": 5, "completed": 4, "dead": 0, "running": 0, "waiting": 1}


def test_a_retry_in_the_last_attempt_is_logged_as_the_end(lite: Engine, caplog: pytest.LogCaptureFixture) -> None:
    put(lite, 1, max_attempts=1)

    def handler(_: Any) -> None:
        raise sl.Retry("busy")

    sl.Worker(queue, handler, bind=lite).run(until_empty=True)
    assert errors(lite) == ["busy"]
    assert "in attempt 1 of 1, and is dead: busy" in caplog.text
    assert "is tried again" not in caplog.text


def test_a_queue_is_not_empty_while_a_failure_is_unsent(lite: Engine) -> None:
    put(lite, 1, max_attempts=2)
    state = state_for(sl.Worker(queue, print, bind=lite, retry_in=0, heartbeat=3600, stalled_after=None))
    state._until_empty = True
    state.cycle()
    job = state.take()
    assert job is not None
    fetch = state._fetch

    def fail_and_fetch() -> None:
        state.done(job, ValueError())  # after this cycle has sent the failures
        fetch()

    state._fetch = fail_and_fetch  # type: ignore[method-assign]
    state.cycle()
    assert state.keep_going()
    state._fetch = fetch  # type: ignore[method-assign]
    state.cycle()
    assert state.take() is not None


def test_a_queue_is_not_empty_while_jobs_are_ready(engine_to: MakeEngine) -> None:
    """They were counted with their capture, and their handlers may put others."""
    engine = engine_to("postgresql15")
    put(engine, 1)
    state = state_of(engine)
    state._until_empty, state._handler_time = True, 1e-6
    state.cycle()
    job = state.take()
    assert job is not None
    state.done(job, None)
    assert state.keep_going()
    state.cycle()
    assert not state.keep_going()
    state.close()


def test_listeners_get_each_event(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15")
    ids = put(engine, "good", "bad", max_attempts=1)

    def handler(job: Any) -> None:
        if job.payload == "bad":
            raise ValueError("wrong")

    def cancelled(_: Any) -> None:
        raise asyncio.CancelledError

    worker = sl.Worker(queue, handler, bind=engine, concurrency=1, poll=0.05)
    seen: list[sl.JobEvent] = []
    registry = CollectorRegistry()
    for what in ("begun", "completed", "failed", "dead", "stalled"):
        event.listen(worker, what, seen.append)
    event.listen(worker, "begun", lambda _: 1 / 0)  # the error is logged
    event.listen(worker, "begun", lambda _: sys.exit("the listener's"))
    event.listen(worker, "begun", cancelled)
    prometheus.instrument_worker(worker, registry)
    worker.run(until_empty=True)
    assert [(each.event, each.external_id) for each in seen] == [
        ("begun", ids[0]),
        ("completed", ids[0]),
        ("begun", ids[1]),
        ("failed", ids[1]),
        ("dead", ids[1]),
    ]
    assert seen[0].waited is not None
    assert seen[1].took is not None
    assert [each.attempt for each in seen] == [1] * 5
    assert str(seen[3]).endswith("ValueError: wrong")
    labels = {"queue": "default", "engine": "PostgreSQL"}
    for name, value in {"jobs_begun_total": 2, "jobs_dead_total": 1, "jobs_running": 0}.items():
        assert registry.get_sample_value(f"sqlalchemy_locks_{name}", labels) == value


@pytest.mark.parametrize("engine", ["postgresql15", "mysql"], indirect=True)
@pytest.mark.parametrize("option", ["stream_results", "yield_per"])
def test_an_engine_that_streams_results_serves_a_worker(engine: Engine, option: str) -> None:
    put(engine, 1, 2)
    sl.Worker(queue, print, bind=engine.execution_options(**{option: 10})).run(until_empty=True)
    assert counts(engine)["completed"] == 2


def test_stalled_jobs_are_an_event(lite: Engine) -> None:
    put(lite, 1, 2)
    with lite.begin() as connection:
        connection.execute(queue.capture(2)).all()
        silenced(connection)
    state = state_of(lite, heartbeat=1, stalled_after=3600)
    seen: list[sl.JobEvent] = []
    event.listen(state.reports._worker, "stalled", seen.append)
    beat(state)  # not before heartbeats were in time for stalled_after
    assert counts(lite)["running"] == 2
    sweep(state)
    assert [(each.event, each.count) for each in seen] == [("stalled", 2)]
    assert counts(lite)["waiting"] == 2

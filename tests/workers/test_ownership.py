"""Which jobs a worker owns: heartbeats, stalled jobs, jobs that others have captured."""

from __future__ import annotations

import logging
import os
import threading
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import Engine, select, text, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.workers import heartbeats
from tests.fixtures.parties import PATIENCE, until
from tests.fixtures.queues import MakeEngine, put, silenced
from tests.fixtures.worker_states import beat, counts, fetched, queue, running, state_for, state_of, sweep


def test_heartbeats_keep_long_jobs_from_stalling(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15")
    put(engine, 1)
    begun, go_on = threading.Event(), threading.Event()

    def handler(_: Any) -> None:
        begun.set()
        assert go_on.wait(4 * PATIENCE)

    an_hour_ago = datetime.now(timezone.utc) - timedelta(hours=1)
    job = build_context(engine.dialect, {}).tables.job

    def heard_of() -> bool:
        with engine.connect() as connection:
            return bool(connection.scalar(select(job.c.heartbeat_at > an_hour_ago)))

    with running(sl.Worker(queue, handler, bind=engine, heartbeat=0.2, stalled_after=3600)):
        assert begun.wait(PATIENCE)
        for _ in range(3):
            with engine.begin() as connection:
                connection.execute(update(job).values(heartbeat_at=an_hour_ago))
            until(heard_of)
            with engine.begin() as connection:
                assert connection.scalar(queue.requeue_stalled(1800)) == 0
        assert counts(engine)["running"] == 1
        go_on.set()
        until(lambda: counts(engine)["completed"] == 1)
    with engine.connect() as connection:
        assert connection.scalar(select(job.c.attempts)) == 1


def test_stalled_jobs_of_other_queues_are_left(lite: Engine) -> None:
    put(lite, 1, queue="other")
    put(lite, 2)
    with lite.begin() as connection:
        assert len(connection.execute(queue.capture(5, queue="other")).all()) == 1
        assert len(connection.execute(queue.capture(5)).all()) == 1
        silenced(connection)
    state = state_of(lite, heartbeat=1, stalled_after=3600)
    sweep(state)
    assert (counts(lite)["running"], counts(lite)["waiting"]) == (1, 1)


def test_stalled_jobs_without_a_host_are_requeued(lite: Engine) -> None:
    """The sweep leaves only the jobs of workers that run in its process, and there is one."""
    put(lite, 1)
    put(lite, 2, queue="other")
    with lite.begin() as connection:
        connection.execute(queue.capture()).all()
        silenced(connection)
    with running(sl.Worker(queue, print, bind=lite, name="other", stalled_after=None, poll=0.05)):
        until(lambda: counts(lite)["completed"] == 1)
        sweep(state_of(lite, heartbeat=1, stalled_after=3600))
    assert counts(lite)["waiting"] == 1


def test_a_sweep_requeues_every_batch(lite: Engine) -> None:
    put(lite, *range(1005))
    with lite.begin() as connection:
        connection.execute(queue.capture(1005)).all()
        silenced(connection)
    state = state_of(lite, heartbeat=1, stalled_after=3600)
    sweep(state)
    assert counts(lite)["running"] == 0


def test_no_job_starts_after_missed_heartbeats(lite: Engine) -> None:
    """The process was suspended: its jobs have other owners, though it has them in memory."""
    put(lite, *range(3))
    state = state_of(lite, heartbeat=1, stalled_after=None, batch=3)
    state.cycle()
    assert len(state.waiting) == 3
    with lite.begin() as connection:
        silenced(connection)
        connection.execute(queue.requeue_stalled(3600))
        assert len(connection.execute(queue.capture(2)).all()) == 2
    state.heartbeats.confirmed_at -= 3
    assert state.take() is None
    beat(state)
    assert state.take() is None
    assert not state.waiting


@pytest.mark.parametrize("kind", ["completes", "releases"])
def test_jobs_lost_to_others_are_logged(lite: Engine, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """A handler that completes its job, in the transaction of its work, has lost nothing."""
    put(lite, 1)
    runs: list[Any] = []

    def handler(job: Any) -> None:
        runs.append(job.payload)
        with lite.begin() as connection:
            connection.execute(queue.release(job) if kind == "releases" and len(runs) == 1 else queue.complete(job))

    with caplog.at_level(logging.WARNING, "sqlalchemy_locks.worker"):
        sl.Worker(queue, handler, bind=lite, poll=0.05).run(until_empty=True)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == (kind == "releases"), logged
    assert all("1 jobs had another owner, or had been returned" in each for each in logged)


def test_a_forked_process_has_its_own_host(lite: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    put(lite, 1)
    worker = sl.Worker(queue, print, bind=lite, stalled_after=None)
    monkeypatch.setattr(os, "getpid", lambda: 12345)
    state = state_for(worker)
    state.cycle()
    (job,) = state.waiting
    assert job.processing_host.split(":")[1] == "12345"


@pytest.mark.parametrize("ended", ["dead", "cancelled"])
def test_a_job_that_was_ended_by_others_is_lost(engine_to: MakeEngine, ended: str) -> None:
    """Its first handler still runs: revived, the job runs twice."""
    engine = engine_to("postgresql15")
    put(engine, 1, max_attempts=1 if ended == "dead" else 2)
    mine, others = (state_of(engine, stalled_after=7200) for _ in range(2))
    mine.cycle()
    job = mine.take()
    assert job is not None
    assert not job.lost
    with engine.begin() as connection:
        silenced(connection)
    sweep(others)
    if ended == "cancelled":
        with engine.begin() as connection:
            assert connection.scalar(queue.cancel(job.external_id)) is True
    beat(mine)
    assert job.lost
    if ended == "dead":
        with engine.begin() as connection:
            assert connection.scalar(queue.revive()) == 1
    others.cycle()
    assert job.lost
    mine.done(job, None)
    mine.cycle()
    assert counts(engine)["completed"] == (ended == "cancelled"), "its first handler completes nothing"


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb", "sqlite"])
def test_a_capture_that_its_worker_never_saw_stalls(engine_to: MakeEngine, name: str) -> None:
    """The server has executed it after the worker looked for it the last time."""
    engine = engine_to(name)
    put(engine, "known", "unknown")
    state = state_of(engine, batch=1, stalled_after=7200)
    state.heartbeats.start()
    try:
        until(lambda: state.heartbeats._due_at > -float("inf"))  # its thread has sent the first one, and pauses
        state.cycle()
        assert [job.payload for job in state.waiting] == ["known"]
        assert len(fetched(engine, [], 1, host=state.host).jobs) == 1
        with engine.begin() as connection:
            silenced(connection)
        sweep(state)
    finally:
        state.heartbeats.end()
    assert (counts(engine)["running"], counts(engine)["waiting"]) == (1, 1)


def test_a_worker_that_gives_up_lets_its_jobs_stall(engine_to: MakeEngine) -> None:
    """Its thread waits for a database that doesn't reply, and run() has returned."""
    engine = engine_to("postgresql15")
    put(engine, 1)
    begun, go_on = threading.Event(), threading.Event()

    def handler(_: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    worker = sl.Worker(queue, handler, bind=engine, grace=0)
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert begun.wait(PATIENCE)
    with engine_to("postgresql15").begin() as blocker:
        blocker.execute(text("LOCK TABLE lock.job"))
        go_on.set()
        worker.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert not [host for process, host in heartbeats._runs if process == os.getpid()]
    until(lambda: all(each.name != "sqlalchemy_locks.worker" for each in threading.enumerate()))

"""A finished job whose row another session has locked: the worker continues, and reports it later."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, select, text

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.runtime.renewal import clock
from sqlalchemy_locks.workers import asynchronous
from sqlalchemy_locks.workers.database import WorkerDatabase
from sqlalchemy_locks.workers.state import WorkerState
from tests.conftest import Servers
from tests.fixtures.parties import PATIENCE, async_connected, later, until
from tests.fixtures.queues import MakeEngine, put, silenced
from tests.fixtures.worker_states import (
    beat,
    counts,
    fetched,
    finish_all,
    look,
    queue,
    state_for,
    state_of,
    sweep,
    worker_engine,
)

#: engines with row locks
ENGINES = ["postgresql15", "postgresql18", "yugabytedb", "mysql", "mariadb"]


@contextmanager
def locking(engine: Engine, *jobs: Any) -> Iterator[Connection]:
    """Lock the rows of these jobs in another transaction."""
    with engine.connect() as connection:
        job = build_context(connection.dialect, {}).tables.job
        for each in jobs:
            connection.execute(select(job.c.claim).where(job.c.internal_id == each.internal_id).with_for_update()).one()
        yield connection
        connection.rollback()


def deferred_cycle(state: WorkerState) -> None:
    """Take a turn when the deferred jobs are due."""
    state.acks._deferred_due = time.monotonic()
    state.cycle()


@pytest.mark.parametrize("name", ENGINES)
def test_a_locked_row_delays_its_own_report_only(
    engine_to: MakeEngine, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = worker_engine(engine_to, name)
    put(engine, *range(6))
    state = state_of(engine, batch=2, concurrency=2)
    state.cycle()
    with locking(engine_to(name), state.waiting[0]):
        assert finish_all(state) == [0, 1]
        state.cycle()
        assert counts(engine)["completed"] == 1
        assert finish_all(state) == [2, 3]  # the next batch was captured
        deferred_cycle(state)
        assert counts(engine)["completed"] == 3
        assert state.pause() <= 1
        assert [job.payload for job, _ in state.acks.deferred] == [0]
        assert "their rows are locked" in caplog.text
        assert "had another owner" not in caplog.text
    deferred_cycle(state)
    assert (state.acks.deferred, counts(engine)["completed"]) == ([], 4)
    assert finish_all(state) == [4, 5]
    state.close()
    assert counts(engine) == {"all": 6, "completed": 6, "dead": 0, "running": 0, "waiting": 0}


@pytest.mark.parametrize("name", ENGINES)
def test_a_locked_row_of_a_failed_job_does_the_same(engine_to: MakeEngine, name: str) -> None:
    engine = worker_engine(engine_to, name)
    put(engine, *range(4), max_attempts=1)
    state = state_of(engine, batch=2, concurrency=2)
    state.cycle()
    with locking(engine_to(name), state.waiting[0]):
        for _ in range(2):
            state.done(state.take(), ValueError("no"))
        state.cycle()
        deferred_cycle(state)
        assert counts(engine)["dead"] == 1
        assert finish_all(state) == [2, 3]
    deferred_cycle(state)
    assert (state.acks.deferred, counts(engine)["dead"]) == ([], 2)
    state.close()
    assert counts(engine) == {"all": 4, "completed": 2, "dead": 2, "running": 0, "waiting": 0}


@pytest.mark.parametrize("name", ENGINES)
def test_a_job_completed_by_the_locker_is_not_reported(
    engine_to: MakeEngine, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = worker_engine(engine_to, name)
    put(engine, 0, 1)
    state = state_of(engine, batch=2, concurrency=2)
    state.cycle()
    mine = list(state.waiting)
    with locking(engine_to(name), *mine) as connection:
        finish_all(state)
        state.cycle()
        assert len(state.acks.deferred) == 2
        connection.execute(queue.complete(mine[0]))
        connection.commit()
    with caplog.at_level(logging.WARNING, "sqlalchemy_locks.worker"):
        caplog.clear()
        deferred_cycle(state)
    assert state.acks.deferred == []
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
    (other, _) = fetched(engine, [], 2).jobs
    with locking(engine_to(name), other):
        finish_all(state)
        state.cycle()
        assert state.acks.deferred == []
    assert counts(engine)["running"] == 2


@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_deferred_jobs_get_heartbeats(engine_to: MakeEngine, name: str) -> None:
    engine = worker_engine(engine_to, name)
    put(engine, 0)
    state = state_of(engine, batch=1)
    state.cycle()
    with locking(engine_to(name), state.waiting[0]):
        finish_all(state)
        state.cycle()
        assert len(state.jobs()) == 1


@pytest.mark.parametrize("name", ENGINES)
def test_the_job_of_a_handler_that_locks_its_row_stays_its_workers(engine_to: MakeEngine, name: str) -> None:
    """Its heartbeats skip the row for longer than ``stalled_after``, and another worker looks right after the commit."""
    engine = worker_engine(engine_to, name)
    put(engine, 0, 1)
    state, other = state_of(engine, heartbeat=1), state_of(engine, heartbeat=1, stalled_after=3600)
    state.cycle()
    first = state.take()
    silence(engine, state)
    with locking(engine_to(name), first):
        assert state.heartbeats.beat(state.database) <= 0.25
        look(other)
        look(other, again=True)
    look(other)  # the first time that it sees an unlocked row
    assert counts(engine)["running"] == 2
    with locking(engine_to(name), first):
        assert state.heartbeats.beat(state.database) <= 0.25
        look(other, again=True)
    look(other)
    assert counts(engine)["running"] == 2
    assert state.heartbeats.beat(state.database) > 0.25
    look(other, again=True)
    assert counts(engine)["running"] == 2
    assert not first.lost
    state.done(first, None)
    assert finish_all(state) == [1]
    state.close()
    assert counts(engine)["completed"] == 2


@pytest.mark.parametrize("name", ENGINES)
def test_a_job_that_is_silent_and_unlocked_is_requeued(engine_to: MakeEngine, name: str) -> None:
    engine = worker_engine(engine_to, name)
    put(engine, 0, 1)
    state, other = state_of(engine), state_of(engine, heartbeat=1, stalled_after=3600)
    state.cycle()
    silence(engine, state)
    with locking(engine_to(name), state.waiting[0]):
        look(other)
        look(other, again=True)
        assert (counts(engine)["running"], counts(engine)["waiting"]) == (1, 1)
    sweep(other)
    assert counts(engine)["waiting"] == 2


@pytest.mark.parametrize("ends", ["commit", "rollback"])
@pytest.mark.parametrize("name", ENGINES)
def test_a_job_that_is_being_requeued_is_not_started(engine_to: MakeEngine, name: str, ends: str) -> None:
    """The worker was suspended, and the transaction that requeues its jobs is not committed yet."""
    engine = worker_engine(engine_to, name)
    put(engine, 0, 1)
    state = state_of(engine, heartbeat=1)
    state.cycle()
    silence(engine, state)
    state.heartbeats.confirmed_at -= 3
    with engine_to(name).connect() as connection:
        assert connection.scalar(queue.requeue_stalled(3600, limit=1)) == 1
        beat(state)
        assert finish_all(state) == [1]
        assert len(state.jobs()) == 2
        state.cycle()  # it looks for other jobs meanwhile
        getattr(connection, ends)()
    beat(state)
    assert finish_all(state) == ([0] if ends == "rollback" else [])
    state.close()
    assert counts(engine)["completed"] == (2 if ends == "rollback" else 1)


@pytest.mark.parametrize("name", ENGINES)
def test_a_stop_waits_for_locked_rows_last(engine_to: MakeEngine, name: str) -> None:
    """One of a job that waits, and one of a job whose handler still runs; the others are reported and released first."""
    engine = worker_engine(engine_to, name)
    put(engine, *range(5))
    state = state_of(engine, heartbeat=1)
    state.cycle()
    finished, running, free = (state.take() for _ in range(3))
    waiting = state.waiting[0]
    state.done(finished, None)
    seen: list[dict[str, int]] = []
    with locking(engine_to(name), running, waiting) as connection:

        def wait() -> None:
            seen.append(counts(engine))
            connection.rollback()
            waits()

        waits, state._wait_for_locked = state._wait_for_locked, wait  # type: ignore[method-assign]
        beat(state)
        assert state.withheld == [waiting]
        state.close()
    assert seen == [{"all": 5, "completed": 1, "dead": 0, "running": 2, "waiting": 2}]
    assert counts(engine) == {"all": 5, "completed": 1, "dead": 0, "running": 0, "waiting": 4}
    assert state.jobs() == [running._row, free._row]


@pytest.mark.parametrize("name", ENGINES)
def test_jobs_of_a_lost_reply_that_are_being_requeued_are_not_started(engine_to: MakeEngine, name: str) -> None:
    engine = worker_engine(engine_to, name)
    put(engine, 0)
    state = state_of(engine, heartbeat=1)
    with engine.begin() as connection:
        connection.execute(queue.capture(host=state.host)).all()
        silenced(connection)
    state._reply_lost, perform = True, state.database.perform

    def perform_and_beat(operation: Any) -> Any:
        found = perform(operation)
        if operation._impl is queue._read_owned:  # at that moment, as the thread of the heartbeats may
            state.heartbeats._due_at = -float("inf")
            state.heartbeats.beat(WorkerDatabase(state.config, time.sleep))
        return found

    with engine_to(name).connect() as connection:
        assert connection.scalar(queue.requeue_stalled(3600)) == 1
        state.database.perform = perform_and_beat  # type: ignore[method-assign]
        state._find_lost_captures()
        assert len(state.waiting) == 1
        assert state.take() is None
        beat(state)
        assert (state.take(), len(state.withheld)) == (None, 1)
        connection.commit()
    beat(state)
    assert state.jobs() == []


def test_a_worker_is_woken_when_it_knows_what_it_owns_again(engine_to: MakeEngine) -> None:
    """A handler has completed its job; while the heartbeats ask what is missing, no job is started."""
    engine = worker_engine(engine_to, "postgresql15")
    put(engine, 0, 1)
    woken: list[bool] = []
    worker = sl.Worker(queue, print, bind=engine, heartbeat=1, stalled_after=None)
    state = WorkerState(
        worker, worker.config, worker._stop, time.sleep, lambda: woken.append(state.heartbeats.recent())
    )
    beat(state)
    state.cycle()
    with engine.begin() as connection:
        connection.execute(queue.complete(state.take()._row))  # type: ignore[union-attr]
    woken.clear()
    state.heartbeats._due_at = -float("inf")
    beat(state)
    assert woken == [True]
    # the rest of the handler's work is no reason to ask again
    assert [job.payload for job in state.jobs()] == [1]


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


def test_the_second_look_for_a_lost_capture_is_not_slept_through(lite: Engine) -> None:
    state = state_of(lite, poll=3600, heartbeat=1, stalled_after=None)
    beat(state)
    state._reply_lost = True
    state.cycle()
    assert state._search_again_at < float("inf")
    assert state.pause() <= 1


@pytest.mark.parametrize("moment", ["during the fetch", "after it"])
def test_a_queue_with_a_withheld_job_is_not_empty(engine_to: MakeEngine, moment: str) -> None:
    engine = worker_engine(engine_to, "postgresql15")
    put(engine, 0)
    state = state_of(engine)
    state._until_empty = True
    state.cycle()
    with locking(engine_to("postgresql15"), state.waiting[0]):
        beat(state)
        assert len(state.withheld) == 1
        perform = state.database.perform

        def perform_and_unlock(operation: Any) -> Any:
            if moment == "during the fetch":
                state.withhold([])
            return perform(operation)

        state.database.perform = perform_and_unlock  # type: ignore[method-assign]
        state.cycle()
        assert state.keep_going()
    state.withhold([])
    assert finish_all(state) == [0]
    state.cycle()
    state.cycle()
    assert not state.keep_going()


def test_a_look_that_fails_begins_again(engine_to: MakeEngine) -> None:
    engine = worker_engine(engine_to, "postgresql15")
    put(engine, 0)
    state, other = state_of(engine), state_of(engine, heartbeat=1, stalled_after=3600)
    state.cycle()
    silence(engine, state)
    look(other)
    perform = other.database.perform

    def fail(operation: Any) -> Any:
        if operation._impl is queue._silent[True]:
            raise sl.LockTimeout("a statement timeout")
        return perform(operation)

    other.database.perform = fail  # type: ignore[method-assign]
    with pytest.raises(sl.LockTimeout):
        other.heartbeats._look(other.database, datetime.now(timezone.utc), clock())
    other.database.perform = perform  # type: ignore[method-assign]
    look(other, again=True)
    assert counts(engine)["running"] == 1
    look(other, again=True)
    assert counts(engine)["running"] == 0


def silence(engine: Engine, state: WorkerState) -> None:
    """Let the last heartbeat of a worker's jobs be years ago, and the next one be due."""
    with engine.begin() as connection:
        silenced(connection)
    state.heartbeats._due_at = -float("inf")


def statements_of(engine: Engine) -> list[str]:
    """Return a list of the statements that complete jobs from now on."""
    sent: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def _(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "completed_at=clock_timestamp()" in statement:
            sent.append(statement)

    return sent


@pytest.mark.parametrize("name", ["postgresql15", "postgresql18"])
def test_a_row_that_was_locked_is_completed_at_once(engine_to: MakeEngine, name: str) -> None:
    """As by a foreign key that refers to it; PostgreSQL doesn't erase the lock of a transaction that has ended."""
    engine = worker_engine(engine_to, name)
    put(engine, *range(6))
    state = state_for(sl.Worker(sl.Queue(), print, bind=engine, batch=2, heartbeat=3600, stalled_after=None))
    sent = statements_of(engine)
    state.cycle()
    for number in range(3):
        with locking(engine_to(name), state.waiting[0]):
            pass
        finish_all(state)
        sent.clear()
        state.cursor._enabled = number == 0  # after a position, and from the head
        state.cycle()
        assert (state.acks.deferred, counts(engine)["completed"]) == ([], 2 * number + 2)
        # a second statement for the first batch only: from then on rows are locked
        assert ["xmax" in statement for statement in sent] == ([False] if number else [True, False])


@pytest.fixture
def yugabytedb_version(engine_to: MakeEngine) -> Iterator[str]:
    """A schema with a function that stands in for YugabyteDB's ``version()``."""
    schema, engine = "yugabytedb_version", engine_to("postgresql15")
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
        connection.exec_driver_sql(
            f"CREATE FUNCTION {schema}.version() RETURNS text LANGUAGE sql AS"
            " $$SELECT 'PostgreSQL 15.2-YB-2.25.1.0-b0 on x86_64'$$"
        )
    yield schema
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA {schema} CASCADE")


@pytest.mark.parametrize("yugabytedb", [False, True])
def test_yugabytedb_by_a_postgresql_url_locks_rows(
    engine_to: MakeEngine, yugabytedb_version: str, yugabytedb: bool
) -> None:
    """Its rows have no xmax."""
    path = f"{yugabytedb_version},pg_catalog" if yugabytedb else "pg_catalog"
    engine = engine_to("postgresql15", connect_args={"options": f"-c search_path={path}"})
    put(engine, 0, 1)
    state = state_for(sl.Worker(sl.Queue(), print, bind=engine, batch=2, heartbeat=3600, stalled_after=None))
    sent = statements_of(engine)
    state.cycle()
    finish_all(state)
    state.cycle()
    assert {"xmax" in statement for statement in sent} == {not yugabytedb}
    assert counts(engine)["completed"] == 2


def test_no_job_is_lost_when_the_second_statement_fails(engine_to: MakeEngine) -> None:
    """The first one has completed what it could, and captured others, which nobody knows."""
    engine = engine_to("postgresql15", connect_args={"options": "-c statement_timeout=200"})
    put(engine, *range(4))
    state = state_for(sl.Worker(sl.Queue(), print, bind=engine, batch=2, heartbeat=3600, stalled_after=None))
    state.cycle()
    with locking(engine_to("postgresql15"), state.waiting[0]):
        pass
    finish_all(state)
    failed: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def _(_connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("WITH locks_unlocked") and not failed:
            failed.append(statement)
            cursor.execute("SELECT pg_sleep(60)")

    state.cycle()
    assert len(failed) == 1
    assert counts(engine) == {"all": 4, "completed": 2, "dead": 0, "running": 2, "waiting": 0}
    state.heartbeats.confirmed_at = clock()
    assert finish_all(state) == [2, 3]
    state.cycle()
    assert state.jobs() == []
    assert counts(engine)["completed"] == 4

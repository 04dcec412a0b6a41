"""Sequences of events that once cost a promise of the workers: each was red."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, func, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.queue.acknowledge import STALLED
from sqlalchemy_locks.sql.clock import SecondsAgo
from sqlalchemy_locks.workers import heartbeats
from tests.conftest import Servers
from tests.fixtures.parties import PATIENCE, until
from tests.fixtures.queues import KINDS, MakeEngine, put, silenced
from tests.fixtures.worker_states import beat, begin_all, counts, finish_all, queue, run_async, state_of, steady, sweep

STORED: dict[str, Any] = {"heartbeat": 60, "stalled_after": 120}


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_workers_start_on_an_engine_that_has_not_connected(
    engine_to: MakeEngine, servers: Servers, driver: str
) -> None:
    """The dialect is initialized by the first connection, and nobody may use another pool of the engine before."""
    engine = engine_to("postgresql15")

    async def main() -> list[Any]:
        bind = create_async_engine(servers.installed("postgresql15", driver))
        workers: list[sl.AsyncWorker] = []

        async def handler(_: Any) -> None:
            for worker in workers:
                worker.stop()

        workers += [sl.AsyncWorker(queue, handler, bind=bind, poll=0.05) for _ in range(3)]
        ended = await asyncio.gather(*(worker.run() for worker in workers), return_exceptions=True)
        await bind.dispose()
        return ended

    for number in range(5):
        put(engine, number)
        assert asyncio.run(asyncio.wait_for(main(), PATIENCE)) == [None] * 3


def test_a_server_that_refuses_connections_ends_no_worker(engine_to: MakeEngine, servers: Servers) -> None:
    """asyncpg raises errors at the connect that SQLAlchemy 2.0 doesn't translate."""
    engine = engine_to("postgresql15")
    server = create_engine(engine.url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    database = engine.url.database

    async def body(bind: AsyncEngine) -> None:
        worker = sl.AsyncWorker(queue, handler, bind=bind, poll=0.05, heartbeat=0.5)
        running = asyncio.create_task(worker.run())
        put(engine, 1)
        await asyncio.wait_for(begun.wait(), PATIENCE)
        begun.clear()
        with server.connect() as admin:
            admin.execute(text(f'ALTER DATABASE "{database}" ALLOW_CONNECTIONS false'))
            try:
                terminating = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name")
                admin.execute(terminating, {"name": database})
                await asyncio.sleep(0.7)
            finally:
                admin.execute(text(f'ALTER DATABASE "{database}" ALLOW_CONNECTIONS true'))
        engine.dispose()
        put(engine, 2)
        await asyncio.wait_for(begun.wait(), PATIENCE)
        worker.stop()
        await running

    async def handler(_: Any) -> None:
        begun.set()

    begun = asyncio.Event()
    try:
        run_async(servers, "postgresql15", "asyncpg", body)
    finally:
        server.dispose()


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_a_row_that_was_added_long_ago_is_no_heartbeat(engine: Engine) -> None:
    """The reply to its INSERT was lost, and then the server was out of reach."""
    put(engine, 1)
    state, other = state_of(engine, **STORED), state_of(engine, **STORED)
    state.heartbeats._added = False
    with engine.begin() as connection:
        worker = build_context(connection.dialect, {}).tables.worker
        added = update(worker).where(worker.c.host == state.heartbeats.host)
        connection.execute(added.values(heartbeat_at=SecondsAgo(3600.0)))
    beat(state)
    state.cycle()
    assert len(begin_all(state)) == 1
    sweep(other)
    assert counts(engine)["running"] == 1


def test_heartbeats_go_on_after_a_permanent_error(lite: Engine) -> None:
    """Running handlers have the grace, in which no other worker may begin their jobs."""
    put(lite, 1)
    begun, go_on, failing, raised = (threading.Event() for _ in range(4))

    def handler(_: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    @event.listens_for(lite, "before_cursor_execute")
    def fail_once(_: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if failing.is_set() and statement.startswith("UPDATE lock_worker"):
            failing.clear()
            raise ValueError("of a listener of the app's")

    worker = sl.Worker(queue, handler, bind=lite, heartbeat=0.1, stalled_after=60, poll=0.05, grace=PATIENCE)

    def silent() -> int:
        with lite.connect() as connection:
            host = build_context(connection.dialect, {}).tables.worker.c.heartbeat_at
            return int(connection.scalar(select(func.count()).where(host < SecondsAgo(60.0))) or 0)

    def run() -> None:
        try:
            worker.run()
        except ValueError:
            raised.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert begun.wait(PATIENCE)
        failing.set()
        until(lambda: worker._state is not None and worker._state.error is not None)
        with lite.begin() as connection:
            silenced(connection)  # the job was captured longer ago than stalled_after, too
        until(lambda: not silent())
        sweep(state_of(lite, heartbeat=0.1, stalled_after=60))
        assert counts(lite)["running"] == 1
    finally:
        go_on.set()
        thread.join(PATIENCE)
    assert raised.is_set()
    assert counts(lite)["completed"] == 1


def test_no_worker_is_judged_after_a_long_outage(lite: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last heartbeat of another worker may be an interval older than the outage."""
    now = [1000.0]
    monkeypatch.setattr(heartbeats, "clock", lambda: now[0])
    state = state_of(lite, heartbeat=15, stalled_after=30)
    for _ in range(5):
        now[0] += 15
        beat(state)
    assert state.heartbeats.steady()
    now[0] += 20
    beat(state)
    assert not state.heartbeats.steady()


def test_a_worker_of_a_suspect_waits(lite: Engine) -> None:
    """While it runs alone, with free slots, and more jobs are due, no cycle follows another one immediately."""
    put(lite, *range(8))
    with lite.begin() as connection:
        job = build_context(connection.dialect, {}).tables.job
        first = select(job.c.internal_id).limit(1).scalar_subquery()
        connection.execute(update(job).where(job.c.internal_id == first).values(error=STALLED))
    state = state_of(lite, concurrency=4, prefetch=0, batch=4)
    state.cycle()
    assert state.take() is not None
    assert state.take() is None
    state.cycle()
    assert state.pause() > 5


def test_handlers_begin_as_soon_as_their_attempts_are_counted(lite: Engine) -> None:
    """A process that dies between the two costs an attempt that hasn't begun."""
    put(lite, 1)
    state = state_of(lite, **STORED)
    steady(state.heartbeats)
    state._compare_at = -float("inf")
    statements: list[str] = []
    event.listen(lite, "before_cursor_execute", lambda c, cursor, statement, *_: statements.append(statement))
    state.cycle()
    assert "attempts=" in statements[-1]
    assert any("lock_worker" in statement for statement in statements)


def test_every_slot_that_a_counted_job_needs_is_woken(lite: Engine) -> None:
    """Handlers are fast, and the next one kills the process: the others would be dead without having begun."""
    put(lite, *range(4), max_attempts=1)
    state = state_of(lite, concurrency=4)
    state._handler_time = 1e-6
    state.cycle()
    assert (len(state.ready), state.slots_to_wake()) == (4, 4)


def test_a_lost_reply_to_a_count_ahead_delays_no_job(lite: Engine) -> None:
    put(lite, *range(3))
    state = state_of(lite, concurrency=1)
    state.cycle()
    job = state.take()
    assert job is not None
    state._handler_time = 1e-6
    perform = state.database.perform

    def lose_reply(operation: Any) -> Any:
        value = perform(operation)
        if operation._impl.name == "Queue.begin":
            raise OperationalError(None, None, Exception("lost"), connection_invalidated=True)
        return value

    state.database.perform = lose_reply  # type: ignore[method-assign]
    state.cycle()
    state.database.perform = perform  # type: ignore[method-assign]
    state.done(job, None)
    state.cycle()  # now a slot is free
    assert finish_all(state) == [1, 2]
    state.close()
    assert counts(lite)["completed"] == 3


def test_a_worker_with_fast_handlers_leaves_them_its_connection(engine_to: MakeEngine) -> None:
    """It keeps one between statements, where the pool has room, and not while it waits."""
    engine = engine_to("postgresql15", pool_size=1, max_overflow=0, pool_timeout=5)
    put(engine, *range(40))

    def handler(job: Any) -> None:
        if job.payload >= 20:
            engine.connect().close()

    sl.Worker(queue, handler, bind=engine, concurrency=1, prefetch=10).run(until_empty=True)
    assert counts(engine)["completed"] == 40
    assert engine.pool.status().endswith("Current Checked out connections: 0")


def test_a_worker_whose_end_is_cancelled_keeps_no_connection(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15")
    state = state_of(engine)
    state.database.keeps_connection = True

    def cancel(_: float) -> None:
        raise asyncio.CancelledError

    def fail() -> None:
        raise OperationalError(None, None, Exception("refused"))

    state.database.sleep, state._release_waiting = cancel, fail  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        state.close()
    assert engine.pool.status().endswith("Current Checked out connections: 0")


@pytest.mark.parametrize("ending", ["complete", "fail"])
@pytest.mark.parametrize("name", ["postgresql15", "sqlite"])
def test_a_row_that_can_not_be_changed_keeps_no_report_back(engine_to: MakeEngine, name: str, ending: str) -> None:
    engine = engine_to(name)
    put(engine, 1, 2, 3)
    state = state_of(engine, concurrency=3)
    state.cycle()
    jobs = begin_all(state)
    table = "lock_job" if name == "sqlite" else "lock.job"
    ended = "new.completed_at IS NOT NULL OR new.started_at IS NULL"
    make = [
        f"CREATE TRIGGER refuse BEFORE UPDATE ON {table} FOR EACH ROW WHEN (new.internal_id = {jobs[0].internal_id}"
    ]
    make[0] += f" AND ({ended})) "
    drop = ["DROP TRIGGER refuse"]
    if name == "sqlite":
        make[0] += "BEGIN SELECT RAISE(ABORT, 'refused'); END"
    else:
        body = "BEGIN RAISE check_violation; END"
        make.insert(0, f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$")
        make[1] += "EXECUTE FUNCTION refuse()"
        drop = [f"DROP TRIGGER refuse ON {table}", "DROP FUNCTION refuse()"]
    for statements in (make, drop):
        with engine.begin() as connection:
            for statement in statements:
                connection.execute(text(statement))
        if statements is make:
            for job in jobs:
                state.done(job, None if ending == "complete" else ValueError(str(job.payload)))
            with pytest.raises(IntegrityError):
                state.acks.send_completed() if ending == "complete" else state.acks.send_failed()
    assert [job.internal_id for job in state.acks.finished] == [jobs[0].internal_id]
    counted = counts(engine)
    assert counted["completed" if ending == "complete" else "waiting"] == 2
    assert counted["running"] == 1

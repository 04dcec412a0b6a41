"""PostgreSQL's statements: rows are selected once, changed by key, and read as of their lock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Engine, Integer, MetaData, Table, Text, create_engine, func, text, update
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import BuildContext, build_context
from sqlalchemy_locks.queue import acknowledge
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.parties import PATIENCE, Watch, later
from tests.fixtures.queues import MakeEngine, put
from tests.fixtures.worker_states import counts, fetched, queue

POSTGRESQL = ["postgresql15", "postgresql18"]


#: an advisory lock that stops a statement after its snapshot and before its row locks
PAUSE_KEY = 7_341_905


#: plans that are disabled, so that a subquery is executed once for each row
WITHOUT = {
    "anything": (),
    "joins of two sets": ("hashjoin", "mergejoin", "hashagg", "sort", "material"),
    "indexes": ("hashjoin", "mergejoin", "material", "memoize", "indexscan", "bitmapscan"),
}


docks = Table("dock", MetaData(), Column("id", Integer, primary_key=True), Column("state", Text, nullable=False))


@pytest.fixture(params=POSTGRESQL)
def stale(servers: Servers, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A queue and a table with 1,000 rows, whose statistics are from when they had one."""
    url = servers.fresh(request.param, PLAIN[request.param])
    install(url)
    engine = create_engine(url, poolclass=NullPool)
    docks.create(engine)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in ("lock.job", "dock"):
            connection.execute(text(f"ALTER TABLE {table} SET (autovacuum_enabled = off)"))
        connection.execute(queue.put(0))
        connection.execute(docks.insert().values(id=0, state="free"))
        connection.execute(text("VACUUM ANALYZE lock.job, dock"))
        connection.execute(queue.put(*range(1000)))
        connection.execute(text("INSERT INTO dock SELECT n, 'free' FROM generate_series(1, 1000) AS n"))
    yield engine
    engine.dispose()


#: operations on 3 jobs, and the state that the jobs must have, if they don't just wait
THREE: dict[str, tuple[Any, str | None]] = {
    "capture": (queue.capture(3), None),
    "fetch": (queue._fetch(3, queue="default", host="h"), None),
    "requeue_stalled": (queue.requeue_stalled(0, limit=3), "started_at = '2020-01-01', attempts = 1"),
    "delete_finished": (queue.delete_finished(0, limit=3), "started_at = now(), completed_at = '2020-01-01'"),
}


@pytest.mark.parametrize("name", THREE)
def test_the_limit_holds_with_stale_statistics(stale: Engine, name: str) -> None:
    """Unlike that of `WHERE id IN (SELECT ... LIMIT 3 FOR UPDATE SKIP LOCKED)`."""
    operation, state = THREE[name]
    if state is not None:
        with stale.begin() as connection:
            connection.execute(text(f"UPDATE lock.job SET {state}"))
    with stale.connect() as connection, stale.connect() as other:
        for without, settings in WITHOUT.items():
            for setting in settings:
                connection.execute(text(f"SET LOCAL enable_{setting} = off"))
            connection.execute(operation).all()
            free = other.execute(text("SELECT count(*) FROM (SELECT 1 FROM lock.job FOR UPDATE SKIP LOCKED) AS free"))
            assert free.scalar_one() == 1001 - 3, without
            other.rollback()
            connection.rollback()


def planned(connection: Connection, operation: Any) -> list[str]:
    compiled = operation.compile(connection.engine, compile_kwargs={"render_postcompile": True})
    return list(connection.exec_driver_sql(f"EXPLAIN {compiled}", compiled.params).scalars())


@pytest.mark.parametrize("limit", [10, 1000])
def test_captured_rows_are_updated_by_key(stale: Engine, limit: int) -> None:
    """With many rows, too, for which the planner may prefer a scan of the whole table."""
    with stale.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("INSERT INTO dock SELECT n, 'free' FROM generate_series(1001, 10000) AS n"))
        connection.execute(text("ANALYZE dock"))
        plan = planned(
            connection,
            sl.capture(
                docks, where=docks.c.state == "free", values={"state": "taken"}, order_by=docks.c.id, limit=limit
            ),
        )
    assert [line for line in plan if "Index Cond: (id = locks_numbered.id)" in line], plan
    assert not [line for line in plan if "Seq Scan" in line], plan


@pytest.fixture
def pause(engine_to: MakeEngine, name: str) -> Iterator[Connection]:
    """Stops statements with PAUSE_KEY until this connection commits."""
    with engine_to(name).connect() as connection:
        connection.execute(func.pg_advisory_xact_lock(PAUSE_KEY).select())
        yield connection
        connection.rollback()


def paused() -> Any:
    return func.pg_advisory_xact_lock_shared(PAUSE_KEY).is_not(None)


@pytest.mark.parametrize("name", POSTGRESQL)
def test_capture_sees_changes_made_before_its_lock(
    engine_to: MakeEngine, servers: Servers, pause: Connection, name: str
) -> None:
    """Between snapshot and lock, another session captures one of them and changes another."""
    engine = engine_to(name)
    put(engine, *range(6))
    held_up = sl.Queue()
    take = held_up._capture
    chosen = take.build_spec
    take.spec = lambda context: replace(chosen(context), where=(*chosen(context).where, paused()))
    watch = Watch(servers, name)

    def capture() -> list[Any]:
        with engine.begin() as connection:
            return list(connection.execute(held_up.capture(3)).all())

    capturing = later(capture)
    watch.until_waiting(capturing)
    (other,) = fetched(engine, [], 1)
    with engine.begin() as connection:
        job = build_context(connection.dialect, {}).tables.job
        connection.execute(update(job).where(job.c.internal_id == other.internal_id + 1).values(max_attempts=77))
    pause.commit()
    taken = capturing.result(PATIENCE)
    watch.close()
    assert other.payload == 0
    assert [(each.payload, each.max_attempts) for each in taken] == [(1, 77), (2, 5), (3, 5)]
    assert counts(engine)["running"] == 4


@pytest.mark.parametrize("name", POSTGRESQL)
def test_completion_checks_the_claim_after_locking(
    engine_to: MakeEngine, servers: Servers, pause: Connection, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Between snapshot and lock another worker captures one of them."""
    engine = engine_to(name)
    put(engine, *range(2))
    mine = [(job.internal_id, job.claim) for job in fetched(engine, [], 2)]
    held_up = sl.Queue()
    complete, unfinished = held_up._complete.skip_locked, acknowledge._unfinished
    changing = complete.update

    def pausing(context: BuildContext) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(acknowledge, "_unfinished", lambda at: (*unfinished(at), paused()))
            return changing(context)

    complete.update = pausing  # type: ignore[method-assign]
    watch = Watch(servers, name)

    def fetch() -> Any:
        with engine.begin() as connection:
            return connection.scalar(acknowledge.skip_locked_rows(held_up.complete(mine)))

    fetching = later(fetch)
    watch.until_waiting(fetching)
    with engine.begin() as connection:
        assert connection.scalar(queue.release(mine[0])) == 1
        (other,) = connection.execute(queue.capture(1)).all()
    pause.commit()
    completed = fetching.result(PATIENCE)
    watch.close()
    assert completed == 1
    with engine.begin() as connection:
        assert connection.scalar(queue.complete(other)) == 1
    assert counts(engine)["completed"] == 2

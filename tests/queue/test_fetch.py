"""Fetch: what a worker sends for each batch, completing jobs and capturing others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

import sqlalchemy_locks as sl
from tests.conftest import Servers, install
from tests.fixtures.parties import connected
from tests.fixtures.queues import MakeEngine, put, silenced
from tests.fixtures.worker_states import beat, counts, fetch, fetched, finish_all, queue, state_for, state_of


def test_fetch_completes_and_captures(engine: Engine) -> None:
    put(engine, *range(5))
    first, completed = fetch(engine, [], 2)
    assert ([job.payload for job in first], completed) == ([0, 1], 0)
    assert {(len(job), job.processing_host, job.attempts) for job in first} == {(16, "web-1", 0)}
    second, completed = fetch(engine, first, 10)
    assert ([job.payload for job in second], completed) == ([2, 3, 4], 2)
    with engine.begin() as connection:
        silenced(connection, second[0])
        connection.execute(queue.requeue_stalled(3600))
        connection.execute(queue.release((second[2].internal_id, second[2].claim)))
    # two were returned to the queue
    third, completed = fetch(engine, second, 1)
    assert (len(third), completed) == (1, 1)
    assert third[0].claim != second[0].claim
    assert fetch(engine, third, 10)[1] == 1
    assert counts(engine)["completed"] == 4
    assert fetch(engine, [], 10) == ([], 0)


def test_fetch_is_atomic(engine: Engine) -> None:
    put(engine, *range(4))
    mine = [(job.internal_id, job.claim) for job in fetched(engine, [], 2)]
    with pytest.raises(RuntimeError), engine.begin() as connection:
        result = connection.scalar(queue._fetch(mine, 2, queue="default", host="h", after=None))
        assert result is not None
        assert (len(result.jobs), result.completed) == (2, 2)
        raise RuntimeError
    assert counts(engine) == {"all": 4, "completed": 0, "dead": 0, "running": 2, "waiting": 2}


@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_a_capture_counts_ahead_no_last_attempt(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name)
    put(engine, "first")
    put(engine, "last", max_attempts=1)
    counted = {job.payload: (job.attempts, job._is_counted) for job in fetched(engine, [], 2, ahead=True)}
    # where a batch is several statements anyway, none is counted ahead
    assert counted == {"first": (1, True) if name == "postgresql15" else (0, False), "last": (0, False)}


@pytest.mark.parametrize("name", ["postgresql15", "yugabytedb"])
def test_a_batch_is_one_statement_on_postgresql(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name)
    put(engine, *range(40))
    state = state_of(engine)
    state.cycle()
    while (job := state.take()) is not None:
        state.done(job, None)
    state.cycle()
    statements: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def _(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    for _round in range(3):
        while (job := state.take()) is not None:
            state.done(job, None)
        state.cycle()
    assert len(statements) == 3
    assert counts(engine)["completed"] == 30


def test_fetch_from_a_class_with_other_names(engine_to: MakeEngine) -> None:
    """The position for the next fetch is read from its columns."""
    from tests.queue.test_own_table import Task, TaskWorker, tasks

    engine = engine_to("postgresql15")
    Task.metadata.drop_all(engine)
    Task.metadata.create_all(engine, [Task.__table__, TaskWorker.__table__])  # type: ignore[list-item]
    with engine.begin() as connection:
        connection.execute(tasks.put(1, 2, 3, queue="q"))
    state = state_for(sl.Worker(tasks, print, bind=engine, name="q", batch=2, heartbeat=3600, stalled_after=None))
    beat(state)
    state.cycle()
    assert state.cursor._position is not None
    assert len(state.waiting) + len(state.ready) == 2
    Task.metadata.drop_all(engine)


def test_payloads_use_the_engines_json_deserializer(engine_to: MakeEngine) -> None:
    def loads(text: str) -> Any:
        return json.loads(text, parse_float=str)

    engine = engine_to("postgresql15", json_deserializer=loads)
    put(engine, {"price": 1.10}, [2.50])
    assert [job.payload for job in fetched(engine, [], 2)] == [{"price": "1.1"}, ["2.5"]]


@pytest.mark.parametrize("batch", [1, 10, 100])
def test_the_generic_plan_has_no_seq_scan(engine_to: MakeEngine, batch: int) -> None:
    """Although the statistics are from a moment when no job ran."""
    engine = engine_to("postgresql15", pool_size=1, max_overflow=0)
    put(engine, *range(3000))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE lock.job"))
    state = state_of(engine, batch=batch, concurrency=batch)
    # search from the head
    state.cursor._enabled = False
    for _ in range(15):
        state.cycle()
        assert len(finish_all(state)) == batch
    with engine.connect() as connection:
        prepared = text("SELECT name, generic_plans FROM pg_prepared_statements WHERE statement ~ 'locks_count'")
        ((name, generic),) = connection.execute(prepared).all()
        assert generic > 0
        plan = (
            connection.exec_driver_sql(f"EXPLAIN EXECUTE {name} ('{{1}}', '{{1}}', 'default', 1, 1, 'h')")
            .scalars()
            .all()
        )
    assert not [line for line in plan if "Seq Scan on job" in line]


def test_jobs_of_a_dead_worker_are_requeued(engine: Engine) -> None:
    put(engine, *range(4))
    mine = fetched(engine, [], 2)
    lost = fetched(engine, mine, 2)  # its worker dies before it reads the reply
    assert counts(engine) == {"all": 4, "completed": 2, "dead": 0, "running": 2, "waiting": 0}
    with engine.begin() as connection:
        silenced(connection)
        assert connection.scalar(queue.requeue_stalled(0)) == 2
    requeued = fetched(engine, [], 5)
    assert [job.payload for job in requeued] == [2, 3]
    # a report of the former owner changes nothing
    assert fetch(engine, lost, 5) == ([], 0)
    assert fetch(engine, requeued, 5) == ([], 2)


def test_fetching_after_a_position_reads_fewer_pages(engine_to: MakeEngine) -> None:
    """Index entries that an old snapshot may need are read by each search from the head."""
    engine = engine_to("postgresql15", isolation_level="REPEATABLE READ")
    with engine.connect() as old, engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("TRUNCATE lock.job"))
        connection.execute(queue.put(*range(3000)))
        connection.execute(text("VACUUM ANALYZE lock.job"))
        old.execute(text("SELECT count(*) FROM lock.job")).scalar()
        pairs: list[Any] = []
        for _ in range(20):
            result: Any = connection.scalar(queue._fetch(pairs, 100, queue="default", host="h", after=None))
            pairs = [(job[0], job[6]) for job in result.jobs]
        last = queue._jobs.position(result.jobs[-1])

        def read(after: Any) -> int:
            operation = queue._fetch([], 10, queue="default", host="h", after=after)
            compiled: Any = operation.compile(engine, compile_kwargs={"render_postcompile": True})
            explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {compiled}"
            (plan,) = connection.exec_driver_sql(explain, compiled.params).one()
            document = json.loads(plan) if isinstance(plan, str) else plan
            return int(pages_searched(document[0]["Plan"]))

        assert read(None) > 2 * read(last)


def pages_searched(node: Any) -> int:
    """Return the number of pages that the search has read."""
    if node.get("Subplan Name") == "CTE locks_chosen":
        return int(node["Shared Hit Blocks"] + node["Shared Read Blocks"])
    return sum(pages_searched(below) for below in node.get("Plans", ()))


def test_updates_use_the_primary_key(engine_to: MakeEngine) -> None:
    """By the statistics no job runs, so that the index of running jobs looks like the cheapest."""
    engine = engine_to("postgresql15")
    put(engine, *range(3000))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE lock.job"))
        for operation in (
            queue.complete([(1, 1), (2, 1)]),
            queue.release([(1, 1), (2, 1)]),
            queue._fetch([(1, 1), (2, 1)], 10, queue="default", host="h", after=None),
        ):
            compiled: Any = operation.compile(engine, compile_kwargs={"render_postcompile": True})
            plan = connection.exec_driver_sql(f"EXPLAIN {compiled}", compiled.params).scalars().all()
            assert not [line for line in plan if "job_running" in line]
            assert [line for line in plan if "job_pkey" in line]


@pytest.mark.parametrize("batch", [10, 100])
def test_plans_made_on_an_empty_table_serve_a_large_one(servers: Servers, batch: int) -> None:
    """PostgreSQL keeps a worker's plans until the table is analyzed, up to a minute after jobs were put."""
    url = servers.fresh("postgresql15", "psycopg")
    install(url)
    with connected(url, pool_size=1, max_overflow=0, isolation_level="AUTOCOMMIT") as engine:

        def execute(statement: Any) -> Any:
            with engine.connect() as connection:
                result = connection.execute(statement)
                return result.scalar() if getattr(result, "returns_rows", False) else None

        def pages() -> int:
            execute(text("SELECT pg_stat_force_next_flush()"))
            columns = "heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit"
            return int(execute(text(f"SELECT sum({columns}) FROM pg_statio_user_tables")))

        def pages_of_a_cycle() -> int:
            before = pages()
            state.cycle()
            return pages() - before

        execute(text("ALTER TABLE lock.job SET (autovacuum_enabled = off)"))
        state = state_of(engine, batch=batch, concurrency=batch)
        state.cursor._enabled = False  # searches from the head
        for _ in range(15):
            execute(queue.put(*range(batch)))
            state.cycle()
            assert len(finish_all(state)) == batch
            state.cycle()
        execute(
            text(
                "INSERT INTO lock.job (external_id, payload) SELECT gen_random_uuid(), '{}' FROM generate_series(1, 50000)"
            )
        )
        state.cycle()
        assert len(finish_all(state)) == batch
        generic = pages_of_a_cycle()
        finish_all(state)
        execute(text("ANALYZE"))
        state.cycle()
        finish_all(state)
        analyzed = pages_of_a_cycle()
        assert generic <= 1.3 * analyzed

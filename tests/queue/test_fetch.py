"""Fetch: what a worker sends for each batch, completing jobs and capturing others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import Engine, text

from sqlalchemy_locks.queue.acknowledge import skip_locked
from tests.conftest import Servers, install
from tests.fixtures.parties import connected
from tests.fixtures.queues import MakeEngine, put, silenced
from tests.fixtures.worker_states import counts, fetch, fetched, finish_all, queue, state_of


def test_fetch_completes_and_captures(engine: Engine) -> None:
    put(engine, *range(5))
    first, completed = fetch(engine, [], 2)
    assert ([job.payload for job in first], completed) == ([0, 1], 0)
    assert {(job.processing_host, job.attempts) for job in first} == {("web-1", 0)}
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


def test_payloads_use_the_engines_json_deserializer(engine_to: MakeEngine) -> None:
    def loads(text: str) -> Any:
        return json.loads(text, parse_float=str)

    engine = engine_to("postgresql15", json_deserializer=loads)
    put(engine, {"price": 1.10}, [2.50])
    assert [job.payload for job in fetched(engine, [], 2)] == [{"price": "1.1"}, ["2.5"]]


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


def test_updates_use_the_primary_key(engine_to: MakeEngine) -> None:
    """By the statistics no job runs, so that the index of running jobs looks like the cheapest."""
    engine = engine_to("postgresql15")
    put(engine, *range(3000))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE lock.job"))
        for operation in (
            queue.complete([(1, 1), (2, 1)]),
            queue.release([(1, 1), (2, 1)]),
            skip_locked(queue.complete([(1, 1), (2, 1)])),
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

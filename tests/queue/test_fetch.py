"""Fetch: what a worker sends for each batch, completing jobs and capturing others."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Engine, text

from sqlalchemy_locks.queue.acknowledge import skip_locked_rows
from tests.fixtures.queues import MakeEngine, put, silenced
from tests.fixtures.worker_states import counts, fetch, fetched, queue


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
    assert fetch(engine, second, 1)[1] == 0  # a report of the former owner changes nothing
    assert fetch(engine, third, 10)[1] == 1
    assert counts(engine)["completed"] == 4
    assert fetch(engine, [], 10) == ([], 0)


def test_payloads_use_the_engines_json_deserializer(engine_to: MakeEngine) -> None:
    def loads(text: str) -> Any:
        return json.loads(text, parse_float=str)

    engine = engine_to("postgresql15", json_deserializer=loads)
    put(engine, {"price": 1.10}, [2.50])
    assert [job.payload for job in fetched(engine, [], 2)] == [{"price": "1.1"}, ["2.5"]]


def test_updates_use_the_primary_key(engine_to: MakeEngine) -> None:
    """By the statistics no job runs, so that the index of running jobs looks like the cheapest."""
    engine = engine_to("postgresql15")
    put(engine, *range(3000))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE lock.job"))
        for operation in (
            queue.complete([(1, 1), (2, 1)]),
            queue.release([(1, 1), (2, 1)]),
            skip_locked_rows(queue.complete([(1, 1), (2, 1)])),
        ):
            compiled: Any = operation.compile(engine, compile_kwargs={"render_postcompile": True})
            plan = connection.exec_driver_sql(f"EXPLAIN {compiled}", compiled.params).scalars().all()
            assert not [line for line in plan if "job_running" in line]
            assert [line for line in plan if "job_pkey" in line]

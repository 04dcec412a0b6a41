"""PostgreSQL keeps the plan of a prepared statement until its tables are analyzed, a minute after they have grown."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from sqlalchemy import text

import sqlalchemy_locks as sl
from tests.conftest import Servers, install
from tests.fixtures.parties import connected

MANY = 20_000
#: fewer than a scan of any of the tables reads
FEW = 60

SINCE = datetime(2020, 1, 1, tzinfo=timezone.utc)
mutex, hourly, tasks, queue = sl.Mutex(), sl.Timeout(every=3600), sl.StateTransition(), sl.Queue()
STATEMENTS: dict[str, sl.Operation[Any]] = {
    "mutex.acquire": mutex.acquire("first"),
    "mutex.acquire_token": mutex.acquire_token("first"),
    "mutex.release": mutex.release("first"),
    "timeout.acquire": hourly.acquire("first"),
    "tasks.capture": tasks.capture(2),
    "tasks.expire": tasks.expire(),
    "queue.put": queue.put(1),
    "queue.put(unique=)": queue.put(1, unique="first"),
    "queue.put(external_id=)": queue.put(1, external_id="8ef0a1ba-5f2b-4f6b-8b0c-0d6d6d3c1a55"),
    "queue.capture": queue.capture(2),
    "queue.complete": queue.complete([(1, 1)]),
    "queue.release": queue.release([(1, 1)]),
    "a worker's sweep": queue._requeue_silent(300, SINCE, queue="default", limit=10),
    "queue.get": queue.get("8ef0a1ba-5f2b-4f6b-8b0c-0d6d6d3c1a55"),
}
GROWTH = (
    "INSERT INTO lock.task_state (queue_id, id, acquired, fence) SELECT 'default', n, false, 0",
    "INSERT INTO lock.task_timeout SELECT (jsonb_populate_record(first, jsonb_build_object('id', n))).*"
    " FROM (SELECT task_timeout FROM lock.task_timeout LIMIT 1) AS one (first),",
    "INSERT INTO lock.task (id, status) SELECT n, 'done'",
    "INSERT INTO lock.job (external_id, payload) SELECT gen_random_uuid(), '{}'",
)


def test_plans_made_on_small_tables_serve_large_ones(servers: Servers) -> None:
    url = servers.fresh("postgresql15", "psycopg")
    install(url)
    with connected(url) as engine, engine.connect() as connection:

        def perform(operation: Any) -> None:
            connection.execute(operation)
            connection.commit()

        def pages() -> int:
            perform(text("SELECT pg_stat_force_next_flush()"))  # the statistics are sent with the commit
            read = "heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit"
            return int(connection.scalar(text(f"SELECT sum({read}) FROM pg_statio_user_tables")) or 0)

        for name in ("task_state", "task_timeout", "task", "job"):
            connection.execute(text(f"ALTER TABLE lock.{name} SET (autovacuum_enabled = off)"))
        for pattern in (mutex, hourly, tasks):
            connection.execute(pattern.create("first"))
        for operation in STATEMENTS.values():
            for _ in range(12):
                perform(operation)
        prepared = text("SELECT count(*) FROM pg_prepared_statements WHERE generic_plans > 0")
        assert connection.scalar(prepared) >= len(STATEMENTS)
        for statement in GROWTH:
            source = "" if statement.endswith(",") else " FROM"
            connection.execute(text(f"{statement}{source} generate_series(1, {MANY}) AS n"))
        connection.commit()
        read = {}
        for name, operation in STATEMENTS.items():
            before = pages()
            perform(operation)
            read[name] = pages() - before
        assert {name: number for name, number in read.items() if number > FEW} == {}

"""Released permits cost nothing: the plans with many thousand released permits and a few held ones."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, StaticPool, text

import sqlalchemy_locks as sl
from tests.conftest import Servers, install
from tests.fixtures.crowd import Filler
from tests.fixtures.parties import connected
from tests.fixtures.semaphores import ENGINES, held, made, place

MANY = 20_000
SUM = (
    "SELECT COALESCE(SUM(count), 0) FROM {permit} WHERE semaphore_id = "
    "(SELECT id FROM {semaphore} WHERE name = :name) AND state = 'ACQUIRED'"
)


def crowd(engine: Engine, sem: str) -> None:
    """Insert released permits of the semaphore."""
    number = f"(SELECT id FROM {place(engine, 'semaphore')} WHERE name = '{sem}')"
    columns = {"permit_request_id": "1000000 + n", "count": "1", "fence": "n", "state": "'RELEASED'"}
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        filler = Filler(connection)
        filler.insert("permit", MANY, semaphore_id=number, **columns)
        filler.analyze("permit")


def plan(engine: Engine, statement: str, **values: object) -> str:
    """The engine's own plan of the statement."""
    explain = {"sqlite": "EXPLAIN QUERY PLAN", "mysql": "EXPLAIN FORMAT=TRADITIONAL"}.get(
        engine.dialect.name, "EXPLAIN"
    )
    with engine.connect() as connection:
        rows = connection.execute(text(f"{explain} {statement}"), values).mappings().all()
        return "\n".join(str(dict(row)) for row in rows)


@pytest.mark.parametrize("name", ENGINES)
def test_sum_reads_held_permits_only(locks: sl.Locks, engine: Engine) -> None:
    sem = made(engine, 10)
    crowd(engine, sem)
    for _ in range(3):
        assert locks.acquire({sem: 1})
    assert held(engine, sem) == 3
    tables = {"permit": place(engine, "permit"), "semaphore": place(engine, "semaphore")}
    assert "permit_held" in plan(engine, SUM.format(**tables), name=sem)
    free = f"UPDATE {tables['permit']} SET state = 'RELEASED' WHERE permit_request_id = 7 AND state <> 'RELEASED'"
    assert "permit_by_request" in plan(engine, free)
    with engine.begin() as connection:
        connection.execute(text(f"DELETE FROM {tables['permit']} WHERE permit_request_id > 1000000"))


@pytest.mark.parametrize("locking", ["native", "table"])
def test_plans_made_on_a_tiny_table_serve_a_large_one(servers: Servers, locking: str) -> None:
    """PostgreSQL keeps a session's plans until the table is analyzed, up to a minute later."""
    url = servers.fresh("postgresql15", "psycopg")
    install(url, locking=locking)
    with connected(url, poolclass=StaticPool, isolation_level="AUTOCOMMIT") as engine, engine.connect() as connection:

        def use() -> None:
            connection.execute(text("SELECT lock.exclusive(1), lock.try_shared(2)"))
            connection.execute(text("SELECT * FROM lock.semaphore_acquire(ARRAY['s'], ARRAY[1], 'mine', NULL, 60)"))
            connection.execute(text("SELECT lock.semaphore_renew('mine'), lock.semaphore_release('mine')"))
            connection.execute(text("DELETE FROM lock.permit_request WHERE external_id = 'mine'"))

        def read() -> int:
            tables = "('permit', 'permit_request', 'semaphore', 'locked_keys')"
            statistics = f"SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE relname IN {tables}"
            connection.execute(text("SELECT pg_stat_force_next_flush()"))
            return int(connection.scalar(text(statistics)) or 0)

        connection.execute(text("SELECT lock.semaphore_create('s', 1000000)"))
        for _ in range(2):
            use()
        connection.execute(text("VACUUM ANALYZE"))
        for _ in range(10):
            use()
        for statement in (
            "INSERT INTO lock.semaphore (name, capacity) SELECT 'other' || n, 1 FROM generate_series(1, 5000) AS n",
            "INSERT INTO lock.permit_request (external_id, state) SELECT n, 'ACQUIRED' FROM generate_series(1, 5000) AS n",
            "INSERT INTO lock.permit (semaphore_id, permit_request_id, count, fence, state)"
            " SELECT 100 + n, n, 1, 1, 'ACQUIRED' FROM generate_series(1, 5000) AS n",
        ):
            connection.execute(text(statement))
        if locking == "table":
            connection.execute(text("INSERT INTO lock.locked_keys SELECT 100 + n FROM generate_series(1, 5000) AS n"))
        before = read()
        for _ in range(5):
            connection.execute(text("SELECT lock.exclusive(1), lock.try_shared(2)"))
            connection.execute(text("SELECT * FROM lock.semaphore_acquire(ARRAY['s'], ARRAY[1], 'last', NULL, 60)"))
            connection.execute(text("SELECT lock.semaphore_renew('last'), lock.semaphore_release('last')"))
        assert read() == before

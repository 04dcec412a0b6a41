"""What status and the page read in a database with many rows: few rows of each table, and counts up to a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.pool import QueuePool

import sqlalchemy_locks as sl
from sqlalchemy_locks.admin import overview
from sqlalchemy_locks.integrations.dashboard import queries
from sqlalchemy_locks.queue import activity
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.crowd import crowd

ROWS = {
    "semaphores": 400,
    "held": 1_000,
    "released": 4_000,
    "jobs": 20_000,
    "queues": 90,
    "mutexes": 600,
    "timeouts": 50,
}
LIMIT, HEAD_LIMIT = 100, 26


@pytest.fixture(scope="module", params=["sqlite", "postgresql15", "mysql", "mariadb"])
def engine(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Engine]:
    """An engine with one connection, on a database with many rows."""
    url = servers.fresh(request.param, PLAIN[request.param])
    install(url)
    # PostgreSQL would scan a table as small as these, whatever the statement
    arguments = {"options": "-c enable_seqscan=off"} if request.param.startswith("postgresql") else {}
    made = create_engine(url, poolclass=QueuePool, pool_size=1, max_overflow=0, connect_args=arguments)
    crowd(made, **ROWS)
    yield made
    made.dispose()


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "COUNT_LIMIT", LIMIT)
    monkeypatch.setattr(overview, "HEAD_LIMIT", HEAD_LIMIT)


def rows_read(engine: Engine, call: Callable[[], object]) -> int:
    """Return how many rows and index entries the engine reads, by its own counters."""
    if engine.dialect.name == "sqlite":
        return _steps(engine, call)
    before = _counter(engine)
    call()
    return _counter(engine) - before


def _counter(engine: Engine) -> int:
    with engine.connect() as connection:
        if engine.dialect.name in ("mysql", "mariadb"):
            status = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'")
            return sum(int(value) for name, value in status if name != "Handler_read_rnd")
        connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
        connection.commit()
        connection.exec_driver_sql("SELECT pg_stat_clear_snapshot()")
        tables = "SELECT COALESCE(SUM(seq_tup_read), 0) FROM pg_stat_user_tables WHERE schemaname = 'lock'"
        indexes = "SELECT COALESCE(SUM(idx_tup_read), 0) FROM pg_stat_user_indexes WHERE schemaname = 'lock'"
        return int(connection.scalar(text(f"SELECT ({tables}) + ({indexes})")) or 0)


def _steps(engine: Engine, call: Callable[[], object]) -> int:
    """Return the instructions of SQLite's virtual machine, in units of what one row takes in a simple loop."""
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
    driver.set_progress_handler(step, 25)
    try:
        call()
    finally:
        driver.set_progress_handler(None, 0)
    return steps


def test_semaphores_are_read_in_one_pass(engine: Engine) -> None:
    locks = sl.Locks(engine)
    part = overview.semaphores(locks, 20)  # the statements are compiled, the settings verified
    read = rows_read(engine, lambda: overview.semaphores(locks, 20))
    # one pass over what is held, with its semaphores, and their sort, which InnoDB's estimates make longer at times; not
    # a pass for each semaphore
    assert read < 10 * (ROWS["semaphores"] + ROWS["held"])
    assert part.counts["semaphores"] == part.counts["leases"] == 200
    assert (part.counts["leases_held"], part.counts["permits"]) == (100, 1_000)
    rows = part.rows or []
    semaphores, leases = [row for row in rows if not row["on_demand"]], [row for row in rows if row["on_demand"]]
    assert (len(semaphores), len(leases)) == (20, 20)
    assert [row["name"] for row in semaphores[:1]] == ["semaphore-1"]
    shares = [row["used"] / row["capacity"] for row in semaphores]
    assert shares == sorted(shares, reverse=True)
    assert part.counts["full"] == sum(share >= 1 for share in shares)
    since = [row["oldest_since"] for row in leases]
    assert since == sorted(since)
    page = queries.read_all(locks).semaphores
    assert (len(page.rows), page.more) == (queries.SEMAPHORES, 150)


def test_holders_of_a_crowded_semaphore_are_limited(engine: Engine) -> None:
    locks = sl.Locks(engine)
    ids = [row["id"] for row in overview.semaphores(locks, 3).rows or () if not row["on_demand"]]
    read = overview.holders(2, ids)
    assert len(read(locks).rows or ()) == 6
    # not all that is held; PostgreSQL may read and sort the 100 holders of the first semaphore
    assert rows_read(engine, lambda: read(locks)) < ROWS["held"] // 2


# of 9,000 completed jobs, and of 10,000 that wait in 76 queues, 400 that run and 600 that are dead
@pytest.mark.parametrize(
    ("read", "times"), [(overview.ages, 20), (overview.completed, 20), (overview.queue_counts, 70)]
)
def test_counts_stop_at_the_limit(engine: Engine, read: Callable[[sl.Locks], overview.Part], times: int) -> None:
    locks = sl.Locks(engine)
    read(locks)
    assert rows_read(engine, lambda: read(locks)) < times * LIMIT


def test_counts_say_that_they_stopped(engine: Engine) -> None:
    part = overview.queue_counts(sl.Locks(engine))
    assert (part.counts["queues"], part.counts["running"], part.counts["dead"]) == (76, LIMIT, LIMIT)
    assert sorted(row["waiting"] + row["scheduled"] for row in part.rows or ()) == [1] * 26 + [HEAD_LIMIT] * 50
    assert all({*row["at_least"]} == {*activity.STATES} for row in part.rows or ())


def test_counts_below_the_limit_are_exact(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "COUNT_LIMIT", 10_000)
    monkeypatch.setattr(overview, "HEAD_LIMIT", 10_000)
    locks = sl.Locks(engine)
    exact = {row["queue_id"]: row for row in overview.queues(locks)}
    counted = [row for row in overview.queue_counts(locks).rows or () if not row["at_least"]]
    assert [exact[row["queue_id"]].items() <= row.items() for row in counted] == [True] * len(activity.HEADS)
    mutexes = overview.mutexes(locks, 5)
    assert (len(mutexes.rows or ()), dict(mutexes.counts), mutexes.at_least) == (5, {"mutexes": 600}, ())
    monkeypatch.setattr(overview, "COUNT_LIMIT", 599)
    assert overview.mutexes(locks, 5).counts == {"mutexes": 599}
    assert overview.mutexes(locks, 5).at_least == ["mutexes"]
    assert overview.timeouts(locks, 5).counts == {"periods": 50}

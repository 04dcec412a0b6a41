"""``maintain``: a task that is due is run by one of many processes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlalchemy_locks as sl
from sqlalchemy_locks.facade import maintenance
from tests.conformance.faces import ASYNC, opened
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import all_of, connected, until
from tests.fixtures.semaphores import ENGINES, despite_deadlocks, expire, held, made, place


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, servers: Servers) -> Any:
    """A database of its own: a task is due once per database."""
    driver = PLAIN[request.param]
    url = servers.fresh(request.param, driver)
    install(url)
    with connected(url) as engine:
        yield engine


def due_again(engine: Engine) -> None:
    despite_deadlocks(engine, f"UPDATE {place(engine, 'task_timeout')} SET ts = ts - 1000000")


def test_each_task_runs_once_in_a_fleet(engine: Engine) -> None:
    sem = made(engine, 3)
    locks = sl.Locks(engine)
    old, gone = locks.acquire({sem: 1}, ttl=3600), locks.acquire({sem: 1})
    with engine.begin() as connection:
        expire(connection, old)
    reports = all_of(*[sl.Locks(engine).maintain for _ in range(4)])
    assert sorted(task for report in reports for task in report.done) == sorted(task.name for task in maintenance.TASKS)
    assert sum(report.done.get("orphans", 0) for report in reports) == 1
    assert held(engine, sem) == 1
    assert locks.maintain().done == {}

    with engine.begin() as connection:
        table = place(engine, "permit_request")
        connection.execute(text(f"UPDATE {table} SET updated_at = :then"), {"then": "2020-01-01 00:00:00.000000"})
    due_again(engine)
    expected = {"tasks": 0, "orphans": 0, "requests": 1, "leases": 0, "history": 0, "keys": 0}
    assert locks.maintain(alive=lambda owners: owners).done == expected
    assert locks.release(old) is sl.Released.UNKNOWN
    due_again(engine)
    report = locks.maintain(alive=lambda owners: [])
    assert (report.done["orphans"], bool(report)) == (1, True)
    assert locks.release(gone) is sl.Released.ALREADY_RELEASED


def test_failing_task_does_not_stop_others(engine: Engine) -> None:
    def down(owners: list[str]) -> list[str]:
        raise RuntimeError("the owners can't be checked")

    locks = sl.Locks(engine)
    locks.acquire({made(engine, 1): 1})
    with pytest.raises(RuntimeError, match="can't be checked"):
        locks.maintain(alive=down)
    assert locks.maintain().done == {}


def test_background_thread(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    sem = made(engine, 1)
    locks = sl.Locks(engine)
    locks.acquire({sem: 1}, owner="dead")
    calls = 0

    def alive(owners: list[str]) -> list[str]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("the owners can't be checked")
        return []

    def told(beginning: str) -> bool:
        return any(record.getMessage().startswith(beginning) for record in caplog.records)

    with caplog.at_level(logging.INFO, "sqlalchemy_locks"), locks.maintenance(alive=alive, every=0.01):
        until(lambda: told("a round of maintenance failed"))  # the task is due again
        due_again(engine)
        until(lambda: held(engine, sem) == 0)
    # requests of other tests may be swept as well
    assert told("maintenance: orphans ")


def test_maintenance_without_tables_logs_a_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with connected(f"sqlite:///{tmp_path / 'empty.db'}") as engine, sl.Locks(engine).maintenance(every=3600):
        until(lambda: bool(caplog.records))
    [record] = caplog.records
    assert "sqlalchemy-locks install" in record.getMessage()
    assert record.exc_info is None


def test_async_maintenance(servers: Servers, engine_to: MakeEngine) -> None:
    plain = engine_to("postgresql15")
    sem = made(plain, 1)
    with plain.begin() as connection:
        expire(connection, sl.Locks(plain).acquire({sem: 1}, ttl=3600))
    due_again(plain)

    async def alive(owners: list[str]) -> list[str]:
        return owners

    url = plain.url.set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)
    with opened(ASYNC, url) as (locks, _):
        with locks.maintenance(alive=alive, every=0.01):
            until(lambda: not held(plain, sem))
        assert "orphans" not in locks.maintain().done

"""The tools for users' tests: a clock, a queue that is worked off, and their pytest plugin."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, make_url
from sqlalchemy.orm import DeclarativeBase

import sqlalchemy_locks as sl
from sqlalchemy_locks.testing import Clock, Drained, run_until_empty
from tests.conftest import PLAIN, Servers
from tests.docs.pages import ROOT, blocks
from tests.docs.test_snippets import ASYNC_URL, PLAIN_URL
from tests.fixtures.parties import PATIENCE

PAGE = ROOT / "docs" / "testing.md"
DAY = 86400


@pytest.fixture
def jobs(locks: sl.Locks) -> Callable[..., Any]:
    return lambda *payloads, **options: locks.run(sl.Queue().put(*payloads, **options))


class TestClock:
    def test_ends_leases_periods_and_pauses(self, locks: sl.Locks, locks_clock: Clock, jobs: Any) -> None:
        queue = sl.Queue()
        locks.run(sl.semaphore.create("room", 1))
        grant = locks.acquire({"room": 1}, ttl=60)
        assert locks.once_per("daily", every=DAY)
        jobs("later", run_in=DAY)
        locks.run(sl.StateTransition().create("task", timeout=60))
        assert len(locks.run(sl.StateTransition().capture(1))) == 1
        locks_clock.advance(50)
        assert locks.renew(grant)
        assert locks.run(sl.StateTransition().expire()) == 0
        assert not locks.once_per("daily", every=DAY)
        assert locks.run(queue.capture(1)) == []
        locks_clock.advance(2 * DAY)
        assert not locks.renew(grant)
        assert locks.run(sl.StateTransition().expire()) == 1
        assert locks.once_per("daily", every=DAY)
        assert len(locks.run(queue.capture(1))) == 1

    def test_moves_tables_of_the_app(self, locks: sl.Locks, locks_engine: Engine) -> None:
        class Base(DeclarativeBase):
            pass

        class Mail(sl.JobColumns, Base):
            __tablename__ = "mail"

        Base.metadata.create_all(locks_engine)
        mails = sl.Queue(Mail)
        locks.run(mails.put({}, run_in=DAY))
        Clock(locks_engine).advance(2 * DAY)
        assert locks.run(mails.capture(1)) == []
        Clock(locks_engine, Mail).advance(2 * DAY)
        assert len(locks.run(mails.capture(1))) == 1


class TestRunUntilEmpty:
    def test_runs_jobs_that_are_put_meanwhile(self, locks_engine: Engine, jobs: Any) -> None:
        ran: list[Any] = []

        def handler(job: Any) -> None:
            ran.append(job.payload)
            if job.payload < 3:
                jobs(job.payload + 1)

        jobs(1)
        jobs("of another queue", queue="other")
        assert run_until_empty(sl.Queue(), handler, bind=locks_engine) == Drained(completed=3, failed=0)
        assert ran == [1, 2, 3]

    def test_error_of_a_handler_is_raised(self, locks: sl.Locks, locks_engine: Engine, jobs: Any) -> None:
        jobs({}, max_attempts=2)
        with pytest.raises(ZeroDivisionError):
            run_until_empty(sl.Queue(), lambda job: 1 / 0, bind=locks_engine)
        assert run_until_empty(sl.Queue(), lambda job: 1 / 0, bind=locks_engine, retry=True) == Drained(0, 1)
        assert run_until_empty(sl.Queue(), lambda job: None, bind=locks_engine) == Drained(0, 0)

    def test_coroutines_are_awaited(self, locks_engine: Engine, jobs: Any) -> None:
        ran: list[Any] = []

        async def handler(job: Any) -> None:
            ran.append(job.payload)

        jobs("a")
        run_until_empty(sl.Queue(), handler, bind=locks_engine)
        assert ran == ["a"]

    def test_a_job_is_as_a_worker_gives_it(self, locks: sl.Locks, locks_engine: Engine, jobs: Any) -> None:
        def handler(job: Any) -> None:
            assert not job.lost
            raise sl.Discard("why") if job.payload == "discarded" else sl.Retry("why", in_=60)

        for payload in ("discarded", "later"):
            jobs(payload)
        assert run_until_empty(sl.Queue(), handler, bind=locks_engine, retry=True) == Drained(0, 2)
        (stats,) = locks.run(sl.Queue().stats())
        assert (stats.dead, stats.scheduled) == (1, 1)

    def test_endless_jobs_end(self, locks_engine: Engine, jobs: Any) -> None:
        jobs({})
        with pytest.raises(AssertionError, match="'default' is not empty after 3 attempts"):
            run_until_empty(sl.Queue(), lambda job: jobs({}), bind=locks_engine, limit=3)


def test_two_connections_are_two_parties(two_connections: tuple[Connection, Connection]) -> None:
    one, other = two_connections
    one.execute(sl.lock.exclusive("key"))
    assert other.scalar(sl.lock.try_exclusive("key")) is False
    one.commit()
    assert other.scalar(sl.lock.try_exclusive("key")) is True


APP = """\
import pytest
import sqlalchemy_locks as sl
from sqlalchemy import NullPool, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

@pytest.fixture
def anyio_backend():
    return "asyncio"

def charge(locks, invoice):
    with locks.exclusive(f"invoice:{invoice}", timeout=1):
        pass

async def lead(locks):
    async with locks.lease("leader", timeout=0):
        pass

def test_plain_fixtures(locks_engine, locks, another_process, two_connections, locks_clock):
    with another_process.lease("a") as grant, pytest.raises(sl.LockTimeout, match="another process"):
        with locks.lease("a", timeout=1):
            pass
    charge(locks, 42)

@pytest.mark.anyio
async def test_async_fixtures(async_locks_engine, async_locks, async_another_process, async_locks_clock):
    with pytest.raises(sl.LockLost):
        async with async_locks.lease("a", ttl=3600):
            await async_locks_clock.advance(3601)
            async with async_another_process.lease("a", timeout=0):
                pass
"""


@pytest.mark.parametrize("name", ["sqlite", "postgresql15"])
def test_snippets_of_the_page(name: str, servers: Servers, tmp_path: Path) -> None:
    """With the plugin's own engines, and with those that the page overrides them by."""
    fixtures, tests = [block.text for block in blocks(PAGE) if block.info == "noexec"]
    if name == "postgresql15":
        url = servers.installed(name, PLAIN[name])
        database = str(make_url(url).database)
        tests += fixtures.replace(PLAIN_URL, url).replace(ASYNC_URL, servers.url(name, "asyncpg", database))
    (tmp_path / "test_app.py").write_text(f"{APP}\n{tests}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert "4 passed" in run.stdout, run.stdout + run.stderr


def test_pytest_is_imported_by_the_plugin_only() -> None:
    code = "import sys, sqlalchemy_locks, sqlalchemy_locks.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 0

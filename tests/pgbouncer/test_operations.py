"""Through PgBouncer in transaction mode, every supported operation works, and leaves nothing to the next client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import text

import sqlalchemy_locks as sl
from tests.conformance.faces import ASYNC, OPERATIONS, SYNC, opened
from tests.fixtures.parties import PATIENCE, async_connected, connected, later, until, unused
from tests.pgbouncer.conftest import SIZE

CASES = [(SYNC, "psycopg"), (SYNC, "psycopg2"), (ASYNC, "psycopg"), (ASYNC, "asyncpg")]
pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture(scope="module", params=CASES, ids=" / ".join)
def locks(request: pytest.FixtureRequest, through: Any) -> Iterator[Any]:
    face, driver = request.param
    url, connect_args = through(driver)
    with opened(face, url, connect_args=connect_args) as (locks, _):
        yield locks


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_works(locks: Any, operation: str) -> None:
    OPERATIONS[operation](locks)


def test_holders_and_waiters(locks: Any, through: Any) -> None:
    key = unused()
    url, connect_args = through("psycopg")
    with connected(url, connect_args=connect_args) as engine:
        other = sl.Locks(engine)

        def wait() -> None:
            with other.exclusive(key, timeout=PATIENCE):
                pass

        with locks.exclusive(key) as held:
            session = held.session.scalar(text("SELECT pg_backend_pid()"))
            waiting = later(wait)
            until(lambda: [len(one.waiting) for one in locks.run(sl.lock.holders(key))] == [1], unless=waiting)
            (holder,) = locks.run(sl.lock.holders(key))
            assert (holder.session, holder.mode, holder.name) == (session, "exclusive", key)
        waiting.result(PATIENCE)


def test_killed_server_connection_loses_lock(locks: Any, through: Any) -> None:
    url, connect_args = through("psycopg")
    with pytest.raises(sl.LockLost), locks.exclusive(unused()) as held:
        session = held.session.scalar(text("SELECT pg_backend_pid()"))
        with connected(url, connect_args=connect_args) as engine, engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:session, 60000)"), {"session": session})
        with pytest.raises(sl.LockLost):
            held.check()


def test_locks_wait_in_autocommit_is_refused(through: Any) -> None:
    """It would belong to the session, which is the next client's."""
    url, connect_args = through("psycopg")
    operation = sl.Mutex().acquire("any")
    with connected(url, connect_args=connect_args, isolation_level="AUTOCOMMIT") as engine:
        with engine.connect() as connection:
            with pytest.raises(sl.Unsupported, match="would set the lock_timeout of another client's session"):
                connection.execute(operation.execution_options(locks_wait=5))
        locks, name = sl.Locks(engine), unused("mutex")
        assert locks.run(sl.Mutex().create(name).execution_options(locks_wait=5)) == 1


def test_tasks_in_autocommit(through: Any) -> None:
    """As in Alembic's `autocommit_block()`: asyncpg sends all of a statement without a name at once."""
    url, connect_args = through("asyncpg")

    async def main() -> None:
        async with async_connected(url, connect_args=connect_args, isolation_level="AUTOCOMMIT") as engine:

            async def ask(task: int) -> None:
                async with engine.connect() as connection:
                    for number in range(task, task + 20):
                        assert await connection.scalar(text(f"SELECT {number}, pg_sleep(0.001)")) == number

            await asyncio.gather(*(ask(100 * task) for task in range(8)))

    asyncio.run(main())


def prepared(through: Any) -> int:
    """How many statements PgBouncer has prepared on its server connections."""
    url, _ = through("psycopg2")
    statement = text("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'PGBOUNCER\\_%'")
    with connected(url) as engine, contextlib.ExitStack() as opened:
        # at the same time, and so one on each
        together = [opened.enter_context(engine.connect()) for _ in range(SIZE)]
        return sum(connection.scalar(statement) or 0 for connection in together)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_never_two_holders(driver: str, through: Any, release: str | None) -> None:
    """The tasks of two processes, on a third of the server connections that they would have without the pooler."""
    url, connect_args = through(driver)
    names = [unused() for _ in range(3)]
    inside: dict[str, int] = dict.fromkeys(names, 0)
    turns = itertools.count()

    async def main() -> None:
        async with (
            async_connected(url, connect_args=connect_args) as one,
            async_connected(url, connect_args=connect_args) as other,
        ):
            facades = [sl.AsyncLocks(engine) for engine in (one, other)]

            async def work(number: int) -> None:
                locks, name = facades[number % 2], names[number % 3]
                for _ in range(5):
                    async with locks.exclusive(name) as held:
                        inside[name] += 1
                        assert inside[name] == 1
                        await held.session.execute(text("SELECT 1"))
                        inside[name] -= 1
                    assert await locks.mutex.acquire(f"{name} {number}")
                    assert not await locks.mutex.acquire(f"{name} {number}")
                    assert await locks.mutex.release(f"{name} {number}")
                    next(turns)

            await asyncio.gather(*(work(number) for number in range(18)))

    asyncio.run(main())
    assert next(turns) == 90
    if release is not None:
        # each statement often enough for psycopg, and known on every server connection
        assert prepared(through)

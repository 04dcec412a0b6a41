"""Prepared statements through a PgBouncer that keeps track of them: each is known on every server connection."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from sqlalchemy import text

import sqlalchemy_locks as sl
from tests.fixtures.parties import async_connected, connected, unused
from tests.pgbouncer.conftest import SIZE

pytestmark = [
    pytest.mark.parametrize("release", ["trixie"], indirect=True),
    pytest.mark.usefixtures("nothing_is_left"),
]

#: more than the server connections, and more often than psycopg executes a statement before it prepares it
PARTIES, TIMES = 5, 12


def prepared(through: Any) -> int:
    """How many statements PgBouncer has prepared on its server connections."""
    url, _ = through("psycopg2")
    statement = text("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'PGBOUNCER\\_%'")
    with connected(url) as engine, contextlib.ExitStack() as opened:
        # at the same time, and so one on each
        together = [opened.enter_context(engine.connect()) for _ in range(SIZE)]
        return sum(connection.scalar(statement) or 0 for connection in together)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_prepared_statements_of_tasks(through: Any, driver: str) -> None:
    url, connect_args = through(driver)

    async def main() -> None:
        async with async_connected(url, connect_args=connect_args) as engine:
            locks = sl.AsyncLocks(engine)

            async def work(name: str) -> None:
                for _ in range(TIMES):
                    async with locks.exclusive(name) as held:
                        await held.session.execute(text("SELECT 1"))
                    assert await locks.mutex.acquire(name)
                    assert not await locks.mutex.acquire(name)
                    assert await locks.mutex.release(name)

            await asyncio.gather(*(work(unused("prepared")) for _ in range(PARTIES)))

    asyncio.run(main())
    assert prepared(through)

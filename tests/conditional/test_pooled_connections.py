"""The state in which ``Locks`` finds a pooled connection, and in which it returns it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import event

import sqlalchemy_locks as sl
from tests.fixtures.parties import async_connected, connected, installed

mutex = sl.Mutex()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("what", ["connect", "checkout"])
def test_async_listener_that_leaves_a_transaction_open(id: str, servers: Any, driver: str, what: str) -> None:
    """An acquisition in autocommit is committed, though the listener's transaction was open."""
    url = installed(servers, "postgresql15", driver)

    def reads(raw: Any, *_: Any) -> None:
        cursor = raw.cursor()
        cursor.execute("SELECT 1")
        cursor.close()

    async def acquires() -> None:
        async with async_connected(url) as engine:
            event.listen(engine.sync_engine, what, reads)
            locks = sl.AsyncLocks(engine)
            await locks.run(mutex.create(id))
            async with engine.connect(), engine.connect():
                pass  # more than the first connection of the engine
            assert await locks.mutex.acquire(id) is True
            async with engine.connect() as connection:
                await connection.rollback()

    asyncio.run(acquires())
    with connected(installed(servers, "postgresql15")) as engine:
        assert sl.Locks(engine).mutex.acquire(id) is False

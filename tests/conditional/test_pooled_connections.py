"""The state in which ``Locks`` finds a pooled connection, and in which it returns it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import event

import sqlalchemy_locks as sl
from tests.fixtures.parties import ENGINES, async_connected, connected, installed, unused

mutex = sl.Mutex()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_connect_event_that_leaves_a_transaction_open(servers: Any, driver: str) -> None:
    with connected(installed(servers, "postgresql15", driver)) as engine:

        @event.listens_for(engine, "connect")
        def connect(connection: Any, record: Any) -> None:
            cursor = connection.cursor()
            cursor.execute("SELECT 1")
            cursor.close()

        locks = sl.Locks(engine)
        assert locks.mutex.acquire(unused()) is True
        assert locks.once_per(unused(), every=60) is True


@pytest.mark.parametrize("name", ENGINES)
def test_connection_is_returned_without_a_reset_round_trip(servers: Any, name: str) -> None:
    """After a COMMIT, or in autocommit, the pool sends no ROLLBACK, and no transaction is open."""
    with connected(installed(servers, name), pool_size=1, max_overflow=0) as engine:
        locks, resets = sl.Locks(engine), []
        locks.run(mutex.create(unused()))

        @event.listens_for(engine, "reset")
        def reset(connection: Any, record: Any, state: Any) -> None:
            resets.append(state.transaction_was_reset)

        id = unused()
        assert locks.mutex.acquire(id) is True
        assert locks.mutex.release(id) is True
        assert resets[-2:] == [True, True]
        with engine.connect() as connection:
            raw: Any = connection.connection.driver_connection
            if name == "postgresql15":
                assert raw.info.transaction_status == 0
                assert not raw.autocommit
            elif name == "sqlite":
                assert not raw.in_transaction
            else:
                assert not raw.server_status & 1  # SERVER_STATUS_IN_TRANS
            assert not connection.in_transaction()
            with connection.begin():
                assert connection.execute(mutex.acquire(id)).scalar() is True
        assert len(resets) >= 3


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("what", ["connect", "checkout"])
def test_async_listener_that_leaves_a_transaction_open(servers: Any, driver: str, what: str) -> None:
    """An acquisition in autocommit is committed, though the listener's transaction was open."""
    url, id = installed(servers, "postgresql15", driver), unused()

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

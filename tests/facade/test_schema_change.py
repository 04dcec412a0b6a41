"""A schema that changes while the app runs: statements that a driver has prepared before are prepared again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DBAPIError

import sqlalchemy_locks as sl
from tests.conftest import Servers, install
from tests.fixtures.parties import async_connected


@pytest.mark.parametrize("listened", [False, True], ids=["plain", "with a listener"])
def test_psycopg_connections_prepare_their_statements_again(listened: bool, servers: Servers) -> None:
    """In autocommit, psycopg would keep what it has prepared, and fail at each further execution."""
    url = servers.fresh("postgresql15", "psycopg")
    install(url)
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    engine = create_engine(url, pool_size=2)
    if listened:
        event.listen(engine, "before_cursor_execute", lambda *_: None)
    locks, queue = sl.Locks(engine), sl.Queue(bind=engine)

    def work() -> None:
        assert locks.mutex.acquire_token("task")
        assert locks.mutex.release("task")
        locks.run(queue.put(1))
        done: list[Any] = []
        sl.Worker(queue, done.append, concurrency=1, batch=1).run(until_empty=True)
        assert len(done) == 1

    try:
        for _ in range(8):  # the sixth execution uses a prepared statement
            work()
        for kind in ("integer", "bigint"):
            with admin.connect() as connection:
                connection.execute(text(f"ALTER TABLE lock.task_state ALTER COLUMN fence TYPE {kind}"))
                connection.execute(text(f"ALTER TABLE lock.job ALTER COLUMN priority TYPE {kind}"))
            for _ in range(8):
                work()
    finally:
        engine.dispose()
        admin.dispose()


@pytest.mark.parametrize("listened", [False, True], ids=["plain", "with a listener"])
def test_asyncpg_connections_prepare_their_statements_again(listened: bool, servers: Servers) -> None:
    """As with SQLAlchemy's own statements, the first one fails; all connections recover. Locks tries it again."""
    url = servers.fresh("postgresql15", "psycopg")
    install(url)
    admin = create_engine(url, isolation_level="AUTOCOMMIT")

    async def main() -> None:
        async with async_connected(url.replace("psycopg", "asyncpg"), pool_size=2) as engine:
            if listened:
                event.listen(engine.sync_engine, "before_cursor_execute", lambda *_: None)
            mutex, failures = sl.Mutex(), 0
            async with engine.connect() as one, engine.connect() as other:

                async def acquire(connection: Any) -> Any:
                    async with connection.begin():
                        await connection.execute(mutex.release("task"))
                        return await connection.scalar(mutex.acquire_token("task"))

                await one.execute(mutex.create("task"))
                await one.commit()
                for connection in (one, other, one, other):
                    assert await acquire(connection)
                with admin.connect() as connection:
                    connection.execute(text("ALTER TABLE lock.task_state ALTER COLUMN fence TYPE integer"))
                for connection in (one, other, one, other):
                    try:
                        assert await acquire(connection)
                    except DBAPIError:
                        failures += 1
            assert failures == 1
            locks = sl.AsyncLocks(engine)
            for _ in range(2):
                assert await locks.mutex.acquire_token("other")
                assert await locks.mutex.release("other")
            with admin.connect() as connection:
                connection.execute(text("ALTER TABLE lock.task_state ALTER COLUMN fence TYPE bigint"))
            assert await locks.mutex.acquire_token("other")

    try:
        asyncio.run(main())
    finally:
        admin.dispose()

"""A limit of asyncpg's own for every statement (``command_timeout``): a wait outlasts it, and a COMMIT is unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, event, text
from sqlalchemy.ext.asyncio import AsyncEngine

import sqlalchemy_locks as sl
from tests.fixtures.parties import PATIENCE, async_connected, connected, installed, later, until, unused
from tests.fixtures.semaphores import made

#: seconds, in which a server that is asked for little answers
LIMIT = 5
SLOW = [
    "CREATE TABLE committed_slowly (id INTEGER)",
    "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS"
    f" $$ BEGIN PERFORM pg_sleep({PATIENCE}); RETURN NULL; END $$",
    "CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON committed_slowly DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW EXECUTE FUNCTION slowly()",
]


@pytest.fixture
def other(servers: Any) -> Iterator[Engine]:
    """An engine without that limit."""
    with connected(installed(servers, "postgresql15"), poolclass=NullPool) as engine:
        yield engine


def limited(servers: Any) -> Any:
    return async_connected(
        installed(servers, "postgresql15", "asyncpg"), pool_size=4, connect_args={"command_timeout": LIMIT}
    )


def test_commit_beyond_the_limit(servers: Any, other: Engine) -> None:
    async def main() -> None:
        async with limited(servers) as engine:
            with pytest.raises(sl.OutcomeUnknown):
                async with sl.AsyncLocks(engine).exclusive(unused()) as held:
                    await held.session.execute(text("INSERT INTO committed_slowly VALUES (1)"))
            assert engine.pool.checkedout() == 0

    with other.begin() as connection:
        for statement in SLOW:
            connection.exec_driver_sql(statement)
    try:
        asyncio.run(main())
    finally:
        with other.begin() as connection:
            connection.exec_driver_sql("DROP TABLE committed_slowly")
            connection.exec_driver_sql("DROP FUNCTION slowly")


async def cut_off(engine: AsyncEngine, waiting: asyncio.Task[Any]) -> None:
    """Return when a statement of what waits has met with the limit: its connection is replaced."""
    replaced = asyncio.Event()

    def invalidated(*_: Any) -> None:
        replaced.set()

    event.listen(engine.sync_engine, "invalidate", invalidated)
    met = asyncio.create_task(replaced.wait())
    await asyncio.wait([met, waiting], return_when=asyncio.FIRST_COMPLETED)
    met.cancel()
    assert not waiting.done(), waiting


def test_wait_beyond_the_limit(servers: Any, other: Engine) -> None:
    key = unused()

    async def main() -> None:
        async with limited(servers) as engine:
            locks = sl.AsyncLocks(engine)

            async def wait() -> None:
                async with locks.exclusive(key):
                    pass

            with sl.Locks(other).exclusive(key):
                waiting = asyncio.create_task(wait())
                await cut_off(engine, waiting)
            await waiting
            with sl.Locks(other).exclusive(key):
                with pytest.raises(sl.LockTimeout, match="could not be acquired within") as late:
                    async with locks.exclusive(key, timeout=LIMIT + 1):
                        pass
            assert type(late.value) is sl.LockTimeout
            assert engine.pool.checkedout() == 0

    asyncio.run(main())


def test_wait_in_a_queue_beyond_the_limit(servers: Any, other: Engine) -> None:
    room = made(other, 1)

    def in_line() -> bool:
        statement = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        with other.connect() as connection:
            return bool(connection.exec_driver_sql(statement).scalar())

    async def main() -> None:
        plain = sl.Locks(other)
        mine = plain.acquire({room: 1})
        first = later(plain.acquire, {room: 1})
        until(in_line, unless=first)
        async with limited(servers) as engine:
            waiting = asyncio.create_task(sl.AsyncLocks(engine).acquire({room: 1}))
            await cut_off(engine, waiting)
            plain.release(mine)
            # one that was cut off tries out of order, and may be first
            for one in asyncio.as_completed([asyncio.to_thread(first.result, PATIENCE), waiting]):
                plain.release(await one)

    asyncio.run(main())

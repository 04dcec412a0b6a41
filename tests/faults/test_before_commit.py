"""A connection that dies at the last statement before COMMIT: nothing is committed, and so it may be done again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

import sqlalchemy_locks as sl
from sqlalchemy_locks import semaphore
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import Watch, async_connected, backend_statement, installed, unused

SYNC = [("mysql", "pymysql"), ("mariadb", "mariadb+pymysql")]
ASYNC = [("mysql", "aiomysql"), ("mysql", "asyncmy"), ("mariadb", "mariadb+aiomysql")]
LAST = "RELEASE SAVEPOINT sqlalchemy_locks"


@contextmanager
def dying(engine: Engine, watched: Watch) -> Iterator[list[int]]:
    """The next connection that comes to its last statement before COMMIT is cut off there; which one it was."""
    cut: list[int] = []

    def before(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement == LAST and not cut:
            cut.append(0)
            cut[0] = watched.backend(connection)
            watched.kill(cut[0])

    event.listen(engine, "before_cursor_execute", before)
    try:
        yield cut
    finally:
        event.remove(engine, "before_cursor_execute", before)


@pytest.mark.parametrize(("name", "driver"), SYNC)
def test_operation_is_retried(engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, driver: str) -> None:
    engine, watched, sem = engine_to(name, driver), watch(name), unused("semaphore")
    locks, done = sl.Locks(engine), []

    def again(what: Callable[[], Any]) -> Any:
        with dying(engine, watched) as cut:
            value = what()
        done.append(len(cut))
        return value

    again(lambda: locks.run(semaphore.create(sem, 2)))
    grant = again(lambda: locks.acquire({sem: 1}, ttl=60))
    assert grant.acquired
    assert again(lambda: locks.renew(grant)) is True
    again(lambda: locks.run(semaphore.resize(sem, 3)))
    assert again(lambda: locks.release(grant)) is sl.Released.RELEASED
    assert again(lambda: locks.acquire({sem: 3}, ttl=60).acquired)
    assert again(lambda: locks.run(sl.lock.create(unused()))) is not None
    other = unused("semaphore")
    locks.run(semaphore.create(other, 1))
    again(lambda: locks.run(semaphore.delete(other)))
    assert done == [1] * 8
    with pytest.raises(sl.LockError):
        locks.acquire({other: 1}, timeout=0)


@pytest.mark.parametrize(("name", "driver"), ASYNC)
def test_async_operation_is_retried(servers: Any, watch: Callable[[str], Watch], name: str, driver: str) -> None:
    watched, sem = watch(name), unused("semaphore")

    async def main() -> None:
        async with async_connected(installed(servers, name, driver)) as engine:
            locks = sl.AsyncLocks(engine)
            with dying(engine.sync_engine, watched) as cut:
                await locks.run(semaphore.create(sem, 2))
            assert cut
            with dying(engine.sync_engine, watched) as cut:
                grant = await locks.acquire({sem: 2}, ttl=60)
            assert grant.acquired
            assert cut
            with dying(engine.sync_engine, watched) as cut:
                assert await locks.release(grant) is sl.Released.RELEASED
            assert cut

    asyncio.run(main())


@pytest.mark.parametrize(("name", "driver"), SYNC)
def test_block_raises_lock_lost(engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, driver: str) -> None:
    """Only its user can do the work again."""
    engine, watched = engine_to(name, driver), watch(name)
    with dying(engine, watched) as cut:
        with pytest.raises(sl.LockLost, match="nothing that was done in it is committed$") as raised:
            with sl.Locks(engine).exclusive(unused()) as held:
                mine = held.session.scalar(text(backend_statement(name)))
    assert type(raised.value) is sl.LockLost
    assert cut == [mine]

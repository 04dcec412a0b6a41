"""A connection that is cut between app and server: the lock is lost, is reported, and a waiter acquires it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import sqlalchemy_locks as sl
from tests.faults.drivers import (
    asynchronous,
    clear,
    good_as_new,
    good_as_new_async,
    sync,
    through_a_proxy,
    through_an_async_proxy,
)
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, Watch, later, until, unused
from tests.fixtures.semaphores import held, made


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_request_that_was_refused_after_a_lost_reply_is_withdrawn(
    servers: Any, engine_to: MakeEngine, driver: str
) -> None:
    """Its first statement may reach the server later, and nobody would own what it acquires."""
    engine = engine_to("postgresql15")
    direct, room, asked = sl.Locks(engine), made(engine, 1), []
    holder = direct.acquire({room: 1})
    with through_a_proxy(servers, "postgresql15", driver, **clear(driver)) as (cut, proxy):
        locks = sl.Locks(cut)
        event.listen(locks, "waited", lambda waited: asked.append(waited.external_id))
        with pytest.raises(sl.LockTimeout):
            locks.acquire({room: 1}, timeout=0)
        proxy.die_at(1, executed=False)
        with pytest.raises(sl.LockTimeout):
            locks.acquire({room: 1}, timeout=0)
        assert proxy.fatal is not None
    direct.release(holder)
    answered, late = asked
    with pytest.raises(sl.IdempotencyConflict):  # it is known by now, without permits
        direct.run(sl.semaphore.acquire({room: 1}, external_id=late))
    assert direct.run(sl.semaphore.acquire({room: 1}, external_id=answered))
    assert held(engine, room) == 1


class Base(DeclarativeBase):
    pass


class Unflushed(Base):
    __tablename__ = "never_created"
    id: Mapped[int] = mapped_column(primary_key=True)


@sync
def test_waiter_acquires_and_the_block_raises(
    servers: Any, engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, driver: str
) -> None:
    key, other = unused(), engine_to(name, poolclass=NullPool)
    with through_a_proxy(servers, name, driver) as (engine, proxy):
        with pytest.raises(sl.LockLost), sl.Locks(engine).exclusive(key, timeout=PATIENCE) as held:
            assert not held.lost
            held.check()
            assert not held.lost
            waiting = later(take, other, key)
            watch(name).until_waiting(waiting)
            proxy.cut()
            waiting.result(PATIENCE)
            until(lambda: held.lost)
            with pytest.raises(sl.LockLost):
                held.check()
            assert held.lost
        good_as_new(engine)


def take(engine: Engine, key: str) -> None:
    with sl.Locks(engine).exclusive(key):
        pass


@sync
def test_lost_is_set_without_a_round_trip(servers: Any, name: str, driver: str) -> None:
    with through_a_proxy(servers, name, driver) as (engine, proxy):
        with pytest.raises(sl.LockLost), sl.Locks(engine).shared(unused()):
            proxy.cut()
        good_as_new(engine)


@sync
def test_error_of_the_block_is_not_replaced(servers: Any, name: str, driver: str) -> None:
    with through_a_proxy(servers, name, driver) as (engine, proxy):
        for touched in (False, True):
            with pytest.raises(KeyError, match="mine"), sl.Locks(engine).exclusive(unused()) as held:
                if touched:
                    held.session.connection()
                proxy.cut()
                raise KeyError("mine")
            good_as_new(engine)


@sync
def test_work_fails_with_the_driver_error(servers: Any, name: str, driver: str) -> None:
    with through_a_proxy(servers, name, driver) as (engine, proxy):
        with pytest.raises(DBAPIError) as failed, sl.Locks(engine).exclusive(unused()) as held:
            proxy.cut()
            held.session.connection().exec_driver_sql("SELECT 1")
        assert failed.value.connection_invalidated
        good_as_new(engine)


@sync
def test_ignored_failure_raises_at_the_end(servers: Any, name: str, driver: str) -> None:
    with through_a_proxy(servers, name, driver) as (engine, proxy):
        with pytest.raises(sl.LockLost), sl.Locks(engine).exclusive(unused()) as held:
            proxy.cut()
            with pytest.raises(DBAPIError):
                held.session.connection().exec_driver_sql("SELECT 1")
            assert held.lost
        good_as_new(engine)


@sync
def test_cut_waiter_waits_again(
    servers: Any, engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, driver: str
) -> None:
    """Nothing was held, so it is asked for again, on another connection."""
    key, watched = unused(), watch(name)
    with through_a_proxy(servers, name, driver) as (engine, proxy):
        with engine_to(name).connect() as holder:
            holder.execute(sl.lock.exclusive(key))
            waiting = later(take, engine, key)
            watched.until_waiting(waiting)
            before = proxy.accepted
            proxy.cut()
            until(lambda: proxy.accepted > before, unless=waiting)
        waiting.result(PATIENCE)
        good_as_new(engine)


@sync
def test_stale_pooled_connection(servers: Any, name: str, driver: str) -> None:
    """As after a restart of the server: the next use is not the one that pays for it."""
    with through_a_proxy(servers, name, driver) as (engine, proxy):
        locks = sl.Locks(engine)
        good_as_new(engine)
        for again in (
            lambda: take(engine, "idle"),
            lambda: locks.run(sl.lock.create("idle")),
            lambda: locks.run(sl.lock.vacuum()),
            lambda: locks.exclusive("idle", timeout=0).__enter__()._short.abandon(),
        ):
            proxy.cut()
            again()
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@sync
def test_several_stale_pooled_connections(servers: Any, name: str, driver: str) -> None:
    """All of them are known to be dead after the first one's death."""
    with through_a_proxy(servers, name, driver, pool_size=8) as (engine, proxy):
        connections = [engine.connect() for _ in range(8)]
        for connection in connections:
            connection.close()
        proxy.cut()
        take(engine, "idle")


@sync
def test_cut_session_of_the_app(servers: Any, engine_to: MakeEngine, name: str, driver: str) -> None:
    key, other = unused(), engine_to(name, poolclass=NullPool)
    with through_a_proxy(servers, name, driver) as (engine, proxy):
        with Session(engine) as session:
            session.execute(sl.lock.exclusive(key))
            proxy.cut()
            take(other, key)
            with pytest.raises(DBAPIError):
                session.execute(sl.lock.exclusive(key))
        good_as_new(engine)


@asynchronous
def test_async_block(servers: Any, engine_to: MakeEngine, name: str, driver: str) -> None:
    key, other = unused(), engine_to(name, poolclass=NullPool)

    async def main() -> None:
        async with through_an_async_proxy(servers, name, driver) as (engine, proxy):
            async with sl.AsyncLocks(engine).exclusive(key, timeout=PATIENCE) as held:
                assert not held.lost
                await held.check()
                await held.session.execute(sl.lock.exclusive(key))
                assert not held.lost
            lost = False
            with pytest.raises(sl.LockLost):
                async with sl.AsyncLocks(engine).exclusive(key, timeout=PATIENCE) as held:
                    await held.check()
                    proxy.cut()
                    await asyncio.to_thread(take, other, key)
                    with pytest.raises(sl.LockLost):
                        await held.check()
                    lost = held.lost
            assert lost
            await good_as_new_async(engine)
            with pytest.raises(KeyError, match="mine"):
                async with sl.AsyncLocks(engine).exclusive(key):
                    proxy.cut()
                    raise KeyError("mine")
            await good_as_new_async(engine)
            with pytest.raises(sl.LockLost):
                async with sl.AsyncLocks(engine).exclusive(key):
                    proxy.cut()
            await good_as_new_async(engine)
            with pytest.raises(sl.LockLost):
                async with sl.AsyncLocks(engine).exclusive(key) as held:
                    held.session.add(Unflushed(id=1))  # the end of the block writes it
                    proxy.cut()
            await good_as_new_async(engine)

    asyncio.run(main())


@asynchronous
def test_async_lost_is_set_without_a_round_trip(servers: Any, name: str, driver: str) -> None:
    """``lost`` costs no round trip, and turns by itself once the loop has run."""

    async def main() -> None:
        async with through_an_async_proxy(servers, name, driver) as (engine, proxy):
            with pytest.raises(sl.LockLost):
                async with sl.AsyncLocks(engine).exclusive(unused()) as held:
                    assert not held.lost
                    proxy.cut()
                    deadline = time.monotonic() + PATIENCE
                    while not held.lost:
                        assert time.monotonic() < deadline
                        await asyncio.sleep(0.005)

    asyncio.run(main())


@asynchronous
def test_async_waiter_and_pool(
    servers: Any, engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, driver: str
) -> None:
    key, watched = unused(), watch(name)

    async def main() -> None:
        async with through_an_async_proxy(servers, name, driver) as (engine, proxy):
            with engine_to(name).connect() as holder:
                await asyncio.to_thread(holder.execute, sl.lock.exclusive(key))
                waiting = asyncio.create_task(atake(engine, key))
                await asyncio.to_thread(watched.until_waiting)
                before = proxy.accepted
                proxy.cut()
                await asyncio.to_thread(until, lambda: proxy.accepted > before)
                assert not waiting.done()
            await waiting
            proxy.cut()
            await atake(engine, key)
            proxy.cut()
            await sl.AsyncLocks(engine).run(sl.lock.create(key))
            await good_as_new_async(engine)

    asyncio.run(main())


async def atake(engine: AsyncEngine, key: str) -> None:
    async with sl.AsyncLocks(engine).exclusive(key):
        pass


@asynchronous
def test_async_cut_session_of_the_app(servers: Any, engine_to: MakeEngine, name: str, driver: str) -> None:
    key, other = unused(), engine_to(name, poolclass=NullPool)

    async def main() -> None:
        async with through_an_async_proxy(servers, name, driver) as (engine, proxy):
            async with AsyncSession(engine) as session:
                await session.execute(sl.lock.exclusive(key))
                proxy.cut()
                await asyncio.to_thread(take, other, key)
                with pytest.raises(DBAPIError):
                    await session.execute(sl.lock.exclusive(key))
            await good_as_new_async(engine)

    asyncio.run(main())


@sync
def test_connection_that_dies_as_it_is_made_is_replaced(servers: Any, name: str, driver: str) -> None:
    with through_a_proxy(servers, name, driver) as (engine, proxy):
        locks = sl.Locks(engine)
        for _ in range(2):
            proxy.refusing = 1
            engine.dispose()
            locks.run(sl.Mutex().held())
            proxy.refusing = 1
            engine.dispose()
            with locks.exclusive("refused", timeout=PATIENCE):
                pass
        assert proxy.refusing == 0


@asynchronous
def test_async_connection_that_dies_as_it_is_made_is_replaced(servers: Any, name: str, driver: str) -> None:
    async def story() -> None:
        async with through_an_async_proxy(servers, name, driver) as (engine, proxy):
            locks = sl.AsyncLocks(engine)
            for _ in range(2):
                proxy.refusing = 1
                await engine.dispose()
                await locks.run(sl.Mutex().held())
            assert proxy.refusing == 0

    asyncio.run(story())

"""A connection that is cut between app and server: the lock is lost, is reported, and a waiter acquires it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
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


def take(engine: Engine, key: str) -> None:
    with sl.Locks(engine).exclusive(key):
        pass


@sync
@pytest.mark.parametrize("ignored", [False, True])
def test_work_fails_and_the_block_is_lost(servers: Any, name: str, driver: str, ignored: bool) -> None:
    with through_a_proxy(servers, name, driver) as (engine, proxy):
        with pytest.raises(sl.LockLost if ignored else DBAPIError), sl.Locks(engine).exclusive(unused()) as held:
            proxy.cut()
            with contextlib.suppress(DBAPIError) if ignored else contextlib.nullcontext():
                held.session.connection().exec_driver_sql("SELECT 1")
            assert held.lost
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
def test_async_cut_waiter_waits_again(
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
            await good_as_new_async(engine)

    asyncio.run(main())


async def atake(engine: AsyncEngine, key: str) -> None:
    async with sl.AsyncLocks(engine).exclusive(key):
        pass


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

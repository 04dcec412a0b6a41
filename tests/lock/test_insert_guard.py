"""MySQL: the guard around a key's first INSERT is always released; GET_LOCK outlives a transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, Watch, async_connected, connected, installed, later, seen, until, unused

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
MINE = text("SELECT count(*) FROM performance_schema.metadata_locks WHERE object_type = 'USER LEVEL LOCK'")
GATE = "SHA2(CONCAT_WS(':', 'sqlalchemy_locks', DATABASE(), 'lock_locked_keys', :key), 256)"
EVERY: list[Any] = [sl.lock.exclusive, sl.lock.shared, sl.lock.try_exclusive, sl.lock.try_shared, sl.lock.create]

level = pytest.mark.parametrize("level", LEVELS)
every = pytest.mark.parametrize("make", EVERY, ids=lambda make: make.__name__)


def guards(connection: Connection) -> int:
    """How many named locks are held, or waited for, on the whole server."""
    return int(connection.scalar(MINE) or 0)


def all_released(connection: Connection) -> None:
    """Assert that no guard is held. Those of closed connections are released a little later."""
    until(lambda: guards(connection) == 0)


@pytest.fixture
def engine(engine_to: MakeEngine, level: str) -> Engine:
    return engine_to("mysql", isolation_level=level)


@level
@every
def test_guard_is_released(engine: Engine, make: Any) -> None:
    with engine.connect() as connection, engine.connect() as other:
        with seen(engine) as statements:
            connection.execute(make(unused()))
        assert any("get_lock(" in statement for statement in statements)
        all_released(other)


@level
@every
def test_guard_is_released_after_a_timeout(engine: Engine, level: str, make: Any) -> None:
    key = unused()
    with engine.connect() as holder, engine.connect() as other:
        holder.execute(sl.lock.exclusive(key))
        other.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 1")
        if "try" in make.__name__:
            assert other.scalar(make(key)) is False
        elif make is sl.lock.create and level == "REPEATABLE READ":
            assert other.scalar(make(key)) == 0  # the row is committed at its first use, and is visible without a lock
        else:
            with pytest.raises(sl.LockTimeout):
                other.execute(make(key))
        all_released(holder)
        other.invalidate()


@level
@pytest.mark.parametrize("make", EVERY[:2], ids=lambda make: make.__name__)
def test_guard_is_free_during_the_wait_for_a_row(
    engine: Engine, watch: Callable[[str], Watch], make: Any, level: str
) -> None:
    """A holder that acquires its key again would wait for the guard, whose owner waits for the row."""
    key = unused()
    with engine.connect() as other, engine.connect() as waiter, engine.connect() as holder:
        holder.execute(sl.lock.exclusive(key))
        waiting = later(waiter.execute, make(key))
        watch("mysql").until_waiting(waiting)
        all_released(other)
        holder.execute(sl.lock.exclusive(key))
        assert not waiting.done()
        holder.rollback()
        waiting.result(PATIENCE)


@level
def test_guard_is_released_after_a_deadlock(engine: Engine, watch: Callable[[str], Watch]) -> None:
    """Each holds a new key and acquires the other's; InnoDB rolls one of them back."""
    a, b = unused(), unused()
    with engine.connect() as one, engine.connect() as other, engine.connect() as third:
        one.execute(sl.lock.exclusive(a))
        other.execute(sl.lock.exclusive(b))
        waiting = later(one.execute, sl.lock.exclusive(b))
        watch("mysql").until_waiting(waiting)
        closing = later(other.execute, sl.lock.exclusive(a))
        # InnoDB has rolled one of them back, so that the other continues
        (error,) = [error for future in (waiting, closing) if (error := future.exception(PATIENCE))]
        assert "1213" in str(error)
        all_released(third)


@level
def test_new_key_while_another_holds_the_guard(engine: Engine) -> None:
    """A try returns False while another transaction inserts the row. A waiting call continues, and acquires it."""
    key = unused()
    with engine.connect() as guard_holder, engine.connect() as other:
        assert guard_holder.scalar(text(f"SELECT GET_LOCK({GATE}, 0)"), {"key": sl.lock.key(key)}) == 1
        for make in (sl.lock.try_exclusive, sl.lock.try_shared):
            assert other.scalar(make(key)) is False
            other.rollback()
        waiting = later(other.execute, sl.lock.exclusive(key))
        until(lambda: guards(guard_holder) == 2, unless=waiting)
        guard_holder.scalar(text(f"SELECT RELEASE_LOCK({GATE})"), {"key": sl.lock.key(key)})
        waiting.result(PATIENCE)
        all_released(guard_holder)


def test_guard_is_released_after_a_cancellation(
    servers: Any, watch: Callable[[str], Watch], engine_to: MakeEngine
) -> None:
    """The server notices at the latest when the key is free; then neither the lock nor the guard is held."""
    key, watched = unused(), watch("mysql")

    async def main() -> None:
        async with async_connected(installed(servers, "mysql", "aiomysql")) as engine, engine.connect() as other:
            waiting = asyncio.create_task(other.execute(sl.lock.exclusive(key)))
            while not await asyncio.to_thread(watched.waiting):
                await asyncio.sleep(0.13)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    engine = engine_to("mysql", isolation_level="READ COMMITTED")
    with engine.connect() as holder, engine.connect() as other:
        holder.execute(sl.lock.exclusive(key))
        asyncio.run(main())
        holder.rollback()
        until(lambda: guards(other) == 0)
        until(lambda: other.scalar(sl.lock.try_exclusive(key)))


def test_each_database_has_its_own_guards(servers: Any, engine_to: MakeEngine) -> None:
    url, key = servers.fresh("mysql", "pymysql"), unused()
    with connected(url) as elsewhere, elsewhere.connect() as guard_holder:
        guard_holder.execute(text(f"SELECT GET_LOCK({GATE}, 0)"), {"key": sl.lock.key(key)})
        with engine_to("mysql").connect() as here:
            assert here.scalar(sl.lock.try_exclusive(key)) is True
            until(lambda: guards(here) == 1)

"""An exhausted pool: ``timeout=`` includes the wait for a connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, QueuePool, event, exc
from sqlalchemy.ext.asyncio import AsyncEngine

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects.connections import connect
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import (
    ASYNC,
    ENGINES,
    PATIENCE,
    Watch,
    all_of,
    async_connected,
    connected,
    installed,
    later,
    until,
    unused,
)

#: one connection, and a ``pool_timeout`` so long that it never ends a wait here
ONE: dict[str, Any] = {"pool_size": 1, "max_overflow": 0, "pool_timeout": PATIENCE}
WITHIN = "no connection was free in the pool within the timeout: all 1 are in use"


def exclusive(locks: Any, name: str, timeout: float | None) -> Any:
    return locks.exclusive(name, timeout=timeout)


def shared(locks: Any, name: str, timeout: float | None) -> Any:
    return locks.shared(name, timeout=timeout)


def several(locks: Any, name: str, timeout: float | None) -> Any:
    return locks.exclusive(name, unused(), timeout=timeout)


def semaphore(locks: Any, name: str, timeout: float | None) -> Any:
    return locks.semaphore(name, ttl=3600, timeout=timeout)


def lease(locks: Any, name: str, timeout: float | None) -> Any:
    return locks.lease(name, ttl=3600, timeout=timeout)


def made_before(locks: Any, name: str, timeout: float | None) -> Any:
    return locks.semaphore({name: 1}, ttl=3600, timeout=timeout, external_id=unused("id"))


BLOCKS = [exclusive, shared, several, semaphore, lease, made_before]


def out(engine: Engine | AsyncEngine) -> int:
    pool = engine.pool
    assert isinstance(pool, QueuePool)
    return pool.checkedout()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, engine_to: MakeEngine) -> Engine:
    return engine_to(request.param, **ONE)


@pytest.mark.parametrize("timeout", [0, 0.2])
@pytest.mark.parametrize("block", BLOCKS)
def test_checkout_timeout_of_a_block(engine: Engine, block: Callable[..., Any], timeout: float) -> None:
    locks, name = sl.Locks(engine), unused()
    locks.run(sl.semaphore.create(name, capacity=1))
    with engine.connect():
        with pytest.raises(sl.PoolTimeout, match=WITHIN) as late:
            block(locks, name, timeout).__enter__()
        assert isinstance(late.value.__cause__, exc.TimeoutError)
        assert out(engine) == 1
    with block(locks, name, PATIENCE):
        pass
    assert out(engine) == 0


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_checkout_timeout_of_acquire(engine: Engine, timeout: float) -> None:
    locks, name = sl.Locks(engine), unused()
    locks.run(sl.semaphore.create(name, capacity=1))
    with engine.connect():
        with pytest.raises(sl.PoolTimeout, match=WITHIN) as late:
            locks.acquire({name: 1}, timeout=timeout)
        assert late.value.holders == ()
    locks.release(locks.acquire({name: 1}, timeout=PATIENCE, ttl=3600))


def test_single_attempt_uses_a_free_connection(engine: Engine) -> None:
    locks, name = sl.Locks(engine), unused()
    for _ in range(3):
        with locks.exclusive(name, timeout=0):
            pass
    assert out(engine) == 0


def test_locked_key_is_not_a_pool_timeout(engine: Engine, engine_to: MakeEngine) -> None:
    locks, name = sl.Locks(engine), unused()
    with connected(engine.url.render_as_string(hide_password=False)) as other, sl.Locks(other).exclusive(name):
        with pytest.raises(sl.LockTimeout, match=r"is locked \(timeout=0\)") as late:
            locks.exclusive(name, timeout=0).__enter__()
    assert not isinstance(late.value, sl.PoolTimeout)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", ENGINES)
def test_without_a_timeout_the_pool_decides(name: str, engine_to: MakeEngine, block: Callable[..., Any]) -> None:
    engine = engine_to(name, **ONE | {"pool_timeout": 0.1})
    locks, key = sl.Locks(engine), unused()
    locks.run(sl.semaphore.create(key, capacity=1))
    with engine.connect():
        with pytest.raises(sl.PoolTimeout, match="within its own pool_timeout"):
            block(locks, key, None).__enter__()
        with pytest.raises(sl.PoolTimeout, match="within its own pool_timeout"):
            locks.run(sl.Mutex().acquire(key, nowait=True))
        with pytest.raises(sl.PoolTimeout, match="within its own pool_timeout"):
            locks.mutex.acquire(key)
    assert out(engine) == 0


@pytest.mark.parametrize("name", ENGINES)
def test_timeout_overrides_the_pool_timeout(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, **ONE | {"pool_timeout": 0.01})
    locks, key, pool = sl.Locks(engine), unused(), engine.pool

    def hold() -> None:
        with locks.exclusive(key, timeout=PATIENCE):
            pass

    with engine.connect():
        waiting = later(hold)
        until(lambda: pool._pool.not_empty._waiters, unless=waiting)  # type: ignore[attr-defined]
    waiting.result(PATIENCE)
    assert out(engine) == 0


def test_threads_wait_for_a_connection_within_the_timeout(engine: Engine) -> None:
    """A pool that had a free connection when it was checked may have none a moment later."""
    locks = sl.Locks(engine)

    def tries() -> int:
        got = 0
        for _ in range(20):
            with contextlib.suppress(sl.LockTimeout), locks.exclusive(unused(), timeout=0):
                got += 1
        return got

    assert sum(all_of(*[tries] * 8)) > 0
    assert out(engine) == 0


@pytest.mark.parametrize("place", ASYNC)
def test_async_checkout_timeout(place: str, servers: Any) -> None:
    name, driver = ASYNC[place]

    async def main() -> None:
        async with async_connected(installed(servers, name, driver), **ONE) as engine:
            locks, key = sl.AsyncLocks(engine), unused()
            await locks.run(sl.semaphore.create(key, capacity=1))
            for timeout in (0, 0.2):
                async with engine.connect():
                    for block in BLOCKS:
                        with pytest.raises(sl.PoolTimeout, match=WITHIN):
                            await block(locks, key, timeout).__aenter__()
                    with pytest.raises(sl.PoolTimeout, match=WITHIN):
                        await locks.acquire({key: 1}, timeout=timeout)
                    assert out(engine) == 1
                async with locks.exclusive(key, timeout=0):
                    pass
            async with engine.connect():
                waiting = asyncio.create_task(in_a_block(locks, key))
                while not engine.pool._pool._queue._getters:  # type: ignore[attr-defined]
                    await asyncio.sleep(0)
                    assert not waiting.done()
            await waiting
            assert out(engine) == 0

    async def in_a_block(locks: sl.AsyncLocks, key: str) -> None:
        async with locks.exclusive(key, timeout=PATIENCE):
            pass

    asyncio.run(main())


class Own(QueuePool):
    """A pool class of an app, which behaves as SQLAlchemy's does."""


class Chosen(QueuePool):
    """A pool class that chooses connections, and so limits the wait, itself."""

    def _do_get(self) -> Any:
        return super()._do_get()


@pytest.mark.parametrize("pool", [Own, Chosen])
def test_custom_pool_class(pool: type[QueuePool], engine_to: MakeEngine) -> None:
    own = {"pool_timeout": PATIENCE if pool is Own else 0.1}
    engine = engine_to("postgresql15", poolclass=pool, **ONE | own)
    with engine.connect():
        with pytest.raises(sl.PoolTimeout, match=WITHIN):
            sl.Locks(engine).exclusive(unused(), timeout=0).__enter__()
    with sl.Locks(engine).exclusive(unused(), timeout=0):
        pass


def test_pool_with_its_own_checkout(engine_to: MakeEngine) -> None:
    asked: list[object] = []

    class Counting(QueuePool):
        def connect(self) -> Any:
            asked.append(self)
            return super().connect()

    engine = engine_to("postgresql15", poolclass=Counting, **ONE)
    with sl.Locks(engine).exclusive(unused(), timeout=PATIENCE):
        assert len(asked) == 1
    assert out(engine) == 0


def test_checkout_listener_that_reports_a_dead_connection(engine_to: MakeEngine, watch: Callable[[str], Watch]) -> None:
    """As with listeners that ping the server at checkout: another connection replaces it, without a warning."""
    watched = watch("postgresql15")
    engine = engine_to("postgresql15", **ONE)
    with engine.connect() as connection:
        backend = watched.backend(connection)
    watched.kill(backend)

    @event.listens_for(engine, "engine_connect")
    def ask(connection: Connection) -> None:
        connection.exec_driver_sql("SELECT 1")
        connection.rollback()

    with sl.Locks(engine).exclusive(unused(), timeout=PATIENCE):
        pass
    assert out(engine) == 0


def test_pool_without_a_limit(engine_to: MakeEngine) -> None:
    for options in ({"poolclass": NullPool}, {"pool_size": 1, "max_overflow": -1}, {"pool_size": 0}):
        engine = engine_to("postgresql15", **options)
        with engine.connect(), engine.connect(), sl.Locks(engine).exclusive(unused(), timeout=0):
            pass


def test_checkout_with_a_timeout_fires_pool_events(engine_to: MakeEngine) -> None:
    """Events, options and the pool's counters are those of ``engine.connect()``."""
    engine = engine_to("postgresql15", **ONE, pool_pre_ping=True, execution_options={"mine": 1})
    heard: list[str] = []
    for what in ("connect", "checkout", "checkin", "invalidate"):
        event.listen(engine, what, lambda *_, what=what: heard.append(what))
    found = []
    for checked_out in (lambda: connect(engine, 0), engine.connect):
        with checked_out() as connection:
            assert connection.engine is engine
            assert connection.get_execution_options()["mine"] == 1
            assert connection.exec_driver_sql("SELECT 1").scalar() == 1
            connection.invalidate()
            connection.rollback()
            assert connection.exec_driver_sql("SELECT 1").scalar() == 1
        found.append(heard.copy())
        heard.clear()
        engine.dispose()
    assert found[0] == found[1] != []
    with connect(engine.execution_options(mine=2), 5) as connection:
        assert connection.get_execution_options()["mine"] == 2
    assert out(engine) == 0


def test_unreachable_server_raises_sqlalchemys_error(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15", **ONE)
    away = engine.url.set(port=1)
    with connected(away.render_as_string(hide_password=False), **ONE) as unreachable:
        for _ in range(3):  # and the pool doesn't count it
            with pytest.raises(exc.OperationalError):
                sl.Locks(unreachable).exclusive(unused(), timeout=5).__enter__()
        assert out(unreachable) == 0

"""An exhausted pool: the wait for a connection is limited by the pool's own ``pool_timeout``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, QueuePool, event, exc
from sqlalchemy.ext.asyncio import AsyncEngine

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ENGINES, PATIENCE, Watch, connected, unused

ONE: dict[str, Any] = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.1}
WITHIN = "no connection was free within the pool's own pool_timeout"
BLOCKS: list[Callable[[Any, str], Any]] = [
    lambda locks, name: locks.exclusive(name, timeout=60),
    lambda locks, name: locks.shared(name),
    lambda locks, name: locks.semaphore(name, ttl=3600, timeout=60),
    lambda locks, name: locks.lease(name, ttl=3600),
]


def out(engine: Engine | AsyncEngine) -> int:
    pool = engine.pool
    assert isinstance(pool, QueuePool)
    return pool.checkedout()


@pytest.mark.parametrize("name", ENGINES)
def test_pool_timeout_of_blocks_and_calls(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, **ONE)
    locks, key = sl.Locks(engine), unused()
    locks.run(sl.semaphore.create(key, capacity=1))
    with engine.connect():
        for block in BLOCKS:
            with pytest.raises(sl.PoolTimeout, match=WITHIN) as late:
                block(locks, key).__enter__()
            assert isinstance(late.value.__cause__, exc.TimeoutError)
        calls = [lambda: locks.acquire({key: 1}, timeout=0), lambda: locks.run(sl.Mutex().acquire(key, nowait=True))]
        for call in (*calls, lambda: locks.mutex.acquire(key)):
            with pytest.raises(sl.PoolTimeout, match=WITHIN):
                call()
        assert out(engine) == 1
    for block in BLOCKS:
        with block(locks, key):
            pass
    assert out(engine) == 0


def test_checkout_listener_that_reports_a_dead_connection(engine_to: MakeEngine, watch: Callable[[str], Watch]) -> None:
    """As with listeners that ping the server at checkout: another connection replaces it."""
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


def test_unreachable_server_raises_sqlalchemys_error(engine_to: MakeEngine) -> None:
    away = engine_to("postgresql15").url.set(port=1)
    with connected(away.render_as_string(hide_password=False), **ONE) as unreachable:
        for _ in range(3):  # and the pool doesn't count it
            with pytest.raises(exc.OperationalError):
                sl.Locks(unreachable).exclusive(unused(), timeout=5).__enter__()
        assert out(unreachable) == 0

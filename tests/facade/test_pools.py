"""Fifty tasks or threads on a pool of five: no timeouts from the pool, no leak; waiters wait in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, Watch, all_of, async_connected, installed, later, until, unused

TASKS, EACH = 50, 2
SMALL: dict[str, Any] = {"pool_size": 5, "max_overflow": 0, "pool_timeout": PATIENCE}
DRIVERS = {
    "postgresql15/asyncpg": ("postgresql15", "asyncpg"),
    "postgresql15/psycopg": ("postgresql15", "psycopg"),
    "mysql/aiomysql": ("mysql", "aiomysql"),
}


@contextmanager
def alone(inside: set[str], key: str) -> Iterator[None]:
    """Fail where another one is inside."""
    assert key not in inside
    inside.add(key)
    yield
    inside.remove(key)


@pytest.mark.parametrize("keys", [1, 10])
@pytest.mark.parametrize("which", DRIVERS)
def test_many_blocks_on_a_small_pool(servers: Any, which: str, keys: int) -> None:
    async def main() -> None:
        names, inside, entered = [unused() for _ in range(keys)], set[str](), 0
        async with async_connected(installed(servers, *DRIVERS[which]), **SMALL) as engine:
            locks = sl.AsyncLocks(engine)

            async def work(number: int) -> None:
                nonlocal entered
                name = names[number % keys]
                for _ in range(EACH):
                    async with locks.exclusive(name):
                        with alone(inside, name):
                            await asyncio.sleep(0)
                            entered += 1

            await asyncio.gather(*(work(number) for number in range(TASKS)))
            assert entered == TASKS * EACH
            assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]

    asyncio.run(main())


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb", "sqlite"])
def test_many_threads_on_a_small_pool(engine_to: MakeEngine, name: str) -> None:
    locks = sl.Locks(engine_to(name, **SMALL))
    key, mutex, inside, entered = unused(), unused("mutex"), set[str](), list[int]()

    def work(number: int) -> None:
        for _ in range(EACH):
            with locks.exclusive(key), alone(inside, key):
                entered.append(number)
        if name != "sqlite":
            assert locks.mutex.acquire(f"{mutex} {number}")
            assert locks.mutex.release(f"{mutex} {number}")

    all_of(*(partial(work, number) for number in range(TASKS)))
    assert len(entered) == TASKS * EACH
    assert locks._engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
def test_waiters_leave_connections_to_others(engine_to: MakeEngine, watch: Callable[[str], Watch], name: str) -> None:
    """Fifty threads wait for one holder: two connections are used, and the holder gets one more for its work."""
    engine, server, key = engine_to(name, **SMALL), watch(name), unused()
    locks, had = sl.Locks(engine), []
    pool: Any = engine.pool
    most = 0

    def seen(*_: Any) -> None:
        nonlocal most
        most = max(most, pool.checkedout() + 1)

    def wait(number: int) -> None:
        with locks.exclusive(key, timeout=600):
            had.append(number)

    locks.run(sl.lock.create(key))
    event.listen(engine, "checkout", seen)
    with locks.exclusive(key):
        waiting = []
        for number in range(TASKS):
            waiting.append(later(wait, number))
            # in the queue, or at its head, before the next thread starts
            until(lambda: line(engine) == len(waiting))
        server.until_waiting(waiting[0])
        assert pool.checkedout() == 2
        locks.run(sl.lock.vacuum())
        # the holder, one waiter, vacuum; later, a thread that ends may still have its connection when the next one begins
        assert most <= 4
    for future in waiting:
        future.result(PATIENCE)
    assert had == list(range(TASKS))  # first come, first served
    assert pool.checkedout() == 0


def line(engine: Any) -> int:
    """How many wait for a key, including the one that waits on a connection."""
    from sqlalchemy_locks.runtime.local_queue import local_queues

    return sum(1 + len(turn.behind or ()) for turn in list(local_queues(engine.dialect).front.values()))


def test_timeout_includes_the_local_queue(engine_to: MakeEngine, watch: Callable[[str], Watch]) -> None:
    engine, key = engine_to("postgresql15", **SMALL), unused()
    locks = sl.Locks(engine)

    def wait(timeout: float | None) -> None:
        with locks.exclusive(key, timeout=timeout):
            pass

    with locks.exclusive(key):
        server = watch("postgresql15")
        patient = later(wait, 600)
        server.until_waiting(patient)
        with pytest.raises(sl.LockTimeout, match="could not be acquired within 0.2 s: held by session") as refused:
            later(wait, 0.2).result(PATIENCE)
        assert len(refused.value.holders) == 1
        with pytest.raises(sl.LockTimeout, match="timeout=0"):
            later(wait, 0).result(PATIENCE)
    patient.result(PATIENCE)
    wait(None)


@pytest.mark.parametrize(
    ("name", "driver"), [("postgresql15", "psycopg2"), ("mysql", "pymysql"), ("mariadb", "pymysql")]
)
def test_connection_that_dies_while_its_level_is_reset(
    engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, driver: str
) -> None:
    """SQLAlchemy takes its place out of the pool for good; the next caller would wait for it in vain."""
    server, one = watch(name), {"pool_size": 1, "max_overflow": 0, "pool_timeout": 1}
    # without a ROLLBACK before, which would find that it has died
    engine = engine_to(name, driver, isolation_level="AUTOCOMMIT", pool_reset_on_return=None, **one)
    locks, key = sl.Locks(engine), unused()
    dying: list[int] = []

    def die(connection: Any, *_: Any) -> None:
        if dying:
            server.kill(dying.pop())

    event.listen(engine, "reset", die)
    for _ in range(2):
        with locks.exclusive(key) as held:
            dying.append(server.backend(held.session.connection()))
    assert not dying
    assert locks.mutex.acquire(unused("mutex"))
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]

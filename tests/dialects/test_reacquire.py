"""A key that this transaction holds is acquired again immediately, past waiters for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import EVERYWHERE, INNODB, PATIENCE, Watch, later, unused

NAMES = [name for name in EVERYWHERE if name != "sqlite"]  # SQLite has one lock, of the whole database
LEVELS = ["READ COMMITTED", "REPEATABLE READ"]
AGAIN: list[Any] = [sl.lock.try_shared, sl.lock.try_exclusive, sl.lock.shared, sl.lock.exclusive]

engines = pytest.mark.parametrize("name", NAMES)
at_levels = pytest.mark.parametrize(
    ("name", "level"), [*((name, LEVELS[0]) for name in NAMES), *((name, LEVELS[1]) for name in INNODB)]
)


def opened(engine_to: MakeEngine, name: str, level: str) -> tuple[Connection, Connection, Connection]:
    engine = engine_to(name, isolation_level=level)
    # closed in the opposite order: the holder first, since the waiter still waits for it after a failed assertion
    return engine.connect(), engine.connect(), engine.connect()


@at_levels
@pytest.mark.parametrize("waits", [sl.lock.shared, sl.lock.exclusive], ids=lambda make: make.__name__)
def test_an_exclusive_key_is_acquired_again_past_waiters(
    engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, level: str, waits: Any
) -> None:
    key = unused()
    third, waiter, holder = opened(engine_to, name, level)
    with third, waiter, holder:
        holder.execute(sl.lock.exclusive(key, allow_stale=True))
        waiting = later(waiter.execute, waits(key, allow_stale=True))
        watch(name).until_waiting(waiting)
        for make in AGAIN:
            assert later(holder.scalar, make(key, allow_stale=True)).result(PATIENCE) in (True, None)
        assert third.scalar(sl.lock.try_shared(key, allow_stale=True)) is False
        third.rollback()
        assert not waiting.done()
        holder.rollback()
        waiting.result(PATIENCE)
        assert third.scalar(sl.lock.try_exclusive(key, allow_stale=True)) is False


@engines
def test_a_try_does_not_get_past_a_waiter(engine_to: MakeEngine, watch: Callable[[str], Watch], name: str) -> None:
    """It doesn't help to hold another key, or to have held this one before, or inside a savepoint that was rolled back."""
    key, other = unused(), unused()
    third, waiter, holder = opened(engine_to, name, "READ COMMITTED")
    with third, waiter, holder:
        holder.execute(sl.lock.create(key, other))
        holder.commit()
        third.execute(sl.lock.exclusive(other))
        holder.execute(sl.lock.exclusive(key))
        waiting = later(waiter.execute, sl.lock.exclusive(key))
        watch(name).until_waiting(waiting)
        for make in AGAIN[:2]:
            assert third.scalar(make(key)) is False
            assert holder.scalar(make(other)) is False
        holder.rollback()
        waiting.result(PATIENCE)
        assert holder.scalar(sl.lock.try_shared(key)) is False


@at_levels
def test_a_shared_key_is_shared_again_past_waiters(
    engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, level: str
) -> None:
    """Sharing it again succeeds. A try for an exclusive lock may fail, but doesn't wait."""
    key = unused()
    third, waiter, holder = opened(engine_to, name, level)
    with third, waiter, holder:
        holder.execute(sl.lock.create(key))
        holder.commit()
        holder.execute(sl.lock.shared(key, allow_stale=True))
        waiting = later(waiter.execute, sl.lock.exclusive(key, allow_stale=True))
        watch(name).until_waiting(waiting)
        for make in (sl.lock.try_shared, sl.lock.shared):
            assert later(holder.scalar, make(key, allow_stale=True)).result(PATIENCE) in (True, None)
        got = later(holder.scalar, sl.lock.try_exclusive(key, allow_stale=True)).result(PATIENCE)
        assert later(third.scalar, sl.lock.try_exclusive(key, allow_stale=True)).result(PATIENCE) is False
        third.rollback()
        if got:
            assert later(third.scalar, sl.lock.try_shared(key, allow_stale=True)).result(PATIENCE) is False
            third.rollback()
        assert not waiting.done()
        holder.rollback()
        waiting.result(PATIENCE)

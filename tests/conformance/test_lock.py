"""The guarantees of locks, on every engine, driver and runner."""

from __future__ import annotations

import pytest
from sqlalchemy import text

import sqlalchemy_locks as sl
from tests.conformance.conftest import RUNNERS, World, combinations
from tests.fixtures.parties import PATIENCE

pytestmark = pytest.mark.parametrize("world", combinations(RUNNERS), ids=str, indirect=True)


def test_exclusive_excludes_exclusive_and_shared(world: World) -> None:
    key = world.key()
    a, b = world.client(), world.client()
    a.hold(key)
    assert b.try_hold(key) is False
    assert b.try_hold(key, shared=True) is False
    b.end()
    a.end()
    assert b.try_hold(key) is True


def test_sharers_share_and_keep_writers_out(world: World) -> None:
    key = world.key()
    a, b, c = world.client(), world.client(), world.client()
    a.hold(key, shared=True)
    a.end()
    a.hold(key, shared=True)
    if world.is_sqlite:
        assert b.try_hold(key, shared=True) is False
        return
    b.hold(key, shared=True)
    assert c.try_hold(key) is False
    a.end()
    c.end()
    assert c.try_hold(key) is False
    b.end()
    c.end()
    assert c.try_hold(key) is True


def test_two_sharers_of_a_brand_new_key_at_once(world: World) -> None:
    key = world.key()
    a, b = world.client(), world.client()
    a.hold(key, shared=True)
    if world.advisory or world.is_innodb:
        b.hold(key, shared=True)
    else:
        # the first use holds it exclusively until its commit, as documented; tries must not wait for it
        assert b.try_hold(key, shared=True) is False
        b.end()
        a.end()
        a.hold(key, shared=True)
        if not world.is_sqlite:
            b.hold(key, shared=True)


def test_created_keys_are_shared_from_their_first_use(world: World) -> None:
    key = world.key()
    a, b = world.client(), world.client()
    made = a.scalar(sl.lock.create(key, key, world.key()))
    a.end()
    assert made == (2 if world.table else 0)
    assert a.scalar(sl.lock.create(key)) == 0
    a.end()
    a.hold(key, shared=True)
    if not world.is_sqlite:
        b.hold(key, shared=True)


@pytest.mark.parametrize("shared", [False, True])
def test_a_waiter_acquires_when_the_holder_ends(world: World, shared: bool) -> None:
    key = world.key()
    a, b, c = world.client(), world.client(), world.client()
    a.hold(key)
    waiting = b.later(b.hold, key, shared=shared)
    world.waits(waiting)
    a.end()
    waiting.result(PATIENCE)
    assert c.try_hold(key) is False


@pytest.mark.parametrize("committed", [False, True], ids=["brand-new", "known"])
def test_a_try_never_waits_for_uncommitted_rows(world: World, committed: bool) -> None:
    key = world.key()
    a, b = world.client(), world.client()
    if committed:
        a.hold(key)
        a.end()
    a.hold(key)
    # `later`, so that a try that waits deadlocks with the test and fails, without a clock
    for shared in (False, True):
        assert b.later(b.try_hold, key, shared=shared).result(PATIENCE) is False
        b.end()
    a.end(rollback=True)
    assert b.try_hold(key) is True


def test_other_keys_are_not_held(world: World) -> None:
    if world.is_sqlite:
        pytest.skip("SQLite has one lock: the database's write lock")
    a, b = world.client(), world.client()
    a.hold(world.key())
    assert b.later(b.try_hold, world.key()).result(PATIENCE) is True
    b.end()
    b.later(b.hold, world.key()).result(PATIENCE)
    b.end()
    b.later(b.hold, world.key(), shared=True).result(PATIENCE)
    b.end()
    assert b.later(b.try_hold, world.key(), shared=True).result(PATIENCE) is True
    b.end()
    assert a.try_hold(world.key()) if a.accumulates else True
    assert b.later(b.try_hold, world.key()).result(PATIENCE) is True
    b.end()
    b.later(b.hold, world.key()).result(PATIENCE)


def test_names_and_integers_are_keys(world: World) -> None:
    a, b = world.client(), world.client()
    name = world.key("naïve 😀 'quoted' \"and\" %s")
    a.hold(name)
    assert b.try_hold(sl.lock.key(name)) is False
    b.end()
    a.end()
    for number in (2**63 - 1, -(2**63), 0, -1):
        a.hold(number)
        assert b.try_hold(number) is False
        b.end()
        a.end()


def test_taken_again_in_the_same_transaction(world: World) -> None:
    a = world.client()
    if not a.accumulates:
        key = world.key()
        if a.asynchronous:
            with pytest.raises(sl.ReentryError):
                a.place.loop.result(_enter_twice(sl.AsyncLocks(a.place.engine), key))
            return
        a.hold(key)
        with pytest.raises(sl.ReentryError):
            a.later(a.locks.shared(key).__enter__).result()
        return
    b = world.client()
    key = world.key()
    a.hold(key)
    a.hold(key)
    a.hold(key, shared=True)
    assert a.try_hold(key) is True
    assert a.try_hold(key, shared=True) is True
    assert b.try_hold(key) is False
    b.end()
    a.end()
    assert b.try_hold(key) is True


async def _enter_twice(locks: sl.AsyncLocks, key: str) -> None:
    async with locks.exclusive(key), locks.shared(key):
        pass


def test_a_wait_is_bounded(world: World) -> None:
    key = world.key()
    a, b = world.client(), world.client()
    a.hold(key)
    with pytest.raises(sl.LockTimeout):
        b.later(b.hold, key, wait=0.2).result(PATIENCE)
    b.end(rollback=True)
    a.end()
    b.hold(key, wait=60)


def test_a_bounded_wait_restores_the_setting(world: World) -> None:
    setting = {
        "mysql": "SELECT @@innodb_lock_wait_timeout",
        "mariadb": "SELECT @@innodb_lock_wait_timeout",
        "sqlite": "PRAGMA busy_timeout",
    }.get(world.engine_name, "SELECT current_setting('lock_timeout')")
    a = world.client()
    if not a.accumulates:
        a.hold(world.key())
    before = a.scalar(text(setting))
    a.end()
    a.hold(world.key(), wait=60)
    assert a.scalar(text(setting)) == before


# The races of the published snippets.


def test_unlock_while_another_waits(world: World) -> None:
    """A holds, B waits, A unlocks and commits: B must hold it, so C is kept out."""
    if world.is_sqlite:
        pytest.skip("SQLite keeps no keys that could be unlocked")
    key = world.key()
    a, b, c = world.client(), world.client(), world.client()
    a.hold(key)
    a.end()
    a.hold(key)
    waiting = b.later(b.hold, key)
    world.waits(waiting)
    a.scalar(sl.lock.unlock(key))
    a.end()
    waiting.result(PATIENCE)
    assert c.later(c.try_hold, key).result(PATIENCE) is False
    c.end()
    third = c.later(c.hold, key)
    world.waits(third)
    b.end()
    third.result(PATIENCE)


def test_vacuum_while_another_waits(world: World) -> None:
    """A vacuum removes the row that B waits for: B must hold the key nevertheless."""
    if world.table is None or world.is_innodb:
        pytest.skip(f"{world.engine_name} keeps no keys that a vacuum could hold")
    key = world.key()
    b, c = world.client(), world.client()
    with world.plain.connect() as vacuum:
        vacuum.execute(sl.lock.create(key))
        vacuum.commit()
        assert vacuum.scalar(sl.lock.vacuum()) >= 1
        waiting = b.later(b.hold, key)
        world.waits(waiting)
        assert c.later(c.try_hold, key).result(PATIENCE) is False
        c.end()
        vacuum.commit()
    waiting.result(PATIENCE)
    assert c.later(c.try_hold, key).result(PATIENCE) is False


def test_vacuum_that_has_not_deleted_yet_while_another_waits(world: World) -> None:
    """Between a vacuum's SELECT and its DELETE, B begins to wait for the row, which is then deleted."""
    if world.table is None:
        pytest.skip(f"{world.engine_name} keeps no keys that could be vacuumed")
    key = world.key()
    column = "`key`" if world.is_innodb else "key"
    b, c = world.client(), world.client()
    with world.plain.connect() as vacuum:
        vacuum.execute(sl.lock.create(key))
        vacuum.commit()
        number = {"key": sl.lock.key(key)}
        vacuum.execute(text(f"SELECT 1 FROM {world.table} WHERE {column} = :key FOR UPDATE"), number)
        waiting = b.later(b.hold, key)
        world.waits(waiting)
        vacuum.execute(text(f"DELETE FROM {world.table} WHERE {column} = :key"), number)
        vacuum.commit()
    waiting.result(PATIENCE)
    assert c.later(c.try_hold, key).result(PATIENCE) is False
    c.end()
    third = c.later(c.hold, key)
    world.waits(third)
    b.end()
    third.result(PATIENCE)


@pytest.mark.usefixtures("spares_nothing_new")
def test_vacuum_spares_held_keys(world: World) -> None:
    held, free = world.key(), world.key()
    a, b, c = world.client(), world.client(), world.client()
    a.hold(free)
    a.end()
    a.hold(held)
    if world.is_sqlite:
        a.end()
        assert b.scalar(sl.lock.vacuum()) == 0
        return
    removed = b.later(b.scalar, sl.lock.vacuum()).result(PATIENCE)
    b.end()
    assert (removed >= 1) if world.table else (removed == 0)
    assert c.try_hold(held) is False
    if world.table:
        with world.plain.connect() as connection:
            keys = set(connection.scalars(text(f"SELECT {'`key`' if world.is_innodb else 'key'} FROM {world.table}")))
        assert sl.lock.key(free) not in keys


def test_unlock_by_two_sharers_does_not_deadlock(world: World) -> None:
    if world.is_sqlite:
        pytest.skip("SQLite's sharers exclude one another")
    key = world.key()
    a, b = world.client(), world.client()
    a.scalar(sl.lock.create(key))
    a.end()
    a.hold(key, shared=True)
    b.hold(key, shared=True)
    a.later(a.scalar, sl.lock.unlock(key)).result(PATIENCE)
    b.later(b.scalar, sl.lock.unlock(key)).result(PATIENCE)
    a.end()
    b.end()
    assert a.try_hold(key) is True

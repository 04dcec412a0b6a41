"""MySQL and MariaDB: a try never waits and never locks a neighbouring key, at any isolation level."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import INNODB, PATIENCE, Watch, all_of, connected, installed, later, until, unused

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
TRIES: list[Any] = [sl.lock.try_exclusive, sl.lock.try_shared]
SHARERS = (sl.lock.shared, sl.lock.try_shared)
TAKES: list[Any] = [*TRIES, sl.lock.exclusive, sl.lock.shared, sl.lock.create]

LIMIT = 4

databases = pytest.mark.parametrize("name", INNODB)
level = pytest.mark.parametrize("level", LEVELS)


@pytest.fixture
def engine(engine_to: MakeEngine, name: str, level: str) -> Engine:
    # a wait that must not happen ends as sl.LockTimeout, or as False from a try
    limit = {"init_command": f"SET innodb_lock_wait_timeout={LIMIT}"}
    return engine_to(name, isolation_level=level, connect_args=limit)


@databases
@level
@pytest.mark.parametrize("make", TRIES, ids=lambda make: make.__name__)
def test_try_on_a_held_or_uncommitted_key(engine: Engine, make: Any) -> None:
    """Brand-new and known keys, in a transaction that has read before and in one that hasn't."""
    for held_by in TAKES:
        new, known = unused(), unused()
        with engine.begin() as connection:
            connection.execute(sl.lock.create(known))
        with engine.connect() as holder, engine.connect() as other:
            for key, read_before in itertools.product((new, known), (False, True)):
                holder.execute(held_by(key))
                if read_before:
                    other.execute(text("SELECT count(*) FROM lock_installed"))
                got = other.scalar(make(key))
                if held_by in SHARERS and make in SHARERS:
                    # a brand-new key may or may not be shared; a key with a row is
                    assert got or key == new
                elif held_by is not sl.lock.create:
                    assert got is False
                other.rollback()
                holder.rollback()
                assert other.scalar(make(key)) is True
                other.rollback()
                if key == new:
                    with engine.begin() as connection:
                        connection.execute(sl.lock.unlock(key))  # new again: a try may have inserted its row


@databases
@level
@pytest.mark.parametrize("first", [*TAKES, sl.lock.unlock], ids=lambda make: make.__name__)
def test_try_blocks_no_other_key(engine: Engine, first: Any) -> None:
    """The first use of a key doesn't wait for the first use of another, wherever the two are in the table."""
    for second in [*TAKES, sl.lock.unlock]:
        number = sl.lock.key(unused())
        with engine.connect() as one, engine.connect() as other:
            one.execute(first(number))
            for neighbour in (number - 1, number + 1, number + 1000):
                assert other.scalar(second(neighbour)) is not False


@databases
@level
def test_vacuum_blocks_no_other_key(engine: Engine, name: str, level: str) -> None:
    """Not even above READ COMMITTED, where a locking scan would lock the whole table."""
    if level == "SERIALIZABLE":
        # at SERIALIZABLE even a plain read of the keys would
        with engine.connect() as one, pytest.raises(sl.Unsupported, match="SERIALIZABLE"):
            one.execute(sl.lock.vacuum())
        return
    number = sl.lock.key(unused())
    with engine.begin() as connection:
        connection.execute(sl.lock.create(number, number + 10, number + 20))
    with engine.connect() as one, engine.connect() as other:
        one.execute(sl.lock.vacuum())
        for second in TAKES:
            for neighbour in (number + 5, number + 15, number + 25):
                assert other.scalar(second(neighbour)) is not False
            other.rollback()


@databases
@level
@pytest.mark.parametrize("make", TRIES, ids=lambda make: make.__name__)
def test_concurrent_tries_on_one_new_key(engine: Engine, make: Any) -> None:
    """No try waits or fails, and at most one exclusive try succeeds."""
    for _ in range(5):
        key, connections = unused(), [engine.connect() for _ in range(5)]
        got = all_of(*[functools.partial(connection.scalar, make(key)) for connection in connections])
        with engine.connect() as another:
            assert another.scalar(sl.lock.try_exclusive(key)) is (not any(got))
        for connection in connections:
            connection.close()
        assert make is sl.lock.try_shared or sum(got) <= 1


@databases
@pytest.mark.parametrize("level", ["READ COMMITTED"])
@pytest.mark.parametrize("make", TAKES[2:4], ids=lambda make: make.__name__)
def test_key_deleted_and_inserted_again_during_a_try(servers: Any, engine: Engine, name: str, make: Any) -> None:
    """An engine that remembers the key inserts it just before the try does, and ends when the try has returned."""
    key, asked = unused(), list[str]()
    with connected(installed(servers, name), isolation_level="REPEATABLE READ") as remembers:
        for _ in range(2):
            with remembers.begin() as connection:
                connection.execute(make(key))
        with engine.begin() as connection:
            connection.execute(sl.lock.unlock(key))
        with remembers.connect() as holder, engine.connect() as tries:
            tries.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {PATIENCE}")

            def before(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
                if "INSERT" in statement and not asked:
                    asked.append(statement)
                    holder.execute(make(key))

            event.listen(tries, "before_cursor_execute", before)
            assert later(tries.scalar, sl.lock.try_exclusive(key)).result(PATIENCE / 2) is False
            assert asked
            assert tries.scalar(text("SELECT @@innodb_lock_wait_timeout")) == PATIENCE
            holder.rollback()
            assert tries.scalar(sl.lock.try_exclusive(key)) is True


@databases
@level
def test_failed_try_keeps_earlier_work(engine: Engine) -> None:
    taken, mine, row = unused(), unused(), sl.lock.key(unused())
    with engine.connect() as holder, engine.connect() as other, engine.connect() as third:
        holder.execute(sl.lock.exclusive(taken))
        other.execute(sl.lock.exclusive(mine))
        other.execute(text("INSERT INTO lock_locked_keys (`key`) VALUES (:row)"), {"row": row})
        for make in TRIES:
            assert other.scalar(make(taken)) is False
        assert third.scalar(sl.lock.try_exclusive(mine)) is False
        other.commit()
        third.rollback()
        assert third.scalar(text("SELECT count(*) FROM lock_locked_keys WHERE `key` = :row"), {"row": row}) == 1


@databases
@level
def test_timeout_keeps_earlier_work(engine: Engine) -> None:
    taken, mine = unused(), unused()
    with engine.connect() as holder, engine.connect() as other, engine.connect() as third:
        holder.execute(sl.lock.exclusive(taken))
        other.execute(sl.lock.exclusive(mine))
        with pytest.raises(sl.LockTimeout):
            other.execute(sl.lock.exclusive(taken).execution_options(locks_wait=1))
        assert third.scalar(sl.lock.try_exclusive(mine)) is False
        assert other.scalar(text("SELECT @@innodb_lock_wait_timeout")) == LIMIT


@databases
@level
@pytest.mark.parametrize("waits", TAKES[2:4], ids=lambda make: make.__name__)
@pytest.mark.parametrize("end", ["rollback", "unlock"])
def test_neighbour_key_after_a_wait_for_a_deleted_row(
    engine: Engine, watch: Callable[[str], Watch], name: str, level: str, waits: Any, end: str
) -> None:
    """A holds a new key, B waits for it, A removes the row: B then holds the key and no gap next to it."""
    number = sl.lock.key(unused())
    with engine.connect() as a, engine.connect() as b, engine.connect() as c:
        a.execute(sl.lock.exclusive(number))
        if end == "unlock":
            a.commit()
            a.execute(sl.lock.exclusive(number))
            a.execute(sl.lock.unlock(number))
        waiting = later(b.execute, waits(number))
        watch(name).until_waiting(waiting)
        a.commit() if end == "unlock" else a.rollback()
        waiting.result(PATIENCE)
        for make in TAKES:
            for neighbour in (number - 1, number + 1, number + 1000):
                # repeated: a loaded server has refused one for a moment; a gap that B held would be refused until B ends
                until(lambda make=make, neighbour=neighbour: c.scalar(make(neighbour)) is not False)
            c.rollback()
        assert c.scalar(sl.lock.try_exclusive(number)) is False


@databases
def test_longest_waits_in_a_strict_sql_mode(engine_to: MakeEngine, name: str) -> None:
    """The server refuses a limit above its maximum there."""
    engine = engine_to(name, isolation_level="REPEATABLE READ")
    with engine.connect() as connection:
        connection.exec_driver_sql("SET SESSION sql_mode = 'STRICT_ALL_TABLES', innodb_lock_wait_timeout = 100000000")
        for wait in (None, 40_000_000, 2**31):
            connection.execute(sl.lock.exclusive(unused()).execution_options(locks_wait=wait))

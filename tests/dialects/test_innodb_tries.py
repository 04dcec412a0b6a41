"""MySQL and MariaDB: a try never waits and never locks a neighbour, at any isolation level."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlalchemy_locks as sl
from tests.operation.fixtures import MakeEngine
from tests.operation.parties import INNODB, all_of, unused

LEVELS = ["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
DRIVERS = [("mysql", "pymysql"), ("mariadb", "mariadb+pymysql"), ("mariadb", "pymysql")]
TRIES: list[Any] = [sl.lock.try_exclusive, sl.lock.try_shared]
SHARERS = (sl.lock.shared, sl.lock.try_shared)
EVERY: list[Any] = [*TRIES, sl.lock.exclusive, sl.lock.shared, sl.lock.create, sl.lock.unlock]

LIMIT = 4

databases = pytest.mark.parametrize(("name", "driver"), DRIVERS, ids=["-".join(pair) for pair in DRIVERS])
level = pytest.mark.parametrize("level", LEVELS)


@pytest.fixture
def engine(engine_to: MakeEngine, name: str, driver: str, level: str) -> Engine:
    # a wait that should not be ends as sl.LockTimeout, or as the False of a try
    limit = {"init_command": f"SET innodb_lock_wait_timeout={LIMIT}"}
    return engine_to(name, driver, isolation_level=level, connect_args=limit)


@databases
@level
@pytest.mark.parametrize("make", TRIES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("held_by", EVERY[:-1], ids=lambda make: make.__name__)
def test_a_key_that_is_held_or_being_made(engine: Engine, make: Any, held_by: Any) -> None:
    """Brand-new and known, in a transaction that has read before and in one that has not."""
    new, known = unused(), unused()
    with engine.begin() as connection:
        connection.execute(sl.lock.create(known))
    with engine.connect() as holder, engine.connect() as other:
        for key in (new, known):
            for read_before in (False, True):
                holder.execute(held_by(key))
                if read_before:
                    other.execute(text("SELECT count(*) FROM lock_installed"))
                got = other.scalar(make(key))
                if held_by in SHARERS and make in SHARERS:
                    # a brand-new key may or may not be shared; one that is there is
                    assert got or key == new
                elif held_by is not sl.lock.create or key == new:
                    assert got is False
                other.rollback()
                holder.rollback()
                assert other.scalar(make(key)) is True
                other.rollback()
                with engine.begin() as connection:
                    if key == new:  # a rollback has not left its row, nor has a failed try
                        connection.execute(sl.lock.unlock(key))


@databases
@level
@pytest.mark.parametrize("second", EVERY, ids=lambda make: make.__name__)
@pytest.mark.parametrize("first", EVERY, ids=lambda make: make.__name__)
def test_other_keys_go_on(engine: Engine, first: Any, second: Any) -> None:
    """The first use of one key doesn't wait for the first use of another, wherever in the table the two are."""
    numbers = [sl.lock.key(unused()) for _ in range(2)]
    with engine.connect() as one, engine.connect() as other:
        for number in numbers:
            one.execute(first(number))
            for neighbour in (number - 1, number + 1, number - 2, number + 1000):
                got = other.scalar(second(neighbour))
                assert got is not False


@databases
@level
def test_many_at_once_on_one_new_key(engine: Engine) -> None:
    """Exactly one has it, whoever that is; nobody waits, nobody fails."""
    for make in (sl.lock.try_exclusive, sl.lock.try_shared):
        for _ in range(5):
            key, connections = unused(), [engine.connect() for _ in range(5)]
            got = all_of(*[lambda c=connection, k=key, m=make: c.scalar(m(k)) for connection in connections])
            with engine.connect() as another:
                assert another.scalar(sl.lock.try_exclusive(key)) is (sum(got) == 0)
            for connection in connections:
                connection.close()
            assert sum(got) <= 1


@databases
@level
def test_a_try_that_fails_keeps_what_was_done_before(engine: Engine) -> None:
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
def test_a_wait_that_ends_in_vain_keeps_what_was_done_before(engine: Engine) -> None:
    taken, mine = unused(), unused()
    with engine.connect() as holder, engine.connect() as other, engine.connect() as third:
        holder.execute(sl.lock.exclusive(taken))
        other.execute(sl.lock.exclusive(mine))
        with pytest.raises(sl.LockTimeout):
            other.execute(sl.lock.exclusive(taken).execution_options(locks_wait=1))
        assert third.scalar(sl.lock.try_exclusive(mine)) is False
        assert other.scalar(text("SELECT @@innodb_lock_wait_timeout")) == LIMIT


def test_these_are_all_of_them() -> None:
    assert {name for name, _ in DRIVERS} == set(INNODB)

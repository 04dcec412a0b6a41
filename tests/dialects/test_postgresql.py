"""PostgreSQL and YugabyteDB: what is refused, and what psql gets from the functions and the view."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, event, text
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import EVERYWHERE, unused

NAMES = [name for name in EVERYWHERE if name.startswith(("postgresql", "yugabytedb"))]
DRIVERS = [*((name, EVERYWHERE[name]) for name in NAMES), ("postgresql15", "psycopg2"), ("yugabytedb", "yugabytedb")]
ACQUIRE: list[Any] = [sl.lock.exclusive, sl.lock.shared, sl.lock.try_exclusive, sl.lock.try_shared]
PAGE = Table("page", MetaData(), Column("id", Integer, primary_key=True))

databases = pytest.mark.parametrize(("name", "driver"), DRIVERS, ids=["-".join(pair) for pair in DRIVERS])
acquire = pytest.mark.parametrize("make", ACQUIRE, ids=lambda make: make.__name__)
level = pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])


@databases
@acquire
@level
def test_a_snapshot_older_than_the_lock_is_refused(
    engine_to: MakeEngine, name: str, driver: str, make: Any, level: str
) -> None:
    engine = engine_to(name, driver, isolation_level=level)
    with engine.connect() as connection, pytest.raises(sl.StaleSnapshot, match=r"snapshot.*READ COMMITTED"):
        connection.execute(make(unused()))
    with Session(engine) as session, pytest.raises(sl.Unsupported):
        session.execute(make(unused()).execution_options(locks_wait=5))


@pytest.mark.parametrize("name", NAMES)
@acquire
@level
def test_allow_stale_takes_it_all_the_same(engine_to: MakeEngine, name: str, make: Any, level: str) -> None:
    key = unused()
    with engine_to(name, isolation_level=level).connect() as connection:
        assert connection.scalar(make(key, allow_stale=True)) is (True if "try" in make.__name__ else None)
        connection.rollback()
        # a key that already has a row, where there is a table
        connection.execute(make(key, allow_stale=True).execution_options(locks_wait=5))
        with engine_to(name).connect() as other:
            assert other.scalar(sl.lock.try_exclusive(key)) is False


@pytest.mark.parametrize("name", NAMES)
@level
def test_locks_take_it_at_read_committed_whatever_the_app_uses(engine_to: MakeEngine, name: str, level: str) -> None:
    engine = engine_to(name, isolation_level=level)
    locks, key = sl.Locks(engine), unused()
    for _ in range(2):
        with locks.exclusive(key) as held, engine_to(name).connect() as other:
            assert held.session.scalar(text("SHOW transaction_isolation")) == "read committed"
            assert other.scalar(sl.lock.try_exclusive(key)) is False
        with locks.shared(key, timeout=0):
            pass
        with engine.connect() as connection:
            assert connection.scalar(text("SHOW transaction_isolation")) == level.lower()
    locks.run(sl.lock.create(key))


def copied(engine: Engine, level: str) -> Engine:
    with sl.Locks(engine).exclusive(unused()):
        return engine.execution_options(isolation_level=level)


def begun_by_a_listener(engine: Engine, level: str) -> Engine:
    copy = engine.execution_options(isolation_level=level)
    event.listen(copy, "engine_connect", lambda connection: connection.exec_driver_sql("SHOW TimeZone"))
    return copy


def first_used_at_another_level(engine: Engine, level: str) -> Engine:
    copy = engine.execution_options(isolation_level=level)
    with copy.connect() as connection:
        connection.execution_options(isolation_level="READ COMMITTED").execute(sl.lock.exclusive(unused()))
    return copy


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "AUTOCOMMIT"])
@pytest.mark.parametrize("begun", [copied, begun_by_a_listener, first_used_at_another_level])
def test_locks_begin_at_read_committed_however_the_engine_was_used(
    engine_to: MakeEngine, driver: str, level: str, begun: Any
) -> None:
    engine, key = begun(engine_to("postgresql15", driver, pool_size=1, max_overflow=0), level), unused()
    with sl.Locks(engine).exclusive(key) as held, engine_to("postgresql15").connect() as other:
        assert held.session.scalar(text("SHOW transaction_isolation")) == "read committed"
        assert other.scalar(sl.lock.try_exclusive(key)) is False
    with engine.connect() as connection:
        raw: Any = connection.connection.dbapi_connection
        assert raw.autocommit is (level == "AUTOCOMMIT")


def read_only(engine: Engine) -> Engine:
    return engine.execution_options(postgresql_readonly=True)


EVERY = {
    **{make.__name__: make for make in ACQUIRE},
    "stale": lambda key: sl.lock.exclusive(key, allow_stale=True),
    "bounded": lambda key: sl.lock.exclusive(key).execution_options(locks_wait=5),
    "unlock": sl.lock.unlock,
    "vacuum": lambda key: sl.lock.vacuum(),
    "create": sl.lock.create,
    "session_exclusive": sl.lock.session_exclusive,
    "row": lambda key: sl.lock.row(PAGE, 1),
}


@databases
@pytest.mark.parametrize("operation", EVERY)
def test_a_read_only_transaction_is_refused(engine_to: MakeEngine, name: str, driver: str, operation: str) -> None:
    engine = engine_to(name, driver)
    PAGE.create(engine, checkfirst=True)
    made = EVERY[operation](unused())
    # the stand-in of YugabyteDB is one without advisory locks
    without = name == "yugabytedb" and operation == "session_exclusive"
    refusal = sl.Unsupported if without else sl.NotWritable
    with read_only(engine).connect() as connection, pytest.raises(refusal):
        connection.execute(made)
    with engine.connect() as connection:
        connection.execute(text("SET TRANSACTION READ ONLY"))
        with pytest.raises(refusal):
            connection.execute(made)

"""In autocommit a lock would end with its own statement: refused, on every engine."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Engine, Integer, MetaData, Table, event, text
from sqlalchemy.orm import Session, sessionmaker

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.transaction import Attempts
from sqlalchemy_locks.dialects.postgresql import PostgreSQL
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import EVERYWHERE, unused

ACQUIRE: list[Any] = [sl.lock.exclusive, sl.lock.shared, sl.lock.try_exclusive, sl.lock.try_shared]
DRIVERS = [*EVERYWHERE.items(), ("postgresql15", "psycopg2"), ("mariadb", "pymysql")]
PAGE = Table("page_in_autocommit", MetaData(), Column("id", Integer, primary_key=True), mysql_engine="InnoDB")

databases = pytest.mark.parametrize(("name", "driver"), DRIVERS, ids=["-".join(pair) for pair in DRIVERS])
ways = pytest.mark.parametrize("way", ["engine", "copy", "connection"])
#: an error in the middle of a checkout loses the connection
loses_connections = pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")


@databases
@ways
def test_a_lock_is_refused(engine_to: MakeEngine, name: str, driver: str, way: str) -> None:
    engine = engine_to(name, driver, **({"isolation_level": "AUTOCOMMIT"} if way == "engine" else {}))
    PAGE.create(engine, checkfirst=True)
    if way == "copy":
        engine = engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        if way == "connection":
            connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        with Session(connection) as session:
            for execute in (connection.execute, session.execute):
                for operation in (*(make(unused()) for make in ACQUIRE), sl.lock.row(PAGE, 1)):
                    with pytest.raises(sl.Unsupported, match="autocommit.* transaction"):
                        execute(operation)
                    with pytest.raises(sl.Unsupported, match="autocommit"):
                        execute(operation.execution_options(locks_wait=2))


@databases
def test_locks_of_an_engine_in_autocommit(engine_to: MakeEngine, name: str, driver: str) -> None:
    """They open a transaction nevertheless, and leave the connection as it was."""
    engine = engine_to(name, driver, isolation_level="AUTOCOMMIT", pool_size=1, max_overflow=0)
    other = engine_to(name)
    locks, key = sl.Locks(engine), unused()
    with engine.connect() as connection:
        level = connection.get_isolation_level()
    for timeout in (None, 0, 5):
        with locks.exclusive(key, timeout=timeout), other.connect() as connection:
            assert connection.scalar(sl.lock.try_exclusive(key)) is False
        with engine.connect() as connection:
            assert connection.get_isolation_level() == level
            with pytest.raises(sl.Unsupported):
                connection.execute(sl.lock.exclusive(key))
    assert locks.run(sl.lock.create(unused())) >= 0
    assert locks.run(sl.lock.vacuum()) >= 0
    with locks.shared(key) as held:
        held.session.execute(text("SELECT 1"))
        held.check()


def roll_back_a_page(engine: Engine) -> None:
    """Write what only a connection in autocommit would keep."""
    gc.collect()
    if engine.pool.checkedout():  # type: ignore[attr-defined]
        engine.dispose()
    with contextlib.suppress(ZeroDivisionError), engine.begin() as connection:
        connection.execute(PAGE.insert().values(id=1))
        raise ZeroDivisionError


def no_page(engine: Engine) -> bool:
    with engine.connect() as connection:
        return connection.scalars(PAGE.select()).all() == []


@pytest.mark.parametrize("step", ["begin", "driver"])
@pytest.mark.parametrize("level", ["READ COMMITTED", "AUTOCOMMIT"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_what_a_listener_has_begun_is_committed(engine_to: MakeEngine, driver: str, level: str, step: str) -> None:
    engine, other = engine_to("postgresql15", driver, isolation_level=level), sl.Locks(engine_to("postgresql15"))
    locks, key, listening = sl.Locks(engine), unused(), True
    assert locks.mutex.acquire(key)
    assert locks.mutex.release(key)

    @event.listens_for(engine, "before_cursor_execute")
    def begin(connection: Connection, cursor: Any, *_: Any) -> None:
        if listening and step == "begin":
            cursor.execute("BEGIN")
        elif listening:
            connection.connection.dbapi_connection.autocommit = False  # type: ignore[union-attr]

    if driver == "psycopg2" and step == "begin":  # its commit() does nothing in autocommit
        with pytest.raises(sl.OutcomeUnknown, match=r"listener.*rolled back"):
            locks.mutex.acquire(key)
        assert other.mutex.acquire(key)
    else:
        assert locks.mutex.acquire(key)
    listening = False
    assert not locks.mutex.acquire(key)
    assert not other.mutex.acquire(key)
    with engine.connect() as connection:
        assert connection.connection.dbapi_connection.autocommit is (level == "AUTOCOMMIT")  # type: ignore[union-attr]


@pytest.mark.parametrize("place", ["engine", "connection class", "session class", "dialect"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_what_the_app_does_at_begin_is_done(engine_to: MakeEngine, driver: str, place: str) -> None:
    """A statement in autocommit would be executed without the settings of the app's transactions."""
    engine, levels = engine_to("postgresql15", driver), []
    maker = sessionmaker(engine)

    def limit(connection: Connection) -> None:
        levels.append(connection.exec_driver_sql("SET LOCAL statement_timeout = '77s'"))

    if place == "session class":
        event.listen(maker, "after_begin", lambda session, transaction, connection: limit(connection))
    elif place == "dialect":
        engine.dialect.do_begin = lambda raw: raw.cursor().execute("SET LOCAL statement_timeout = '77s'")  # type: ignore[method-assign]
    else:
        event.listen(engine if place == "engine" else Connection, "begin", limit)
    seen: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def look(connection: Connection, cursor: Any, sql: str, *_: Any) -> None:
        if sql.startswith("UPDATE"):
            cursor.execute("SHOW statement_timeout")
            seen.append(cursor.fetchone()[0])

    locks, key = sl.Locks(maker), unused()
    try:
        assert locks.mutex.acquire(key)
        assert locks.mutex.release(key)
    finally:
        if place == "connection class":
            event.remove(Connection, "begin", limit)
    assert seen
    assert set(seen) == {"77s"}


@pytest.mark.parametrize("how", ["option", "connect"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
def test_autocommit_is_at_read_committed(engine_to: MakeEngine, level: str, driver: str, how: str) -> None:
    option = level.replace(" ", "\\ ")
    options = {"connect_args": {"options": f"-c default_transaction_isolation={option}"}} if how == "option" else {}
    engine = engine_to("postgresql15", driver, **options)
    levels: list[str] = []

    if how == "connect":

        @event.listens_for(engine, "connect")
        def connect(raw: Any, _: Any) -> None:
            raw.cursor().execute(f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {level}")
            raw.commit()

    @event.listens_for(engine, "before_cursor_execute")
    def look(connection: Connection, cursor: Any, sql: str, *_: Any) -> None:
        if sql.startswith("UPDATE"):
            cursor.execute("SHOW transaction_isolation")
            levels.append(cursor.fetchone()[0])

    locks, key = sl.Locks(engine), unused()
    assert locks.mutex.acquire(key)
    assert locks.mutex.release(key)
    assert levels
    assert set(levels) == {"read committed"}


@loses_connections
@pytest.mark.parametrize("method", [PostgreSQL.autocommitted, Attempts.run], ids=["autocommitted", "run"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_an_interruption_leaves_no_autocommit(engine_to: MakeEngine, driver: str, method: Any) -> None:
    """A signal handler may raise wherever Python calls a function, and before each line."""
    engine = engine_to("postgresql15", driver, pool_size=1, max_overflow=0, pool_timeout=1)
    locks, key = sl.Locks(engine), unused()
    PAGE.create(engine, checkfirst=True)
    with engine.begin() as connection:
        connection.execute(PAGE.delete())
    locks.mutex.acquire(key)

    def interrupted(after: int) -> bool:
        left = after

        def trace(frame: Any, _event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code is not method.__code__:
                return None
            if _event != "line":
                return trace
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            left -= 1
            return trace

        usual = sys.gettrace()
        sys.settrace(trace)
        try:
            locks.mutex.release(key)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(usual)
        return False

    for number in itertools.count():
        if not interrupted(number):
            break
        roll_back_a_page(engine)
    assert number > 5
    assert no_page(engine)

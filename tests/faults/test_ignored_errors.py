"""An error that a block ignores loses its lock immediately, where the server aborts the transaction for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DBAPIError

import sqlalchemy_locks as sl
from tests.fixtures.parties import ASYNC, PATIENCE, async_connected, connected, installed, later, unused

POSTGRESQL = [
    ("postgresql15", "psycopg"),
    ("postgresql15", "psycopg2"),
    ("postgresql15-table", "psycopg"),
    ("postgresql18", "psycopg"),
    ("yugabytedb", "psycopg2"),
    ("yugabytedb", "yugabytedb"),
]
INNODB = [("mysql", "pymysql"), ("mariadb", "mariadb+pymysql")]
AWAITED = [pair for case, pair in ASYNC.items() if not case.startswith("sqlite")]
NOTHING = "nothing that was done in it after that is committed$"
TABLE = "CREATE TABLE passed_over (id INTEGER PRIMARY KEY, note INTEGER)"


def named(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    return {"argnames": ("name", "driver"), "argvalues": pairs, "ids": ["/".join(pair) for pair in pairs]}


@pytest.fixture
def rows(servers: Any, name: str) -> Iterator[Engine]:
    """A table with two light rows, and an engine that leads to it besides the one that is tested."""
    with connected(installed(servers, name)) as engine:
        with engine.begin() as connection:
            connection.execute(text(TABLE))
            connection.execute(text("INSERT INTO passed_over (id) VALUES (1), (2)"))
        yield engine
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE passed_over"))


def insert(number: int) -> Any:
    return text(f"INSERT INTO passed_over (id) VALUES ({number})")


def numbers(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT id FROM passed_over ORDER BY id")))


def free(engine: Engine, key: str) -> bool:
    with engine.connect() as connection, connection.begin():
        return bool(connection.scalar(sl.lock.try_exclusive(key)))


@contextmanager
def losing(locks: Any, said: str = NOTHING) -> Iterator[None]:
    """What raises ``LockLost``, and tells once that the lock is lost."""
    events: list[object] = []
    event.listen(locks, "lost", events.append)
    with pytest.raises(sl.LockLost, match=said) as raised:
        yield
    assert type(raised.value) is sl.LockLost
    assert len(events) == 1


def deadlock(other: Engine, ready: threading.Event) -> None:
    """The heavier of two transactions, so that the other is the victim."""
    with other.begin() as connection:
        for number in range(100, 120):
            connection.execute(insert(number))
        connection.execute(text("UPDATE passed_over SET note = 2 WHERE id = 2"))
        ready.set()
        connection.execute(text("UPDATE passed_over SET note = 2 WHERE id = 1"))


@pytest.mark.parametrize(**named(POSTGRESQL))
def test_lock_is_lost_immediately(servers: Any, rows: Engine, name: str, driver: str) -> None:
    key = unused()
    with connected(installed(servers, name, driver)) as engine:
        locks = sl.Locks(engine)
        with losing(locks), locks.exclusive(key) as held:
            held.session.execute(insert(3))
            with pytest.raises(DBAPIError):
                held.session.execute(insert(1))
            assert free(rows, key)
            assert later(lambda: held.lost).result(PATIENCE)  # as another thread sees it
            with pytest.raises(sl.LockLost, match=NOTHING):
                held.session.execute(insert(4))
            with pytest.raises(sl.LockLost, match=NOTHING):
                held.check()
    assert numbers(rows) == [1, 2]


@pytest.mark.parametrize(**named([*POSTGRESQL, *INNODB]))
def test_savepoint_keeps_the_lock(servers: Any, rows: Engine, name: str, driver: str) -> None:
    key = unused()
    with connected(installed(servers, name, driver)) as engine, sl.Locks(engine).exclusive(key) as held:
        with pytest.raises(DBAPIError), held.session.begin_nested():
            held.session.execute(insert(1))
        with held.session.begin_nested():
            with pytest.raises(DBAPIError), held.session.begin_nested():
                with pytest.raises(DBAPIError):
                    held.session.execute(insert(1))
                assert not held.lost
                assert not later(lambda: held.lost).result(PATIENCE)
                if name not in ("mysql", "mariadb"):
                    held.check()
                raise DBAPIError("passed on", None, Exception())
            held.session.execute(insert(3))
        held.check()
        assert not held.lost
        assert not free(rows, key)
    assert numbers(rows) == [1, 2, 3]


@pytest.mark.parametrize(**named(POSTGRESQL))
def test_released_savepoint_does_not_keep_the_lock(servers: Any, rows: Engine, name: str, driver: str) -> None:
    key = unused()
    with connected(installed(servers, name, driver)) as engine:
        locks = sl.Locks(engine)
        with losing(locks), locks.exclusive(key) as held:
            nested = held.session.begin_nested()
            held.session.execute(text("RELEASE SAVEPOINT sa_savepoint_1"))
            with pytest.raises(DBAPIError):
                nested.rollback()
            assert free(rows, key)
            assert held.lost


@pytest.mark.parametrize(**named(INNODB))
@pytest.mark.parametrize("nested", [False, True])
def test_deadlock_is_a_lost_lock(servers: Any, rows: Engine, name: str, driver: str, nested: bool) -> None:
    """InnoDB has rolled all of it back, and would go on in a new transaction that nothing guards."""
    key, ready = unused(), threading.Event()
    with connected(installed(servers, name, driver)) as engine:
        locks = sl.Locks(engine)
        with losing(locks), locks.exclusive(key) as held:
            held.session.execute(text("UPDATE passed_over SET note = 1 WHERE id = 1"))
            others = later(deadlock, rows, ready)
            assert ready.wait(PATIENCE)
            if nested:
                held.session.begin_nested()
            with pytest.raises(DBAPIError):
                held.session.execute(text("UPDATE passed_over SET note = 1 WHERE id = 2"))
            assert free(rows, key)
            if not nested:
                held.session.execute(insert(3))  # no error tells the driver that this is another transaction
                with pytest.raises(sl.LockLost, match=NOTHING):
                    held.check()
        others.result(PATIENCE)
    with rows.connect() as connection:
        assert connection.scalar(text("SELECT note FROM passed_over WHERE id = 1")) == 2
    assert 3 not in numbers(rows)


@pytest.mark.parametrize("name", ["sqlite"])
@pytest.mark.parametrize("nested", [False, True])
def test_rollback_by_sqlite_itself(servers: Any, rows: Engine, name: str, nested: bool) -> None:
    with connected(installed(servers, name)) as engine:
        locks = sl.Locks(engine)
        with losing(locks), locks.exclusive(unused()) as held:
            held.session.execute(insert(3))
            if nested:
                held.session.begin_nested()
            with pytest.raises(DBAPIError):
                held.session.execute(text("INSERT OR ROLLBACK INTO passed_over (id) VALUES (1)"))
            assert held.lost
            with pytest.raises(sl.LockLost, match=NOTHING):
                held.session.execute(insert(4))
    assert numbers(rows) == [1, 2]


@pytest.mark.parametrize(**named([("postgresql15", "psycopg"), ("postgresql15", "asyncpg")]))
def test_async_lock_is_lost_immediately(servers: Any, rows: Engine, name: str, driver: str) -> None:
    async def main() -> None:
        async with async_connected(installed(servers, name, driver)) as engine:
            locks, key = sl.AsyncLocks(engine), unused()
            with losing(locks):
                async with locks.exclusive(key) as held:
                    with pytest.raises(DBAPIError):
                        async with held.session.begin_nested():
                            await held.session.execute(insert(1))
                    async with held.session.begin_nested():
                        with pytest.raises(DBAPIError):
                            async with held.session.begin_nested():
                                with pytest.raises(DBAPIError):
                                    await held.session.execute(insert(1))
                                assert not held.lost
                                await held.check()
                                raise DBAPIError("passed on", None, Exception())
                        await held.session.execute(insert(3))
                    assert not held.lost
                    await held.check()
                    assert not await asyncio.to_thread(free, rows, key)
                    with pytest.raises(DBAPIError):
                        await held.session.execute(insert(1))
                    with pytest.raises(sl.LockLost, match=NOTHING):
                        await held.check()
                    with pytest.raises(sl.LockLost, match=NOTHING):
                        await held.session.execute(insert(4))
                    assert held.lost

    asyncio.run(main())
    assert numbers(rows) == [1, 2]


@pytest.mark.parametrize("name", ["postgresql15"])
def test_asyncpg_error_before_sending_keeps_the_lock(servers: Any, rows: Engine, name: str) -> None:
    async def main() -> None:
        async with async_connected(installed(servers, name, "asyncpg")) as engine:
            async with sl.AsyncLocks(engine).exclusive(unused()) as held:
                with pytest.raises(DBAPIError):
                    await held.session.execute(
                        text("INSERT INTO passed_over (id) VALUES (:id)"), {"id": "not a number"}
                    )
                assert not held.lost
                await held.session.execute(insert(3))

    asyncio.run(main())
    assert numbers(rows) == [1, 2, 3]


@pytest.mark.parametrize("name", ["postgresql15"])
def test_asyncpg_command_timeout_loses_the_lock(servers: Any, rows: Engine, name: str) -> None:
    async def main() -> None:
        async with async_connected(installed(servers, name, "asyncpg"), connect_args={"command_timeout": 5}) as engine:
            locks, key = sl.AsyncLocks(engine), unused()
            with losing(locks, "its connection died"):  # which is how SQLAlchemy takes it
                async with locks.exclusive(key) as held:
                    await held.session.execute(insert(3))
                    with pytest.raises(TimeoutError):
                        await held.session.execute(text(f"SELECT pg_sleep({PATIENCE})"))
                    assert await asyncio.to_thread(free, rows, key)
                    assert held.lost

    asyncio.run(main())
    assert numbers(rows) == [1, 2]


@pytest.mark.parametrize(**named([pair for pair in AWAITED if not pair[0].startswith("postgresql")]))
def test_async_deadlock_is_a_lost_lock(servers: Any, rows: Engine, name: str, driver: str) -> None:
    ready = threading.Event()

    async def main() -> None:
        async with async_connected(installed(servers, name, driver)) as engine:
            locks, key = sl.AsyncLocks(engine), unused()
            with losing(locks):
                async with locks.exclusive(key) as held:
                    await held.session.execute(text("UPDATE passed_over SET note = 1 WHERE id = 1"))
                    others = later(deadlock, rows, ready)
                    assert await asyncio.to_thread(ready.wait, PATIENCE)
                    with pytest.raises(DBAPIError):
                        await held.session.execute(text("UPDATE passed_over SET note = 1 WHERE id = 2"))
                    assert await asyncio.to_thread(free, rows, key)
                    await held.session.execute(insert(3))
            await asyncio.to_thread(others.result, PATIENCE)

    asyncio.run(main())
    assert 3 not in numbers(rows)


@pytest.mark.parametrize(**named(POSTGRESQL[:2]))
def test_error_of_a_driver_cursor(servers: Any, rows: Engine, name: str, driver: str) -> None:
    """What SQLAlchemy doesn't see, such as a COPY, the driver remembers."""
    key = unused()
    with connected(installed(servers, name, driver)) as engine:
        locks = sl.Locks(engine)
        with losing(locks), locks.exclusive(key) as held:
            raw: Any = held.session.connection().connection.driver_connection
            cursor = raw.cursor()
            with pytest.raises(raw.IntegrityError if driver == "psycopg" else Exception):
                cursor.execute("INSERT INTO passed_over (id) VALUES (1)")
            cursor.close()
            assert free(rows, key)
            assert held.lost

"""A hot standby grants advisory locks that have no effect on the primary: every operation is refused there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conftest import Servers, install
from tests.dialects.test_postgresql import EVERY, PAGE
from tests.fixtures.parties import async_connected, connected, unused
from tests.servers import PostgreSQL

DATABASES = {"native": "of_advisory_locks", "table": "of_tables"}


@pytest.fixture(scope="module")
def standby(servers: Servers) -> PostgreSQL:
    primary, standby = servers.pair()
    for locking, database in DATABASES.items():
        primary.create_database(database)
        url = primary.url("psycopg", database)
        install(url, locking=locking)
        with connected(url) as engine, engine.begin() as connection:
            PAGE.create(connection)
            connection.execute(PAGE.insert().values(id=1))
    standby.catch_up()
    return standby


@pytest.fixture(params=DATABASES)
def url(standby: PostgreSQL, request: pytest.FixtureRequest) -> str:
    return standby.url("psycopg", DATABASES[request.param])


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    with connected(url) as engine:
        yield engine


@pytest.mark.parametrize("operation", EVERY)
def test_every_operation_is_refused(engine: Engine, operation: str) -> None:
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT pg_is_in_recovery()")) is True
        for _ in range(2):
            with pytest.raises(sl.NotWritable):
                connection.execute(EVERY[operation](unused()))
            connection.rollback()
        assert connection.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")) == 0
        with Session(connection) as session, pytest.raises(sl.NotWritable):
            session.execute(EVERY[operation](unused()))


@pytest.mark.parametrize("operation", ["exclusive", "try_shared", "create", "vacuum", "session_exclusive"])
def test_every_operation_is_refused_in_autocommit(url: str, operation: str) -> None:
    with connected(url, isolation_level="AUTOCOMMIT") as engine, engine.connect() as connection:
        with pytest.raises(sl.Unsupported):
            connection.execute(EVERY[operation](unused()))


def test_the_error_says_what_to_do(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(sl.NotWritable, match="connect to the primary"):
        connection.execute(sl.lock.exclusive("a"))


def test_locks_are_refused(engine: Engine) -> None:
    locks = sl.Locks(engine)
    for timeout in (None, 0, 5):
        for method in (locks.exclusive, locks.shared):
            with pytest.raises(sl.NotWritable), method("a", timeout=timeout):
                pass
    for operation in (sl.lock.vacuum(), sl.lock.create("a")):
        with pytest.raises(sl.NotWritable):
            locks.run(operation)


def test_async_locks_are_refused(standby: PostgreSQL) -> None:
    async def main() -> None:
        async with async_connected(standby.url("asyncpg", DATABASES["native"])) as engine:
            locks = sl.AsyncLocks(engine)
            with pytest.raises(sl.NotWritable):
                async with locks.exclusive("a"):
                    pass
            with pytest.raises(sl.NotWritable):
                await locks.run(sl.lock.vacuum())

    asyncio.run(main())


def test_lock_key_works_on_a_standby(engine: Engine) -> None:
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT lock.key('a')")) == sl.lock.key("a")

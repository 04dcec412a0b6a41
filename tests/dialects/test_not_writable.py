"""Where nothing can be written, no session gets a lock: a hot standby grants advisory locks of its own.

``tests/conformance/test_refused.py`` has the operations of ``Locks``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conftest import Servers, install
from tests.dialects.test_postgresql import EVERY, PAGE
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import INNODB, connected, unused
from tests.servers import PostgreSQL

ACQUIRE: list[Any] = [sl.lock.exclusive, sl.lock.shared, sl.lock.try_exclusive, sl.lock.try_shared]
LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
BEGINS = {
    "its own": "START TRANSACTION READ ONLY",
    "the next one": "SET TRANSACTION READ ONLY",
    "the session's": "SET SESSION TRANSACTION READ ONLY",
}
DATABASES = {"native": "of_advisory_locks", "table": "of_tables"}


@pytest.mark.parametrize("name", INNODB)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("begin", BEGINS.values(), ids=BEGINS)
def test_row_locks_refuse_a_read_only_transaction(engine_to: MakeEngine, name: str, level: str, begin: str) -> None:
    engine = engine_to(name, isolation_level=level)
    with engine.begin() as connection:
        connection.execute(sl.lock.create(known := unused()))
    with engine.connect() as holder, engine.connect() as connection:
        # also a key that this engine has acquired before, and one that another shares
        holder.execute(sl.lock.exclusive(again := unused()))
        holder.commit()
        holder.execute(sl.lock.shared(known))
        for make in ACQUIRE:
            for key in (known, again, unused()):
                connection.execute(text(begin))
                with pytest.raises(sl.NotWritable):
                    connection.execute(make(key))
                connection.rollback()
        connection.invalidate()


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
def replica(standby: PostgreSQL, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with connected(standby.url("psycopg", DATABASES[request.param])) as engine:
        yield engine


@pytest.mark.parametrize("operation", EVERY)
def test_every_operation_is_refused_on_a_standby(replica: Engine, operation: str) -> None:
    with replica.connect() as connection:
        assert connection.scalar(text("SELECT pg_is_in_recovery()")) is True
        for _ in range(2):
            with pytest.raises(sl.NotWritable):
                connection.execute(EVERY[operation](unused()))
            connection.rollback()
        assert connection.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")) == 0
        with Session(connection) as session, pytest.raises(sl.NotWritable):
            session.execute(EVERY[operation](unused()))

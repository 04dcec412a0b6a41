"""Every operation of both façades, on engines with every common configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import SingletonThreadPool, StaticPool

import sqlalchemy_locks as sl
from tests.conformance.faces import ASYNC, OPERATIONS, SYNC, opened
from tests.conftest import PLAIN, Servers, install

ONE: dict[str, Any] = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 240}
ELSEWHERE: dict[str, Any] = {"execution_options": {"schema_translate_map": {"lock": "elsewhere"}}}
PREFIXED: dict[str, Any] = {"execution_options": {"locks_prefix": "mine_"}}


@dataclass(frozen=True)
class Shape:
    """An engine as an app creates it, and a driver of each façade; one of them where the other only awaits the same."""

    server: str
    sync: str
    asynchronous: str
    options: dict[str, Any] = field(default_factory=dict)
    maker: bool = False
    #: how the locks are installed, in a database of their own
    installed: dict[str, str] = field(default_factory=dict)


SHAPES = {
    "an engine": Shape("postgresql15", "psycopg", "asyncpg"),
    "a sessionmaker": Shape("postgresql15", "psycopg2", "psycopg", maker=True),
    "a sessionmaker, SQLite": Shape("sqlite", "pysqlite", "", maker=True),
    "another schema": Shape("postgresql15", "", "asyncpg", ELSEWHERE, installed={"schema": "elsewhere"}),
    "another schema, YugabyteDB": Shape("yugabytedb", "psycopg2", "", ELSEWHERE, installed={"schema": "elsewhere"}),
    "another prefix": Shape("mariadb", "mariadb+pymysql", "", PREFIXED, installed={"prefix": "mine_"}),
    "NullPool": Shape("postgresql15", "", "asyncpg", {"poolclass": NullPool}),
    "NullPool, MySQL": Shape("mysql", "pymysql", "", {"poolclass": NullPool}),
    "one connection": Shape("postgresql15", "", "asyncpg", ONE),
    "one connection, SQLite": Shape("sqlite", "pysqlite", "", ONE),
    "AUTOCOMMIT": Shape("postgresql15", "psycopg2", "asyncpg", {"isolation_level": "AUTOCOMMIT"}),
    "AUTOCOMMIT, MySQL": Shape("mysql", "pymysql", "aiomysql", {"isolation_level": "AUTOCOMMIT"}),
    "SERIALIZABLE": Shape("postgresql15", "psycopg", "", {"isolation_level": "SERIALIZABLE"}),
}
CASES = [
    (shape, face)
    for shape, made in SHAPES.items()
    for face, driver in ((SYNC, made.sync), (ASYNC, made.asynchronous))
    if driver
]


@pytest.fixture(scope="module", params=CASES, ids=" / ".join)
def locks(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Any]:
    name, face = request.param
    shape = SHAPES[name]
    driver = shape.sync if face == SYNC else shape.asynchronous
    if shape.installed:
        database = servers.database(shape.server)
        install(servers.url(shape.server, PLAIN[shape.server], database), **shape.installed)
        url = servers.url(shape.server, driver, database)
    else:
        url = servers.installed(shape.server, driver)
    with opened(face, url, maker=shape.maker, **shape.options) as (locks, engine):
        yield locks
        if hasattr(engine.pool, "checkedout"):
            assert engine.pool.checkedout() == 0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_works_on_every_engine(locks: Any, operation: str) -> None:
    OPERATIONS[operation](locks)


@pytest.mark.parametrize("pool", [StaticPool, SingletonThreadPool])
def test_a_pool_with_one_shared_connection_is_refused(pool: Any) -> None:
    """The end of its transaction, for example by a second operation, ends the block's lock."""
    engine = create_engine("sqlite://", poolclass=pool)
    with pytest.raises(sl.Unsupported, match=rf"{pool.__name__}.*a file instead of :memory:"):
        sl.Locks(engine)
    with pytest.raises(sl.Unsupported, match=rf"{pool.__name__}.*a file instead of :memory:"):
        sl.Worker(sl.Queue(), print, bind=engine)


def test_a_database_in_memory_is_refused() -> None:
    """SQLAlchemy's default pool for it is such a pool."""
    with pytest.raises(sl.Unsupported, match="SingletonThreadPool"):
        sl.Locks(create_engine("sqlite://"))
    with pytest.raises(sl.Unsupported, match="StaticPool"):
        sl.AsyncLocks(create_async_engine("sqlite+aiosqlite://"))

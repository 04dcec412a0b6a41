"""Settings of servers and drivers under which locks work, or are refused by a sentence before any effect."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from contextlib import nullcontext
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks import health
from sqlalchemy_locks.dialects import backend_for
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import unused

POSTGRESQL = [
    "standard_conforming_strings=off",
    "backslash_quote=off",
    "bytea_output=escape",
    "extra_float_digits=-15",
    "IntervalStyle=sql_standard",
    "TimeZone=Asia/Kathmandu",
    "default_transaction_deferrable=on",
    "search_path=",
]
MYSQL = [
    "sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PAD_CHAR_TO_FULL_LENGTH,STRICT_ALL_TABLES'",
    "sql_mode = ''",
    "sql_auto_is_null = 1",
    "autocommit = 0",
    "time_zone = '+05:45'",
]


def used(engine: Engine) -> None:
    locks, queue, name = sl.Locks(engine), sl.Queue(), unused("queue")
    with locks.exclusive(unused(), timeout=5), locks.lease(unused(), ttl=60):
        pass
    assert locks.mutex.acquire(unused())
    locks.run(queue.put({"a": "\\ ' \""}, queue=name))
    (job,) = locks.run(queue.capture(queue=name))
    assert job.payload == {"a": "\\ ' \""}
    assert locks.run(queue.complete(job)) == 1


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.parametrize("setting", [*POSTGRESQL, "DateStyle=German"])
def test_postgresql_works_under(engine_to: MakeEngine, setting: str, driver: str) -> None:
    engine = engine_to("postgresql15", driver, connect_args={"options": f"-c {setting}"})
    if setting.startswith("DateStyle") and driver == "psycopg":
        with pytest.raises(sl.Unsupported, match="DateStyle"):
            sl.Locks(engine).mutex.acquire(unused())
        with engine.connect() as connection:
            problems = [each.says for each in health.examine(connection) if each.level == "problem"]
        assert "DateStyle" in problems[0]
        return
    used(engine)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT lock.key('a', 'b')")) == sl.lock.key("a", "b")


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
@pytest.mark.parametrize("setting", MYSQL)
def test_innodb_works_under(engine_to: MakeEngine, name: str, setting: str) -> None:
    used(engine_to(name, connect_args={"init_command": f"SET SESSION {setting}"}))


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_chained_transactions_are_refused(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name, connect_args={"init_command": "SET SESSION completion_type = CHAIN"})
    with pytest.raises(sl.Unsupported, match="completion_type"):
        sl.Locks(engine).exclusive(unused()).__enter__()
    with engine.connect() as connection:
        problems = [each.says for each in health.examine(connection) if each.level == "problem"]
    assert any("completion_type" in says for says in problems)


def warnings(connection: Connection) -> list[str]:
    findings = backend_for(connection.dialect).findings(connection)
    return [each.says for each in findings if (each.subject, each.level) == ("storage engine", "warning")]


@pytest.mark.parametrize(("name", "kept_by"), [("mysql", "MyISAM"), ("mariadb", "Aria")])
def test_check_warns_of_tables_without_row_locks(engine_to: MakeEngine, name: str, kept_by: str) -> None:
    with engine_to(name).connect() as connection:
        assert not warnings(connection)
        connection.execute(text(f"CREATE TABLE stored_page (id INTEGER PRIMARY KEY) ENGINE={kept_by}"))
        (says,) = warnings(connection)
        connection.execute(text("DROP TABLE stored_page"))
    assert says.startswith(f"stored_page is kept by {kept_by}, which has no row locks")


class Strict(sqlite3.Connection):
    """What connect(autocommit=False) of Python 3.12 gives: the next transaction begins with the end of the last one."""

    autocommit = False
    isolation_level: Any = ""  # which has no effect

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.execute("BEGIN")

    def commit(self) -> None:
        super().commit()
        self.execute("BEGIN")

    def rollback(self) -> None:
        super().rollback()
        self.execute("BEGIN")


class Loose(sqlite3.Connection):
    """What connect(autocommit=True) gives."""

    autocommit = True

    def commit(self) -> None:
        """Do nothing."""

    rollback = commit


def driver_arguments(autocommit: bool) -> dict[str, Any]:
    if sys.version_info >= (3, 12):
        return {"autocommit": autocommit}
    return {"factory": Loose if autocommit else Strict}


def test_sqlite3_without_autocommit(servers: Any) -> None:
    url = servers.installed("sqlite", "pysqlite")
    engine = create_engine(url, connect_args=driver_arguments(False))
    locks, other = sl.Locks(engine), create_engine(url, poolclass=NullPool)
    assert locks.mutex.acquire(unused())
    with locks.exclusive(unused()), pytest.raises(sl.LockTimeout):
        sl.Locks(other).exclusive(unused(), timeout=0.1).__enter__()
    with locks.lease(unused(), ttl=60) as lease:
        assert sl.Locks(other).renew(lease)
    with engine.connect() as connection:
        connection.execute(sl.Queue().put(1))
        connection.rollback()
        assert connection.scalar(sl.lock.try_exclusive("a"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with pytest.raises(sl.Unsupported, match="autocommit=False"):
            connection.execute(sl.Queue().put(1))
    engine.dispose()


@pytest.mark.parametrize("autocommit", [False, True])
def test_begin_immediate_needs_the_default_autocommit(servers: Any, autocommit: bool) -> None:
    options: dict[str, Any]
    url, options = servers.installed("sqlite", "pysqlite"), {"connect_args": driver_arguments(autocommit)}
    engine = create_engine(url, **options, poolclass=NullPool)
    sl.sqlite.begin_immediate(engine)
    with pytest.raises(sl.Unsupported, match=f"autocommit={autocommit}"):
        engine.connect()

    async def main() -> None:
        asynchronous = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"), **options, poolclass=NullPool)
        async with asynchronous.connect() as connection:
            await connection.exec_driver_sql("SELECT 1")
            with pytest.raises(sl.Unsupported, match="autocommit=False") if not autocommit else nullcontext():
                async with asynchronous.connect() as writer:
                    await writer.execution_options(isolation_level="AUTOCOMMIT")
                    await writer.execute(sl.Queue().put(1))
        sl.sqlite.begin_immediate(asynchronous)
        with pytest.raises(sl.Unsupported, match=f"autocommit={autocommit}"):
            await asynchronous.connect()

    asyncio.run(main())

"""Which of the tests' connections are encrypted, and that the end of one is seen in either case."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text

import sqlalchemy_locks as sl
from tests.faults.drivers import (
    clear,
    encrypted,
    good_as_new,
    good_as_new_async,
    through_a_proxy,
    through_an_async_proxy,
)
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, Watch, async_connected, installed, until, unused

POSTGRESQL = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
MYSQL = "SELECT variable_value <> '' FROM performance_schema.session_status WHERE variable_name = 'Ssl_cipher'"

MYSQL_ASYNC = pytest.mark.parametrize("driver", ["aiomysql", "asyncmy"])
EITHER = pytest.mark.parametrize("options", [encrypted, clear], ids=["tls", "plain"])
Options = Callable[[str], dict[str, Any]]


@pytest.mark.parametrize(
    ("name", "driver", "tls"),
    [
        ("postgresql15", "psycopg", True),
        ("postgresql15", "psycopg2", True),
        ("postgresql18", "psycopg", False),
        ("yugabytedb", "psycopg2", False),
        ("mysql", "pymysql", True),
    ],
)
def test_encrypted_connections(engine_to: MakeEngine, name: str, driver: str, tls: bool) -> None:
    with engine_to(name, driver).connect() as connection:
        assert bool(connection.scalar(text(MYSQL if name == "mysql" else POSTGRESQL))) is tls


@pytest.mark.parametrize(
    ("name", "driver", "options", "tls"),
    [
        ("postgresql15", "psycopg", None, True),
        ("postgresql15", "asyncpg", None, True),
        ("postgresql18", "asyncpg", None, False),
        ("mysql", "aiomysql", None, False),
        ("mysql", "aiomysql", encrypted, True),
        ("mysql", "asyncmy", encrypted, True),
    ],
)
def test_encrypted_async_connections(servers: Any, name: str, driver: str, options: Options | None, tls: bool) -> None:
    async def main() -> None:
        given = options(driver) if options else {}
        async with async_connected(installed(servers, name, driver), **given) as engine, engine.connect() as one:
            assert bool(await one.scalar(text(MYSQL if name == "mysql" else POSTGRESQL))) is tls

    asyncio.run(main())


@EITHER
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "cut"])
def test_end_of_a_mysql_connection_is_seen(
    servers: Any, watch: Callable[[str], Watch], options: Options, killed: bool
) -> None:
    watched = watch("mysql")
    with through_a_proxy(servers, "mysql", "pymysql", **options("pymysql")) as (engine, proxy):
        with pytest.raises(sl.LockLost) as raised:
            with sl.Locks(engine).exclusive(unused()) as held:
                backend = watched.backend(held.session.connection())
                held.check()
                assert not held.lost
                watched.kill(backend) if killed else proxy.cut()
                until(lambda: held.lost)
        assert type(raised.value) is sl.LockLost
        good_as_new(engine)


@EITHER
@MYSQL_ASYNC
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "cut"])
def test_end_of_an_async_mysql_connection_is_seen(
    servers: Any, watch: Callable[[str], Watch], options: Options, driver: str, killed: bool
) -> None:
    watched = watch("mysql")

    async def main() -> None:
        async with through_an_async_proxy(servers, "mysql", driver, **options(driver)) as (engine, proxy):
            with pytest.raises(sl.LockLost) as raised:
                async with sl.AsyncLocks(engine).exclusive(unused()) as held:
                    connection = await held.session.connection()
                    backend = await connection.run_sync(watched.backend)
                    await held.check()
                    assert not held.lost
                    if killed:
                        await asyncio.to_thread(watched.kill, backend)
                    else:
                        proxy.cut()
                    deadline = time.monotonic() + PATIENCE
                    while not held.lost:
                        assert time.monotonic() < deadline
                        await asyncio.sleep(0.005)
            assert type(raised.value) is sl.LockLost
            await good_as_new_async(engine)

    asyncio.run(main())

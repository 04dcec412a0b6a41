"""The drivers that the faults are tried with."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

import sqlalchemy_locks as sl
from tests.faults.proxy import Proxy
from tests.fixtures.parties import PATIENCE, async_connected, connected, installed

SYNC = [
    ("postgresql15", "psycopg"),
    ("postgresql15", "psycopg2"),
    ("yugabytedb", "yugabytedb"),
    ("mysql", "pymysql"),
    ("mariadb", "mariadb+pymysql"),
]
ASYNC = [
    ("postgresql15", "psycopg"),
    ("postgresql15", "asyncpg"),
    ("mysql", "aiomysql"),
    ("mysql", "asyncmy"),
    ("mariadb", "mariadb+aiomysql"),
]

sync = pytest.mark.parametrize(("name", "driver"), SYNC, ids=["-".join(pair) for pair in SYNC])
asynchronous = pytest.mark.parametrize(("name", "driver"), ASYNC, ids=["-".join(pair) for pair in ASYNC])

ONE: dict[str, Any] = {"pool_size": 1, "max_overflow": 0, "pool_timeout": PATIENCE}


#: arguments of a driver that encrypts where it can, so that the proxy can read the requests
_CLEAR: dict[str, dict[str, Any]] = {
    "psycopg": {"sslmode": "disable"},
    "psycopg2": {"sslmode": "disable"},
    "asyncpg": {"ssl": "disable"},
    "pymysql": {"ssl_disabled": True},
}


def clear(driver: str) -> dict[str, Any]:
    """The options of an engine whose requests the proxy can read."""
    return {"connect_args": _CLEAR.get(driver, {})}


def encrypted(driver: str) -> dict[str, Any]:
    """The options of an engine that speaks TLS to MySQL, whose certificate is self-signed."""
    if driver == "pymysql":
        return {}  # it does wherever it can
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return {"connect_args": {"ssl": context}}


@contextlib.contextmanager
def through_a_proxy(servers: Any, name: str, driver: str, **options: Any) -> Iterator[tuple[Engine, Proxy]]:
    """An engine with one connection, which can be cut."""
    with Proxy(installed(servers, name, driver)) as proxy, connected(proxy.url, **{**ONE, **options}) as engine:
        yield engine, proxy


@contextlib.asynccontextmanager
async def through_an_async_proxy(
    servers: Any, name: str, driver: str, **options: Any
) -> AsyncIterator[tuple[AsyncEngine, Proxy]]:
    with Proxy(installed(servers, name, driver)) as proxy:
        async with async_connected(proxy.url, **{**ONE, **options}) as engine:
            yield engine, proxy


def good_as_new(engine: Engine) -> None:
    """Nothing is leaked, and the one connection that there is can lock and work."""
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    for _ in range(2):
        with sl.Locks(engine).exclusive("good as new", timeout=PATIENCE) as held:
            held.session.execute(sl.lock.shared("good as new"))
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


async def good_as_new_async(engine: AsyncEngine) -> None:
    """As ``good_as_new``."""
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    for _ in range(2):
        async with sl.AsyncLocks(engine).exclusive("good as new", timeout=PATIENCE) as held:
            await held.session.execute(sl.lock.shared("good as new"))
        async with engine.connect() as connection:
            assert (await connection.exec_driver_sql("SELECT 1")).scalar() == 1
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]

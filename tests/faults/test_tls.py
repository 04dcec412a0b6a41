"""Which of the tests' connections are encrypted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text

from tests.faults.drivers import (
    encrypted,
)
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import async_connected, installed

POSTGRESQL = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
MYSQL = "SELECT variable_value <> '' FROM performance_schema.session_status WHERE variable_name = 'Ssl_cipher'"

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

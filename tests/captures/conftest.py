"""One app database for each engine, emptied before each test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Engine

from tests.conftest import PLAIN, Servers
from tests.fixtures.capture_models import Base
from tests.fixtures.parties import connected
from tests.fixtures.queues import MakeEngine, leveled

__all__ = ["engine", "engine_to", "leveled"]

#: PostgreSQL 18 gets the same statements as 15; it captures in the tests of the queue
ENGINES = ["postgresql15", "yugabytedb", "mysql", "mariadb", "sqlite"]
_databases: dict[str, str] = {}


@pytest.fixture
def engine_to(servers: Servers) -> Iterator[MakeEngine]:
    """Engines for the app's database, with its tables and no rows: ``engine_to("mysql", isolation_level=...)``."""
    with ExitStack() as opened:
        emptied: set[str] = set()

        def make(name: str, driver: str | None = None, **options: Any) -> Engine:
            new = name not in _databases
            if new:
                _databases[name] = servers.database(name)
            if name not in emptied:
                with connected(servers.url(name, PLAIN[name], _databases[name])) as plain, plain.begin() as connection:
                    if new:
                        Base.metadata.create_all(connection)
                    for table in reversed(Base.metadata.sorted_tables):
                        connection.execute(table.delete())
                emptied.add(name)
            level = {key: value for key, value in options.items() if value is not None}
            url = servers.url(name, driver or PLAIN[name], _databases[name])
            return opened.enter_context(connected(url, **level))

        yield make


@pytest.fixture(params=ENGINES)
def engine(engine_to: MakeEngine, request: pytest.FixtureRequest) -> Engine:
    return engine_to(request.param)

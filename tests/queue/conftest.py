"""Engines to the databases with the locks, their queues empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, delete, update
from sqlalchemy.pool import NullPool

from sqlalchemy_locks.core.operation import build_context
from tests.conftest import PLAIN, Servers

ENGINES = ["postgresql15", "postgresql18", "yugabytedb", "mysql", "mariadb", "sqlite"]
#: one of each kind, for what takes long
KINDS = ["postgresql15", "mysql", "mariadb", "sqlite"]
LEVELS = [
    ("postgresql15", None),
    ("yugabytedb", None),
    ("mysql", "READ COMMITTED"),
    ("mysql", "REPEATABLE READ"),
    ("mariadb", "READ COMMITTED"),
    ("mariadb", "REPEATABLE READ"),
]

MakeEngine = Callable[..., Engine]


def empty(url: str) -> None:
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        tables = build_context(connection.dialect, {}).tables
        for table in (tables.job, tables.task):
            connection.execute(delete(table))


def silenced(connection: Connection, *jobs: Any, table: Any = None) -> None:
    """Let these jobs that run, or all of them, seem to have been silent for years: no test waits until a clock moves."""
    if table is None:
        table = build_context(connection.dialect, {}).tables.job
    years_ago = datetime(2020, 1, 1, tzinfo=timezone.utc)
    silencing = update(table).where(table.c.heartbeat_at.is_not(None)).values(heartbeat_at=years_ago)
    if jobs:
        silencing = silencing.where(table.c.internal_id.in_([job.internal_id for job in jobs]))
    assert connection.execute(silencing).rowcount > 0


@pytest.fixture
def engine_to(servers: Servers) -> Iterator[MakeEngine]:
    """``engine_to("mysql", isolation_level=...)``: an engine to its database, emptied at the first call."""
    with ExitStack() as opened:
        emptied: set[str] = set()

        def make(name: str, driver: str | None = None, **options: Any) -> Engine:
            if name not in emptied:
                empty(servers.installed(name, PLAIN[name]))
                emptied.add(name)
            given = {key: value for key, value in options.items() if value is not None}
            engine = create_engine(servers.installed(name, driver or PLAIN[name]), **given)
            opened.callback(engine.dispose)
            return engine

        yield make


@pytest.fixture(params=ENGINES)
def engine(engine_to: MakeEngine, request: pytest.FixtureRequest) -> Engine:
    return engine_to(request.param)


@pytest.fixture(params=LEVELS, ids=lambda level: " ".join(filter(None, level)))
def leveled(engine_to: MakeEngine, request: pytest.FixtureRequest) -> Engine:
    """An engine with row locks, at a level that an app may have it."""
    name, level = request.param
    return engine_to(name, isolation_level=level)

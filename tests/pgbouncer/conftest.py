"""PgBouncer in transaction mode with three server connections, and what every test must have left on each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, make_url, text

from tests.conftest import Servers
from tests.operation.parties import POOLED
from tests.servers import PgBouncer, PostgreSQL

SIZE = 3
#: what PgBouncer itself sets as each client has it, and what asyncpg turns off while it asks about types
TRACKED = ("client_encoding", "DateStyle", "TimeZone", "standard_conforming_strings", "application_name", "jit")

MakePooler = Callable[..., PgBouncer]


@pytest.fixture(scope="module")
def pooler(servers: Servers) -> Iterator[MakePooler]:
    """Poolers of a module's own: ``pooler(default_pool_size=1)``, started once."""
    server = servers.server("postgresql15")
    assert isinstance(server, PostgreSQL)
    with contextlib.ExitStack() as started:
        made: dict[Any, PgBouncer] = {}

        def make(**settings: str | int) -> PgBouncer:
            key = tuple(settings.items())
            if key not in made:
                made[key] = started.enter_context(PgBouncer(server, **settings))
            return made[key]

        yield make


@pytest.fixture(scope="module")
def through(servers: Servers, pooler: MakePooler) -> Callable[..., tuple[str, dict[str, Any]]]:
    """A URL and its ``connect_args``, through a pooler to a database with the locks: ``through("asyncpg")``."""

    def url(driver: str, **settings: str | int) -> tuple[str, dict[str, Any]]:
        database = make_url(servers.installed("postgresql15", driver)).database
        return pooler(**(settings or {"default_pool_size": SIZE})).url(driver, database), dict(POOLED[driver])

    return url


@pytest.fixture
def nothing_is_left(through: Any) -> Iterator[None]:
    """On every server connection of the pooler: no setting, no channel, no lock, no statement of libpq's drivers."""
    yield
    url, connect_args = through("psycopg")
    engine = create_engine(url, poolclass=NullPool, connect_args=connect_args)
    sessions: set[int] = set()
    with contextlib.ExitStack() as opened:
        for _ in range(SIZE):  # at the same time, and so one on each
            connection = opened.enter_context(engine.connect())
            sessions.add(connection.scalar(text("SELECT pg_backend_pid()")))  # type: ignore[arg-type]
            settings = connection.execute(
                text("SELECT name, setting FROM pg_settings WHERE source = 'session' AND NOT name = ANY(:tracked)"),
                {"tracked": list(TRACKED)},
            ).all()
            assert settings == []
            assert connection.scalars(text("SELECT pg_listening_channels()")).all() == []
            mine = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
            assert connection.scalar(text(mine)) == 0
            kept = "SELECT name FROM pg_prepared_statements WHERE name NOT LIKE '\\_\\_asyncpg\\_%'"
            assert connection.scalars(text(kept)).all() == []
    assert len(sessions) == SIZE

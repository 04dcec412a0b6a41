"""PgBouncer in transaction mode with three server connections, and the state that every test must leave on them.

Each test runs through two versions: an old one, with drivers set to prepare nothing, and one that keeps track of
prepared statements, with the drivers' defaults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import NullPool, make_url, text

from tests.conftest import Servers, not_here
from tests.fixtures.parties import POOLED, connected
from tests.servers import PgBouncer, PostgreSQL, Unavailable

SIZE = 3
#: settings that PgBouncer sets for each client, and one that asyncpg turns off while it reads types
TRACKED = ("client_encoding", "DateStyle", "TimeZone", "standard_conforming_strings", "application_name", "jit")

#: the statements that asyncpg leaves there, and those that PgBouncer prepares itself
OWN = {None: "\\_\\_asyncpg\\_%", "trixie": "PGBOUNCER\\_%"}

MakePooler = Callable[..., PgBouncer]


#: the Debian release; the installed version is 1.18, and trixie's is 1.24
RELEASES = {"installed": None, "trixie": "trixie"}


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str | None:
    return RELEASES[request.param]


@pytest.fixture(scope="module")
def pooler(servers: Servers, release: str | None) -> Iterator[MakePooler]:
    """Poolers of one test module: ``pooler(default_pool_size=1)``, started once."""
    server = servers.server("postgresql15")
    assert isinstance(server, PostgreSQL)
    with contextlib.ExitStack() as started:
        made: dict[Any, PgBouncer] = {}

        def make(**settings: str | int) -> PgBouncer:
            key = tuple(settings.items())
            if key not in made:
                try:
                    made[key] = started.enter_context(PgBouncer(server, release, **settings))
                except Unavailable as why:
                    not_here(why)
            return made[key]

        yield make


@pytest.fixture(scope="module")
def through(servers: Servers, pooler: MakePooler, release: str | None) -> Callable[..., tuple[str, dict[str, Any]]]:
    """A URL and its ``connect_args``, through a pooler to a database with the locks: ``through("asyncpg")``."""

    def url(driver: str, **settings: str | int) -> tuple[str, dict[str, Any]]:
        database = make_url(servers.installed("postgresql15", driver)).database
        options = {} if release else dict(POOLED[driver])
        return pooler(**(settings or {"default_pool_size": SIZE})).url(driver, database), options

    return url


@pytest.fixture
def nothing_is_left(through: Any, release: str | None) -> Iterator[None]:
    """Assert that no server connection of the pooler has a setting, channel, lock or statement of libpq's drivers."""
    yield
    url, connect_args = through("psycopg")
    sessions: set[int] = set()
    with connected(url, poolclass=NullPool, connect_args=connect_args) as engine, contextlib.ExitStack() as opened:
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
            kept = "SELECT name FROM pg_prepared_statements WHERE name NOT LIKE :own"
            assert connection.scalars(text(kept), {"own": OWN[release]}).all() == []
    assert len(sessions) == SIZE

"""Projects that migrate real databases, by the shipped revisions and by directives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url
from sqlalchemy.engine import URL

from tests.alembic.project import Fresh, Project

#: Every engine, with the drivers that run migrations.
ENGINES = [
    ("postgresql15", "psycopg"),
    ("postgresql15", "psycopg2"),
    ("postgresql18", "psycopg"),
    ("yugabytedb", "psycopg2"),
    ("yugabytedb", "yugabytedb"),
    ("mysql", "pymysql"),
    ("mariadb", "mariadb+pymysql"),
    ("sqlite", "pysqlite"),
]

#: Each kind of server, once.
SERVERS = [
    ("postgresql15", "psycopg"),
    ("yugabytedb", "psycopg2"),
    ("mysql", "pymysql"),
    ("mariadb", "mariadb+pymysql"),
    ("sqlite", "pysqlite"),
]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of slow tests, which interrupt every command and don't depend on the driver."""
    config.addinivalue_line("markers", "long: once on each kind of server, by directives only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`engine`: once for every engine; `installed_by`: once for each; fewer for tests marked as long."""
    long = metafunc.definition.get_closest_marker("long") is not None
    if "engine" in metafunc.fixturenames:
        engines = [engine for engine in ENGINES if not long or engine in SERVERS]
        metafunc.parametrize("engine", engines, ids=lambda pair: "-".join(pair))
    if "installed_by" in metafunc.fixturenames:
        metafunc.parametrize("installed_by", ["directives"] if long else ["revisions", "directives"])


@pytest.fixture
def fresh(servers: Any) -> Fresh:
    """An empty database on the server named, as the driver reaches it."""
    return lambda server, driver: make_url(servers.fresh(server, driver))


@pytest.fixture
def url(engine: tuple[str, str], fresh: Fresh) -> URL:
    """An empty database of the engine."""
    return fresh(*engine)


@pytest.fixture
def project(url: URL, installed_by: str, tmp_path: Path) -> Project:
    """A project on that database."""
    return Project(tmp_path / "project", url, installed_by)


@pytest.fixture
def postgresql(fresh: Fresh) -> URL:
    """An empty database of one PostgreSQL."""
    return fresh("postgresql15", "psycopg")


@pytest.fixture
def yugabytedb(fresh: Fresh) -> URL:
    """An empty database of YugabyteDB, by its own dialect name."""
    return fresh("yugabytedb", "yugabytedb")

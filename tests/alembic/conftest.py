"""Projects that migrate real databases, by the shipped revisions and by directives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url
from sqlalchemy.engine import URL

from tests.alembic.project import Fresh, Project

#: Every kind of server, with a driver that runs migrations; YugabyteDB's stand-in is a PostgreSQL 15.
ENGINES = [
    ("postgresql18", "psycopg"),
    ("yugabytedb", "yugabytedb"),
    ("mysql", "pymysql"),
    ("mariadb", "mariadb+pymysql"),
    ("sqlite", "pysqlite"),
]


@pytest.fixture(params=ENGINES, ids="-".join)
def engine(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Each kind of server."""
    pair: tuple[str, str] = request.param
    return pair


@pytest.fixture(params=["revisions", "directives"])
def installed_by(request: pytest.FixtureRequest) -> str:
    """Both doors."""
    return str(request.param)


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

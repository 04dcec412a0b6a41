"""The command line, on one database of each kind of server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.cli.connect import URL_VARIABLES
from sqlalchemy_locks.cli.group import commands
from tests.conftest import PLAIN, Servers, install

ENGINES = ["sqlite", "postgresql15", "mysql", "mariadb"]


@dataclass(frozen=True)
class Cli:
    """Runs commands on a database, in this process."""

    url: str

    def __call__(self, *arguments: str, code: int = 0, **environment: str) -> Result:
        done = run(*arguments, SQLALCHEMY_LOCKS_URL=self.url, **environment)
        assert done.exit_code == code, f"{done.exit_code}: {done.output}"
        return done

    def json(self, *arguments: str, code: int = 0) -> Any:
        at = arguments.index("--") if "--" in arguments else len(arguments)
        return json.loads(self(*arguments[:at], "--json", *arguments[at:], code=code).stdout)

    @property
    def locks(self) -> sl.Locks:
        # no pool, so that no connection stays open
        return sl.Locks(create_engine(self.url, poolclass=NullPool))


def run(*arguments: str, **environment: str) -> Result:
    """Run a command, without the environment variables that set a database or a terminal width."""
    clean: dict[str, str | None] = dict.fromkeys((*URL_VARIABLES, "NO_COLOR", "FORCE_COLOR"))
    return CliRunner().invoke(commands, arguments, env={**clean, **environment}, prog_name="sqlalchemy-locks")


@pytest.fixture(scope="module")
def made(servers: Servers) -> Callable[[str], str]:
    """Return the URL of this module's database with the locks, one for each engine."""
    urls: dict[str, str] = {}

    def make(engine: str) -> str:
        if engine not in urls:
            urls[engine] = servers.fresh(engine, PLAIN[engine])
            install(urls[engine])
        return urls[engine]

    return make


@pytest.fixture(params=ENGINES)
def cli(request: pytest.FixtureRequest, made: Callable[[str], str]) -> Cli:
    """The command line on each kind of server."""
    return Cli(made(request.param))


@pytest.fixture
def postgresql(made: Callable[[str], str]) -> Cli:
    return Cli(made("postgresql15"))


@pytest.fixture
def sqlite(made: Callable[[str], str]) -> Cli:
    return Cli(made("sqlite"))


@pytest.fixture
def fresh(servers: Servers) -> Cli:
    """The command line on an SQLite database of the test's own, with the locks."""
    cli = Cli(servers.fresh("sqlite", PLAIN["sqlite"]))
    cli("install")
    return cli

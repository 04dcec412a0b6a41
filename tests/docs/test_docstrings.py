"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from sqlalchemy import make_url

import sqlalchemy_locks as sl
from tests import servers as real
from tests.conftest import Servers, install
from tests.docs import apps, docstrings
from tests.redis.conftest import started_or_skipped

#: only servers list holders by session, and have session locks
ON_A_SERVER = ("holders", "session_exclusive", "session_unlock", "KeyHolder", "KeyWaiter")
#: of a program as a whole, and of a user's own tests
ELSEWHERE = ("__main__", "testing.")


def examples() -> dict[str, str]:
    """Return the docstrings with examples, by the name in the package."""
    found: dict[str, str] = {}
    package = f"{sl.__name__}."
    for info in pkgutil.walk_packages(sl.__path__, package):
        if info.name.removeprefix(package).startswith(ELSEWHERE):
            continue
        for each in doctest.DocTestFinder().find(importlib.import_module(info.name), info.name):
            # a module's own has no name of its own
            if each.examples and each.name != info.name:
                found[each.name.removeprefix(package)] = each.docstring
    return found


EXAMPLES = examples()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with the locks and what the examples use."""
    file = tmp_path_factory.mktemp("docstrings") / "app.db"
    install(f"sqlite:///{file}")
    docstrings.fill(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="module")
def filled(servers: Servers) -> str:
    url = servers.fresh("postgresql15", "psycopg")
    install(url)
    docstrings.fill(url)
    return url


@pytest.mark.parametrize("name", [name for name in EXAMPLES if not name.startswith("redis.")])
def test_example_runs(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if name.endswith(ON_A_SERVER):
        url = request.getfixturevalue("filled")
        docstrings.executed(
            EXAMPLES[name], url, make_url(url).set(drivername="postgresql+asyncpg").render_as_string(False)
        )
        return
    shutil.copy(request.getfixturevalue("template"), tmp_path / "app.db")
    file = tmp_path / "app.db"
    docstrings.executed(
        EXAMPLES[name],
        f"sqlite:///{file}?timeout=120",
        f"sqlite+aiosqlite:///{file}?timeout=120",
        apps.around(name.removeprefix("integrations.")),
    )


@pytest.fixture(scope="module")
def client() -> Iterator[redis.Redis]:
    with started_or_skipped(real.Redis()) as server:
        client = redis.Redis(host=server.host, port=server.port)
        yield client
        client.close()


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.startswith("redis.")])
def test_redis_example_runs(name: str, client: redis.Redis) -> None:
    client.flushall()
    docstrings.executed_with_redis(EXAMPLES[name], client)

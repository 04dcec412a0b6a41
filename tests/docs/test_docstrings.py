"""Every public name has a docstring with an example, and every example runs."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import make_url

import sqlalchemy_locks as sl
from sqlalchemy_locks.facade.async_lease import AsyncLostEvent
from sqlalchemy_locks.facade.exclusive import Held
from sqlalchemy_locks.facade.lease import LostEvent
from sqlalchemy_locks.facade.mutexes import Mutexes
from sqlalchemy_locks.integrations import dashboard, fastapi, flask, otel, problem, prometheus, starlette
from sqlalchemy_locks.redis import Mutex, StateTransition, Timeout
from sqlalchemy_locks.runtime.events import LockEvents
from tests import servers as real
from tests.conftest import Servers, install
from tests.docs import apps, docstrings
from tests.redis.conftest import started_or_skipped

#: classes that aren't exported, whose methods need examples as well
OTHERS = [Held, LostEvent, AsyncLostEvent, LockEvents, Mutexes]
#: only servers list holders by session, and have session locks
ON_A_SERVER = {"lock.holders", "lock.session_exclusive", "lock.session_unlock", "KeyHolder", "KeyWaiter"}
#: methods that the façades use internally, and those that the example of a listener's class covers
INTERNAL = {"LostEvent.close", "LostEvent.confirm", "LostEvent.set"}
REDIS = {"redis.Mutex": Mutex, "redis.Timeout": Timeout, "redis.StateTransition": StateTransition}


def methods(name: str, cls: type[Any]) -> Iterator[tuple[str, Any]]:
    """The methods that this library defines."""
    for attribute in dir(cls):
        made = inspect.getattr_static(cls, attribute)
        function = getattr(made, "__func__", made)
        module = getattr(function, "__module__", None) or ""
        own = str(module).startswith("sqlalchemy_locks") and "operation" not in module
        if not attribute.startswith("_") and callable(function) and own:
            yield f"{name}.{attribute}", made


def public() -> dict[str, Any]:
    """Return every public name, as it is written after ``sl.``, without methods of exceptions."""
    found: dict[str, Any] = {}
    for name in sl.__all__:
        made = getattr(sl, name)
        if inspect.ismodule(made):
            found |= {
                f"{name}.{each}": member
                for each, member in vars(made).items()
                if inspect.isfunction(member) and not each.startswith("_") and each in exported(made)
            }
        else:
            found[name] = made
    found |= {cls.__name__: cls for cls in OTHERS} | REDIS
    found |= {f"{module.__name__.rpartition('.')[2]}.instrument": module.instrument for module in (otel, prometheus)}
    for name, made in list(found.items()):
        if inspect.isclass(made) and not issubclass(made, Exception):
            found |= dict(methods(name, made) if made is not LockEvents else ())
    for module in (flask, fastapi, starlette, problem, dashboard):
        found |= integration(module)
    return {name: made for name, made in found.items() if name not in INTERNAL}


def integration(module: Any) -> dict[str, Any]:
    """Return an integration's own names, without re-exported and inherited ones."""
    found: dict[str, Any] = {}
    for name in module.__all__:
        made = getattr(module, name)
        called = f"{module.__name__.rpartition('.')[2]}.{name}"
        if (inspect.isclass(made) or inspect.isfunction(made)) and made.__module__.startswith(module.__name__):
            found[called] = made
            own = vars(made) if inspect.isclass(made) and not issubclass(made, Exception) else {}
            found |= {
                f"{called}.{each}": member
                for each, member in own.items()
                if not each.startswith("_") and (inspect.isroutine(member) or isinstance(member, property))
            }
    return found


def exported(module: Any) -> list[str]:
    return getattr(module, "__all__", None) or [
        name for name, member in vars(module).items() if getattr(member, "__module__", None) == module.__name__
    ]


PUBLIC = public()
DOCS = {name: inspect.getdoc(made) or "" for name, made in PUBLIC.items()}
SHOWN = [name for name, told in DOCS.items() if ">>>" in told]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_has_an_example(name: str) -> None:
    told = DOCS[name]
    assert told
    # a method of the async side, or of an app's locks, refers to its counterpart, which has an example
    twin = (name.startswith("Async") and told.startswith("As ")) or told.startswith(("See :meth:`", "As :meth:`"))
    # the example of a value's class shows its attributes
    assert ">>>" in told or twin or isinstance(PUBLIC[name], (property, cached_property)), name


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


@pytest.mark.parametrize("name", [name for name in SHOWN if not name.startswith("redis.")])
def test_example_runs(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if name in ON_A_SERVER:
        url = request.getfixturevalue("filled")
        docstrings.executed(DOCS[name], url, make_url(url).set(drivername="postgresql+asyncpg").render_as_string(False))
        return
    shutil.copy(request.getfixturevalue("template"), tmp_path / "app.db")
    file = tmp_path / "app.db"
    docstrings.executed(
        DOCS[name], f"sqlite:///{file}?timeout=120", f"sqlite+aiosqlite:///{file}?timeout=120", apps.around(name)
    )


@pytest.fixture(scope="module")
def client() -> Iterator[redis.Redis]:
    with started_or_skipped(real.Redis()) as server:
        client = redis.Redis(host=server.host, port=server.port)
        yield client
        client.close()


@pytest.mark.parametrize("name", [name for name in SHOWN if name.startswith("redis.")])
def test_redis_example_runs(name: str, client: redis.Redis) -> None:
    client.flushall()
    docstrings.executed_with_redis(DOCS[name], client)

"""The page behind each of its doors, on databases of its own, and a browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import a2wsgi
import httpx
import pytest
from a2wsgi import ASGIMiddleware

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations import dashboard
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.lent import Loan
from tests.fixtures.parties import connected, until, unused
from tests.integrations.dashboard.chromium import Chromium, chromium

ENGINES = ("sqlite", "postgresql15", "mysql", "mariadb")
#: the engine's driver for each door
ASYNC = {"sqlite": "aiosqlite", "postgresql15": "asyncpg", "mysql": "aiomysql", "mariadb": "mariadb+aiomysql"}
DOORS = ("asgi", "thread", "wsgi")
ORIGIN = "http://app.example.org"


@contextmanager
def bridges_that_end() -> Iterator[None]:
    """The threads of WSGI apps that are made meanwhile end with the block, where an app's would end with its process."""
    loops: list[asyncio.AbstractEventLoop] = []

    class Bridge(ASGIMiddleware):
        def __init__(self, app: Any) -> None:
            super().__init__(app)
            loops.append(self.loop)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(a2wsgi, "ASGIMiddleware", Bridge)
        yield
    for loop in loops:
        loop.call_soon_threadsafe(loop.stop)
        until(lambda loop=loop: not loop.is_running(), pause=0.01)
        loop.close()


class Door:
    """A visitor of a page, through one door: cookies are kept, redirections not followed."""

    def __init__(self, door: str, url: str, async_url: str, prefix: str = "/", **options: Any) -> None:
        self._prefix = prefix
        self._loop = asyncio.new_event_loop()
        self._opened = ExitStack()
        self.locks = sl.Locks(self._opened.enter_context(connected(url)))
        self._client: Any
        if door == "wsgi":
            self._opened.enter_context(bridges_that_end())
            transport = httpx.WSGITransport(app=dashboard.wsgi(self.locks, **options))
            self._client = self._opened.enter_context(httpx.Client(transport=transport, base_url=ORIGIN))
            return
        locks: Any = self.locks
        if door == "asgi":
            loan = Loan(async_url, True, {})
            self._opened.callback(lambda: self._loop.run_until_complete(loan.take_back_async()))
            locks = sl.AsyncLocks(loan.engine)
        transport = httpx.ASGITransport(app=dashboard.asgi(locks, **options))
        self._client = httpx.AsyncClient(transport=transport, base_url=ORIGIN)
        self._opened.callback(lambda: self._loop.run_until_complete(self._client.aclose()))

    def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        answer = self._client.request(method, path, **given)
        return answer if isinstance(answer, httpx.Response) else self._loop.run_until_complete(answer)

    def get(self, path: str = "/", **given: Any) -> httpx.Response:
        return self.ask("GET", path, **given)

    def text(self, path: str = "/") -> str:
        answer = self.get(path)
        assert answer.status_code == 200, answer.text
        return answer.text

    def token(self) -> str:
        """Return the token of the page's forms; the visitor's cookie is stored."""
        found = re.search(r'name="token" value="([^"]*)"', self.text("/live"))
        assert found is not None
        return found[1]

    def post(self, action: str, *, headers: Any = None, **fields: str) -> httpx.Response:
        """As a browser sends a form of the page."""
        return self.ask("POST", f"/{action}", data=fields, headers={"Origin": ORIGIN} if headers is None else headers)

    def forget(self) -> None:
        """The visitor's cookies."""
        self._client.cookies.clear()

    def close(self) -> None:
        self._opened.close()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


MakeDoor = Callable[..., Door]


@pytest.fixture(scope="session")
def databases(servers: Servers) -> Callable[[str], tuple[str, str]]:
    """The URLs, synchronous and not, of a database with the locks that is this folder's own: one for each engine."""
    made: dict[str, tuple[str, str]] = {}

    def make(engine: str) -> tuple[str, str]:
        if engine not in made:
            name = servers.database(engine)
            install(servers.url(engine, PLAIN[engine], name))
            made[engine] = servers.url(engine, PLAIN[engine], name), servers.url(engine, ASYNC[engine], name)
        return made[engine]

    return make


@pytest.fixture
def door_to(databases: Callable[[str], tuple[str, str]]) -> Iterator[MakeDoor]:
    """``door_to("sqlite", "asgi", authorize=...)``."""
    with ExitStack() as opened:

        def make(engine: str = "sqlite", door: str = "thread", **options: Any) -> Door:
            made = Door(door, *databases(engine), **options)
            opened.callback(made.close)
            return made

        yield make


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def semaphore(databases: Callable[[str], tuple[str, str]]) -> Iterator[Callable[..., str]]:
    """Make a semaphore that no other test has, and hold some of it: its name, which is its holder's id as well."""
    locks_of: dict[str, sl.Locks] = {}

    def make(engine: str = "sqlite", capacity: int = 3, held: int = 1, name: str | None = None, **given: Any) -> str:
        name = name or unused("semaphore")
        if engine not in locks_of:
            locks_of[engine] = sl.Locks(opened.enter_context(connected(databases(engine)[0])))
        locks = locks_of[engine]
        locks.run(sl.semaphore.create(name, capacity))
        if held:
            assert locks.acquire({name: held}, **{"external_id": name, "owner": "somebody", "ttl": 3600, **given})
        return name

    with ExitStack() as opened:
        yield make


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as started:
        yield started

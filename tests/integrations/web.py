"""What the tests of web frameworks share: an app that is asked in its own loop, and requests that wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import AsyncEngine

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.fastapi import FastAPILocks
from sqlalchemy_locks.integrations.starlette import StarletteLocks
from tests.operation.parties import ASYNC, PATIENCE, async_connected, installed

PROBLEM = "application/problem+json"
#: where the dependencies are tried
ENGINES = {name: ASYNC[name] for name in ("sqlite/aiosqlite", "postgresql15/asyncpg", "postgresql15/psycopg")}
ENGINES["mysql/aiomysql"] = ASYNC["mysql/aiomysql"]


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Asks an app whose lifespan runs meanwhile; an error of the app's is raised here."""
    async with app.router.lifespan_context(app), client(app) as asking:
        yield asking


def client(app: Any) -> httpx.AsyncClient:
    """The same without a lifespan."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app", timeout=PATIENCE)


@asynccontextmanager
async def served(servers: Any, which: str, **options: Any) -> AsyncIterator[tuple[FastAPI, FastAPILocks]]:
    """An app without routes, and its locks. Their maintenance, which is in the way of a try on SQLite, stands still."""
    name, driver = ASYNC[which]
    async with async_connected(installed(servers, name, driver), **options) as engine:
        locks = FastAPILocks(engine, maintain_every=None)
        yield FastAPI(lifespan=locks.lifespan), locks


@asynccontextmanager
async def other(servers: Any, which: str) -> AsyncIterator[StarletteLocks]:
    """Another process, as far as the database can tell."""
    name, driver = ASYNC[which]
    async with async_connected(installed(servers, name, driver)) as engine:
        yield StarletteLocks(engine, maintain_every=None)


class Door:
    """What an endpoint waits at, and its test knows that it does."""

    def __init__(self) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def pass_(self) -> None:
        """Wait until the test opens it."""
        self.reached.set()
        await self.opened.wait()


@asynccontextmanager
async def meanwhile(request: Coroutine[Any, Any, Any], door: Door) -> AsyncIterator[asyncio.Task[Any]]:
    """A request that stands at the door while the block runs, and is answered afterwards."""
    task = asyncio.create_task(request)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(lambda: asyncio.wait([task], timeout=PATIENCE))
        stack.callback(door.opened.set)
        reached = asyncio.create_task(door.reached.wait())
        await asyncio.wait([task, reached], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        assert door.reached.is_set(), task
        yield task


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test, which is ended when it hangs."""

    async def bounded() -> None:
        await asyncio.wait_for(main(), PATIENCE)

    asyncio.run(bounded())


def code(response: httpx.Response) -> tuple[int, str]:
    """What a problem is."""
    assert response.headers["Content-Type"] == PROBLEM, response.text
    return response.status_code, response.json()["type"].rpartition(":")[2]


async def used(locks: sl.AsyncLocks, semaphore: str) -> int:
    """How many permits of a semaphore are held."""
    return next(int(row.used) for row in await locks.run(sl.semaphore.usage()) if row.name == semaphore)


def checked_out(engine: AsyncEngine) -> int:
    """How many connections of the pool are in use."""
    return int(engine.pool.checkedout())  # type: ignore[attr-defined]

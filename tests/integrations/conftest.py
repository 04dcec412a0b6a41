"""An app of FastAPI, its locks, and those of another process; tests that are coroutines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from sqlalchemy_locks.integrations.starlette import StarletteLocks
from tests.fixtures.parties import ASYNC, async_connected, installed
from tests.fixtures.web import client_of


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def which() -> str:
    """The engine and its driver, of tests that aren't parametrized with one."""
    return "sqlite/aiosqlite"


@pytest.fixture
async def locks(servers: Any, which: str) -> AsyncIterator[StarletteLocks]:
    """Their maintenance, which could block a try on SQLite, is off."""
    async with async_connected(installed(servers, *ASYNC[which])) as engine:
        yield StarletteLocks(engine, maintain_every=None)


@pytest.fixture
def app(locks: StarletteLocks) -> FastAPI:
    """Without routes."""
    return FastAPI(lifespan=locks.lifespan)


@pytest.fixture
async def elsewhere(servers: Any, which: str) -> AsyncIterator[StarletteLocks]:
    """Locks that are another process to the database."""
    async with async_connected(installed(servers, *ASYNC[which])) as engine:
        yield StarletteLocks(engine, maintain_every=None)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app, whose lifespan runs meanwhile; an error of the app is raised here."""
    async with client_of(app) as client:
        yield client

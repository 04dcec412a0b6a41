"""With a real server: a client that disconnects in a stream leaves nothing behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.dashboard.serving import serve
from sqlalchemy_locks.integrations.fastapi import StarletteLocks, exclusive, semaphore
from tests.fixtures.parties import PATIENCE, async_connected, connected, installed, until, unused
from tests.fixtures.web import code


@pytest.mark.parametrize("which", ["sqlite", "postgresql15"])
def test_disconnected_client_releases_the_lock(servers: Any, which: str) -> None:
    url = installed(servers, which, {"sqlite": "aiosqlite", "postgresql15": "asyncpg"}[which])
    room, what = unused("exports"), unused()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with async_connected(url) as engine:
            async with StarletteLocks(engine, maintain_every=None).lifespan(app):
                yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/stream", dependencies=[semaphore(room, ttl=3600, timeout=0)])
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            while True:
                yield b"part" * 1000
                await asyncio.sleep(0.01)

        return StreamingResponse(parts())

    @app.post("/tried", dependencies=[semaphore(room, ttl=3600, timeout=0)])
    async def tried() -> int:
        return 1

    @app.post("/work", dependencies=[exclusive(what, timeout=PATIENCE)])
    async def work() -> int:
        return 1

    with connected(installed(servers, which)) as plain:
        locks = sl.Locks(plain)
        locks.run(sl.semaphore.create(room, 1))
        with serve(app) as address, httpx.Client(base_url=address, timeout=PATIENCE) as client:
            with client.stream("GET", "/stream") as streamed:
                parts = streamed.iter_bytes(4)  # a reference, without which httpx would disconnect
                assert next(parts) == b"part"
                assert code(client.post("/tried")) == (429, "no-room")
            until(lambda: not locks.run(sl.semaphore.holders(room)))
            assert client.post("/work").json() == 1
            del parts

"""With a real server: a client that disconnects in a stream leaves nothing behind."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from sqlalchemy import create_engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.fastapi import StarletteLocks, exclusive, semaphore
from tests.fixtures.parties import EVERYWHERE, PATIENCE, async_connected, installed, until, unused
from tests.fixtures.web import code


class Server(uvicorn.Server):
    """A server in a thread, at ``address``."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))
        self.failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._in_thread, daemon=True)

    def _in_thread(self) -> None:
        try:
            asyncio.run(self.serve())
        except BaseException as error:
            self.failed.append(error)

    def __enter__(self) -> str:
        self._thread.start()
        until(lambda: self.started or not self._thread.is_alive())
        assert self.started, self.failed
        return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"

    def __exit__(self, *error: object) -> None:
        self.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        assert not self.failed


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

    plain = create_engine(installed(servers, which, EVERYWHERE[which]))
    try:
        locks = sl.Locks(plain)
        locks.run(sl.semaphore.create(room, 1))
        with Server(app) as address, httpx.Client(base_url=address, timeout=PATIENCE) as client:
            with client.stream("GET", "/stream") as streamed:
                parts = streamed.iter_bytes(4)  # a reference, without which httpx would disconnect
                assert next(parts) == b"part"
                assert code(client.post("/tried")) == (429, "no-room")
            until(lambda: not locks.run(sl.semaphore.holders(room)))
            assert client.post("/work").json() == 1
            del parts
    finally:
        plain.dispose()

"""Connections that belong to the app's event loop, as a cloud connector makes them."""

from __future__ import annotations

import asyncio
from typing import Any

import aiosqlite
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import create_async_engine

import sqlalchemy_locks as sl
from tests.conftest import Servers
from tests.fixtures.parties import PATIENCE, unused


def test_async_creator_of_the_apps_loop(servers: Servers) -> None:
    path, name, done = make_url(servers.installed("sqlite", "aiosqlite")).database, unused("queue"), []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        async def create() -> Any:
            if asyncio.get_running_loop() is not loop:
                raise RuntimeError("this connector belongs to another event loop")
            return await aiosqlite.connect(str(path))

        engine = create_async_engine(f"sqlite+aiosqlite:///{path}", async_creator=create)

        async def handle(job: Any) -> None:
            done.append(job.payload)

        queue = sl.Queue()
        async with engine.begin() as connection:
            await connection.execute(queue.put(1, queue=name))
        worker = sl.AsyncWorker(queue, handle, bind=engine, name=name)
        try:
            await asyncio.wait_for(worker.run(until_empty=True), PATIENCE)
        finally:
            await engine.dispose()

    asyncio.run(run())
    assert done == [1]

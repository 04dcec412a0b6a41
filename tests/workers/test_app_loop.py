"""Event loops: connections that belong to the app's, as a cloud connector makes them; one engine in several."""

from __future__ import annotations

import asyncio
from typing import Any

import aiosqlite
import asyncpg
import pytest
from sqlalchemy import URL, NullPool, make_url
from sqlalchemy.ext.asyncio import create_async_engine

import sqlalchemy_locks as sl
from tests.conftest import Servers
from tests.fixtures.parties import PATIENCE, unused


async def connect(url: URL) -> Any:
    if url.get_driver_name() == "aiosqlite":
        return await aiosqlite.connect(str(url.database))
    server = {"host": url.host, "port": url.port, "user": url.username, "password": url.password}
    return await asyncpg.connect(database=url.database, **server)


@pytest.mark.parametrize(("name", "driver"), [("sqlite", "aiosqlite"), ("postgresql15", "asyncpg")])
def test_async_creator_of_the_apps_loop(name: str, driver: str, servers: Servers) -> None:
    url, queue_name, done = make_url(servers.installed(name, driver)), unused("queue"), []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        async def create() -> Any:
            if asyncio.get_running_loop() is not loop:
                raise RuntimeError("this connector belongs to another event loop")
            return await connect(url)

        engine = create_async_engine(url, async_creator=create)

        async def handle(job: Any) -> None:
            async with sl.AsyncLocks(engine).lease(queue_name, ttl=60) as lease:
                await lease.check()
            done.append(job.payload)

        queue = sl.Queue()
        async with engine.begin() as connection:
            await connection.execute(queue.put(1, queue=queue_name))
        worker = sl.AsyncWorker(queue, handle, bind=engine, name=queue_name, heartbeat=0.05)
        try:
            await asyncio.wait_for(worker.run(until_empty=True), PATIENCE)
        finally:
            await engine.dispose()

    asyncio.run(run())
    assert done == [1]


def test_engine_without_a_pool_in_several_loops(servers: Servers) -> None:
    """A pooled connection belongs to the loop that has opened it."""
    engine = create_async_engine(servers.installed("postgresql15", "asyncpg"), poolclass=NullPool)
    locks, name = sl.AsyncLocks(engine), unused("lease")

    async def hold() -> None:
        async with locks.lease(name, ttl=1) as lease, locks.exclusive(name):
            await asyncio.sleep(0.5)  # for a renewal
            await lease.check()

    for _ in range(2):
        asyncio.run(hold())

"""Scopes that cancel at every await, as anyio's do, and with them Starlette's and FastAPI's: nothing is left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import sqlalchemy_locks as sl
from tests.fixtures.parties import ASYNC, PATIENCE, async_connected, cancelled_at_every_await, installed, unused
from tests.fixtures.web import used


@pytest.mark.parametrize("which", ASYNC)
def test_block_in_a_cancelled_scope(servers: Any, which: str) -> None:
    async def main() -> None:
        async with async_connected(installed(servers, *ASYNC[which])) as engine:
            locks, name = sl.AsyncLocks(engine), unused("semaphore")
            await locks.run(sl.semaphore.create(name, 1))
            for block in (locks.semaphore(name, ttl=3600), locks.lease(name, ttl=3600), locks.exclusive(name)):
                inside = asyncio.Event()

                async def work(block: Any = block, inside: asyncio.Event = inside) -> None:
                    async with block:
                        inside.set()
                        await asyncio.sleep(3600)

                task = asyncio.create_task(work())
                await inside.wait()
                await cancelled_at_every_await(task)
                assert task.cancelled()
                assert await used(locks, name) == 0
                async with locks.exclusive(name, timeout=PATIENCE):
                    pass

    asyncio.run(main())


@pytest.mark.parametrize("which", ASYNC)
def test_acquire_in_a_cancelled_scope(servers: Any, which: str) -> None:
    """Cancelled at any moment: permits that the caller doesn't know of would never be released."""

    async def main() -> None:
        async with async_connected(installed(servers, *ASYNC[which])) as engine:
            locks, name = sl.AsyncLocks(engine), unused("semaphore")
            await locks.run(sl.semaphore.create(name, 1))
            for moments in range(30):
                task = asyncio.create_task(locks.acquire({name: 1}))
                for _ in range(moments):
                    await asyncio.sleep(0)
                await cancelled_at_every_await(task)
                if not task.cancelled():
                    await locks.release(task.result())
                assert await used(locks, name) == 0

    asyncio.run(main())

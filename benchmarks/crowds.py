"""One asyncio process with thousands of leases, and with thousands of tasks that want one key, on PostgreSQL.

make bench ONLY=crowds
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from sqlalchemy import URL, make_url
from sqlalchemy.ext.asyncio import create_async_engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.facade.async_lease import AsyncLease

from .lock import database
from .report import durable, judge

LEASES, TTL, ENTERING, HELD = 3_000, 20, 20, 20.0
TASKS = 5_000


async def report_leases(locks: sl.AsyncLocks) -> None:
    """Enter many leases, and hold them for ``HELD`` seconds."""
    print(f"\n{LEASES:,} leases with a ttl of {TTL} s", flush=True)
    async with contextlib.AsyncExitStack() as held:
        room = asyncio.Semaphore(ENTERING)

        async def enter(number: int) -> AsyncLease:
            async with room:
                return await held.enter_async_context(locks.lease(f"lease-{number}", ttl=TTL))

        began = time.perf_counter()
        grants = await asyncio.gather(*map(enter, range(LEASES)))
        judge("entering all, s", time.perf_counter() - began, 8, 4)
        spent = time.process_time()
        await asyncio.sleep(HELD)
        judge("of a core while they are held, %", (time.process_time() - spent) / HELD * 100, 12, 5)
        judge("lost", sum(bool(grant.lost) for grant in grants), 0, 0)


async def report_tasks(locks: sl.AsyncLocks) -> None:
    """Have many tasks enter a block of one key."""
    inside = most = 0

    async def work() -> None:
        nonlocal inside, most
        async with locks.exclusive("key"):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    print(f"\n{TASKS:,} tasks that want one key", flush=True)
    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(TASKS)))
    judge("turns a second", TASKS / (time.perf_counter() - began), 600, 1_000, least=True)
    judge("inside at once", most, 1, 1)


async def report(url: URL, part: Callable[[sl.AsyncLocks], Awaitable[None]]) -> None:
    """Run one of both."""
    engine = create_async_engine(url.set(drivername="postgresql+asyncpg"), pool_size=ENTERING)
    await part(sl.AsyncLocks(engine))
    await engine.dispose()


def main() -> None:
    """Run the benchmark."""
    # one turn at a time: on two processors each has one of two speeds
    for part, pinned in ((report_leases, False), (report_tasks, True)):
        with durable("postgresql15", pinned=pinned) as server, database(make_url(server.url("psycopg"))) as url:
            asyncio.run(report(url, part))


if __name__ == "__main__":
    main()

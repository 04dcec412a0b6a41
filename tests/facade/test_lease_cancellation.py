"""Blocks that are interrupted or cancelled at their end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.util import await_only

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import (
    ASYNC,
    async_connected,
    connected,
    installed,
    until,
)
from tests.fixtures.renewal_threads import renewers
from tests.fixtures.semaphores import ENGINES, held, unused


@pytest.mark.parametrize("name", ENGINES)
def test_interrupted_exit_releases(name: str, engine_to: MakeEngine) -> None:
    engine, lease = engine_to(name), unused("lease")
    armed: list[int] = []

    @event.listens_for(engine, "checkout")
    def interrupt(*_: Any) -> None:
        if armed:
            armed.pop()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), sl.Locks(engine).lease(lease, ttl=3600):
        armed.append(1)
    assert held(engine, lease) == 0
    until(lambda: not renewers())


@pytest.mark.parametrize("place", ASYNC)
def test_an_exit_waits_for_a_renewal_under_way(place: str, servers: Any) -> None:
    """Its connection would be closed in the middle of a statement, which drivers log as an error."""
    name, driver = ASYNC[place]

    async def main() -> int:
        async with async_connected(installed(servers, name, driver), pool_size=1) as engine:
            begun, cancelled = asyncio.Event(), []

            @event.listens_for(engine.sync_engine, "before_cursor_execute")
            def slowly(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
                if "renew" in statement and asyncio.current_task() is not holder:
                    begun.set()
                    try:
                        await_only(asyncio.sleep(0.1))
                    except asyncio.CancelledError:
                        cancelled.append(statement)
                        raise

            holder = asyncio.current_task()
            async with sl.AsyncLocks(engine).lease(unused("lease"), ttl=1.5):
                await begun.wait()
            return len(cancelled)

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize("place", ASYNC)
def test_cancelled_exit_releases(place: str, servers: Any) -> None:
    name, driver = ASYNC[place]

    async def main() -> str:
        async with async_connected(installed(servers, name, driver)) as engine:
            lease, armed = unused("lease"), list[int]()

            @event.listens_for(engine.sync_engine, "checkout")
            def cancel(*_: Any) -> None:
                if armed:
                    armed.pop()
                    raise asyncio.CancelledError

            async def work() -> None:
                async with sl.AsyncLocks(engine).lease(lease, ttl=3600):
                    armed.append(1)

            task = asyncio.create_task(work())
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
            return lease

    lease = asyncio.run(main())
    with connected(installed(servers, name)) as plain:
        assert held(plain, lease) == 0

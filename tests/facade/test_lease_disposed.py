"""The engine is disposed of while one of its leases is being renewed: the renewal's connection is closed, too.

The end of a block, and then of the engine, doesn't wait for a renewal. Left in the old pool, the connection would stay
open until the garbage collector finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.util import greenlet_spawn

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects.connections import disposing_replaced_pool
from sqlalchemy_locks.runtime.renewal import LostEvent, RenewableLease, clock
from tests.facade.test_lease_loss import due
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ASYNC, PATIENCE, async_connected, connected, installed, until
from tests.fixtures.semaphores import ENGINES, place, unused


@contextlib.contextmanager
def busy(engine: Engine, request: str | None) -> Iterator[Any]:
    """Block renewals of the request, until the yielded function is called."""
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            statement = f"SELECT id FROM {place(engine, 'permit_request')} WHERE external_id = :id FOR UPDATE"
            assert connection.scalar(text(statement), {"id": request})
        yield connection.rollback


@pytest.mark.parametrize("name", ENGINES)
def test_renewal_thread_leaves_no_connection(name: str, servers: Any, engine_to: MakeEngine) -> None:
    others = engine_to(name)
    with connected(installed(servers, name)) as engine:
        locks, pool = sl.Locks(engine), engine.pool
        with locks.lease(unused("lease"), ttl=3600) as grant:
            (renewed,) = locks._semaphores.renewals()._leases
            with busy(others, grant.external_id) as go_on:
                due(locks)
                until(lambda: pool.checkedout() == 1)  # type: ignore[attr-defined]
                engine.dispose()
                go_on()
            until(lambda: not renewed.busy)
            assert pool.checkedin() == 0  # type: ignore[attr-defined]
            grant.check()


@pytest.mark.parametrize("case", ASYNC)
def test_renewal_task_leaves_no_connection(case: str, servers: Any, engine_to: MakeEngine) -> None:
    name, driver = ASYNC[case]
    others = engine_to(name)

    async def main() -> None:
        async with async_connected(installed(servers, name, driver)) as engine:
            locks, pool = sl.AsyncLocks(engine), engine.pool
            block = locks.lease(unused("lease"), ttl=3600)
            async with block as grant:
                assert block._context._entered is not None
                renewed = block._context._entered[1]
                with busy(others, grant.external_id) as go_on:
                    task = asyncio.create_task(greenlet_spawn(renewed.renew))
                    while not pool.checkedout():  # type: ignore[attr-defined]
                        await asyncio.sleep(0.005)
                    await engine.dispose()
                    go_on()
                await asyncio.wait_for(task, PATIENCE)
                assert pool.checkedin() == 0  # type: ignore[attr-defined]
                await grant.check()

    asyncio.run(main())


def test_closed_lease_is_not_renewed() -> None:
    """The engine may have been disposed of already, and a connection opened now would never be closed."""
    asked: list[int] = []
    renewed = RenewableLease("a lease", LostEvent(3600, clock()), clock(), lambda: not asked.append(1))
    renewed.closed = True
    assert renewed.renew() is False
    assert asked == []


@pytest.mark.parametrize("name", ENGINES)
def test_fork_closes_no_connection_of_parent(name: str, engine_to: MakeEngine) -> None:
    """The fork disposes of the engine as SQLAlchemy documents, and leaves the block with an exception."""
    engine = engine_to(name)
    engine.connect().close()
    closed: list[int] = []
    event.listen(engine, "close", lambda connection, record: closed.append(1))
    left, child = 2, 0
    try:
        with disposing_replaced_pool(engine):
            child = os.fork()
            if not child:
                engine.dispose(close=False)
                raise SystemExit
    except SystemExit:
        left = len(closed)
    finally:
        if not child:
            os._exit(left)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1

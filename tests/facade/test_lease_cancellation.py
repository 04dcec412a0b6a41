"""Blocks that are interrupted or cancelled at their end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.util import await_only

import sqlalchemy_locks as sl
from sqlalchemy_locks.runtime import renewal
from tests.facade.test_lease_ids import GRANTS
from tests.faults.drivers import clear
from tests.faults.proxy import Proxy
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ASYNC, PATIENCE, Watch, async_connected, installed, until
from tests.fixtures.renewal_threads import due, renewers
from tests.fixtures.semaphores import ENGINES, held, made, place, unused


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


@pytest.mark.parametrize("place", [place for place in ASYNC if not place.startswith("sqlite")])
def test_block_that_is_entered_while_the_last_renewal_is_cancelled_is_renewed(
    place: str, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "_RENEWAL_END", 0.01)
    name, driver = ASYNC[place]

    async def main() -> None:
        async with async_connected(installed(servers, name, driver)) as engine:
            begun, cancelled, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
            app = set[Any]()

            @event.listens_for(engine.sync_engine, "before_cursor_execute")
            def slowly(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
                if "renewed_at" in statement and asyncio.current_task() not in app and not begun.is_set():
                    begun.set()
                    try:
                        await_only(asyncio.sleep(PATIENCE))
                    except asyncio.CancelledError:
                        cancelled.set()
                        await_only(over.wait())
                        raise

            async def first() -> None:
                app.add(asyncio.current_task())
                async with locks.lease(unused("lease"), ttl=3600):
                    due(locks)
                    await begun.wait()

            locks = sl.AsyncLocks(engine)
            app.add(asyncio.current_task())
            ending = asyncio.create_task(first())
            await cancelled.wait()
            async with locks.lease(unused("lease"), ttl=3600) as grant:
                over.set()
                await ending
                before = grant.lost._lost.deadline
                due(locks)
                while grant.lost._lost.deadline == before:
                    await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


CANCELLED = {"postgresql15": "asyncpg", "mysql": "aiomysql"}


def entering(locks: sl.AsyncLocks, room: str, ident: str) -> Any:
    return locks.semaphore(room, external_id=ident, ttl=3600, timeout=PATIENCE)


@pytest.mark.parametrize("name", CANCELLED)
def test_a_block_that_is_cancelled_while_it_waits_for_a_row_leaves_its_id_free(
    name: str, servers: Any, watch: Callable[[str], Watch]
) -> None:
    server = watch(name)
    table = place("postgresql" if name == "postgresql15" else name, "semaphore")

    async def main() -> None:
        async with async_connected(installed(servers, name, CANCELLED[name])) as engine:
            locks, room, ident = sl.AsyncLocks(engine), unused("room"), unused("request")
            await locks.run(sl.semaphore.create(room, 1))
            began = list[str]()

            async def work() -> None:
                async with entering(locks, room, ident):
                    began.append(ident)

            async with engine.begin() as other:
                await other.execute(text(f"SELECT id FROM {table} WHERE name = :name FOR UPDATE"), {"name": room})
                task = asyncio.create_task(work())
                await asyncio.to_thread(server.until_waiting)
                task.cancel()
                # MySQL hears of it only when the row is free
            with pytest.raises(asyncio.CancelledError):
                await task
            assert began == []
            async with entering(locks, room, ident) as grant:
                assert not grant.replayed

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize("holder", ["nobody", "another caller"])
@pytest.mark.parametrize("name", CANCELLED)
def test_a_block_that_is_cancelled_when_it_was_granted_leaves_its_id_free(
    name: str, holder: str, servers: Any, engine_to: MakeEngine
) -> None:
    """It did not begin. What another caller holds by the same id stays that caller's."""
    plain = engine_to(name)
    direct, room, ident = sl.Locks(plain), made(plain, 2), unused("request")
    theirs = None if holder == "nobody" else direct.acquire({room: 1}, external_id=ident, ttl=3600)

    async def main(proxy: Proxy) -> None:
        loop = asyncio.get_running_loop()
        async with async_connected(proxy.url, **clear(CANCELLED[name])) as engine:
            locks, began = sl.AsyncLocks(engine), list[str]()

            async def work() -> None:
                async with entering(locks, room, ident):
                    began.append(ident)

            def cancel() -> None:
                """Cancel the task when the server has answered, before it hears of that."""
                cancelled = threading.Event()
                loop.call_soon_threadsafe(lambda: (task.cancel(), cancelled.set()))
                assert cancelled.wait(PATIENCE)

            proxy.lose_answer(GRANTS[name], cancel)
            task = asyncio.create_task(work())
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (proxy.losses, began) == (1, [])
            if theirs is None:
                assert await asyncio.to_thread(held, plain, room) == 0
                async with entering(locks, room, ident) as grant:
                    assert not grant.replayed
            else:
                with pytest.raises(sl.RequestHeld):
                    async with entering(locks, room, ident):
                        raise AssertionError("another caller holds it")

    with Proxy(installed(servers, name, CANCELLED[name])) as proxy:
        asyncio.run(asyncio.wait_for(main(proxy), PATIENCE))
    if theirs is not None:
        assert held(plain, room) == 1
        assert direct.renew(theirs)
        assert direct.release(theirs) is sl.Released.RELEASED

"""``Locks`` and ``AsyncLocks`` with semaphores: waiting, the queue in memory, sweeping, a complete example."""

from __future__ import annotations

import asyncio
import inspect
import threading
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text, create_engine, insert, select, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import installation
from sqlalchemy_locks.runtime.local_queue import LocalQueues, local_queues
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ASYNC, PATIENCE, async_connected, installed, later, until
from tests.fixtures.semaphores import BRIEFLY, ENGINES, INNODB, SERVERS, expire, held, made, unused

NOW = "clock_timestamp() AT TIME ZONE 'UTC'"

DOCUMENT = Table("guarded_document", MetaData(), Column("id", Integer, primary_key=True), Column("body", Text))


@pytest.mark.parametrize("name", ENGINES)
def test_waiter_is_served_when_there_is_room(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    sem = made(engine, 1)
    locks = sl.Locks(engine)
    first = locks.acquire({sem: 1})
    with pytest.raises(sl.LockTimeout, match=r"had no room \(timeout=0\)"):
        locks.acquire({sem: 1}, timeout=0)
    with pytest.raises(sl.LockTimeout, match=r"had no room within 0.05 s"):
        locks.acquire({sem: 1}, timeout=0.05)
    waiting = later(locks.acquire, {sem: 1}, timeout=PATIENCE)
    locks.release(first)
    assert waiting.result(PATIENCE).fence == {sem: 2}


@pytest.mark.parametrize("name", ENGINES)
def test_finished_request_is_refused(name: str, engine_to: MakeEngine) -> None:
    locks = sl.Locks(engine := engine_to(name))
    sem, ident = made(engine, 1), unused("job")
    locks.release(locks.acquire({sem: 1}, external_id=ident))
    with pytest.raises(sl.LockLost, match="is RELEASED: it is never granted again"):
        locks.acquire({sem: 1}, external_id=ident)
    with pytest.raises(sl.UnknownSemaphore, match="there is no semaphore"):
        locks.acquire({unused("nothing"): 1})


@pytest.mark.parametrize("name", SERVERS)
def test_wait_for_locked_row_is_bounded(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, isolation_level="READ COMMITTED", pool_size=2)
    sem = made(engine, 2)
    setting = "SHOW lock_timeout" if name == "postgresql15" else "SELECT @@innodb_lock_wait_timeout"
    with engine.connect() as keeper:
        before = keeper.exec_driver_sql(setting).scalar()
        assert keeper.scalar(sl.semaphore.acquire({sem: 1}))
        with pytest.raises(sl.LockTimeout):
            sl.Locks(engine).acquire({sem: 1}, timeout=0.2)
        with engine.connect() as other:
            assert other.exec_driver_sql(setting).scalar() == before
        keeper.rollback()
    assert held(engine, sem) == 0


def test_one_thread_waits_on_a_connection(engine_to: MakeEngine, watch: Any) -> None:
    """Ten threads acquire a semaphore whose row is locked: one waits on a connection, nine wait in memory."""
    engine, watcher = engine_to("postgresql15", pool_size=20), watch("postgresql15")
    sem = made(engine, 20)
    with engine.connect() as keeper:
        assert keeper.scalar(sl.semaphore.acquire({sem: 1}))
        waiting = [later(sl.Locks(engine).acquire, {sem: 1}, timeout=PATIENCE) for _ in range(10)]
        watcher.until_waiting()
        until(lambda: visitors(local_queues(engine.dialect)) == 10)
        assert engine.pool.checkedout() == 2  # type: ignore[attr-defined]
        keeper.commit()
    assert all(future.result(PATIENCE) for future in waiting)
    assert local_queues(engine.dialect).front == {}
    assert held(engine, sem) == 11


def visitors(lines: LocalQueues) -> int:
    return sum(1 + len(ticket.behind or ()) for (key, _), ticket in list(lines.front.items()) if key[0] == "rows")


def test_wait_in_the_queue_for_rows_is_bounded(engine_to: MakeEngine) -> None:
    engine = engine_to("sqlite")
    locks, queues = sl.Locks(engine), local_queues(engine.dialect)
    first, second, third = sorted(made(engine, 1) for _ in range(3))
    ticket = queues.ticket(("rows", installation(engine), second))
    assert ticket.wait(0)
    locks.release(locks.acquire({third: 1}, timeout=0))
    for permits in ({second: 1}, {first: 1, second: 1}):
        with pytest.raises(sl.LockTimeout, match="stayed locked by others within 0.05 s"):
            locks.acquire(permits, timeout=0.05)
    ticket.leave()
    assert queues.front == {}


@pytest.mark.parametrize("name", ENGINES)
def test_sweep_of_dead_owners(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    sem = made(engine, 10)
    locks = sl.Locks(engine)
    dead, living = unused("dead"), unused("living")
    grants = {owner: [locks.acquire({sem: 1}, owner=owner) for _ in range(3)] for owner in (dead, living)}
    asked: list[str] = []

    def explode(owners: list[str]) -> list[str]:
        raise RuntimeError("the orchestrator is down")

    with pytest.raises(RuntimeError, match="orchestrator"):
        locks.sweep(alive=explode)
    for nonsense in (lambda owners: None, lambda owners: "everybody", lambda owners: True):
        with pytest.raises(TypeError, match="alive returns those of the given owners"):
            locks.sweep(alive=nonsense)  # type: ignore[arg-type]
    assert held(engine, sem) == 6

    def alive(owners: list[str]) -> list[str]:
        asked.extend(owners)
        return [owner for owner in owners if owner != dead]

    assert locks.sweep(alive=alive) >= 3
    assert sorted(asked) == sorted(set(asked))
    assert {dead, living} <= set(asked)
    assert [locks.renew(grant) for grant in grants[living]] == [True] * 3
    assert [locks.release(grant) for grant in grants[dead]] == [sl.Released.ALREADY_RELEASED] * 3


@pytest.mark.parametrize("name", ENGINES)
def test_sweep_finishes_half_a_release(name: str, engine_to: MakeEngine) -> None:
    """The holder freed the permits and died before it ended the request, as a release without a transaction may."""
    from sqlalchemy import text

    from tests.fixtures.semaphores import place, request_of

    engine = engine_to(name)
    sem = made(engine, 1)
    locks = sl.Locks(engine)
    grant = locks.acquire({sem: 1})
    with engine.begin() as connection:
        connection.execute(
            text(f"UPDATE {place(engine, 'permit')} SET state = 'RELEASED' WHERE permit_request_id = :id"),
            {"id": request_of(engine, grant)},
        )
    assert locks.sweep(stale_after=None) >= 1
    assert locks.release(grant) is sl.Released.ALREADY_RELEASED


@pytest.mark.parametrize("name", ENGINES)
def test_late_holder_writes_nothing(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    DOCUMENT.create(engine, checkfirst=True)
    with engine.begin() as connection:
        connection.execute(DOCUMENT.delete())
        connection.execute(insert(DOCUMENT).values(id=1, body=""))
    sem = made(engine, 1)
    locks = sl.Locks(engine)

    def write(body: str) -> Any:
        return update(DOCUMENT).where(DOCUMENT.c.id == 1).values(body=body)

    sleeper = locks.acquire({sem: 1}, ttl=3600)
    assert locks.run(sl.guarded(write("mine"), sleeper)) is True
    with engine.begin() as connection:
        expire(connection, sleeper)
    # no caller waits for a sweep: an acquire releases the expired permit itself
    next_one = locks.acquire({sem: 1}, ttl=3600, timeout=0)
    assert next_one.fence[sem] > sleeper.fence[sem]
    assert locks.renew(sleeper) is False
    with pytest.raises(sl.LockLost, match="held no longer"):
        locks.run(sl.guarded(write("mine, too late"), sleeper))
    assert locks.run(sl.guarded(write("the next one's"), next_one)) is True
    assert locks.release(sleeper) is sl.Released.ALREADY_RELEASED
    assert locks.renew(next_one) is True
    with engine.connect() as connection:
        assert connection.scalar(select(DOCUMENT.c.body)) == "the next one's"


@pytest.mark.parametrize("name", SERVERS)
def test_ttl_counts_from_after_wait(name: str, engine_to: MakeEngine, watch: Any) -> None:
    """The ttl counts from after the wait: a clock read before it would be behind by the length of the wait."""
    engine, watcher = engine_to(name, isolation_level="READ COMMITTED"), watch(name)
    sleep, clock = ("SELECT SLEEP(0.2)", "UTC_TIMESTAMP(6)") if name in INNODB else ("SELECT pg_sleep(0.2)", NOW)
    sem = made(engine, 2)
    with engine.connect() as keeper:
        assert keeper.scalar(sl.semaphore.acquire({sem: 1}))
        waiting = later(sl.Locks(engine).acquire, {sem: 1}, ttl=3600)
        watcher.until_waiting(waiting)
        # a wait of up to 10 ms isn't counted
        keeper.exec_driver_sql(sleep)
        waited_until = keeper.exec_driver_sql(f"SELECT {clock}").scalar()
        keeper.commit()
        grant = waiting.result(PATIENCE)
        stored = next(row for row in keeper.execute(sl.semaphore.holders(sem)) if row.external_id == grant.external_id)
    for expires_at in (grant.expires_at, stored.expires_at):
        assert (expires_at.replace(tzinfo=None) - waited_until).total_seconds() >= 3600


@pytest.mark.parametrize("place_", ASYNC)
def test_async_semaphores(servers: Any, place_: str) -> None:
    name, driver = ASYNC[place_]
    plain = create_engine(installed(servers, name))
    sem = made(plain, 2)

    async def main() -> None:
        async with async_connected(
            installed(servers, name, driver), pool_size=3, max_overflow=0, pool_timeout=PATIENCE
        ) as engine:
            locks = sl.AsyncLocks(engine)

            async def turns(number: int) -> None:
                for _ in range(3):
                    grant = await locks.acquire({sem: 1}, ttl=3600, timeout=PATIENCE)
                    assert await locks.renew(grant)
                    assert await locks.release(grant) is sl.Released.RELEASED

            await asyncio.gather(*[turns(number) for number in range(12)])
            grants = [await locks.acquire({sem: 1}, owner="other") for _ in range(2)]
            with pytest.raises(sl.LockTimeout):
                await locks.acquire({sem: 1}, timeout=0)
            waiting = asyncio.ensure_future(locks.acquire({sem: 1}))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

            async def alive(owners: list[str]) -> list[str]:
                await asyncio.sleep(0)
                return [owner for owner in owners if owner != "other"]

            assert await locks.sweep(alive=alive) >= len(grants)
            assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
            assert local_queues(engine.sync_engine.dialect).front == {}

    asyncio.run(main())
    assert held(plain, sem) == 0
    plain.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_cancelled_wait_for_row_acquires_nothing(servers: Any, watch: Any, driver: str) -> None:
    watcher = watch("postgresql15")
    plain = create_engine(installed(servers, "postgresql15"))
    sem = made(plain, 3)

    async def main() -> None:
        async with async_connected(installed(servers, "postgresql15", driver)) as engine:
            with plain.connect() as keeper:
                assert keeper.scalar(sl.semaphore.acquire({sem: 1}))
                waiting = asyncio.ensure_future(sl.AsyncLocks(engine).acquire({sem: 1}))
                while not await asyncio.to_thread(watcher.waiting):
                    assert not waiting.done()
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                keeper.commit()
            assert (await sl.AsyncLocks(engine).acquire({sem: 1})).fence == {sem: 2}
            assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]

    asyncio.run(main())
    assert held(plain, sem) == 2
    plain.dispose()


def test_async_signatures_are_equal() -> None:
    for method in ("acquire", "release", "renew"):
        assert inspect.signature(getattr(sl.Locks, method)) == inspect.signature(getattr(sl.AsyncLocks, method))


def test_threads_never_exceed_capacity(engine_to: MakeEngine) -> None:
    engine: Engine = engine_to("sqlite")
    sem = made(engine, 2)
    inside, most, guard = 0, 0, threading.Lock()

    def turn() -> None:
        nonlocal inside, most
        locks = sl.Locks(engine)
        for _ in range(5):
            grant = locks.acquire({sem: 1}, timeout=PATIENCE)
            with guard:
                inside += 1
                most = max(most, inside)
            with guard:
                inside -= 1
            locks.release(grant)

    for future in [later(turn) for _ in range(6)]:
        future.result(PATIENCE)
    assert most <= 2


@pytest.mark.parametrize("name", [*SERVERS, "yugabytedb"])
def test_change_of_semaphore_respects_locks_wait(name: str, engine_to: MakeEngine) -> None:
    """A bounded wait, in a session and through ``Locks``; no setting is left changed."""
    engine = engine_to(name, isolation_level="READ COMMITTED", pool_size=9)
    setting = "SELECT @@innodb_lock_wait_timeout" if name in ("mysql", "mariadb") else "SHOW lock_timeout"
    sem, new = made(engine, 2), unused("semaphore")
    changes = [sl.semaphore.resize(sem, 3), sl.semaphore.delete(sem), sl.semaphore.create(new, 1)]
    with engine.connect() as other, engine.connect() as keeper:
        assert keeper.scalar(sl.semaphore.acquire({sem: 1}))
        assert keeper.scalar(sl.semaphore.create(new, 2))
        before = other.exec_driver_sql(setting).scalar()
        bounded = [change.execution_options(locks_wait=BRIEFLY[name]) for change in changes]

        def in_a_session(change: Any) -> None:
            with engine.connect() as own:
                own.scalar(change)

        for way in (in_a_session, sl.Locks(engine).run):
            for waiting in [later(way, change) for change in bounded]:
                with pytest.raises(sl.LockTimeout):
                    waiting.result(PATIENCE)
        with ExitStack() as opened:
            pooled = [opened.enter_context(engine.connect()) for _ in range(engine.pool.checkedin())]  # type: ignore[attr-defined]
            assert {connection.exec_driver_sql(setting).scalar() for connection in pooled} == {before}
        keeper.rollback()
        for change in changes:
            other.scalar(change.execution_options(locks_wait=PATIENCE))
            assert other.exec_driver_sql(setting).scalar() == before
        other.rollback()

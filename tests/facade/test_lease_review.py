"""What a hostile reading of leases has found: each of these was red."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
from typing import Any

import pytest
from sqlalchemy import NullPool, event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

import sqlalchemy_locks as sl
from sqlalchemy_locks.facade import semaphore_wait as waits
from sqlalchemy_locks.facade.async_lease import AsyncLostEvent
from sqlalchemy_locks.runtime.local_queue import LocalQueues, local_queues
from sqlalchemy_locks.runtime.renewal import MAX_THREADS, LostEvent, RenewableLease, RenewalThread, clock
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import (
    ASYNC,
    PATIENCE,
    async_connected,
    connected,
    installed,
    later,
    seen,
    until,
)
from tests.fixtures.renewal_threads import renewers
from tests.fixtures.semaphores import ENGINES, EVERYWHERE, expire, held, in_memory, made, unused

MOVED = {"sqlite": {"locks_prefix": "o_"}, "mysql": {"locks_prefix": "o_"}, "mariadb": {"locks_prefix": "o_"}}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_request_that_is_resumed_keeps_its_own_time(name: str, engine_to: MakeEngine) -> None:
    """The server counts with the ttl that it was granted with, and so must whoever holds it."""
    engine, job = engine_to(name), unused("job")
    sem = made(engine, 1)
    locks = sl.Locks(engine)
    before = locks.acquire({sem: 1}, external_id=job, ttl=3600)
    with locks.semaphore(sem, external_id=job, ttl=7200) as grant:
        assert grant.replayed
        assert grant.lost.ttl == 3600
        assert grant.lost.deadline < clock() + 3600
        (renewed,) = locks._semaphores.renewals()._leases
        assert renewed.due <= clock() + 1200
        assert before.expires_at is not None
    assert held(engine, sem) == 0


@pytest.mark.parametrize("name", ENGINES)
def test_a_request_without_a_time_is_no_block(name: str, engine_to: MakeEngine) -> None:
    engine, job = engine_to(name), unused("job")
    sem = made(engine, 1)
    locks = sl.Locks(engine)
    locks.acquire({sem: 1}, external_id=job)
    with pytest.raises(sl.IdempotencyConflict, match="granted without a ttl"):
        locks.semaphore(sem, external_id=job).__enter__()
    assert held(engine, sem) == 1
    assert locks.release(job) is sl.Released.RELEASED


@pytest.mark.parametrize("name", ENGINES)
def test_one_id_is_in_one_block_at_a_time(name: str, engine_to: MakeEngine) -> None:
    """Else whoever leaves first gives back what the other one believes to hold."""
    engine, job = engine_to(name), unused("job")
    sem = made(engine, 1)
    locks = sl.Locks(engine)
    with locks.semaphore(sem, external_id=job):
        for party in (locks, sl.Locks(engine)):
            with pytest.raises(sl.ReentryError, match="held by another block"):
                later(party.semaphore(sem, external_id=job).__enter__).result(PATIENCE)
    with pytest.raises(sl.LockLost, match="never granted again"):
        locks.semaphore(sem, external_id=job).__enter__()


def test_whoever_waits_hears_of_what_was_renewed() -> None:
    """A thread waits for what is due in an hour, while another renews what is due again before that."""
    renewals, times = RenewalThread(), []

    class Often(RenewableLease):
        def renew(self) -> bool:
            if len(times) < 2:
                until(lambda: renewals._idle)
                self.due = clock()
            times.append(1)
            return len(times) < 3

    often = Often("often", LostEvent(3600, clock()), clock(), lambda: True)
    often.due = clock()
    seldom = RenewableLease("seldom", LostEvent(3600, clock()), clock(), lambda: True)
    renewals._leases.add(seldom)
    renewals.add(often)
    try:
        until(lambda: len(times) == 3)
    finally:
        renewals.remove(often)
        renewals.remove(seldom)
    until(lambda: not renewers())


def test_the_threads_that_renew_are_few() -> None:
    until(lambda: not renewers())  # of the tests before
    renewals, go_on, guard = RenewalThread(), threading.Event(), threading.Lock()
    inside = most = done = 0

    def renew() -> bool:
        nonlocal inside, most, done
        with guard:
            inside += 1
            most = max(most, inside)
        go_on.wait(PATIENCE)
        with guard:
            inside -= 1
            done += 1
        return True

    leases = [RenewableLease(f"no. {number}", LostEvent(3600, clock()), clock(), renew) for number in range(50)]
    for lease in leases:
        lease.due = clock()
    renewals._leases.update(leases)
    try:
        renewals.add(leases[0])
        until(lambda: inside >= MAX_THREADS)
        assert len(renewers()) <= MAX_THREADS
        go_on.set()
        until(lambda: done == len(leases))
        assert most == MAX_THREADS
    finally:
        go_on.set()
        for lease in leases:
            renewals.remove(lease)
    until(lambda: not renewers())


@pytest.mark.parametrize("name", ENGINES)
def test_a_line_is_of_one_place(name: str, engine_to: MakeEngine) -> None:
    """Tenants of one engine, each with a schema or prefix of its own, have nothing to wait for at each other's."""
    engine, sem = engine_to(name), unused("semaphore")
    locks = sl.Locks(engine)
    moved = sl.Locks(engine.execution_options(**MOVED.get(name, {"schema_translate_map": {"lock": "elsewhere"}})))
    request = sl.semaphore.acquire({sem: 1})
    first, other = (waits.SemaphoreWaiter(party._semaphores, request, None) for party in (locks, moved))
    turn = local_queues(engine.dialect).ticket(("queue", first.installation, sem))
    assert turn.wait(0)
    assert first.queued_semaphore() == sem
    assert other.queued_semaphore() is None
    turn.leave()
    assert first.queued_semaphore() is None


def test_so_is_a_line_of_a_key(engine_to: MakeEngine) -> None:
    engine, key = engine_to("mysql"), unused()
    turn = local_queues(engine.dialect).ticket(("key", None, sl.lock.key(key)))
    assert turn.wait(0)
    try:
        with sl.Locks(engine.execution_options(schema_translate_map={"unrelated": "x"})).exclusive(
            key, timeout=PATIENCE
        ):
            pass
    finally:
        turn.leave()


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", ENGINES)
def test_who_holds_some_waits_behind_nobody(name: str, same: bool, engine_to: MakeEngine) -> None:
    """Whoever is in front may be waiting for just those."""
    engine = engine_to(name)
    others = engine if same else engine_to(name)
    sem = made(engine, 2)
    locks = sl.Locks(engine)
    with locks.semaphore(sem, ttl=3600):
        big = later(in_a_block, sl.Locks(others), sem, 2)
        until(lambda: in_memory(others, sem) == 1, unless=big)
        with locks.semaphore(sem, ttl=3600, timeout=PATIENCE):
            assert held(engine, sem) == 2
    assert big.result(PATIENCE) == 3


def in_a_block(locks: sl.Locks, sem: str, count: int) -> int:
    with locks.semaphore(sem, count=count, ttl=3600, timeout=PATIENCE) as grant:
        return grant.fence[sem]


@pytest.mark.parametrize("name", ENGINES)
def test_nobody_waits_in_memory_for_one_that_hangs(
    name: str, engine_to: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "QUEUE_TIMEOUT", 0.05)
    engine = engine_to(name)
    sem = made(engine, 1)
    locks = sl.Locks(engine)
    where = locks._semaphores.installation()
    hangs = local_queues(engine.dialect).ticket(("queue", where, sem))
    assert hangs.wait(0)
    try:
        locks.release(locks.acquire({sem: 1}, ttl=3600, timeout=PATIENCE))
        assert in_memory(engine, sem) == 1
    finally:
        hangs.leave()


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", ENGINES)
def test_who_asks_for_more_than_there_is_keeps_nobody_waiting(name: str, same: bool, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    others = engine if same else engine_to(name)
    sem = made(engine, 3)
    locks = sl.Locks(engine)
    with seen(others) as statements:
        big = later(sl.Locks(others).acquire, {sem: 5}, ttl=3600, timeout=PATIENCE)
        until(lambda: any("AS known" in statement for statement in list(statements)), unless=big)
    grant = locks.acquire({sem: 3}, ttl=3600, timeout=PATIENCE)
    locks.release(grant)
    assert not big.done()
    assert locks.run(sl.semaphore.resize(sem, 5)) == 3
    locks.release(big.result(PATIENCE))


@pytest.mark.parametrize("name", ENGINES)
def test_a_lease_whose_semaphore_was_resized_is_one_persons_still(name: str, engine_to: MakeEngine) -> None:
    engine, lease = engine_to(name), unused("lease")
    locks = sl.Locks(engine)
    with locks.lease(lease):
        pass
    with locks.lease(lease):
        locks.run(sl.semaphore.resize(lease, 2))
        with pytest.raises(sl.Unsupported, match="is a semaphore of 2"):
            later(locks.lease(lease).__enter__).result(PATIENCE)
        assert held(engine, lease) == 1


def test_signals_are_heard_in_time(servers: Any) -> None:
    """psycopg2 waits in C: there the wait in the server's line is a short one, in the thread that hears signals."""
    for driver, wait in (("psycopg2", "5000ms"), ("psycopg", "60000ms")):
        with connected(installed(servers, "postgresql15", driver)) as engine:
            sem = made(engine, 1)
            locks, asked = sl.Locks(engine), []
            grant = locks.acquire({sem: 1}, ttl=3600)
            joined = threading.Event()

            @event.listens_for(engine, "before_cursor_execute")
            def note(
                connection: Any,
                cursor: Any,
                statement: str,
                parameters: Any,
                *_: Any,
                asked: list[Any] = asked,
                joined: threading.Event = joined,
            ) -> None:
                if "pg_advisory_xact_lock" in statement:
                    asked.append(parameters)
                    joined.set()

            def give(joined: threading.Event = joined, locks: sl.Locks = locks, grant: sl.Grant = grant) -> None:
                assert joined.wait(PATIENCE)
                locks.release(grant)

            giving = later(give)
            locks.release(locks.acquire({sem: 1}, ttl=3600))
            giving.result(PATIENCE)
            assert wait in asked[0].values()


@pytest.mark.parametrize("name", ENGINES)
def test_who_is_interrupted_while_leaving_leaves_nothing(name: str, engine_to: MakeEngine) -> None:
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
def test_who_is_cancelled_while_leaving_leaves_nothing(place: str, servers: Any) -> None:
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


@pytest.mark.parametrize("place", ["postgresql15/asyncpg", "sqlite/aiosqlite"])
@pytest.mark.parametrize("kind", ["lease", "exclusive"])
def test_a_task_is_not_taken_for_one_that_is_gone(place: str, kind: str, servers: Any) -> None:
    """A task that began inside a block has that block in its context; and ids of tasks come again."""

    async def use(engine: AsyncEngine) -> None:
        locks, name = sl.AsyncLocks(engine), unused("lease")
        block = getattr(locks, kind)

        async def grandchild() -> None:
            async with block(name, timeout=PATIENCE):
                pass

        async def child(go_on: asyncio.Event) -> None:
            await go_on.wait()
            await asyncio.create_task(grandchild())

        async def parent(go_on: asyncio.Event) -> asyncio.Task[None]:
            async with block(name, timeout=PATIENCE):
                return asyncio.create_task(child(go_on))

        for _ in range(20):
            go_on = asyncio.Event()
            task = await asyncio.create_task(parent(go_on))
            go_on.set()
            await task

    async def main() -> None:
        async with async_connected(installed(servers, *ASYNC[place])) as engine:
            await use(engine)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["lease", "exclusive"])
def test_another_pool_is_the_same_database(kind: str, engine_to: MakeEngine) -> None:
    engine, name = engine_to("postgresql15", poolclass=NullPool), unused("lease")
    locks = sl.Locks(engine)
    block = getattr(locks, kind)
    with block(name):
        engine.dispose()
        with pytest.raises(sl.ReentryError):
            block(name, timeout=PATIENCE).__enter__()


def test_a_cancellation_that_comes_with_the_turn_is_none_the_less() -> None:
    async def main() -> None:
        lines = LocalQueues(True)
        entered: list[int] = []
        first = lines.ticket("x")
        assert first.wait(0)

        def stand() -> None:
            turn = lines.ticket("x")
            try:
                if turn.wait(600):
                    entered.append(1)
            finally:
                turn.leave()

        waiting = asyncio.create_task(greenlet_spawn(stand))
        while first.behind is None:
            await asyncio.sleep(0)
        first.leave()
        await asyncio.sleep(0)  # what wakes it is on its way
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not entered
        assert not lines.front

    asyncio.run(main())


def test_nor_is_one_that_comes_with_a_loss() -> None:
    async def main() -> None:
        lost = LostEvent(3600, clock())
        told = AsyncLostEvent(lost)
        waiting = asyncio.create_task(told.wait(600))
        await asyncio.sleep(0)
        lost.set("somebody swept it")
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await told.wait(0)

    asyncio.run(main())


def test_a_loss_that_another_thread_finds_wakes_a_task() -> None:
    async def main() -> None:
        lost = LostEvent(3600, clock())
        told = AsyncLostEvent(lost)
        waiting = asyncio.create_task(told.wait(PATIENCE))
        await asyncio.sleep(0)
        await asyncio.to_thread(lost.set, "somebody swept it")
        assert await waiting

    asyncio.run(main())


@pytest.mark.parametrize("name", ENGINES)
def test_a_block_that_nobody_can_leave_ends_with_its_time(name: str, engine_to: MakeEngine) -> None:
    """An exception from outside, between the entering and the first line: its thread is renewed for ever, else."""
    engine, lease = engine_to(name), unused("lease")
    locks = sl.Locks(engine)
    ident = locks.lease(lease, ttl=3600).__enter__().external_id
    # again and again: the thread that renews may have it in its hands
    until(lambda: gc.collect() >= 0 and len(locks._semaphores.renewals()._leases) == 0)
    with engine.begin() as connection:
        expire(connection, ident)
    with locks.lease(lease, timeout=PATIENCE) as grant:
        assert grant.fence == {lease: 2}
    until(lambda: not renewers())


def test_a_copy_is_the_grant(engine_to: MakeEngine) -> None:
    locks = sl.Locks(engine_to("sqlite"))
    with locks.lease(unused("lease")) as grant:
        for twin in (pickle.loads(pickle.dumps(grant)), copy.deepcopy(grant), copy.copy(grant)):
            assert type(twin) is sl.Grant
            assert vars(twin).items() <= vars(grant).items()
    with pytest.raises(sl.ReentryError, match="not entered"):
        locks.lease("x").__exit__(None, None, None)


@pytest.mark.parametrize("name", ENGINES)
def test_nobody_enters_with_what_is_over(name: str, engine_to: MakeEngine) -> None:
    """The answer to the acquire comes when its time has run out by the server's clock."""
    engine, sem = engine_to(name), made(engine_to(name), 1)
    locks = sl.Locks(engine)
    for over in (False, True):
        block = locks.semaphore(sem, ttl=3600)
        acquire = block._acquire

        def slowly(own: Any, acquire: Any = acquire, over: bool = over) -> Any:
            grant, asked_at, ttl = acquire(own)
            if over:
                with engine.begin() as connection:
                    expire(connection, grant)
            return grant, asked_at - 3600, ttl

        block._acquire = slowly  # type: ignore[method-assign]
        if over:
            with pytest.raises(sl.LockLost, match="its time ran out meanwhile"):
                block.__enter__()
            assert held(engine, sem) == 0
        else:
            with block as grant:
                assert not grant.lost

"""Waiters for permits, and the order in which they are served."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, event, text

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import installation
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.facade import semaphore_wait as waits
from sqlalchemy_locks.keys import queue_keys
from sqlalchemy_locks.runtime.local_queue import local_queues
from tests.fixtures.engines import MakeEngine
from tests.fixtures.holders import Process, hold_lease
from tests.fixtures.lease_faces import FACES, locks_of
from tests.fixtures.parties import ASYNC, PATIENCE, async_connected, connected, installed, later, seen, until
from tests.fixtures.semaphores import ENGINES, EVERYWHERE, SERVERS, held, in_memory, made, place, polled, unused

MOVED = {"sqlite": {"locks_prefix": "o_"}, "mysql": {"locks_prefix": "o_"}, "mariadb": {"locks_prefix": "o_"}}

HEADED = {
    "postgresql15": "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock'"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND objsubid = 1 AND (CAST(classid AS bigint) << 32) | CAST(objid AS bigint) = :key"
}
BY_NAME = (
    "SELECT NOT IS_FREE_LOCK(CONCAT("
    "LEFT(SHA2(CONCAT_WS(':', 'sqlalchemy_locks.queue', DATABASE()), 256), 40), ':', :key))"
)
#: without queues of the server, too
ALL = [*ENGINES, "yugabytedb"]


def headed(watcher: Any, name: str, sem: str) -> bool:
    """Whether the server's queue of a semaphore has a waiter at its head, by the server's own tables."""
    where = "None.lock_semaphore" if name in MOVED else "lock.semaphore"
    key = sl.lock.key("sqlalchemy_locks.semaphore", where, sem)
    return bool(watcher.ask(HEADED.get(name, BY_NAME), key=key))


def full(engine: Engine, capacity: int = 1, **options: str) -> tuple[sl.Locks, str, sl.Grant]:
    """A semaphore of which all is held: its locks, its name and the grant."""
    locks, sem = sl.Locks(engine, **options), made(engine, capacity)
    return locks, sem, locks.acquire({sem: capacity}, ttl=3600)


def turn(locks: sl.Locks, sem: str) -> int:
    grant = locks.acquire({sem: 1}, ttl=3600, timeout=PATIENCE)
    locks.release(grant)
    return grant.fence[sem]


@pytest.mark.usefixtures("never_cut")
@pytest.mark.parametrize("name", SERVERS)
def test_processes_are_served_in_fifo_order(name: str, engine_to: MakeEngine, watch: Any) -> None:
    """Three processes (engines, which share nothing in memory): none overtakes, whatever it asks for."""
    watcher = watch(name)
    first, second, third = (sl.Locks(engine_to(name)) for _ in range(3))
    sem = made(first._engine, 2)
    one, two = (first.acquire({sem: 1}, ttl=3600) for _ in range(2))
    second_ = later(second.acquire, {sem: 2}, ttl=3600, timeout=PATIENCE)
    until(lambda: headed(watcher, name, sem), unless=second_)
    third_ = later(third.acquire, {sem: 1}, ttl=3600, timeout=PATIENCE)
    watcher.until_waiting(third_)
    first.release(one)
    # there is room for one, but the waiter of two comes first
    with pytest.raises(sl.LockTimeout, match=r"had no room \(timeout=0\)"):
        first.acquire({sem: 1}, timeout=0)
    first.release(two)
    assert second_.result(PATIENCE).fence == {sem: 3}
    assert not third_.done()
    second.release(second_.result())
    assert third_.result(PATIENCE).fence == {sem: 4}
    third.release(third_.result())
    until(lambda: not headed(watcher, name, sem))
    for locks in (first, second, third):
        assert locks._engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        assert turn(locks, sem) > 4


@pytest.mark.parametrize("name", EVERYWHERE)
def test_threads_are_served_in_fifo_order(name: str, engine_to: MakeEngine) -> None:
    """One that gives up lets the next one continue, wherever it is in the queue."""
    engine = engine_to(name)
    locks, sem, grant = full(engine)
    waiting = []
    for number in range(5):
        waiting.append(later(turn, locks, sem))
        until(lambda number=number: in_memory(engine, sem) == number + 1)
    impatient = [later(locks.acquire, {sem: 1}, timeout=0.3) for _ in range(2)]
    for future in impatient:
        with pytest.raises(sl.LockTimeout, match=r"had no room within 0.3 s"):
            future.result(PATIENCE)
    locks.release(grant)
    assert [future.result(PATIENCE) for future in waiting] == [2, 3, 4, 5, 6]
    assert in_memory(engine, sem) == 0
    assert local_queues(engine.dialect).waiting_connections == 0


@pytest.mark.parametrize("name", ENGINES)
def test_pool_of_one_is_left_to_holder(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, pool_size=1, max_overflow=0, pool_timeout=PATIENCE)
    sem = made(engine, 1)
    locks = sl.Locks(engine)
    with locks.semaphore(sem):
        waiting = [later(turn, locks, sem) for _ in range(3)]
        until(lambda: in_memory(engine, sem) == 3)
    assert sorted(future.result(PATIENCE) for future in waiting) == [2, 3, 4]


@pytest.mark.parametrize("name", ALL)
def test_waiter_leaves_queue_of_available_semaphore(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    everybody, tenant = made(engine, 2), made(engine, 1)
    locks, others = sl.Locks(engine), sl.Locks(engine_to(name))
    mine = locks.acquire({tenant: 1}, ttl=3600)
    waiting = later(locks.acquire, {everybody: 1, tenant: 1}, ttl=3600, timeout=PATIENCE)
    until(lambda: in_memory(engine, tenant) == 1, unless=waiting)
    theirs = [party.acquire({everybody: 1}, ttl=3600, timeout=0) for party in (locks, others)]
    locks.release(mine)  # now it waits for the other semaphore
    until(lambda: in_memory(engine, everybody) == 1, unless=waiting)
    assert in_memory(engine, tenant) == 0
    locks.release(theirs[0])
    assert waiting.result(PATIENCE).acquired
    locks.release(waiting.result())
    locks.release(theirs[1])


@pytest.mark.parametrize("name", ALL)
def test_wait_ends_when_one_of_its_semaphores_is_deleted(name: str, engine_to: MakeEngine) -> None:
    """Though another one is full."""
    engine, others = engine_to(name), engine_to(name)
    (locks, sem, _), deleted = full(engine), made(engine, 5)
    with seen(others) as statements:
        waiting = later(sl.Locks(others).acquire, {sem: 1, deleted: 1}, ttl=3600, timeout=PATIENCE)
        until(lambda: polled(statements), unless=waiting)
    locks.run(sl.semaphore.delete(deleted))
    with pytest.raises(sl.UnknownSemaphore, match=deleted):
        waiting.result(PATIENCE / 2)
    assert in_memory(others, sem) == 0


@pytest.mark.parametrize("face", ["postgresql15 sync", "postgresql15 async", "sqlite async"])
def test_long_waits_are_logged_once(
    face: str, servers: Any, engine_to: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever they are: in memory, in the server's queue, or at its head."""
    monkeypatch.setattr(waits, "LONG_WAIT", 0.01)
    caplog.set_level("INFO", "sqlalchemy_locks")
    holder, sem, grant = full(engine_to(FACES[face][0]), owner="the leader")

    def logged() -> bool:
        return len(caplog.messages) == 3

    with locks_of(face, servers) as second, locks_of(face, servers) as others:
        waiting = [later(enter_and_leave, party, sem, 1, None) for party in (second, second, others)]
        until(logged)
        holder.release(grant)
        for future in waiting:
            future.result(PATIENCE)
    assert logged()
    sentence = rf"still waiting for '{sem}' after \d+ s, without a timeout: held by the leader since 2.*"
    assert all(re.fullmatch(sentence, message) for message in caplog.messages)


@pytest.mark.parametrize("name", ENGINES)
def test_replay_does_not_queue(name: str, engine_to: MakeEngine) -> None:
    """A repeated request with a held id is answered immediately, whatever waiters are queued."""
    engine, ident = engine_to(name), unused("job")
    sem = made(engine, 1)
    locks = sl.Locks(engine)
    grant = locks.acquire({sem: 1}, external_id=ident, ttl=3600)
    waiting = later(turn, locks, sem)
    until(lambda: in_memory(engine, sem) == 1, unless=waiting)
    for party in (locks, sl.Locks(engine_to(name))):
        again = party.acquire({sem: 1}, external_id=ident, ttl=3600, timeout=PATIENCE)
        assert again.replayed
        assert again.fence == grant.fence
    with pytest.raises(sl.RequestHeld):
        locks.semaphore(sem, external_id=ident, ttl=3600, timeout=PATIENCE).__enter__()
    locks.release(grant)
    assert waiting.result(PATIENCE) == 2


def test_statement_timeout_does_not_end_wait(engine_to: MakeEngine, watch: Any) -> None:
    watcher = watch("postgresql15")
    (holder, sem, grant), head = full(engine_to("postgresql15")), sl.Locks(engine_to("postgresql15"))
    limited, limits = engine_to("postgresql15"), ["300"]

    @event.listens_for(limited, "before_cursor_execute")
    def limit(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        # only the first wait is limited: on a busy machine the rest may take longer
        if "pg_advisory_xact_lock" in statement and limits:
            cursor.execute(f"SET LOCAL statement_timeout = {limits.pop()}")

    first = later(head.acquire, {sem: 1}, ttl=3600, timeout=PATIENCE)
    until(lambda: headed(watcher, "postgresql15", sem), unless=first)
    with seen(limited) as statements:
        second = later(sl.Locks(limited).acquire, {sem: 1}, ttl=3600, timeout=PATIENCE)
        until(lambda: sum("pg_advisory_xact_lock" in statement for statement in list(statements)) > 1, unless=second)
    holder.release(grant)
    head.release(first.result(PATIENCE))
    assert second.result(PATIENCE).fence == {sem: 3}
    head.release(second.result())


@pytest.mark.parametrize("name", SERVERS)
def test_killed_head_queues_again(name: str, engine_to: MakeEngine, watch: Any) -> None:
    watcher = watch(name)
    (holder, sem, grant), waiter = full(engine_to(name)), engine_to(name)
    backends: list[int] = []

    @event.listens_for(waiter, "checkout")
    def note(dbapi_connection: Any, record: Any, proxy: Any) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute("SELECT CONNECTION_ID()" if name in ("mysql", "mariadb") else "SELECT pg_backend_pid()")
        backends.append(cursor.fetchone()[0])
        cursor.close()
        dbapi_connection.rollback()

    waiting = later(sl.Locks(waiter).acquire, {sem: 1}, ttl=3600, timeout=PATIENCE)
    until(lambda: headed(watcher, name, sem), unless=waiting)
    watcher.kill(backends[-1])
    until(lambda: headed(watcher, name, sem), unless=waiting)
    holder.release(grant)
    assert waiting.result(PATIENCE).fence == {sem: 2}
    holder.release(waiting.result())


@pytest.mark.parametrize("name", ["postgresql15", "mariadb"])
def test_stopped_head_is_cut_off(name: str, servers: Any, engine_to: MakeEngine, watch: Any) -> None:
    """A silent waiter at the head is disconnected by the server, here after 2 seconds."""
    watcher = watch(name)
    (holder, sem, grant), second = full(engine_to(name)), sl.Locks(engine_to(name))
    with Process(hold_lease, installed(servers, name), sem, 3600, True) as head:
        until(lambda: headed(watcher, name, sem))
        with head.stopped(between_looks=True):
            holder.release(grant)
            second.release(second.acquire({sem: 1}, ttl=3600, timeout=PATIENCE))
        assert head.hear() != ""  # it has queued again, and holds it
        assert head.asked("leave") == "left"


@pytest.mark.parametrize("place", [place for place, (name, _) in ASYNC.items() if name in SERVERS])
@pytest.mark.parametrize("where", ["in front", "behind"])
def test_cancelled_waiter_leaves_queue(place: str, where: str, servers: Any, watch: Any) -> None:
    name, driver = ASYNC[place]
    watcher = watch(name)

    async def main() -> None:
        with connected(installed(servers, name), poolclass=NullPool) as plain:
            holder, sem, grant = full(plain)
            async with (
                async_connected(installed(servers, name, driver)) as head,
                async_connected(installed(servers, name, driver)) as other,
            ):
                front = asyncio.ensure_future(sl.AsyncLocks(head).acquire({sem: 1}, ttl=3600, timeout=PATIENCE))
                while not await asyncio.to_thread(headed, watcher, name, sem):
                    assert not front.done()
                behind = asyncio.ensure_future(sl.AsyncLocks(other).acquire({sem: 1}, ttl=3600, timeout=PATIENCE))
                while not await asyncio.to_thread(watcher.waiting):
                    assert not behind.done()
                cancelled, stays = (front, behind) if where == "in front" else (behind, front)
                cancelled.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
                assert (head if cancelled is front else other).pool.checkedout() == 0  # type: ignore[attr-defined]
                await asyncio.to_thread(holder.release, grant)
                grant = await asyncio.wait_for(stays, PATIENCE)
                assert grant.fence == {sem: 2}
                await asyncio.to_thread(holder.release, grant)
                assert in_memory(head.sync_engine, sem) == in_memory(other.sync_engine, sem) == 0
            assert held(plain, sem) == 0
            until(lambda: not headed(watcher, name, sem))

    asyncio.run(main())


@pytest.mark.parametrize("name", ENGINES)
def test_installations_share_no_queue_and_no_block(name: str, engine_to: MakeEngine) -> None:
    """Tenants of one engine, each with a schema or prefix of its own, don't wait for one another."""
    engine, unit = engine_to(name), unused()
    backend = backend_for(engine.dialect)
    moved = engine.execution_options(**MOVED.get(name, {"schema_translate_map": {"lock": "elsewhere"}}))
    elsewhere = sl.metadata(schema="elsewhere") if backend.schemas else sl.metadata(prefix="o_")
    elsewhere.create_all(engine)
    queue = local_queues(engine.dialect).ticket(("queue", installation(engine), unit))
    try:
        locks, others = sl.Locks(engine), sl.Locks(moved)
        with locks.lease(unit), others.lease(unit, timeout=PATIENCE), pytest.raises(sl.ReentryError, match="already"):
            others.lease(unit).__enter__()
        assert queue.wait(0)
        assert locks.acquire({unit: 1}, timeout=PATIENCE)
        assert others.acquire({unit: 1}, timeout=PATIENCE)
        with pytest.raises(sl.LockTimeout):
            locks.acquire({unit: 1}, timeout=0.1)
        with locks.exclusive(unit):
            turn = local_queues(engine.dialect).ticket(("key", None, sl.lock.key(unit)))
            assert turn.wait(0)
            try:
                if backend.key_rows:
                    with others.exclusive(unit, timeout=PATIENCE):
                        pass
                else:
                    with pytest.raises(sl.ReentryError, match="already"):
                        others.exclusive(unit).__enter__()
            finally:
                turn.leave()
    finally:
        queue.leave()
        elsewhere.drop_all(engine)


@pytest.mark.parametrize("name", ["sqlite", "mysql", "mariadb"])
def test_another_name_of_the_same_tables_is_a_reentry(name: str, engine_to: MakeEngine) -> None:
    engine, unit = engine_to(name), unused()
    database = "main" if name == "sqlite" else engine.url.database
    locks, others = sl.Locks(engine), sl.Locks(engine.execution_options(schema_translate_map={None: database}))
    with locks.lease(unit), pytest.raises(sl.ReentryError, match="already"):
        others.lease(unit).__enter__()
    with locks.exclusive(unit), pytest.raises(sl.ReentryError, match="already"):
        others.exclusive(unit).__enter__()


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", ENGINES)
def test_holder_of_permits_does_not_queue(name: str, same: bool, engine_to: MakeEngine) -> None:
    """The waiter at the head may be waiting for these very permits."""
    engine = engine_to(name)
    others = engine if same else engine_to(name)
    sem = made(engine, 2)
    locks = sl.Locks(engine)
    with locks.semaphore(sem, ttl=3600):
        big = later(enter_and_leave, sl.Locks(others), sem, 2)
        until(lambda: in_memory(others, sem) == 1, unless=big)
        with locks.semaphore(sem, ttl=3600, timeout=PATIENCE):
            assert held(engine, sem) == 2
    assert big.result(PATIENCE) == 3


def enter_and_leave(locks: sl.Locks, sem: str, count: int, timeout: float | None = PATIENCE) -> int:
    with locks.semaphore(sem, count=count, ttl=3600, timeout=timeout) as grant:
        return grant.fence[sem]


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", ENGINES)
def test_request_beyond_capacity_ends_and_delays_no_other(name: str, same: bool, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    others = engine if same else engine_to(name)
    locks, sem, grant = full(engine, 3)
    with seen(others) as statements:
        big = later(sl.Locks(others).acquire, {sem: 3}, ttl=3600)
        until(lambda: polled(statements), unless=big)
    locks.run(sl.semaphore.resize(sem, 0))  # nobody gets any, and waiters wait
    assert not big.done()
    locks.run(sl.semaphore.resize(sem, 2))
    with pytest.raises(sl.LockTimeout, match=f"3 permits of {sem!r} were asked for, and its capacity is 2"):
        big.result(PATIENCE)
    locks.release(grant)
    locks.release(locks.acquire({sem: 2}, ttl=3600, timeout=PATIENCE))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [*SERVERS, "yugabytedb"])
def test_row_that_is_locked_is_waited_for_until_the_timeout(
    name: str, engine_to: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, others = engine_to(name), engine_to(name)
    locks, sem, grant = full(engine)
    with engine.connect() as keeper, seen(others) as statements:
        waiting = later(sl.Locks(others).acquire, {sem: 1}, ttl=3600, timeout=2)
        until(lambda: polled(statements), unless=waiting)
        monkeypatch.setattr(waits, "ROW_TIMEOUT", 600.0)
        keeper.execute(
            text(f"SELECT id FROM {place(engine, 'semaphore')} WHERE name = :name FOR UPDATE"), {"name": sem}
        )
        locks.release(grant)
        with pytest.raises(sl.LockTimeout, match="stayed locked by others within 2 s"):
            waiting.result(PATIENCE)


def test_the_key_of_a_queue_is_that_of_three_names() -> None:
    names = ["slots", "größe"]
    keys = [sl.lock.key("sqlalchemy_locks.semaphore", "lock.semaphore", name) for name in names]
    assert list(queue_keys("lock.semaphore", names)) == keys

"""Events of locks, for listeners and for the log; a listener can't break a lock."""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ENGINES, PATIENCE, Watch, async_connected, installed, later, unused

ALL = ("waited", "acquired", "released", "lost", "retried", "swept")


def listened(locks: Any) -> list[sl.LockEvent]:
    events: list[sl.LockEvent] = []
    for what in ALL:
        event.listen(locks, what, events.append)
    return events


@pytest.mark.parametrize("name", ENGINES)
def test_events_of_a_block(engine_to: MakeEngine, name: str) -> None:
    locks, key = sl.Locks(engine_to(name), owner="ann"), unused()
    events = listened(locks)
    with locks.exclusive(key):
        assert [one.event for one in events] == ["waited", "acquired"]
    assert [one.event for one in events] == ["waited", "acquired", "released"]
    for one in events:
        assert (one.kind, one.names, one.owner, one.shared, one.error) == ("lock", (key,), "ann", False, None)
        assert one.engine == locks.engine_name
    waited, acquired, released = events
    assert waited.waited == acquired.waited
    assert acquired.waited is not None
    assert acquired.waited > 0
    assert released.held is not None
    assert released.held > 0
    assert key in str(acquired)


def test_events_of_errors(engine_to: MakeEngine) -> None:
    engine, key = engine_to("postgresql15"), unused()
    locks = sl.Locks(engine)
    events = listened(locks)
    with sl.Locks(engine).exclusive(key):
        with pytest.raises(sl.LockTimeout) as refused:
            later(lambda: locks.exclusive(key, timeout=0).__enter__()).result(PATIENCE)
        assert [(one.event, one.error) for one in events] == [("waited", refused.value)]
    events.clear()
    failure = RuntimeError("the app's")
    with pytest.raises(RuntimeError), locks.shared(key):
        raise failure
    assert [(one.event, one.shared, one.error) for one in events] == [
        ("waited", True, None),
        ("acquired", True, None),
        ("released", True, failure),
    ]


def test_exit_of_a_listener_releases_what_was_acquired(engine_to: MakeEngine) -> None:
    engine, key, room = engine_to("postgresql15"), unused(), unused("room")
    locks, other = sl.Locks(engine), sl.Locks(engine)
    other.run(sl.semaphore.create(room, capacity=1))

    @event.listens_for(locks, "acquired")
    def ends(_: sl.LockEvent) -> None:
        raise SystemExit

    block = locks.exclusive(key)
    with pytest.raises(SystemExit):
        block.__enter__()
    with other.exclusive(key, timeout=0):
        pass
    for acquire in (lambda: locks.acquire({room: 1}), lambda: locks.semaphore(room, ttl=3600).__enter__()):
        with pytest.raises(SystemExit):
            acquire()
        assert other.release(other.acquire({room: 1}, timeout=0)) is sl.Released.RELEASED


@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_lost_is_emitted_once(engine_to: MakeEngine, watch: Callable[[str], Watch], name: str) -> None:
    locks, server = sl.Locks(engine_to(name)), watch(name)
    events = listened(locks)
    with pytest.raises(sl.LockLost), locks.exclusive(unused()) as held:
        server.kill(server.backend(held.session.connection()))
        with pytest.raises(sl.LockLost):
            held.check()
        assert held.lost
    assert [one.event for one in events] == ["waited", "acquired", "lost", "released"]
    assert isinstance(events[2].error, sl.LockLost)
    assert isinstance(events[-1].error, sl.LockLost)


def test_events_of_retries(engine_to: MakeEngine, watch: Callable[[str], Watch]) -> None:
    """The connection dies while it waits for the key."""
    engine, key, server = engine_to("postgresql15"), unused(), watch("postgresql15")
    locks = sl.Locks(engine)
    events = listened(locks)

    def wait() -> None:
        with locks.exclusive(key):
            pass

    with sl.Locks(engine).exclusive(key):
        server.until_none_wait()
        waiting = later(wait)
        server.until_waiting(waiting)
        server.kill(
            server.ask(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )
        server.until_waiting(waiting)
    waiting.result(PATIENCE)
    assert [(one.event, one.count) for one in events] == [
        ("retried", 1),
        ("waited", None),
        ("acquired", None),
        ("released", None),
    ]
    assert events[0].error is not None


def test_events_of_mutexes_and_timeouts(engine_to: MakeEngine) -> None:
    locks, name = sl.Locks(engine_to("postgresql15")), unused()
    events = listened(locks)
    assert locks.mutex.acquire(name)
    assert not locks.mutex.acquire(name)
    assert locks.mutex.release(name)
    assert not locks.mutex.release(name)
    token = locks.mutex.acquire_token(name)
    assert locks.once_per(name, every=3600)
    assert not locks.once_per(name, every=3600)
    assert [(one.event, one.kind, one.fence) for one in events] == [
        ("acquired", "mutex", None),
        ("released", "mutex", None),
        ("acquired", "mutex", token),
        ("acquired", "period", None),
    ]


def test_error_of_a_listener_is_logged(engine_to: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    locks, key = sl.Locks(engine_to("postgresql15")), unused()

    def breaks(events: sl.LockEvent) -> None:
        raise RuntimeError("the listener's")

    event.listen(locks, "acquired", breaks)
    events = listened(locks)
    with locks.exclusive(key):
        pass
    assert [one.event for one in events] == ["waited", "acquired", "released"]
    assert "the listener's" in caplog.text
    event.remove(locks, "acquired", breaks)
    caplog.clear()
    with locks.exclusive(key):
        pass
    assert "the listener's" not in caplog.text


def test_async_listeners_are_refused(engine_to: MakeEngine) -> None:
    async def hear(one: object) -> None:
        raise AssertionError("nothing awaits it")

    engine = engine_to("sqlite")
    worker = sl.Worker(sl.Queue(), print, bind=engine)
    locks = sl.Locks(engine)
    for target, what in ((locks, "acquired"), (worker, "begun")):
        for listener in (hear, functools.partial(hear)):
            with pytest.raises(TypeError, match=r"hear.* is async: start a task in a plain function"):
                event.listen(target, what, listener)
    assert not list(locks.dispatch.acquired)


@pytest.mark.parametrize("which", ["postgresql15/asyncpg", "sqlite/aiosqlite"])
def test_events_of_async_locks(servers: Any, which: str) -> None:
    name, driver = which.split("/")

    async def main() -> None:
        async with async_connected(installed(servers, name, driver)) as engine:
            locks = sl.AsyncLocks(engine)
            events = listened(locks)
            async with locks.exclusive(unused()):
                pass
            await locks.mutex.acquire(unused())
            assert [one.event for one in events] == ["waited", "acquired", "released", "acquired"]

    asyncio.run(main())


@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_lock_timeout_names_the_holders(engine_to: MakeEngine, name: str) -> None:
    engine, key = engine_to(name), unused()
    locks = sl.Locks(engine)
    locks.run(sl.lock.create(key))

    def wait() -> None:
        with locks.exclusive(key, timeout=0.1):
            pass

    with locks.exclusive(key) as held:
        session = held.session.connection().exec_driver_sql(
            "SELECT pg_backend_pid()" if name == "postgresql15" else "SELECT CONNECTION_ID()"
        )
        number = session.scalar()
        with pytest.raises(sl.LockTimeout) as refused:
            later(wait).result(PATIENCE)
    (holder,) = refused.value.holders
    assert isinstance(holder, sl.KeyHolder)
    assert (holder.name, holder.session) == (key, number)
    assert f"could not be acquired within 0.1 s: held by session {number} (locks@" in str(refused.value)
    again = pickle.loads(pickle.dumps(refused.value))
    assert (str(again), again.holders) == (str(refused.value), refused.value.holders)


@pytest.mark.parametrize("name", ["sqlite", "mariadb", "postgresql15-table"])
def test_lock_timeout_without_holders(engine_to: MakeEngine, name: str) -> None:
    engine, key = engine_to(name), unused()
    locks = sl.Locks(engine)

    def wait() -> None:
        with locks.exclusive(key, timeout=0.1):
            pass

    with locks.exclusive(key), pytest.raises(sl.LockTimeout) as refused:
        later(wait).result(PATIENCE)
    assert refused.value.holders == ()
    assert str(refused.value) == f"{key!r} could not be acquired within 0.1 s"
    pool: Any = engine.pool
    assert pool.checkedout() == 0

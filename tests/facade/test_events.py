"""Events of locks, for listeners and for the log; a listener can't break a lock."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.lease_faces import everywhere, locks_of
from tests.fixtures.parties import PATIENCE, Watch, later, unused

ALL = ("waited", "acquired", "released", "lost", "retried", "swept")


def listened(locks: Any) -> list[sl.LockEvent]:
    events: list[sl.LockEvent] = []
    for what in ALL:
        event.listen(locks, what, events.append)
    return events


def take(locks: sl.Locks, key: str, timeout: float | None = None) -> None:
    with locks.exclusive(key, timeout=timeout):
        pass


@everywhere
def test_events_of_a_block(face: str, servers: Any) -> None:
    with locks_of(face, servers) as locks:
        key, events = unused(), listened(getattr(locks, "_target", locks))
        with locks.exclusive(key):
            assert [one.event for one in events] == ["waited", "acquired"]
        assert locks.mutex.acquire(key)
        assert [one.event for one in events] == ["waited", "acquired", "released", "acquired"]
        events.pop()
        for one in events:
            assert (one.kind, one.names, one.owner, one.shared, one.error) == ("lock", (key,), locks.owner, False, None)
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


def test_exit_of_a_listener_releases_the_lock(engine_to: MakeEngine) -> None:
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


def test_events_of_retries(engine_to: MakeEngine, watch: Callable[[str], Watch]) -> None:
    """The connection dies while it waits for the key."""
    engine, key, server = engine_to("postgresql15"), unused(), watch("postgresql15")
    locks = sl.Locks(engine)
    events = listened(locks)

    with sl.Locks(engine).exclusive(key):
        waiting = later(take, locks, key)
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


@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_lock_timeout_names_the_holders(engine_to: MakeEngine, name: str) -> None:
    engine, key = engine_to(name), unused()
    locks = sl.Locks(engine)
    locks.run(sl.lock.create(key))

    with locks.exclusive(key) as held:
        session = held.session.connection().exec_driver_sql(
            "SELECT pg_backend_pid()" if name == "postgresql15" else "SELECT CONNECTION_ID()"
        )
        number = session.scalar()
        with pytest.raises(sl.LockTimeout) as refused:
            later(take, locks, key, 0.1).result(PATIENCE)
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

    with locks.exclusive(key), pytest.raises(sl.LockTimeout) as refused:
        later(take, locks, key, 0.1).result(PATIENCE)
    assert refused.value.holders == ()
    assert str(refused.value) == f"{key!r} could not be acquired within 0.1 s"
    pool: Any = engine.pool
    assert pool.checkedout() == 0

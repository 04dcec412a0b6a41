"""What this library promises, as tests to run against your own engine, schema and prefix.

Import them into a test module, where the fixture ``locks_engine`` is yours::

    from sqlalchemy_locks.testing.conformance import *

They leave some rows behind, under names that no app has, and take about a second.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, Engine

from sqlalchemy_locks import lock, semaphore
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.errors import IdempotencyConflict, LockLost, LockTimeout, RequestOver
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.queue import Queue
from sqlalchemy_locks.testing.clock import Clock
from sqlalchemy_locks.testing.drain import Drained, run_until_empty
from sqlalchemy_locks.testing.serialised import Inside, assert_serialised
from sqlalchemy_locks.values import Released

__all__ = [
    "test_capacity_is_never_exceeded",
    "test_exclusive_excludes_others",
    "test_expired_permits_are_reclaimed",
    "test_job_exists_if_its_transaction_commits",
    "test_job_of_a_dead_worker_is_requeued",
    "test_job_runs_once",
    "test_lease_has_one_holder",
    "test_lock_ends_with_an_error",
    "test_mutex_is_held_until_released",
    "test_once_per_period",
    "test_request_is_granted_once",
    "test_shared_excludes_exclusive",
    "test_waiters_are_serialised",
]

T = TypeVar("T")
_HOUR = 3600


def _unique_name(what: str) -> str:
    return f"conformance:{what}:{uuid.uuid4()}"


def _in_other_thread(call: Callable[[], T]) -> T:
    """Make a call in a thread that holds no lock."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return answers[0]


def _can_enter(block: Any) -> bool:
    """Return whether another thread could enter a block."""

    def enter() -> bool:
        try:
            with block:
                return True
        except LockTimeout:
            return False

    return _in_other_thread(enter)


def _captured(locks: Locks, queue: Queue[Any], name: str) -> list[Any]:
    jobs: list[Any] = locks.run(queue.capture(1, queue=name))
    return jobs


def test_exclusive_excludes_others(locks: Locks) -> None:
    key = _unique_name("key")
    with locks.exclusive(key) as held:
        held.check()
        assert not _can_enter(locks.exclusive(key, timeout=0))
        assert not _can_enter(locks.shared(key, timeout=0))
    assert _can_enter(locks.exclusive(key, timeout=0))


def test_shared_excludes_exclusive(locks: Locks, locks_engine: Engine) -> None:
    key = _unique_name("key")
    locks.run(lock.create(key))  # where a key is a row, its first lock is exclusive
    one_lock = backend_for(locks_engine.dialect).single_writer
    with locks.shared(key):
        assert not _can_enter(locks.exclusive(key, timeout=0))
        assert _can_enter(locks.shared(key, timeout=0)) is not one_lock


def test_lock_ends_with_an_error(locks: Locks) -> None:
    key = _unique_name("key")
    with pytest.raises(ZeroDivisionError), locks.exclusive(key):
        raise ZeroDivisionError
    assert _can_enter(locks.exclusive(key, timeout=0))


def test_waiters_are_serialised(locks: Locks) -> None:
    key = _unique_name("key")

    def work(inside: Inside) -> None:
        with locks.exclusive(key), inside:
            pass

    assert_serialised(work, callers=3, calls=2)


def test_mutex_is_held_until_released(locks: Locks) -> None:
    task = _unique_name("task")
    first = locks.mutex.acquire_token(task)
    assert first is not None
    assert locks.mutex.acquire(task) is False
    assert locks.mutex.release(task) is True
    assert locks.mutex.release(task) is False
    second = locks.mutex.acquire_token(task)
    assert second is not None
    assert second > first
    locks.mutex.release(task)


def test_once_per_period(locks: Locks, locks_clock: Clock) -> None:
    task = _unique_name("task")
    assert [locks.once_per(task, every=100 * _HOUR) for _ in range(2)] == [True, False]
    locks_clock.advance(101 * _HOUR)
    assert [locks.once_per(task, every=100 * _HOUR) for _ in range(2)] == [True, False]


def test_capacity_is_never_exceeded(locks: Locks) -> None:
    room = _unique_name("room")
    locks.run(semaphore.create(room, 2))

    def work(inside: Inside) -> None:
        with locks.semaphore(room, ttl=_HOUR), inside:
            pass

    assert_serialised(work, callers=4, calls=2, limit=2)
    grants = [locks.acquire({room: 1}, timeout=0) for _ in range(2)]
    with pytest.raises(LockTimeout):
        locks.acquire({room: 1}, timeout=0)
    assert [locks.release(grant) for grant in grants] == [Released.RELEASED] * 2
    locks.run(semaphore.delete(room))


def test_request_is_granted_once(locks: Locks) -> None:
    room, request = _unique_name("room"), _unique_name("request")
    locks.run(semaphore.create(room, 2))
    first, again = (locks.acquire({room: 1}, external_id=request, ttl=_HOUR) for _ in range(2))
    assert (first.fence, again.replayed) == (again.fence, True)
    with pytest.raises(IdempotencyConflict):
        locks.acquire({room: 2}, external_id=request, ttl=_HOUR)
    assert [locks.release(request) for _ in range(2)] == [Released.RELEASED, Released.ALREADY_RELEASED]
    with pytest.raises(RequestOver):
        locks.acquire({room: 1}, external_id=request, ttl=_HOUR)
    locks.run(semaphore.delete(room))


def test_expired_permits_are_reclaimed(locks: Locks, locks_clock: Clock) -> None:
    room = _unique_name("room")
    locks.run(semaphore.create(room, 1))
    dead = locks.acquire({room: 1}, ttl=60)
    locks_clock.advance(61)
    alive = locks.acquire({room: 1}, ttl=60, timeout=0)
    assert alive.fence[room] > dead.fence[room]
    assert locks.renew(dead) is False
    assert locks.release(dead) is Released.ALREADY_RELEASED
    assert locks.release(alive) is Released.RELEASED
    locks.run(semaphore.delete(room))


def test_lease_has_one_holder(locks: Locks, locks_clock: Clock) -> None:
    name = _unique_name("lease")
    with locks.lease(name, ttl=_HOUR) as grant:
        grant.check()
        assert not _can_enter(locks.lease(name, ttl=_HOUR, timeout=0))
    with pytest.raises(LockLost), locks.lease(name, ttl=_HOUR) as grant:
        locks_clock.advance(2 * _HOUR)
        assert _can_enter(locks.lease(name, ttl=_HOUR, timeout=0))
        grant.check()


def test_job_exists_if_its_transaction_commits(
    locks_engine: Engine, two_connections: tuple[Connection, Connection]
) -> None:
    queue, name = Queue(), _unique_name("queue")
    one, other = two_connections
    one.execute(queue.put({"n": 1}, queue=name))
    one.rollback()
    one.execute(queue.put({"n": 2}, queue=name))
    one.commit()
    jobs: list[Any] = list(other.execute(queue.capture(5, queue=name)).all())
    assert [job.payload for job in jobs] == [{"n": 2}]
    other.rollback()
    run_until_empty(queue, lambda job: None, bind=locks_engine, name=name)


def test_job_runs_once(locks: Locks, locks_engine: Engine) -> None:
    queue, name = Queue(), _unique_name("queue")
    ran: list[Any] = []
    locks.run(queue.put({"n": 1}, {"n": 2}, queue=name))
    [first] = _captured(locks, queue, name)
    drained = run_until_empty(queue, ran.append, bind=locks_engine, name=name)
    assert drained == Drained(completed=1, failed=0)
    assert sorted(job.payload["n"] for job in [first, *ran]) == [1, 2]
    assert [locks.run(queue.complete(first)) for _ in range(2)] == [1, 0]


def test_job_of_a_dead_worker_is_requeued(locks: Locks, locks_engine: Engine, locks_clock: Clock) -> None:
    queue, name = Queue(), _unique_name("queue")
    locks.run(queue.put({}, queue=name))
    [dead] = _captured(locks, queue, name)
    assert locks.run(queue.requeue_stalled(_HOUR, queue=name)) == 0
    locks_clock.advance(2 * _HOUR)
    assert locks.run(queue.requeue_stalled(_HOUR, queue=name)) == 1
    locks_clock.advance(2 * _HOUR)  # after the pause that a failed attempt has
    assert run_until_empty(queue, lambda job: None, bind=locks_engine, name=name).completed == 1
    assert locks.run(queue.complete(dead)) == 0

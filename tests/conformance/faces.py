"""Both façades behind one interface: each of ``OPERATIONS`` is written once, and runs on both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

import sqlalchemy_locks as sl
from tests.fixtures.lent import Loan
from tests.fixtures.parties import PATIENCE, unused

SYNC, ASYNC = "Locks", "AsyncLocks"


class Loop:
    """An event loop in a thread of its own, for calls that block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def result(self, awaitable: Any) -> Any:
        async def wait() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result(PATIENCE)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Blocking:
    """A proxy for an object of ``AsyncLocks``: awaits each call in the loop, and enters async blocks."""

    def __init__(self, target: Any, loop: Loop) -> None:
        self._target, self._loop = target, loop

    def __getattr__(self, name: str) -> Any:
        return self._here(getattr(self._target, name))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._here(self._target(*arguments, **named))

    def __enter__(self) -> Any:
        return self._here(self._loop.result(self._target.__aenter__()))

    def __exit__(self, *error: Any) -> Any:
        return self._loop.result(self._target.__aexit__(*error))

    def _here(self, value: Any) -> Any:
        if hasattr(value, "__await__"):
            return self._here(self._loop.result(value))
        if (
            callable(value)
            or hasattr(value, "__aenter__")
            or type(value).__module__.startswith("sqlalchemy_locks.facade.async_")
        ):
            return Blocking(value, self._loop)
        return value


@contextmanager
def opened(
    face: str, url: str, *, maker: bool = False, session_class: type[Session] = Session, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """A façade of that name and its (synchronous) engine, which other tests may have had before.

    :param maker: give it a sessionmaker instead of the engine.
    :param session_class: that of the sessionmaker, synchronous.
    """
    if face == SYNC:
        loan = Loan(url, False, options)
        try:
            yield sl.Locks(sessionmaker(loan.engine, class_=session_class) if maker else loan.engine), loan.engine
        finally:
            loan.take_back()
        return
    loop = Loop()
    loan = Loan(url, True, options)
    try:
        try:
            bind: Any = loan.engine
            if maker:
                bind = async_sessionmaker(bind, sync_session_class=session_class)
            yield Blocking(sl.AsyncLocks(bind), loop), loan.engine.sync_engine
        finally:
            loop.result(loan.take_back_async())
    finally:
        loop.close()


def exclusive(locks: Any) -> None:
    with locks.exclusive(unused(), timeout=PATIENCE) as held:
        held.check()
        assert not held.lost


def tried(locks: Any) -> None:
    with locks.exclusive(unused(), timeout=0):
        pass


def several(locks: Any) -> None:
    with locks.exclusive(unused(), unused(), timeout=PATIENCE) as held:
        held.session.execute(text("SELECT 1"))


def shared(locks: Any) -> None:
    with locks.shared(unused()) as held:
        held.check()


def mutex(locks: Any) -> None:
    name = unused("mutex")
    assert locks.mutex.acquire(name) is True
    assert locks.mutex.acquire(name) is False
    assert locks.mutex.release(name) is True
    assert locks.mutex.release(name) is False
    assert locks.mutex.acquire_token(name) == 2
    assert locks.mutex.release(name) is True


def bounded_mutex(locks: Any) -> None:
    name = unused("mutex")
    assert locks.run(sl.Mutex().create(name)) == 1
    assert locks.run(sl.Mutex().acquire(name).execution_options(locks_wait=PATIENCE)) is True
    assert locks.run(sl.Mutex().release(name).execution_options(locks_wait=PATIENCE)) is True


def captured_mutexes(locks: Any) -> None:
    queue = unused("queue")
    assert locks.run(sl.Mutex().create("a", "b", "c", queue=queue)) == 3
    assert len(locks.run(sl.Mutex().capture(2, queue=queue))) == 2
    assert locks.run(sl.Mutex().set_retries("a", 3, queue=queue)) is True


def once_per(locks: Any) -> None:
    name = unused("timeout")
    assert [bool(locks.once_per(name, every=86400)) for _ in range(2)] == [True, False]


def keys(locks: Any) -> None:
    assert isinstance(locks.run(sl.lock.create(unused())), int)
    assert isinstance(locks.run(sl.lock.vacuum()), int)


def transition(locks: Any) -> None:
    tasks, queue = sl.StateTransition(), unused("queue")
    assert locks.run(tasks.create("a", "b", queue=queue)) == 2
    first, second = locks.run(tasks.capture(5, queue=queue))
    assert {first.id, second.id} == {"a", "b"}
    assert locks.run(tasks.set_status("a", "done", queue=queue)) is True
    assert isinstance(locks.run(tasks.expire()), int)


def queue(locks: Any) -> None:
    jobs, name = sl.Queue(), unused("queue")
    assert locks.run(jobs.put({"n": 1}, queue=name)) is not None
    (job,) = locks.run(jobs.capture(5, queue=name, host="web-1"))
    assert job.payload == {"n": 1}
    assert locks.run(jobs.complete(job)) == 1
    assert locks.run(jobs.requeue_stalled(3600, queue=name)) == 0


def permits(locks: Any) -> None:
    name = unused("room")
    locks.run(sl.semaphore.create(name, capacity=2))
    grant = locks.acquire({name: 2}, ttl=3600, timeout=PATIENCE)
    assert grant.acquired
    with pytest.raises(sl.LockTimeout):
        locks.acquire({name: 1}, ttl=3600, timeout=0)
    assert locks.renew(grant) is True
    assert [row.owner for row in locks.run(sl.semaphore.holders(name))] == [locks.owner]
    assert locks.release(grant) is sl.Released.RELEASED
    locks.run(sl.semaphore.resize(name, 3, by="ops"))
    locks.run(sl.semaphore.delete(name))


def block_of_permits(locks: Any) -> None:
    name = unused("room")
    locks.run(sl.semaphore.create(name, capacity=2))
    with locks.semaphore({name: 2}, ttl=3600, timeout=PATIENCE) as grant:
        grant.check()
    with locks.semaphore(name, ttl=3600, timeout=0):
        pass


def lease(locks: Any) -> None:
    name = unused("lease")
    with locks.lease(name, ttl=3600, timeout=PATIENCE) as grant:
        grant.check()
        assert grant.fence[name] >= 1  # above the fences of all removed semaphores


def sweep(locks: Any) -> None:
    assert isinstance(locks.sweep(stale_after=86400, alive=lambda owners: owners), int)


def maintain(locks: Any) -> None:
    assert isinstance(locks.maintain(), sl.Report)


OPERATIONS: dict[str, Callable[[Any], None]] = {
    each.__name__: each
    for each in (
        exclusive,
        tried,
        several,
        shared,
        mutex,
        bounded_mutex,
        captured_mutexes,
        once_per,
        keys,
        transition,
        queue,
        permits,
        block_of_permits,
        lease,
        sweep,
        maintain,
    )
}

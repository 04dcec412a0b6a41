"""A connection that is cut between app and server: the lock is lost, is reported, and a waiter acquires it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import NullPool, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlalchemy_locks as sl
from tests.conformance.faces import ASYNC
from tests.faults.drivers import blocking_through_a_proxy, clear, every, good_as_new, through_a_proxy
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, Watch, later, until, unused
from tests.fixtures.semaphores import held, made


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_request_that_was_refused_after_a_lost_reply_is_withdrawn(
    servers: Any, engine_to: MakeEngine, driver: str
) -> None:
    """Its first statement may reach the server later, and nobody would own what it acquires."""
    engine = engine_to("postgresql15")
    direct, room, asked = sl.Locks(engine), made(engine, 1), []
    holder = direct.acquire({room: 1})
    with through_a_proxy(servers, "postgresql15", driver, **clear(driver)) as (cut, proxy):
        locks = sl.Locks(cut)
        event.listen(locks, "waited", lambda waited: asked.append(waited.external_id))
        with pytest.raises(sl.LockTimeout):
            locks.acquire({room: 1}, timeout=0)
        proxy.die_at(1, executed=False)
        with pytest.raises(sl.LockTimeout):
            locks.acquire({room: 1}, timeout=0)
        assert proxy.fatal is not None
    direct.release(holder)
    answered, late = asked
    with pytest.raises(sl.IdempotencyConflict):  # it is known by now, without permits
        direct.run(sl.semaphore.acquire({room: 1}, external_id=late))
    assert direct.run(sl.semaphore.acquire({room: 1}, external_id=answered))
    assert held(engine, room) == 1


class Base(DeclarativeBase):
    pass


class Unflushed(Base):
    __tablename__ = "never_created"
    id: Mapped[int] = mapped_column(primary_key=True)


def take(locks: Any, key: str) -> None:
    with locks.exclusive(key, timeout=PATIENCE):
        pass


@every
def test_cut_block_is_lost(servers: Any, engine_to: MakeEngine, name: str, driver: str, face: str) -> None:
    key, other = unused(), sl.Locks(engine_to(name, poolclass=NullPool))
    with blocking_through_a_proxy(servers, name, driver, face) as (locks, engine, proxy):
        lost = False
        with pytest.raises(sl.LockLost), locks.exclusive(key, timeout=PATIENCE) as held:
            held.check()
            assert not held.lost
            proxy.cut()
            take(other, key)
            with pytest.raises(sl.LockLost):
                held.check()
            lost = held.lost
        assert lost
        good_as_new(locks, engine)
        with pytest.raises(KeyError, match="mine"), locks.exclusive(key):  # it is not replaced
            proxy.cut()
            raise KeyError("mine")
        good_as_new(locks, engine)
        with pytest.raises(sl.LockLost), locks.exclusive(key):
            proxy.cut()
        good_as_new(locks, engine)
        with pytest.raises(sl.LockLost), locks.exclusive(key) as held:
            held.session.add(Unflushed(id=1))  # the end of the block writes it
            proxy.cut()
        good_as_new(locks, engine)


@every
@pytest.mark.parametrize("ignored", [False, True])
def test_work_fails_and_the_block_is_lost(servers: Any, name: str, driver: str, face: str, ignored: bool) -> None:
    # the event loop may see the cut before the statement is sent, which the session then refuses
    failed = (sl.LockLost,) if ignored else (DBAPIError, sl.LockLost) if face == ASYNC else (DBAPIError,)
    with blocking_through_a_proxy(servers, name, driver, face) as (locks, engine, proxy):
        with pytest.raises(failed), locks.exclusive(unused()) as held:
            held.session.execute(text("SELECT 1"))
            proxy.cut()
            with contextlib.suppress(DBAPIError) if ignored else contextlib.nullcontext():
                held.session.execute(text("SELECT 1"))
            assert held.lost
        good_as_new(locks, engine)


@every
def test_cut_waiter_waits_again(
    servers: Any, engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, driver: str, face: str
) -> None:
    """Nothing was held, so it is asked for again, on another connection."""
    key, watched = unused(), watch(name)
    with blocking_through_a_proxy(servers, name, driver, face) as (locks, engine, proxy):
        with engine_to(name).connect() as holder:
            holder.execute(sl.lock.exclusive(key))
            waiting = later(take, locks, key)
            watched.until_waiting(waiting)
            before = proxy.accepted
            proxy.cut()
            until(lambda: proxy.accepted > before, unless=waiting)
        waiting.result(PATIENCE)
        good_as_new(locks, engine)


@every
def test_connection_that_dies_as_it_is_made_is_replaced(servers: Any, name: str, driver: str, face: str) -> None:
    with blocking_through_a_proxy(servers, name, driver, face) as (locks, _, proxy):
        proxy.refusing = 1
        locks.run(sl.Mutex().held())
        assert proxy.refusing == 0
        proxy.cut()
        proxy.refusing = 1
        take(locks, "refused")
        assert proxy.refusing == 0

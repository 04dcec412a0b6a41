"""A reply that was lost after everything was done: asked again, a semaphore knows what it did."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool

import sqlalchemy_locks as sl
from tests.conditional.test_lost_replies import in_the_clear
from tests.faults.drivers import clear, sync, through_a_proxy
from tests.fixtures.parties import PATIENCE, connected, installed, later, until
from tests.fixtures.semaphores import INNODB, held, made, unused


@pytest.fixture
def other(servers: Any, name: str) -> Iterator[Engine]:
    """An engine that leads to the server directly."""
    with connected(installed(servers, name), poolclass=NullPool) as engine:
        yield engine


def final(name: str, function: str) -> bytes:
    """The request after whose execution everything is done."""
    if name in INNODB:
        return b"\x03COMMIT"
    # the first try sees whether others wait
    return b"semaphore_in_turn" if function == "acquire" else f"semaphore_{function}".encode()


@sync
def test_lost_replies_grant_and_release_once(servers: Any, other: Engine, name: str, driver: str) -> None:
    sem, ident = made(other, 2), unused("job")
    with in_the_clear(servers, name, driver) as (engine, proxy):
        locks = sl.Locks(engine)
        locks.run(sl.semaphore.usage())
        proxy.lose_answer(final(name, "acquire"))
        grant = locks.acquire({sem: 1}, external_id=ident, ttl=3600)
        assert (proxy.losses, grant.acquired, grant.replayed, grant.fence) == (1, True, True, {sem: 1})
        assert held(other, sem) == 1
        proxy.lose_answer(final(name, "renew"))
        assert locks.renew(grant) is True
        proxy.lose_answer(final(name, "release"))
        assert locks.release(grant) is sl.Released.ALREADY_RELEASED
        assert (proxy.losses, held(other, sem)) == (3, 0)
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@sync
def test_released_request_is_not_granted_again(servers: Any, other: Engine, name: str, driver: str) -> None:
    sem, ident = made(other, 1), unused("job")
    with in_the_clear(servers, name, driver) as (engine, proxy):
        locks = sl.Locks(engine)
        locks.run(sl.semaphore.usage())
        proxy.lose_answer(final(name, "acquire"), lambda: sl.Locks(other).release(ident))
        with pytest.raises(sl.LockLost, match="is RELEASED: it is never granted again"):
            locks.acquire({sem: 1}, external_id=ident, ttl=3600)
    assert held(other, sem) == 0


@sync
def test_lost_commit_reply_at_head_of_queue(servers: Any, other: Engine, name: str, driver: str) -> None:
    sem = made(other, 1)
    mine = sl.Locks(other).acquire({sem: 1})
    with through_a_proxy(servers, name, driver, **clear(driver), pool_size=4) as (engine, proxy):
        locks = sl.Locks(engine)
        waiting = later(lambda: locks.acquire({sem: 1}, timeout=PATIENCE))
        joins = b"GET_LOCK" if name in INNODB else b"idle_in_transaction_session_timeout"
        until(lambda: any(joins in asked for asked in proxy.asked), unless=waiting)
        proxy.lose_answer(
            b"\x03COMMIT" if name in INNODB else b"COMMIT", proxy.close
        )  # the server can't be reached any more
        sl.Locks(other).release(mine)
        with pytest.raises(sl.OutcomeUnknown, match="its external_id is") as unknown:
            waiting.result(PATIENCE)
        (ident,) = re.findall("external_id is '(.*?)'", str(unknown.value))
        assert held(other, sem) == 1
        assert sl.Locks(other).release(ident) is sl.Released.RELEASED


@sync
def test_lost_resize_and_delete_are_not_repeated(servers: Any, other: Engine, name: str, driver: str) -> None:
    """Done again, a resize would overrule an emergency, and a deletion would delete another semaphore."""
    sem, old = made(other, 5), made(other, 5)
    with in_the_clear(servers, name, driver) as (engine, proxy):
        locks, others = sl.Locks(engine), sl.Locks(other)
        locks.run(sl.semaphore.usage())
        proxy.lose_answer(final(name, "resize"), lambda: others.run(sl.semaphore.resize(sem, 1)))
        with pytest.raises(sl.OutcomeUnknown):
            locks.run(sl.semaphore.resize(sem, 9))
        proxy.lose_answer(final(name, "delete"), lambda: others.run(sl.semaphore.create(old, 7)))
        with pytest.raises(sl.OutcomeUnknown):
            locks.run(sl.semaphore.delete(old))
    assert others.run(sl.semaphore.resize(sem, 1)) == 1
    assert others.run(sl.semaphore.create(old, 7)) is False


def test_unknown_outcome_names_generated_id(servers: Any) -> None:
    """Made up by acquire itself, it would else be known to nobody."""
    with connected(installed(servers, "postgresql15"), poolclass=NullPool) as direct:
        sem = made(direct, 1)
        with in_the_clear(servers, "postgresql15", "psycopg") as (engine, proxy):
            sl.Locks(engine).run(sl.semaphore.usage())
            proxy.lose_answer(final("postgresql15", "acquire"), always=True)
            with pytest.raises(sl.OutcomeUnknown) as raised:
                sl.Locks(engine).acquire({sem: 1}, timeout=1)
        (holder,) = sl.Locks(direct).run(sl.semaphore.holders(sem))
        assert f"its external_id is {holder.external_id!r}" in str(raised.value)

"""With fewer server connections than there are who wait, nobody waits for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError

import sqlalchemy_locks as sl
from sqlalchemy_locks.facade import semaphore_wait
from sqlalchemy_locks.runtime.local_queue import local_queues
from tests.fixtures.parties import PATIENCE, connected, later, seen, until, unused


@pytest.fixture
def direct(servers: Any) -> Iterator[Engine]:
    """A connection that is not one of the pooler's, for the server's own account."""
    with connected(servers.installed("postgresql15", "psycopg"), poolclass=NullPool) as engine:
        yield engine


def locks_of(through: Any, opened: ExitStack, processes: int, **settings: Any) -> list[sl.Locks]:
    """As many façades, each on an engine of its own, as processes have."""
    url, connect_args = through("psycopg", **settings)
    engines = [create_engine(url, connect_args=connect_args) for _ in range(processes)]
    for engine in engines:
        opened.callback(engine.dispose)
    return [sl.Locks(engine) for engine in engines]


def in_line(direct: Engine, room: str) -> int:
    """How many stand in the server's line of a semaphore: in front, or behind."""
    key = sl.lock.key("sqlalchemy_locks.semaphore", semaphore_wait.place_key(*_place(direct)), room)
    statement = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1"
        " AND ((classid::bigint << 32) | objid::bigint) = :key"
    )
    with direct.connect() as connection:
        return int(connection.scalar(text(statement), {"key": key}))  # type: ignore[arg-type]


def _place(engine: Engine) -> tuple[Any, Any]:
    options = engine.get_execution_options()
    return semaphore_wait.build_context(engine.dialect, options), options


@pytest.mark.parametrize("size", [1, 2])
def test_a_release_comes_through(through: Any, direct: Engine, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All server connections are had by who waits in line; who is to release gets one, and so those who wait get theirs."""
    monkeypatch.setattr(semaphore_wait, "TURN", 1e6)  # that those who wait give up in time is not what is tested
    monkeypatch.setattr(semaphore_wait, "KEPT", 0.2)
    monkeypatch.setattr(semaphore_wait, "SLOW", 1e6)
    room = unused("room")
    with ExitStack() as opened:
        holder, *others = locks_of(through, opened, size + 1, default_pool_size=size)
        holder.run(sl.semaphore.create(room, capacity=1))
        grant = holder.acquire({room: 1})  # without a time to live: it ends by its release alone
        waiters = [later(other.acquire, {room: 1}, ttl=3600) for other in others]
        until(lambda: in_line(direct, room) == size)
        assert holder.renew(grant) is True
        assert holder.release(grant) is sl.Released.RELEASED
        served: list[Any] = []
        while len(served) < len(waiters):
            until(lambda: any(waiter.done() for waiter in waiters if waiter not in served))
            waiter = next(waiter for waiter in waiters if waiter.done() and waiter not in served)
            assert holder.release(waiter.result()) is sl.Released.RELEASED
            served.append(waiter)


def test_who_waits_for_a_connection_keeps_none(through: Any, direct: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pooler that takes long for an answer has too few: those that it has are for who holds."""
    monkeypatch.setattr(semaphore_wait, "SLOW", -1)  # no answer is fast enough
    room = unused("room")
    with ExitStack() as opened:
        holder, other = locks_of(through, opened, 2, default_pool_size=1)
        holder.run(sl.semaphore.create(room, capacity=1))
        grant = holder.acquire({room: 1})
        with seen(other._engine) as statements:
            waiter = later(other.acquire, {room: 1}, ttl=3600)
            until(lambda: sum("AS known" in statement for statement in list(statements)) > 3, unless=waiter)
            assert holder.renew(grant) is True
            assert in_line(direct, room) == 0
            assert holder.release(grant) is sl.Released.RELEASED
            grant = waiter.result(PATIENCE)
        assert not any("pg_advisory_xact_lock" in statement for statement in statements)
        # and stands in line again some time later
        monkeypatch.setattr(semaphore_wait, "SLOW", 1e6)
        local_queues(holder._engine.dialect).aside_until = 0
        waiter = later(holder.acquire, {room: 1}, ttl=3600)
        until(lambda: in_line(direct, room) == 1, unless=waiter)
        assert other.release(grant) is sl.Released.RELEASED
        assert holder.release(waiter.result(PATIENCE)) is sl.Released.RELEASED


def test_who_kept_it_from_the_holder_learns_that(through: Any, direct: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semaphore_wait, "KEPT", 0.2)
    monkeypatch.setattr(semaphore_wait, "SLOW", 1e6)
    room = unused("room")
    with ExitStack() as opened:
        holder, other = locks_of(through, opened, 2, default_pool_size=1)
        holder.run(sl.semaphore.create(room, capacity=1))
        for _ in range(100):  # the release may come between two turns
            grant = holder.acquire({room: 1})
            waiter = later(other.acquire, {room: 1}, ttl=3600)
            until(lambda waiter=waiter: in_line(direct, room) == 1, unless=waiter)
            assert holder.release(grant) is sl.Released.RELEASED
            assert other.release(waiter.result(PATIENCE)) is sl.Released.RELEASED
            if local_queues(other._engine.dialect).aside_until:
                break
        else:
            raise AssertionError("it has learnt nothing")
        assert not local_queues(holder._engine.dialect).aside_until


def test_who_gets_no_server_connection_is_told_by_the_pooler(through: Any) -> None:
    """No timeout of ours counts before there is a session to count it; PgBouncer's own does."""
    key = unused()
    with ExitStack() as opened:
        holder, other = locks_of(through, opened, 2, default_pool_size=1, query_wait_timeout=2)
        with holder.exclusive(key) as held:
            with pytest.raises(DBAPIError, match="query_wait_timeout"), other.exclusive(key, timeout=PATIENCE):
                pass
            held.check()
        with other.exclusive(key, timeout=PATIENCE):
            pass

"""With fewer server connections than waiters, none waits forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text

import sqlalchemy_locks as sl
from tests.fixtures.parties import PATIENCE, connected, later, seen, until, unused


@pytest.fixture
def direct(servers: Any) -> Iterator[Engine]:
    """A connection past the pooler, to read the server's own list of locks."""
    with connected(servers.installed("postgresql15", "psycopg"), poolclass=NullPool) as engine:
        yield engine


def locks_of(through: Any, opened: ExitStack, processes: int, **settings: Any) -> list[sl.Locks]:
    """This many façades, each on an engine of its own, as in processes."""
    url, connect_args = through("psycopg", **settings)
    engines = [create_engine(url, connect_args=connect_args) for _ in range(processes)]
    for engine in engines:
        opened.callback(engine.dispose)
    return [sl.Locks(engine) for engine in engines]


def advisory_locks(direct: Engine) -> int:
    """How many advisory locks the server has granted or queued in this database."""
    statement = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    with direct.connect() as connection:
        return int(connection.scalar(text(statement)))  # type: ignore[arg-type]


def polls(statements: list[str]) -> int:
    return sum("AS known" in statement for statement in list(statements))


@pytest.mark.parametrize("size", [1, 2])
def test_waiters_keep_no_server_connection(through: Any, direct: Engine, size: int) -> None:
    """The holder can renew and release, though more wait than there are server connections."""
    room = unused("room")
    with ExitStack() as opened:
        holder, *others = locks_of(through, opened, size + 2, default_pool_size=size)
        holder.run(sl.semaphore.create(room, capacity=1))
        grant = holder.acquire({room: 1})  # without a time to live: it ends only by its release
        with seen(others[0]._engine) as statements:
            waiters = [later(other.acquire, {room: 1}, ttl=3600) for other in others]
            until(lambda: polls(statements) > 3, unless=waiters[0])
            assert advisory_locks(direct) == 0
            assert holder.renew(grant) is True
            assert holder.release(grant) is sl.Released.RELEASED
            served: list[Any] = []
            while len(served) < len(waiters):
                until(lambda: any(waiter.done() for waiter in waiters if waiter not in served))
                waiter = next(waiter for waiter in waiters if waiter.done() and waiter not in served)
                assert holder.release(waiter.result()) is sl.Released.RELEASED
                served.append(waiter)
        assert not any("pg_advisory_xact_lock" in statement for statement in statements)


@pytest.mark.parametrize("size", [1, 3])
def test_contended_permit_has_one_holder(through: Any, size: int) -> None:
    """Six processes contend for a semaphore of one: no two hold it, all are served, and waits are bounded."""
    room, ready, inside, most, longest = unused("room"), threading.Barrier(6), 0, 0, 0.0
    guard = threading.Lock()
    with ExitStack() as opened:
        everybody = locks_of(through, opened, 6, default_pool_size=size)
        everybody[0].run(sl.semaphore.create(room, capacity=1))

        def work(locks: sl.Locks) -> int:
            nonlocal inside, most, longest
            ready.wait(PATIENCE)
            for _ in range(10):
                began = time.monotonic()
                grant = locks.acquire({room: 1}, ttl=3600, timeout=PATIENCE)
                with guard:
                    inside += 1
                    most, longest = max(most, inside), max(longest, time.monotonic() - began)
                time.sleep(0.002)
                with guard:
                    inside -= 1
                assert locks.release(grant) is sl.Released.RELEASED
            return 10

        working = [later(work, locks) for locks in everybody]
        assert [future.result(PATIENCE) for future in working] == [10] * 6
    assert most == 1
    assert longest < PATIENCE

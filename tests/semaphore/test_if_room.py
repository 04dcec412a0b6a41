"""A waiter's poll: a denial by a read writes and locks nothing, and where there is room the same call acquires."""

from __future__ import annotations

from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, text

import sqlalchemy_locks as sl
from sqlalchemy_locks.semaphore.acquire import acquire_if_room
from tests.fixtures.engines import MakeEngine
from tests.fixtures.semaphores import held, made

FUNCTIONS = pytest.mark.parametrize("name", ["postgresql15", "postgresql18", "yugabytedb"])


@pytest.fixture
def engine(engine_to: MakeEngine, name: str) -> Engine:
    return engine_to(name, isolation_level="READ COMMITTED")


def poll(connection: Connection, permits: dict[str, int], ident: str | None = None) -> sl.Grant:
    grant: sl.Grant = connection.execute(
        acquire_if_room(sl.semaphore.acquire(permits, external_id=ident, ttl=3600))
    ).scalar_one()
    return grant


@FUNCTIONS
def test_denial_writes_and_locks_nothing(engine: Engine) -> None:
    full, free = made(engine, 2), made(engine, 5)
    sl.Locks(engine).acquire({full: 2})
    with engine.connect() as connection:
        grant = poll(connection, {full: 1, free: 3})
        assert (grant.acquired, grant.state, grant.exhausted, grant.token) == (False, "DENIED", (full,), None)
        assert dict(zip(grant.permits, grant.capacities, strict=True)) == {full: 2, free: 5}
        assert connection.scalar(text("SELECT pg_current_xact_id_if_assigned()")) is None
        rows = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND mode LIKE 'Row%'"
        assert connection.scalar(text(rows)) == 0


@FUNCTIONS
def test_poll_sees_a_release_in_the_same_transaction(engine: Engine) -> None:
    sem = made(engine, 1)
    locks = sl.Locks(engine)
    holder = locks.acquire({sem: 1})
    with engine.begin() as connection:
        assert not poll(connection, {sem: 1})
        locks.release(holder)
        grant = poll(connection, {sem: 1})
        assert grant
        assert grant.fence[sem] > holder.fence[sem]
    assert held(engine, sem) == 1


@FUNCTIONS
def test_expired_lease_leaves_room(engine: Engine) -> None:
    sem = made(engine, 1)
    sl.Locks(engine).acquire({sem: 1}, ttl=0.001)
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_sleep(0.01)"))
        assert poll(connection, {sem: 1})
    assert held(engine, sem) == 1


@FUNCTIONS
def test_request_that_was_granted_is_granted_again(engine: Engine) -> None:
    """Its own permits leave no room: an earlier attempt, whose reply was lost, may have acquired them."""
    sem, ident = made(engine, 1), str(uuid4())
    first = sl.Locks(engine).acquire({sem: 1}, external_id=ident)
    with engine.begin() as connection:
        again = poll(connection, {sem: 1}, ident)
    assert (again.acquired, again.replayed, again.token) == (True, True, first.token)


@FUNCTIONS
def test_unknown_semaphore_is_refused(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(sl.UnknownSemaphore):
        poll(connection, {"unknown": 1})
    deleted = made(engine, 1)
    sl.Locks(engine).run(sl.semaphore.delete(deleted))
    with engine.connect() as connection, pytest.raises(sl.UnknownSemaphore):
        poll(connection, {deleted: 1})

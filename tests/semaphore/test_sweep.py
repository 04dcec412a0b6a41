"""A sweep releases expired and stale requests, and permits without a request. Never a live lease."""

from __future__ import annotations

import contextlib

import pytest
from sqlalchemy import Engine, text, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.facade import maintenance
from tests.fixtures.engines import MakeEngine
from tests.fixtures.semaphores import EVERYWHERE, expire, held, made, place, unused

DAY = 86400


def days_ago(engine: Engine, grant: sl.Grant, days: int) -> None:
    """Move a grant into the past by these seconds, without a renewal since."""
    with engine.begin() as connection:
        for _ in range(days):
            expire(connection, grant)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_request_with_ttl_is_never_stale(name: str, engine_to: MakeEngine) -> None:
    """A ttl of a week is renewed every 56 hours: such a request isn't stale in between."""
    engine = engine_to(name)
    sem = made(engine, 2)
    locks = sl.Locks(engine)
    orphans = next(task for task in maintenance.TASKS if task.name == "orphans")
    lease, endless = locks.acquire({sem: 1}, ttl=7 * DAY), locks.acquire({sem: 1})
    days_ago(engine, lease, 2)
    locks.sweep()
    locks.sweep(stale_after=60)
    orphans.run(locks, None)
    with engine.begin() as connection:
        connection.execute(sl.semaphore.sweep(stale_after=60))
    assert held(engine, sem) == 2
    assert locks.renew(lease)
    days_ago(engine, lease, 8)
    assert locks.sweep(stale_after=None) >= 1
    assert locks.release(lease) is sl.Released.ALREADY_RELEASED
    # a request without a time to live is stale after a day
    days_ago(engine, endless, 2)
    assert locks.sweep(stale_after=None) >= 0
    assert held(engine, sem) == 1
    assert orphans.run(locks, None) >= 1
    assert locks.release(endless) is sl.Released.ALREADY_RELEASED


@pytest.mark.parametrize("through", ["locks", "session"])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_orphaned_permit_is_ended(name: str, through: str, engine_to: MakeEngine) -> None:
    """Rows that were written or deleted by hand: no holder would ever release them."""
    engine = engine_to(name)
    sem, ident = made(engine, 3), unused("job")
    locks = sl.Locks(engine)
    locks.acquire({sem: 1}, ttl=3600)
    locks.acquire({sem: 1}, external_id=ident)
    permit, semaphore, request = (place(engine, table) for table in ("permit", "semaphore", "permit_request"))
    with engine.begin() as connection:
        half = f"UPDATE {request} SET state = 'RELEASED' WHERE external_id = :id"
        assert connection.execute(text(half), {"id": ident}).rowcount == 1
        made_up = (
            f"INSERT INTO {permit} (semaphore_id, permit_request_id, count, fence, state)"
            f" SELECT id, 900000000000, 1, 99, 'ACQUIRED' FROM {semaphore} WHERE name = :name"
        )
        connection.execute(text(made_up), {"name": sem})
    assert held(engine, sem) == 3
    if through == "locks":
        assert locks.sweep() >= 2
    else:
        with engine.begin() as connection:
            assert connection.execute(sl.semaphore.sweep()).scalar_one() >= 2
    assert held(engine, sem) == 1
    with pytest.raises(sl.RequestOver):
        locks.acquire({sem: 1}, external_id=ident, timeout=0)
    with engine.connect() as connection:
        left = f"SELECT count(*) FROM {permit} WHERE permit_request_id = 900000000000"
        assert connection.scalar(text(left)) == 0


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_request_that_is_asked_for_again_is_renewed(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    sem, ident = made(engine, 1), unused("job")
    locks = sl.Locks(engine)
    first = locks.acquire({sem: 1}, external_id=ident, owner="job", ttl=3600)
    again = locks.acquire({sem: 1}, external_id=ident, owner="job", ttl=3600)
    assert again.replayed
    assert (again.token, again.fence) == (first.token, first.fence)
    assert first.expires_at is not None
    assert again.expires_at is not None
    assert again.expires_at > first.expires_at
    with engine.connect() as connection:
        (holder,) = connection.execute(sl.semaphore.holders(sem))
    assert holder.expires_at == again.expires_at


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", [name for name in EVERYWHERE if name != "sqlite"])
def test_a_request_with_an_open_guarded_write_is_not_waited_for(name: str, engine_to: MakeEngine) -> None:
    """Its holder is alive. (On SQLite every writer waits for it.)"""
    engine = engine_to(name)
    sem, ident = made(engine, 1), unused("job")
    grant = sl.Locks(engine).acquire({sem: 1}, external_id=ident, ttl=3600)
    semaphores = build_context(engine.dialect, engine.get_execution_options()).tables.semaphore
    with engine.begin() as connection:
        nothing = update(semaphores).where(semaphores.c.id == 0).values(fence=0)
        assert connection.execute(sl.guarded(nothing, grant)).scalar_one() is False
        with pytest.raises(sl.LockTimeout, match="or the request itself, stayed locked by others"):
            sl.Locks(engine).acquire({sem: 1}, external_id=ident, ttl=3600, timeout=0.1)
    assert sl.Locks(engine).acquire({sem: 1}, external_id=ident, ttl=3600, timeout=0).replayed


@pytest.mark.parametrize("asked", ["block", "acquire"])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_who_resumes_a_request_is_its_owner(name: str, asked: str, engine_to: MakeEngine) -> None:
    """The owner that a crashed process has stored is dead, and its permits have a new holder."""
    engine = engine_to(name)
    sem, ident = made(engine, 1), unused("job")
    crashed, restarted = sl.Locks(engine), sl.Locks(engine)
    assert crashed.acquire({sem: 1}, external_id=ident, ttl=3600)

    def resume() -> None:
        if asked == "acquire":
            assert restarted.acquire({sem: 1}, external_id=ident, ttl=3600).replayed
        else:
            blocks.enter_context(restarted.semaphore(sem, external_id=ident, ttl=3600, timeout=0))

    def alive(owners: list[str]) -> list[str]:
        if crashed.owner in owners:
            resume()  # after the sweep has read the owners
        return [owner for owner in owners if owner != crashed.owner]

    with contextlib.ExitStack() as blocks:
        for _ in range(2):
            sl.Locks(engine).sweep(alive=alive)
            assert held(engine, sem) == 1
        with engine.connect() as connection:
            (holder,) = connection.execute(sl.semaphore.holders(sem))
        assert holder.owner == restarted.owner

"""A sweep releases expired and stale requests, and permits without a request. Never a live lease."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

import sqlalchemy_locks as sl
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
    orphans.run(locks._semaphores, None)
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
    assert orphans.run(locks._semaphores, None) >= 1
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

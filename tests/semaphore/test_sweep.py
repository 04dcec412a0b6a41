"""A sweep releases expired and stale requests, never a live lease."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.facade import maintenance
from tests.fixtures.semaphores import ENGINES, expire, held, made

DAY = 86400


def days_ago(engine: Engine, grant: sl.Grant, days: int) -> None:
    """Move a grant into the past by these seconds, without a renewal since."""
    with engine.begin() as connection:
        for _ in range(days):
            expire(connection, grant)


@pytest.mark.parametrize("name", ENGINES)
def test_request_with_ttl_is_never_stale(locks: sl.Locks, engine: Engine) -> None:
    """A ttl of a week is renewed every 56 hours: such a request isn't stale in between."""
    sem = made(engine, 2)
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

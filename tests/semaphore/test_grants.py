"""A denial stands for no request: not for the one that its id is granted to later either."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, Engine, MetaData, Table, update

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.semaphores import EVERYWHERE, held, made, unused

ROWS = Table("of_denied", MetaData(), Column("id", BigInteger(), primary_key=True, autoincrement=False))


@pytest.fixture(params=EVERYWHERE)
def engine(request: pytest.FixtureRequest, engine_to: MakeEngine) -> Engine:
    return engine_to(request.param)


def denied_and_granted(engine: Engine) -> tuple[str, Any, Any]:
    """A denial, and what is granted to another caller with the same id as soon as there is room."""
    locks, sem, ident = sl.Locks(engine), made(engine, 1), unused("job")
    before = locks.acquire({sem: 1})
    acquire = sl.semaphore.acquire({sem: 1}, external_id=ident, ttl=3600)
    denied = locks.run(acquire)
    assert not denied
    locks.release(before)
    granted = locks.run(acquire)
    assert granted
    return sem, denied, granted


def test_it_frees_and_renews_nothing(engine: Engine) -> None:
    sem, denied, granted = denied_and_granted(engine)
    locks = sl.Locks(engine)
    assert locks.release(denied) is sl.Released.UNKNOWN
    with engine.begin() as connection:
        assert connection.scalar(sl.semaphore.release(denied)) == "UNKNOWN"
        assert connection.scalar(sl.semaphore.renew(denied)) is False
    assert locks.renew(denied) is False
    assert held(engine, sem) == 1
    assert locks.release(granted) is sl.Released.RELEASED


def test_neither_does_a_grant_that_tells_no_request(engine: Engine) -> None:
    """As one that was made by hand, or stored by who has left the token out."""
    ROWS.create(engine, checkfirst=True)
    sem, _, granted = denied_and_granted(engine)
    locks, stored = sl.Locks(engine), {**vars(granted)}
    del stored["token"]
    partial = pickle.loads(pickle.dumps(sl.Grant(**stored)))
    assert locks.renew(partial) is False
    assert locks.release(partial) is sl.Released.UNKNOWN
    with pytest.raises(sl.LockLost):
        locks.run(sl.guarded(update(ROWS).values(id=1), partial))
    assert held(engine, sem) == 1
    assert locks.release(granted.external_id) is sl.Released.RELEASED

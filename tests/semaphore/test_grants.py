"""A denial identifies no request, not even one that is granted later with the same id."""

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
    """A denial, and the grant of another caller with the same id as soon as there is room."""
    locks, sem, ident = sl.Locks(engine), made(engine, 1), unused("job")
    before = locks.acquire({sem: 1})
    acquire = sl.semaphore.acquire({sem: 1}, external_id=ident, ttl=3600)
    denied = locks.run(acquire)
    assert not denied
    locks.release(before)
    granted = locks.run(acquire)
    assert granted
    return sem, denied, granted


def test_denied_grant_releases_and_renews_nothing(engine: Engine) -> None:
    sem, denied, granted = denied_and_granted(engine)
    locks = sl.Locks(engine)
    assert locks.release(denied) is sl.Released.UNKNOWN
    with engine.begin() as connection:
        assert connection.scalar(sl.semaphore.release(denied)) == "UNKNOWN"
        assert connection.scalar(sl.semaphore.renew(denied)) is False
    assert locks.renew(denied) is False
    assert held(engine, sem) == 1
    assert locks.release(granted) is sl.Released.RELEASED


def test_grant_without_token_matches_no_request(engine: Engine) -> None:
    """As a grant that was built by hand, or stored without its token."""
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


@pytest.mark.parametrize("name", EVERYWHERE)
def test_grant_stands_for_its_own_request(name: str, engine_to: MakeEngine) -> None:
    """It doesn't identify a later request with the same id, made after the first was cleaned up."""
    locks, ident = sl.Locks(engine := engine_to(name)), unused("job")
    sem = made(engine, 1)
    old = locks.acquire({sem: 1}, external_id=ident)
    assert locks.renew(old)
    assert locks.release(old) is sl.Released.RELEASED
    assert locks.release(old) is sl.Released.ALREADY_RELEASED
    while locks.run(sl.semaphore.clean(older_than=0)):
        pass
    new = locks.acquire({sem: 1}, external_id=ident)
    assert not locks.renew(old)
    assert locks.release(old) is sl.Released.UNKNOWN
    assert held(engine, sem) == 1
    assert locks.renew(new)
    assert locks.renew(ident)
    assert locks.release(ident) is sl.Released.RELEASED


def test_grant_is_hashable(engine_to: MakeEngine) -> None:
    locks = sl.Locks(engine := engine_to("sqlite"))
    sem = made(engine, 2)
    grants = [locks.acquire({sem: 1}) for _ in range(2)]
    assert len({*grants, *grants}) == 2

"""Events of semaphores and leases, the holders that a timeout names, and blocks as decorators."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import sqlalchemy_locks as sl
from tests.facade.test_events import listened
from tests.fixtures.engines import MakeEngine
from tests.fixtures.semaphores import ENGINES, expire, made, unused


def shown(told: list[sl.LockEvent]) -> list[tuple[Any, ...]]:
    return [(one.event, one.kind, one.names) for one in told]


@pytest.mark.parametrize("name", ENGINES)
def test_events_of_block(name: str, engine_to: MakeEngine) -> None:
    engine, lease = engine_to(name), unused("lease")
    locks = sl.Locks(engine, owner="me")
    told = listened(locks)
    with locks.lease(lease) as grant:
        pass
    assert shown(told) == [(what, "lease", (lease,)) for what in ("waited", "acquired", "released")]
    assert {one.external_id for one in told} == {grant.external_id}
    assert {one.owner for one in told} == {"me"}
    assert [one.fence for one in told[1:]] == [{lease: 1}, {lease: 1}]
    assert told[0].waited is not None
    assert told[2].held is not None
    assert all(one.error is None for one in told)
    assert repr(grant.external_id) in str(told[1])


@pytest.mark.parametrize("name", ENGINES)
def test_events_of_loss(name: str, engine_to: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine, sem = engine_to(name), made(engine_to(name), 2)
    locks = sl.Locks(engine)
    told = listened(locks)
    with caplog.at_level(logging.WARNING, "sqlalchemy_locks"), pytest.raises(sl.LockLost):
        with locks.semaphore(sem, count=2, owner="they", ttl=3600) as grant:
            with engine.begin() as connection:
                expire(connection, grant)
            with pytest.raises(sl.LockLost):
                grant.check()
            assert grant.lost
    names = ["waited", "acquired", "lost", "released"]
    assert shown(told) == [(what, "semaphore", (sem,)) for what in names]
    assert {one.owner for one in told} == {"they"}
    assert isinstance(told[2].error, sl.LockLost)
    assert isinstance(told[3].error, sl.LockLost)
    assert f"lost semaphore '{sem}'" in caplog.text


@pytest.mark.parametrize("name", ENGINES)
def test_events_of_calls(name: str, engine_to: MakeEngine) -> None:
    engine, sem = engine_to(name), made(engine_to(name), 1)
    locks = sl.Locks(engine)
    told = listened(locks)
    grant = locks.acquire({sem: 1}, ttl=3600)
    with pytest.raises(sl.LockTimeout):
        locks.acquire({sem: 1}, timeout=0)
    assert locks.renew(grant) is True
    assert locks.release(grant) is sl.Released.RELEASED
    assert locks.release(grant) is sl.Released.ALREADY_RELEASED
    assert locks.renew(grant.external_id) is False
    assert [(one.event, one.names) for one in told] == [
        ("waited", (sem,)),
        ("acquired", (sem,)),
        ("waited", (sem,)),
        ("released", (sem,)),
        ("lost", ()),
    ]
    assert isinstance(told[2].error, sl.LockTimeout)
    assert told[4].external_id == grant.external_id
    del told[:]
    again = locks.acquire({sem: 1}, ttl=3600)
    with engine.begin() as connection:
        expire(connection, again)
    assert locks.sweep() >= 1
    assert [one.event for one in told] == ["waited", "acquired", "swept"]
    assert told[2].count is not None
    assert told[2].count >= 1


@pytest.mark.parametrize("name", ENGINES)
def test_timeout_names_holders(name: str, engine_to: MakeEngine) -> None:
    engine, sem = engine_to(name), made(engine_to(name), 3)
    locks = sl.Locks(engine)
    lasting = locks.acquire({sem: 2}, owner="web-1", ttl=3600)
    locks.acquire({sem: 1}, owner="web-2", external_id=(other := unused("job")))
    with pytest.raises(
        sl.LockTimeout, match="had no room within 0.2 s: held by web-1 since .* until .*; web-2"
    ) as gone:
        locks.acquire({sem: 1}, timeout=0.2)
    first, second = gone.value.holders
    assert isinstance(first, sl.PermitHolder)
    assert isinstance(second, sl.PermitHolder)
    assert (first.name, first.owner, first.permits, first.external_id) == (sem, "web-1", 2, lasting.external_id)
    assert first.expires_at == lasting.expires_at
    assert first.since is not None
    assert (second.owner, second.permits, second.external_id, second.expires_at) == ("web-2", 1, other, None)
    with pytest.raises(sl.LockTimeout) as gone, locks.semaphore(sem, timeout=0.2):
        pass
    assert len(gone.value.holders) == 2
    with pytest.raises(sl.LockTimeout) as gone:
        locks.acquire({sem: 1}, timeout=0)
    assert gone.value.holders == ()
    for grant in (lasting.external_id, other):
        locks.release(grant)

"""The guarantees of semaphores, on every engine, driver and runner."""

from __future__ import annotations

from datetime import timedelta, timezone
from typing import Any

import pytest

import sqlalchemy_locks as sl
from tests.conformance.clients import Client
from tests.conformance.conftest import World


def run(client: Client, operation: Any) -> Any:
    """One operation, committed."""
    value = client.scalar(operation)
    client.end()
    return value


def semaphore(world: World, client: Client, capacity: int) -> str:
    name = world.key("sém 🚦")
    assert run(client, sl.semaphore.create(name, capacity, by="tests")) is True
    assert run(client, sl.semaphore.create(name, capacity + 1)) is False
    return name


def test_permits_are_granted_up_to_the_capacity(world: World) -> None:
    a, b = world.client(), world.client()
    name = semaphore(world, a, 3)
    first = run(a, sl.semaphore.acquire({name: 2}, external_id=world.key(), owner="ä 🙂"))
    assert first
    assert (first.state, first.fence, first.replayed, first.expires_at) == ("ACQUIRED", {name: 1}, False, None)
    denied = run(b, sl.semaphore.acquire({name: 2}, external_id=world.key()))
    assert not denied
    assert (denied.state, denied.exhausted, denied.fence) == ("DENIED", (name,), {})
    assert run(b, sl.semaphore.acquire({name: 1})).fence == {name: 2}
    assert run(b, sl.semaphore.release(first)) is sl.Released.RELEASED
    assert run(a, sl.semaphore.release(first.external_id)) is sl.Released.ALREADY_RELEASED
    assert run(a, sl.semaphore.release(denied)) is sl.Released.UNKNOWN
    assert run(a, sl.semaphore.acquire({name: 2})).fence == {name: 3}


def test_a_request_gets_all_permits_or_none(world: World) -> None:
    a = world.client()
    here, there = semaphore(world, a, 1), semaphore(world, a, 2)
    grant = run(a, sl.semaphore.acquire({there: 2, here: 1}))
    assert grant.fence == {here: 1, there: 1}
    assert run(a, sl.semaphore.release(grant)) == "RELEASED"
    assert run(a, sl.semaphore.acquire({there: 2}))
    denied = run(a, sl.semaphore.acquire({here: 1, there: 1}))
    assert denied.exhausted == (there,)
    assert run(a, sl.semaphore.acquire({here: 1})).fence == {here: 2}


def test_an_id_is_granted_once(world: World) -> None:
    a, b = world.client(), world.client()
    name, other = semaphore(world, a, 5), semaphore(world, a, 5)
    ident = world.key("job")
    asked = sl.semaphore.acquire({name: 2}, external_id=ident, ttl=timedelta(hours=1))
    first, again = run(a, asked), run(b, asked)
    assert (again.acquired, again.replayed, again.fence) == (True, True, first.fence)
    assert again.expires_at == first.expires_at
    assert first.expires_at.tzinfo is timezone.utc
    for permits in ({name: 1}, {other: 2}, {name: 2, other: 1}):
        with pytest.raises(sl.IdempotencyConflict):
            b.scalar(sl.semaphore.acquire(permits, external_id=ident))
        b.end(rollback=True)
    assert run(b, sl.semaphore.release(ident)) == "RELEASED"
    late = run(b, asked)
    assert (late.acquired, late.replayed, late.state) == (False, True, "RELEASED")
    assert run(a, sl.semaphore.acquire({name: 5}))


def test_names_that_only_look_alike(world: World) -> None:
    a = world.client()
    name = semaphore(world, a, 3)
    for ident in ("job-a", "JOB-A", "jób-A"):
        assert run(a, sl.semaphore.acquire({name: 1}, external_id=f"{name}{ident}")).replayed is False
    assert run(a, sl.semaphore.create(name.upper(), 7)) is True
    assert run(a, sl.semaphore.resize(name.upper(), 8)) == 7


def test_renew_extends_a_held_request(world: World) -> None:
    a = world.client()
    name = semaphore(world, a, 1)
    grant = run(a, sl.semaphore.acquire({name: 1}, ttl=2 * 86_400))
    world.age(grant)
    aged = run(a, sl.semaphore.acquire({name: 1}, external_id=grant.external_id))
    assert aged.acquired
    assert aged.expires_at < grant.expires_at
    assert run(a, sl.semaphore.renew(grant)) is True
    # SQLite's clock counts milliseconds, and all of this may pass in one
    assert run(a, sl.semaphore.acquire({name: 1}, external_id=grant.external_id)).expires_at >= grant.expires_at
    assert run(a, sl.semaphore.renew("no such request")) is False
    run(a, sl.semaphore.release(grant))
    assert run(a, sl.semaphore.renew(grant)) is False


def test_an_acquire_releases_expired_permits(world: World) -> None:
    a = world.client()
    name, besides = semaphore(world, a, 1), semaphore(world, a, 1)
    old = run(a, sl.semaphore.acquire({name: 1, besides: 1}, ttl=3600))
    world.age(old)
    assert run(a, sl.semaphore.renew(old)) is False
    late = run(a, sl.semaphore.acquire({name: 1, besides: 1}, external_id=old.external_id))
    assert (late.acquired, late.state) == (False, "EXPIRED")
    new = run(a, sl.semaphore.acquire({name: 1}, ttl=3600))
    assert new.fence == {name: 2}
    # the whole expired request was released, including permits that weren't needed
    assert run(a, sl.semaphore.acquire({besides: 1}))
    assert run(a, sl.semaphore.release(old)) == "ALREADY_RELEASED"
    assert not run(a, sl.semaphore.acquire({name: 1}))


def test_fences_continue_after_a_deletion(world: World) -> None:
    a, b = world.client(), world.client()
    name = semaphore(world, a, 1)
    grant = run(a, sl.semaphore.acquire({name: 1}))
    with pytest.raises(sl.SemaphoreHeld):
        b.scalar(sl.semaphore.delete(name))
    b.end(rollback=True)
    run(a, sl.semaphore.release(grant))
    assert run(b, sl.semaphore.delete(name, by="ops")) is None
    for gone in (sl.semaphore.delete(name), sl.semaphore.resize(name, 3), sl.semaphore.acquire({name: 1})):
        with pytest.raises(sl.UnknownSemaphore):
            a.scalar(gone)
        a.end(rollback=True)
    assert run(a, sl.semaphore.create(name, 1)) is True
    assert run(b, sl.semaphore.acquire({name: 1})).fence == {name: 2}


def test_less_capacity_evicts_and_grants_no_permits(world: World) -> None:
    a = world.client()
    name = semaphore(world, a, 3)
    grants = [run(a, sl.semaphore.acquire({name: 1})) for _ in range(3)]
    assert run(a, sl.semaphore.resize(name, 2, by="ops")) == 3
    run(a, sl.semaphore.release(grants[0]))
    assert not run(a, sl.semaphore.acquire({name: 1}))
    run(a, sl.semaphore.release(grants[1]))
    assert run(a, sl.semaphore.acquire({name: 1}))
    assert all(run(a, sl.semaphore.renew(grant)) for grant in grants[2:])


def test_sweep_releases_and_clean_deletes(world: World) -> None:
    a = world.client()
    name = semaphore(world, a, 3)
    expired, kept, endless = (run(a, sl.semaphore.acquire({name: 1}, ttl=ttl)) for ttl in (3600, 3600, None))
    world.age(expired)
    assert run(a, sl.semaphore.sweep(stale_after=3600)) >= 1
    assert run(a, sl.semaphore.release(expired)) == "ALREADY_RELEASED"
    assert run(a, sl.semaphore.renew(kept)) is True
    world.age(endless)
    run(a, sl.semaphore.sweep())
    assert run(a, sl.semaphore.renew(endless)) is True
    world.age(endless)
    assert run(a, sl.semaphore.sweep(stale_after=timedelta(hours=1))) >= 1
    assert run(a, sl.semaphore.release(endless)) == "ALREADY_RELEASED"
    assert run(a, sl.semaphore.clean(older_than=86400)) == 0
    while run(a, sl.semaphore.clean(older_than=0)):
        pass
    assert run(a, sl.semaphore.release(endless)) == "UNKNOWN"
    assert run(a, sl.semaphore.clean_history(older_than=86400)) == 0
    assert run(a, sl.semaphore.release(kept)) == "RELEASED"

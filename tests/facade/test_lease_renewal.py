"""Leases are renewed in batches, beside the app's pool: no locked row, no used-up pool, no lost lease holds them up."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, event, text, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.runtime import renewal
from tests.faults.drivers import sync, through_a_proxy
from tests.fixtures.engines import MakeEngine
from tests.fixtures.lease_faces import FACES, everywhere, grant_of, locks_of, lost
from tests.fixtures.parties import PATIENCE, connected, installed, until
from tests.fixtures.renewal_threads import due, renewers, timers_of
from tests.fixtures.semaphores import ENGINES, expire_in, made, place, unused

NOTHING = Table("lease_nothing", MetaData(), Column("id", Integer, primary_key=True))
WRITE = update(NOTHING).where(NOTHING.c.id == 0).values(id=0)


def deadline(grant: Any) -> float:
    event_ = grant_of(grant).lost
    return float(getattr(event_, "_lost", event_).deadline)


def renew_all(locks: Any, grants: list[Any]) -> None:
    """Return when each of the grants has been renewed."""
    before = {id(grant): deadline(grant) for grant in grants}
    due(locks)
    until(lambda: all(deadline(grant) > before[id(grant)] for grant in grants))


@pytest.mark.parametrize("face", [face for face in FACES if not face.startswith("sqlite")])
def test_locked_row_holds_up_no_other_lease(
    face: str, servers: Any, engine_to: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guarded write of one is open: that one is neither renewed nor lost, and is renewed when the write has ended."""
    monkeypatch.setattr(renewal, "MAX_RENEWED", 8)
    plain = engine_to(FACES[face][0])
    NOTHING.create(plain, checkfirst=True)
    room = made(plain, 20)
    with locks_of(face, servers) as locks, contextlib.ExitStack() as blocks:
        grants = [blocks.enter_context(locks.semaphore(room, ttl=3600)) for _ in range(20)]
        locked = grants.pop(10)
        with plain.begin() as connection:
            assert connection.execute(sl.guarded(WRITE, grant_of(locked))).scalar_one() is False
            before = deadline(locked)
            for _ in range(3):
                renew_all(locks, grants)
            assert (deadline(locked), lost(locked)) == (before, False)
        renew_all(locks, [*grants, locked])
        assert not any(map(lost, [*grants, locked]))


@pytest.mark.parametrize("face", ["postgresql15 sync", "postgresql15 async"])
def test_many_leases_outlive_a_write_that_is_open_for_longer_than_their_ttl(
    face: str, servers: Any, engine_to: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than one batch of them."""
    monkeypatch.setattr(renewal, "MAX_RENEWED", 50)
    plain = engine_to("postgresql15")
    NOTHING.create(plain, checkfirst=True)
    many, ttl = 130, 6
    room = made(plain, many)
    with locks_of(face, servers) as locks, contextlib.ExitStack() as blocks:
        entered = [locks.semaphore(room, ttl=ttl) for _ in range(many)]
        grants = [block.__enter__() for block in entered]
        blocks.callback(leave, entered)
        with plain.begin() as connection:
            locked = grants.pop(many // 2)
            assert connection.execute(sl.guarded(WRITE, grant_of(locked))).scalar_one() is False
            assert locked.lost.wait(2 * ttl)
            assert not any(map(lost, grants))


def test_guarded_writes_back_to_back_lose_no_lease(engine_to: MakeEngine) -> None:
    """The row is free for a moment only, again and again, which no batch hits in time."""
    engine = engine_to("postgresql15")
    NOTHING.create(engine, checkfirst=True)
    # with time enough for a machine that is paused in between
    with sl.Locks(engine).lease(unused("lease"), ttl=6) as grant:
        end = time.monotonic() + 8
        while time.monotonic() < end:
            with engine.begin() as connection:
                connection.execute(sl.guarded(WRITE, grant))
                time.sleep(0.1)
        assert not grant.lost


def leave(blocks: list[Any]) -> None:
    for block in blocks:
        with contextlib.suppress(sl.LockLost):
            block.__exit__(None, None, None)


@everywhere
def test_pool_that_is_all_in_use_loses_no_lease(face: str, servers: Any) -> None:
    """What holds all connections may be what the leases are for: endpoints, each in its block."""
    with locks_of(face, servers, pool_size=1, max_overflow=0) as locks:
        with locks.lease(unused("lease"), ttl=3600) as grant, locks_held(locks):
            for _ in range(3):
                renew_all(locks, [grant])
            assert not lost(grant)


@contextlib.contextmanager
def locks_held(locks: Any) -> Iterator[None]:
    """Hold the one connection of the pool."""
    engine = getattr(locks, "_target", locks)._engine
    if isinstance(engine, Engine):
        with engine.connect():
            yield
    else:
        connection = engine.connect()
        locks._loop.result(connection.start())
        try:
            yield
        finally:
            locks._loop.result(connection.close())


@everywhere
def test_only_unheld_leases_are_lost(face: str, servers: Any, engine_to: MakeEngine) -> None:
    """Of one batch: expired, released, its row deleted, its id granted to another caller; and two that are held."""
    engine = engine_to(FACES[face][0])
    room, other = made(engine, 9), sl.Locks(engine)
    told: list[str | None] = []
    with locks_of(face, servers) as locks:
        event.listen(getattr(locks, "_target", locks), "lost", lambda seen: told.append(seen.external_id))
        blocks = [locks.semaphore(room, ttl=3600, external_id=unused("request")) for _ in range(6)]
        grants = [block.__enter__() for block in blocks]
        expired, released, deleted, taken, *kept = [grant_of(grant) for grant in grants]
        expire_in(engine, expired)
        other.release(released)
        with engine.begin() as connection:
            for table, column in (("permit", "permit_request_id"), ("permit_request", "id")):
                rows = f"SELECT id FROM {place(engine, 'permit_request')} WHERE external_id = :id"
                connection.execute(
                    text(f"DELETE FROM {place(engine, table)} WHERE {column} IN (SELECT id FROM ({rows}) AS own)"),
                    {"id": deleted.external_id},
                )
        expire_in(engine, taken)
        with other.semaphore(room, ttl=3600, external_id=taken.external_id) as theirs:
            stamp = theirs.expires_at
            due(locks)
            until(lambda: len(told) == 4)
            assert set(told) == {grant.external_id for grant in (expired, released, deleted, taken)}
            renew_all(locks, grants[4:])
            assert [lost(grant) for grant in grants] == [True] * 4 + [False] * 2
            # what was lost was not renewed, neither by its own id nor by another caller's
            assert other.renew(expired) is False
            with engine.connect() as connection:
                stamps = {row.external_id: row.expires_at for row in connection.execute(sl.semaphore.holders(room))}
            assert stamps[taken.external_id] == stamp
            assert all(other.renew(grant) for grant in kept)
        for block, grant in zip(blocks, grants, strict=True):
            with pytest.raises(sl.LockLost) if lost(grant) else contextlib.nullcontext():
                block.__exit__(None, None, None)


def test_nothing_is_left_when_nothing_is_held(servers: Any) -> None:
    """No thread, no task, no connection of the pool beside the app's."""
    for face, named in (
        ("postgresql15 sync", lambda name: {"application_name": name}),
        ("postgresql15 async", lambda name: {"server_settings": {"application_name": name}}),
    ):
        name = unused("lease")
        with (
            connected(installed(servers, "postgresql15")) as watcher,
            locks_of(face, servers, pool_size=1, connect_args=named(name)) as locks,
        ):

            def count(watcher: Engine = watcher, name: str = name) -> Any:
                sessions = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name")
                with watcher.connect() as connection:
                    return connection.scalar(sessions, {"name": name})

            for _ in range(2):
                with locks.lease(name, ttl=3600) as grant:
                    renew_all(locks, [grant])
                    assert count() == 2
                until(lambda count=count: count() == 1)
                until(lambda: not renewers())
                assert timers_of(locks)._tasks == {}


@sync
def test_lease_survives_its_connection(servers: Any, name: str, driver: str) -> None:
    """Unlike a transaction's lock: the next connection renews it."""
    with through_a_proxy(servers, name, driver, pool_size=2) as (engine, proxy):
        locks = sl.Locks(engine)
        with locks.lease(unused("lease"), ttl=3600) as grant:
            for _ in range(2):
                renew_all(locks, [grant])
                proxy.cut()
            renew_all(locks, [grant])
            grant.check()


@pytest.mark.parametrize("name", ENGINES)
def test_collected_block_is_not_renewed(name: str, engine_to: MakeEngine) -> None:
    """An exception raised between ``__enter__`` and the first line of the block must not leave it renewed forever."""
    engine, lease = engine_to(name), unused("lease")
    locks = sl.Locks(engine)
    abandoned = copy.copy(locks.lease(lease, ttl=3600).__enter__())
    # repeatedly: the renewal thread may hold a reference
    until(lambda: gc.collect() >= 0 and len(timers_of(locks).thread.schedule.leases) == 0)
    expire_in(engine, abandoned)
    with locks.lease(lease, timeout=PATIENCE) as grant:
        assert grant.fence == {lease: 2}
    until(lambda: not renewers())


@everywhere
def test_block_that_was_granted_its_id_does_not_renew_a_lost_one(
    face: str, servers: Any, engine_to: MakeEngine
) -> None:
    """Both are renewed by the same timer, in the same batch."""
    engine = engine_to(FACES[face][0])
    room, ident, other = made(engine, 2), unused("request"), sl.Locks(engine)
    with locks_of(face, servers) as locks:
        first = locks.semaphore(room, ttl=3600, external_id=ident)
        lost_grant = first.__enter__()
        assert other.release(ident) is sl.Released.RELEASED
        while other.run(sl.semaphore.clean(older_than=0)):
            pass  # other tests left more than one batch
        with locks.semaphore(room, ttl=3600, external_id=ident) as grant:
            before = deadline(lost_grant)
            renew_all(locks, [grant])
            assert deadline(lost_grant) == before
            until(lambda: lost(lost_grant))
            assert not lost(grant)
            with pytest.raises(sl.LockLost):
                first.__exit__(None, None, None)
            grant.check()

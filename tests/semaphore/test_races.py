"""The races of a semaphore, step by step: by barriers and the server's own list of waiters, without a clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, select, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.sql.clock import Now, utc
from sqlalchemy_locks.sql.tables import tables
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, all_of, later, until
from tests.fixtures.semaphores import BRIEFLY, ENGINES, INNODB, SERVERS, expire, held, made, unused

PLACES = [*ENGINES, "yugabytedb"]
WITH_ROW_LOCKS = [*SERVERS, "yugabytedb"]


def between(engine: Engine, word: str, act: Callable[[], Any]) -> None:
    """Call a function right before the next statement that contains that word is sent."""
    done = threading.Event()

    def before(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if word in statement and not done.is_set():
            done.set()
            act()

    event.listen(engine, "before_cursor_execute", before)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("what", ["the same", "another count", "another semaphore"])
def test_one_id_from_many_connections(name: str, what: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, pool_size=8)
    sem, other, ident = made(engine, 8), made(engine, 8), unused("job")
    asked = [
        {"the same": {sem: 1}, "another count": {sem: n + 1}}.get(what, {(sem, other)[n % 2]: 1}) for n in range(8)
    ]
    barrier = threading.Barrier(8, timeout=PATIENCE)

    def ask(permits: dict[str, int]) -> str:
        locks = sl.Locks(engine)
        barrier.wait()
        try:
            grant = locks.acquire(permits, external_id=ident)
        except sl.IdempotencyConflict:
            return "conflict"
        return "again" if grant.replayed else "granted"

    answers = all_of(*[lambda permits=permits: ask(permits) for permits in asked])  # type: ignore[misc]
    assert answers.count("granted") == 1
    if what == "the same":
        assert answers.count("again") == 7
        assert held(engine, sem) == 1
    elif what == "another count":
        assert answers.count("conflict") == 7
    else:
        assert answers.count("conflict") == 4
        assert held(engine, sem) + held(engine, other) == 1


@pytest.mark.parametrize("name", WITH_ROW_LOCKS)
def test_waiter_for_rolled_back_request_is_granted(sem: str, name: str, engine_to: MakeEngine, watch: Any) -> None:
    engine, watcher = engine_to(name, pool_size=8, isolation_level="READ COMMITTED"), watch(name)
    ident = unused("job")
    with engine.connect() as first:
        assert first.scalar(sl.semaphore.acquire({sem: 1}, external_id=ident))
        # ``Locks`` of two engines, so that no queue in memory serializes them
        waiting = [later(run, engine, sl.semaphore.acquire({sem: 1}, external_id=ident)) for _ in range(3)]
        watcher.until_waiting(waiting[0], besides=2)
        first.rollback()
    answers = sorted(future.result(PATIENCE).replayed for future in waiting)
    assert answers == [False, True, True]
    assert held(engine, sem) == 1


def run(engine: Engine, operation: Any) -> Any:
    return sl.Locks(engine).run(operation)


@pytest.mark.parametrize("name", WITH_ROW_LOCKS)
def test_semaphores_are_locked_in_one_order(name: str, engine_to: MakeEngine, watch: Any) -> None:
    """A request that waits for its first semaphore has not locked the others, in whatever order it names them."""
    engine, watcher = engine_to(name, isolation_level="READ COMMITTED"), watch(name)
    first, second = sorted([made(engine, 4), made(engine, 4)])
    with engine.connect() as connection:
        assert connection.scalar(sl.semaphore.acquire({first: 1}))
        waiting = later(run, engine, sl.semaphore.acquire({second: 1, first: 1}))
        watcher.until_waiting(waiting)
        bounded = sl.semaphore.acquire({second: 1}).execution_options(locks_wait=BRIEFLY[name])
        assert run(engine, bounded).acquired
        connection.rollback()
    assert waiting.result(PATIENCE).acquired


@pytest.mark.parametrize("name", WITH_ROW_LOCKS)
def test_release_waits_for_no_acquire(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, isolation_level="READ COMMITTED")
    sem = made(engine, 2)
    locks = sl.Locks(engine)
    grant = locks.acquire({sem: 1}, ttl=3600)
    with engine.connect() as acquirer:
        assert acquirer.scalar(sl.semaphore.acquire({sem: 1}))
        assert later(locks.renew, grant).result(PATIENCE) is True
        assert later(locks.release, grant).result(PATIENCE) is sl.Released.RELEASED
        acquirer.rollback()


@pytest.mark.parametrize("name", WITH_ROW_LOCKS)
@pytest.mark.parametrize("how", ["sweep", "take-back"])
def test_locked_request_is_not_swept(sem: str, name: str, how: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, isolation_level="READ COMMITTED")
    locks = sl.Locks(engine)
    grant = locks.acquire({sem: 1}, ttl=3600)
    with engine.begin() as connection:
        expire(connection, grant)
    with engine.connect() as holder:
        holder.scalar(sl.semaphore.renew(grant))  # too late, but the row is locked
        if how == "sweep":
            later(locks.sweep).result(PATIENCE)
        else:
            with pytest.raises(sl.LockTimeout):
                later(locks.acquire, {sem: 1}, timeout=0).result(PATIENCE)
        holder.rollback()
    assert held(engine, sem) == 1
    assert locks.acquire({sem: 1}, timeout=0).fence == {sem: 2}


@pytest.mark.parametrize("name", PLACES)
def test_request_renewed_during_sweep_stays(locks: sl.Locks, name: str, engine: Engine, engine_to: MakeEngine) -> None:
    aside = sl.Locks(engine_to(name))
    sem = made(engine, 2)
    judged_by_owner = locks.acquire({sem: 1}, ttl=3600, owner="dead")
    other = locks.acquire({sem: 1}, ttl=3600, owner="dead as well")

    def alive(owners: list[str]) -> list[str]:
        assert aside.renew(judged_by_owner)
        return [owner for owner in owners if not owner.startswith("dead")]

    locks.sweep(alive=alive)
    assert locks.renew(judged_by_owner) is True
    assert locks.renew(other) is False


@pytest.mark.parametrize("name", WITH_ROW_LOCKS)
def test_request_renewed_since_judged_expired_stays(name: str, engine: Engine, engine_to: MakeEngine) -> None:
    aside = engine_to(name)
    sem = made(aside, 1)
    grant = sl.Locks(aside).acquire({sem: 1}, ttl=3600)
    with aside.begin() as connection:
        expire(connection, grant)

    def renewed_at_the_last_moment() -> None:
        # renew() would refuse, since it has expired. What matters is that the row has changed since it was read
        with aside.begin() as connection:
            expire_to_now(connection, grant)

    between(engine, "SKIP LOCKED", renewed_at_the_last_moment)
    sl.Locks(engine).sweep()
    assert sl.Locks(aside).renew(grant) is True


def expire_to_now(connection: Any, grant: sl.Grant) -> None:
    schema = "lock" if connection.dialect.name in ("postgresql", "yugabytedb") else None
    request = tables(schema, "" if schema else "lock_").permit_request
    changed = connection.execute(
        update(request).where(request.c.external_id == grant.external_id).values(renewed_at=Now())
    )
    assert changed.rowcount == 1


@pytest.mark.parametrize("name", WITH_ROW_LOCKS)
def test_ttl_counts_from_after_wait_for_semaphore(name: str, engine_to: MakeEngine, watch: Any) -> None:
    engine, watcher = engine_to(name, isolation_level="READ COMMITTED"), watch(name)
    sem = made(engine, 2)
    with engine.connect() as first, engine.connect() as caller:
        assert first.scalar(sl.semaphore.acquire({sem: 1})).acquired
        waiting = later(caller.scalar, sl.semaphore.acquire({sem: 1}, ttl=60))
        watcher.until_waiting(waiting)
        begun = now(engine)
        until(lambda: now(engine) > begun + timedelta(seconds=0.02))  # a wait of 0.01 seconds may count
        after = now(engine)
        first.commit()
        assert waiting.result(PATIENCE).expires_at >= after + timedelta(seconds=60)
        caller.commit()


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("name", WITH_ROW_LOCKS)
def test_guarded_write_is_judged_after_its_wait(
    sem: str, name: str, level: str, engine_to: MakeEngine, watch: Any
) -> None:
    """While it waits for a release that is rolled back, the request expires: the row is unchanged, the time isn't."""
    engine, watcher = engine_to(name, isolation_level=level), watch(name)
    write = anything(engine)
    locks = sl.Locks(engine)
    for ttl in (1, 3, 12, 48):
        grant = locks.acquire({sem: 1}, ttl=ttl)
        with engine.connect() as writer, engine.connect() as releasing:
            assert releasing.scalar(sl.semaphore.release(grant)) is sl.Released.RELEASED
            writing = later(writer.scalar, sl.guarded(write, grant))
            until(lambda write=writing: write.done() or watcher.waiting(), pause=0.13)
            waited = not writing.done()
            until(lambda grant=grant: now(engine) > grant.expires_at, pause=0.1)
            releasing.rollback()
            with pytest.raises(sl.LockLost, match="held no longer"):
                writing.result(PATIENCE)
            writer.rollback()
        if waited:
            return
    raise AssertionError("it never came to wait")


def now(engine: Engine) -> Any:
    with engine.connect() as connection:
        return utc(connection.scalar(select(Now())))


@pytest.mark.parametrize("name", WITH_ROW_LOCKS)
def test_guarded_write_respects_locks_wait(sem: str, name: str, engine: Engine) -> None:
    grant = sl.Locks(engine).acquire({sem: 1})
    with engine.connect() as writer, engine.connect() as releasing:
        assert releasing.scalar(sl.semaphore.release(grant)) is sl.Released.RELEASED
        with pytest.raises(sl.LockTimeout):
            write = sl.guarded(anything(engine), grant).execution_options(locks_wait=BRIEFLY[name])
            later(writer.scalar, write).result(PATIENCE)
        writer.rollback()
        releasing.rollback()


def anything(engine: Engine) -> Any:
    """A write that changes nothing."""
    schema = None if engine.dialect.name in ("mysql", "mariadb") else "lock"
    installed = tables(schema, "" if schema else "lock_").installed
    return update(installed).where(installed.c.step == "0001").values(installed_by=installed.c.installed_by)


@pytest.mark.parametrize("name", WITH_ROW_LOCKS)
def test_guarded_write_keeps_permits_until_commit(sem: str, name: str, engine_to: MakeEngine, watch: Any) -> None:
    engine, watcher = engine_to(name, isolation_level="READ COMMITTED"), watch(name)
    write = anything(engine)
    locks = sl.Locks(engine)
    grant = locks.acquire({sem: 1}, ttl=3600)
    with engine.connect() as writer:
        assert writer.scalar(sl.guarded(write, grant)) is True
        release = later(locks.release, grant)
        watcher.until_waiting(release)
        writer.commit()
        assert release.result(PATIENCE) is sl.Released.RELEASED
        with pytest.raises(sl.LockLost, match=f"permits of '{sem}' .request '{grant.external_id}'. are held no longer"):
            writer.scalar(sl.guarded(write, grant))


@pytest.mark.parametrize("name", INNODB)
def test_one_id_denied_on_many_connections(sem: str, name: str, engine: Engine, engine_to: MakeEngine) -> None:
    """Their rows are inserted and deleted, and they deadlock over gaps: the result is a denial, no driver error."""
    ident = unused("job")
    sl.Locks(engine).acquire({sem: 1})
    ready = threading.Barrier(8, timeout=PATIENCE)

    def ask(each: Engine) -> int:
        ready.wait()
        for _ in range(20):
            with pytest.raises(sl.LockTimeout, match=r"\(timeout=0\)"):
                sl.Locks(each).acquire({sem: 1}, external_id=ident, timeout=0)
        return 20

    # engines of their own, as in processes: no queue in memory serializes them
    asking = [later(ask, engine_to(name)) for _ in range(8)]
    assert [future.result(PATIENCE) for future in asking] == [20] * 8

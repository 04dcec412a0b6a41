"""What a hostile reading of the semaphore has found, each as its finder would try it again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, false, text, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.sql.tables import tables
from tests.conditional.test_lost_replies import in_the_clear
from tests.faults.drivers import sync
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, connected, installed, later
from tests.fixtures.semaphores import EVERYWHERE, INNODB, held, made, place, request_of, unused
from tests.semaphore.test_lost_replies import final


@pytest.fixture
def other(servers: Any, name: str) -> Iterator[Engine]:
    """An engine that leads to the server directly."""
    with connected(installed(servers, name), poolclass=NullPool) as engine:
        yield engine


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("name", INNODB)
def test_a_wait_that_timed_out_leaves_no_half_request(name: str, level: str, engine_to: MakeEngine) -> None:
    """InnoDB undoes the statement that waited, and not what came before it in the caller's transaction."""
    engine, ident = engine_to(name, isolation_level=level), unused("job")
    first, second = sorted([made(engine, 1), made(engine, 1)])
    with engine.connect() as keeper, engine.connect() as caller:
        lock = f"SELECT id FROM {place(name, 'semaphore')} WHERE name = :name FOR UPDATE"
        keeper.execute(text(lock), {"name": second})
        both = sl.semaphore.acquire({first: 1, second: 1}, external_id=ident)
        with pytest.raises(sl.LockTimeout):
            caller.scalar(both.execution_options(locks_wait=1))
        caller.commit()
        rows = f"SELECT count(*) FROM {place(name, 'permit_request')} WHERE external_id = :id"
        assert caller.scalar(text(rows), {"id": ident}) == 0
        caller.commit()
    assert held(engine, first) == 0
    assert sl.Locks(engine).acquire({first: 1, second: 1}, external_id=ident, timeout=0).replayed is False


@pytest.mark.parametrize("name", INNODB)
def test_a_write_that_timed_out_leaves_no_permit(name: str, engine_to: MakeEngine, monkeypatch: Any) -> None:
    """The same, after the first of two permits was written."""
    engine, ident = engine_to(name), unused("job")
    both = {made(engine, 1): 1, made(engine, 1): 1}
    done: list[int] = []

    def second_times_out(run: Any, semaphore: int) -> None:
        done.append(semaphore)
        if len(done) == 2:
            raise sl.LockTimeout("the second row was not free in time")

    monkeypatch.setattr(import_module("sqlalchemy_locks.semaphore.acquire"), "mark_changed", second_times_out)
    with engine.connect() as caller:
        with pytest.raises(sl.LockTimeout):
            caller.scalar(sl.semaphore.acquire(both, external_id=ident))
        caller.commit()
    monkeypatch.undo()
    assert [held(engine, sem) for sem in both] == [0, 0]
    assert sl.Locks(engine).acquire(both, external_id=ident, timeout=0).replayed is False


@pytest.mark.parametrize("name", INNODB)
def test_a_release_that_timed_out_can_be_done_again(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    sem = made(engine, 1)
    grant = sl.Locks(engine).acquire({sem: 1})
    with engine.connect() as keeper, engine.connect() as caller:
        lock = f"SELECT id FROM {place(name, 'permit')} WHERE permit_request_id = :id FOR UPDATE"
        keeper.execute(text(lock), {"id": request_of(engine, grant)})
        with pytest.raises(sl.LockTimeout):
            caller.scalar(sl.semaphore.release(grant).execution_options(locks_wait=1))
        caller.commit()
    assert sl.Locks(engine).release(grant) is sl.Released.RELEASED
    assert held(engine, sem) == 0


@pytest.mark.parametrize("name", INNODB)
def test_many_who_ask_for_what_is_full_with_one_id(name: str, engine_to: MakeEngine) -> None:
    """Their rows come and go, and they deadlock over the gaps: that is no room, and no error of the driver's."""
    engine = engine_to(name)
    sem, ident = made(engine, 1), unused("job")
    sl.Locks(engine).acquire({sem: 1})
    ready = threading.Barrier(8, timeout=PATIENCE)

    def ask(each: Engine) -> int:
        ready.wait()
        for _ in range(20):
            with pytest.raises(sl.LockTimeout, match=r"\(timeout=0\)"):
                sl.Locks(each).acquire({sem: 1}, external_id=ident, timeout=0)
        return 20

    # engines of their own, as processes have: no gate in memory before them
    asking = [later(ask, engine_to(name)) for _ in range(8)]
    assert [future.result(PATIENCE) for future in asking] == [20] * 8


@sync
def test_a_lost_reply_does_not_undo_what_others_did_meanwhile(
    servers: Any, other: Engine, name: str, driver: str
) -> None:
    """Done again, a resize would overrule an emergency, and a deletion would delete another semaphore."""
    sem, old = made(other, 5), made(other, 5)
    with in_the_clear(servers, name, driver) as (engine, proxy):
        locks, others = sl.Locks(engine), sl.Locks(other)
        locks.run(sl.semaphore.usage())
        proxy.lose_answer(final(name, "resize"), lambda: others.run(sl.semaphore.resize(sem, 1)))
        with pytest.raises(sl.OutcomeUnknown):
            locks.run(sl.semaphore.resize(sem, 9))
        proxy.lose_answer(final(name, "delete"), lambda: others.run(sl.semaphore.create(old, 7)))
        with pytest.raises(sl.OutcomeUnknown):
            locks.run(sl.semaphore.delete(old))
    assert others.run(sl.semaphore.resize(sem, 1)) == 1
    assert others.run(sl.semaphore.create(old, 7)) is False


@pytest.mark.parametrize("name", INNODB)
def test_what_nobody_has_committed_is_not_believed(name: str, engine_to: MakeEngine) -> None:
    """READ UNCOMMITTED shows a release that is rolled back later: nothing is granted, or deleted, for it."""
    engine, careless = engine_to(name), engine_to(name, isolation_level="READ UNCOMMITTED")
    sem = made(engine, 1)
    grant = sl.Locks(engine).acquire({sem: 1})
    with engine.connect() as releasing, careless.connect() as caller:
        assert releasing.scalar(sl.semaphore.release(grant)) is sl.Released.RELEASED
        for operation in (sl.semaphore.acquire({sem: 1}), sl.semaphore.delete(sem)):
            with pytest.raises(sl.LockTimeout):
                caller.scalar(operation.execution_options(locks_wait=1))
            caller.rollback()
        releasing.rollback()
        assert not caller.scalar(sl.semaphore.acquire({sem: 1}))
        with pytest.raises(sl.SemaphoreHeld):
            caller.scalar(sl.semaphore.delete(sem))
    assert held(engine, sem) == 1


@pytest.mark.parametrize("name", INNODB)
@pytest.mark.parametrize("what", ["an acquire", "a release", "an answer known before"])
def test_a_session_at_repeatable_read_keeps_no_other_semaphore_from_anybody(
    name: str, what: str, engine_to: MakeEngine
) -> None:
    """Where it locked gaps, nobody could acquire anything until it commits."""
    engine = engine_to(name, isolation_level="REPEATABLE READ")
    sem, sems = made(engine, 5), [made(engine, 5) for _ in range(2)]
    locks = sl.Locks(engine)
    grant = locks.acquire({sem: 1})
    with engine.connect() as caller:
        if what == "a release":
            assert caller.scalar(sl.semaphore.release(grant)) is sl.Released.RELEASED
        elif what == "an acquire":
            assert caller.scalar(sl.semaphore.acquire({sem: 1}))
        else:
            assert caller.scalar(sl.semaphore.acquire({sem: 1}, external_id=grant.external_id)).replayed
        # beside the id that was found, too
        before, after = grant.external_id[:-1], f"{grant.external_id}0"
        for sem, ident in zip(sems, (before, after), strict=True):
            assert locks.acquire({sem: 1}, external_id=ident, timeout=PATIENCE)
        with engine.connect() as another:
            asked = sl.semaphore.acquire({sem: 1}, external_id=f"{before}!")
            assert another.scalar(asked.execution_options(locks_wait=PATIENCE))
            another.rollback()


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("name", INNODB)
def test_a_semaphore_from_after_the_snapshot(name: str, level: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, isolation_level="READ COMMITTED")
    with engine.connect() as caller:
        caller.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {level}")
        caller.execute(sl.semaphore.usage()).all()
        sem = made(engine, 1)
        sl.Locks(engine).release(sl.Locks(engine).acquire({sem: 1}))
        assert caller.scalar(sl.semaphore.acquire({sem: 1}))
        caller.rollback()
        caller.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {level}")
        caller.execute(sl.semaphore.usage()).all()
        another, ident = made(engine, 1), unused("job")
        sl.Locks(engine).acquire({another: 1}, external_id=ident)
        assert not caller.scalar(sl.semaphore.acquire({another: 1}))
        # nor does the snapshot show the grant that it gives back
        assert caller.scalar(sl.semaphore.release(ident)) is sl.Released.RELEASED
        caller.commit()
    assert held(engine, another) == 0


@pytest.mark.parametrize("name", INNODB)
def test_room_since_the_snapshot(name: str, engine_to: MakeEngine) -> None:
    """At a level that the session's variable doesn't tell, either."""
    engine = engine_to(name, isolation_level="READ COMMITTED")
    sem = made(engine, 1)
    grant = sl.Locks(engine).acquire({sem: 1})
    with engine.connect() as caller:
        caller.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        caller.execute(sl.semaphore.usage()).all()
        sl.Locks(engine).release(grant)
        assert caller.scalar(sl.semaphore.acquire({sem: 1}))
        caller.rollback()


@pytest.mark.parametrize("name", INNODB)
def test_the_time_of_who_waited_for_a_release_is_whole(name: str, engine_to: MakeEngine, watch: Any) -> None:
    """Its time counts from after the wait, which is for the permits where it sums them with a lock."""
    engine, watcher = engine_to(name, isolation_level="REPEATABLE READ"), watch(name)
    sem = made(engine, 2)
    with engine.connect() as caller, engine.connect() as releasing:
        caller.execute(sl.semaphore.usage()).all()
        grant = sl.Locks(engine).acquire({sem: 1})  # which that snapshot doesn't show
        releasing.scalar(sl.semaphore.release(grant))
        waiting = later(caller.scalar, sl.semaphore.acquire({sem: 1}, ttl=60))
        watcher.until_waiting(waiting)
        waited = releasing.scalar(text("SELECT UTC_TIMESTAMP(6) FROM (SELECT SLEEP(0.2)) AS slept"))
        after = releasing.scalar(text("SELECT UTC_TIMESTAMP(6)"))
        assert waited < after
        releasing.commit()
        got = waiting.result(PATIENCE)
        assert got.expires_at.replace(tzinfo=None) - timedelta(seconds=60) >= after
        caller.commit()


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_grant_stands_for_its_own_request(name: str, engine_to: MakeEngine) -> None:
    """Not for one that somebody made later with the same id, after the first was cleaned up."""
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


@pytest.mark.parametrize("name", ["postgresql15", "yugabytedb"])
def test_a_release_beside_its_own_guarded_write_ends(name: str, engine_to: MakeEngine, monkeypatch: Any) -> None:
    """In the very block that writes it would wait for itself."""
    monkeypatch.setattr("sqlalchemy_locks.facade.semaphores.ROW_TIMEOUT", 0.5)
    engine = engine_to(name)
    locks, sem = sl.Locks(engine), made(engine, 1)
    grant = locks.acquire({sem: 1})
    nothing = update(tables("lock", "").semaphore).where(false()).values(capacity=0)
    with engine.begin() as connection:
        assert connection.scalar(sl.guarded(nothing, grant)) is False
        for ask in (locks.release, locks.renew):
            with pytest.raises(sl.LockTimeout):
                later(ask, grant).result(PATIENCE)
        with engine.begin() as caller:
            before = caller.scalar(text("SHOW lock_timeout"))
            assert caller.scalar(sl.semaphore.release("nobody's").execution_options(locks_wait=7)) == "UNKNOWN"
            assert caller.scalar(sl.semaphore.renew("nobody's").execution_options(locks_wait=7)) is False
            assert caller.scalar(text("SHOW lock_timeout")) == before
    assert locks.renew(grant)
    assert locks.release(grant) is sl.Released.RELEASED


def test_a_sqlite_that_begins_immediately_waits_no_longer_than_asked(engine_to: MakeEngine) -> None:
    engine = engine_to("sqlite", connect_args={"timeout": 600})
    sl.sqlite.begin_immediate(engine)
    sem, keeper = made(engine, 1), engine.connect()
    with keeper:
        assert keeper.scalar(sl.semaphore.acquire({sem: 1}))
        with pytest.raises(sl.LockTimeout, match=r"stayed locked by others within 0.2 s: whether there is room"):
            later(sl.Locks(engine).acquire, {sem: 1}, timeout=0.2).result(PATIENCE)
        keeper.rollback()


def test_an_unknown_outcome_tells_the_id(servers: Any) -> None:
    """Made up by acquire itself, it would else be known to nobody."""
    with connected(installed(servers, "postgresql15"), poolclass=NullPool) as direct:
        sem = made(direct, 1)
        with in_the_clear(servers, "postgresql15", "psycopg") as (engine, proxy):
            sl.Locks(engine).run(sl.semaphore.usage())
            proxy.lose_answer(final("postgresql15", "acquire"), always=True)
            with pytest.raises(sl.OutcomeUnknown) as raised:
                sl.Locks(engine).acquire({sem: 1}, timeout=1)
        (holder,) = sl.Locks(direct).run(sl.semaphore.holders(sem))
        assert f"its external_id is {holder.external_id!r}" in str(raised.value)


@pytest.mark.parametrize("age", [float("inf"), 4e9, 10**400, timedelta.max])
def test_a_time_that_no_clock_can_tell(age: Any, engine_to: MakeEngine) -> None:
    locks = sl.Locks(engine_to("sqlite"))
    for refused in (
        lambda: sl.semaphore.acquire({"x": 1}, ttl=age),
        lambda: sl.semaphore.sweep(stale_after=age),
        lambda: sl.semaphore.clean(older_than=age),
        lambda: sl.semaphore.clean_history(older_than=age),
        lambda: locks.sweep(stale_after=age),
        lambda: locks.maintenance(every=age),
    ):
        with pytest.raises(ValueError, match="at most a hundred years"):
            refused()


def test_a_grant_can_be_in_a_set(engine_to: MakeEngine) -> None:
    locks = sl.Locks(engine := engine_to("sqlite"))
    sem = made(engine, 2)
    grants = [locks.acquire({sem: 1}) for _ in range(2)]
    assert len({*grants, *grants}) == 2

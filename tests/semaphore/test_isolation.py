"""In the caller's own transaction, at any isolation level: a correct answer or an error, never an over-grant."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from importlib import import_module
from itertools import product
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, column, table, text, update
from sqlalchemy.exc import DBAPIError, OperationalError

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.semaphore.admin import create_for_lease
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, later, snapshot_isolation
from tests.fixtures.semaphores import INNODB, SERVERS, expire, held, made, place, unused

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
#: the level that the session reports, and the actual one of its next transaction
HIDDEN = [("READ COMMITTED", "REPEATABLE READ"), ("REPEATABLE READ", "READ COMMITTED")]
PLACES = [*SERVERS, "yugabytedb"]


def at_each(levels: list[str], names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "level"), list(product(names, levels)))


places = at_each(LEVELS, PLACES)
innodb = at_each(LEVELS, INNODB)


@pytest.fixture
def engine(engine_to: MakeEngine, name: str, level: str) -> Engine:
    return engine_to(name, isolation_level=level)


def look(connection: Connection) -> None:
    """Create the transaction's snapshot, if it has one, without reading our rows, which SERIALIZABLE would lock."""
    connection.execute(text(f"SELECT * FROM {place(connection.engine, 'locked_keys')}")).all()


def outcome(connection: Connection, operation: Any) -> str:
    """``granted``, ``denied``, or ``error`` where the engine reports that the transaction can't continue."""
    try:
        grant = connection.scalar(operation)
        connection.commit()
    except (DBAPIError, sl.MustRollback) as error:
        connection.rollback()
        if isinstance(error, DBAPIError) and not backend_for(connection.dialect).is_conflict(error):
            raise
        return "error"
    return "granted" if grant else "denied"


def met_newer_row(engine: Engine, level: str) -> AbstractContextManager[Any]:
    """Expect the end of a transaction that meets a row newer than its snapshot, where the server ends it."""
    ended = level == "REPEATABLE READ" and snapshot_isolation(engine)
    return pytest.raises(sl.MustRollback) if ended else nullcontext()


@places
def test_grant_after_snapshot_is_counted(sem: str, level: str, engine: Engine) -> None:
    with engine.connect() as a, engine.connect() as b:
        look(a)
        assert outcome(b, sl.semaphore.acquire({sem: 1})) == "granted"
        got = outcome(a, sl.semaphore.acquire({sem: 1}))
    assert got == "denied" if level == "READ COMMITTED" else got in ("denied", "error")
    assert held(engine, sem) == 1


@places
def test_release_after_snapshot(sem: str, locks: sl.Locks, engine: Engine) -> None:
    other = made(engine, 1)
    grant = locks.acquire({sem: 1})
    with engine.connect() as a:
        look(a)
        locks.release(grant)
        # not denied: there is room
        assert outcome(a, sl.semaphore.acquire({other: 1, sem: 1})) in ("granted", "error")


@pytest.mark.parametrize("since", ["a grant", "a renewal"])
@places
def test_expiry_after_snapshot(locks: sl.Locks, level: str, since: str, engine: Engine) -> None:
    """Granted or renewed since the snapshot, and expired again: it blocks no other request."""
    sem, full = made(engine, 2), made(engine, 1)
    living = [locks.acquire({sem: 1}, ttl=3600), locks.acquire({full: 1})]
    dead = locks.acquire({sem: 1}, ttl=3600) if since == "a renewal" else None
    with engine.connect() as a:
        if dead is not None:
            # renewed in time, and expired again by now: its time stamp differs from the snapshot's
            with engine.begin() as connection:
                expire(connection, dead)
        look(a)
        dead = dead or locks.acquire({sem: 1}, ttl=3600)
        with engine.begin() as connection:
            expire(connection, dead)
        got = outcome(a, sl.semaphore.acquire({sem: 1}))
        assert got == "granted" if level == "READ COMMITTED" else got in ("granted", "error")
        if got == "granted":
            assert not locks.renew(dead)
            # one of the two is alive, so there is no room for another
            assert outcome(a, sl.semaphore.acquire({sem: 1})) == "denied"
    assert all(locks.renew(grant) for grant in living)


@pytest.mark.parametrize("what", ["denied", "not deleted"])
@pytest.mark.parametrize("level", LEVELS[:2])
@pytest.mark.parametrize("name", SERVERS)
def test_denial_delays_no_release_or_renewal(locks: sl.Locks, name: str, level: str, what: str, engine: Engine) -> None:
    """It keeps neither holders from renewing and releasing, nor others from semaphores with neighbouring ids."""
    sem, ident = made(engine, 2), f"{unused('job')} m"
    others = [made(engine, 2) for _ in range(2)]
    before = locks.acquire({sem: 1}, ttl=3600)
    with engine.connect() as a:
        if level == "REPEATABLE READ" and name != "postgresql15" and not snapshot_isolation(engine):
            look(a)  # a snapshot from before the second grant
        since = locks.acquire({sem: 1}, ttl=3600)
        if what == "denied":
            assert a.scalar(sl.semaphore.acquire({sem: 1}, external_id=ident)).acquired is False
        else:
            with pytest.raises(sl.SemaphoreHeld):
                a.scalar(sl.semaphore.delete(sem))
        for each, neighbour in zip(others, (f"{ident}0", f"{ident[:-1]}l"), strict=True):
            asked = sl.semaphore.acquire({each: 1}, external_id=neighbour)
            assert later(locks.run, asked.execution_options(locks_wait=PATIENCE)).result(PATIENCE).acquired
        for grant in (before, since):
            assert later(locks.renew, grant).result(PATIENCE)
            released = sl.semaphore.release(grant).execution_options(locks_wait=PATIENCE)
            assert later(locks.run, released).result(PATIENCE) is sl.Released.RELEASED
        a.rollback()


@places
def test_permit_released_in_same_transaction(locks: sl.Locks, engine: Engine) -> None:
    """Which no other transaction sees."""
    sem = made(engine, 2)
    grant = locks.acquire({sem: 1})
    with engine.connect() as a:
        other = a.scalar(sl.semaphore.acquire({sem: 1}))
        a.commit()
        assert a.scalar(sl.semaphore.release(grant)) is sl.Released.RELEASED
        assert a.scalar(sl.semaphore.acquire({sem: 1})).acquired
        assert not a.scalar(sl.semaphore.acquire({sem: 1})).acquired
        assert a.scalar(sl.semaphore.release(other)) is sl.Released.RELEASED
        assert outcome(a, sl.semaphore.acquire({sem: 1})) == "granted"
    assert held(engine, sem) == 2


@innodb
def test_usage_without_side_connection(sem: str, locks: sl.Locks, engine: Engine, monkeypatch: Any) -> None:
    """Locking reads replace the snapshot's: an expired permit is released, and a held one leads to a denial."""

    def refused(run: Any, **_: Any) -> Any:
        raise OperationalError("connect", {}, Exception("Too many connections"))

    grants = []
    grants.append(locks.acquire({sem: 1}, ttl=3600))
    monkeypatch.setattr(import_module("sqlalchemy_locks.semaphore.base"), "side_connection", refused)
    with engine.connect() as a:
        assert not a.scalar(sl.semaphore.acquire({sem: 1}))
        assert a.scalar(sl.semaphore.release(unused("job"))) is sl.Released.UNKNOWN
        a.rollback()
        with engine.begin() as connection:
            expire(connection, grants[0])
        assert outcome(a, sl.semaphore.acquire({sem: 1})) == "granted"
    assert held(engine, sem) == 1


@places
def test_waiter_for_taken_last_permit_is_denied(sem: str, name: str, level: str, engine: Engine, watch: Any) -> None:
    watcher = watch(name)
    with engine.connect() as a, engine.connect() as b:
        assert a.scalar(sl.semaphore.acquire({sem: 1}))
        waiting = later(outcome, b, sl.semaphore.acquire({sem: 1}))
        watcher.until_waiting(waiting)
        a.commit()
        got = waiting.result(PATIENCE)
    assert got == "denied" if level == "READ COMMITTED" else got in ("denied", "error")
    assert held(engine, sem) == 1


@pytest.mark.parametrize("how", ["nothing", "a grant of its own", "a resize of its own"])
@pytest.mark.parametrize(("told", "real"), HIDDEN)
@pytest.mark.parametrize("name", INNODB)
def test_level_that_no_variable_shows(name: str, told: str, real: str, how: str, engine_to: MakeEngine) -> None:
    """InnoDB shows a transaction its own change of a row, and so a current fence with outdated permits."""
    engine = engine_to(name, isolation_level=told)
    sem = made(engine, 3)
    locks = sl.Locks(engine)
    with engine.connect() as a:
        a.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {real}")
        look(a)
        grants = [locks.acquire({sem: 1}), locks.acquire({sem: 1})]
        with met_newer_row(engine, real):
            if how == "a grant of its own":
                assert a.scalar(sl.semaphore.acquire({sem: 1}))
            elif how == "a resize of its own":
                a.scalar(sl.semaphore.resize(sem, 2))
            else:
                grants.append(locks.acquire({sem: 1}))
            assert not a.scalar(sl.semaphore.acquire({sem: 1}))
        a.rollback()
        assert all(locks.renew(grant) for grant in grants)


@places
def test_replay_in_an_older_snapshot(sem: str, locks: sl.Locks, engine: Engine) -> None:
    ident = unused("job")
    again = sl.semaphore.acquire({sem: 1}, external_id=ident)
    with engine.connect() as a:
        look(a)
        locks.acquire({sem: 1}, external_id=ident)
        assert outcome(a, again) in ("granted", "error")
        assert held(engine, sem) == 1
        look(a)
        locks.release(ident)
        assert outcome(a, again) in ("denied", "error")


@pytest.mark.parametrize("name", PLACES)
def test_locks_on_engine_at_other_levels(name: str, engine_to: MakeEngine) -> None:
    """``Locks`` raises no serialization failure, however many callers wait."""
    engine = engine_to(name, isolation_level="SERIALIZABLE", pool_size=10)
    sem = made(engine, 2)
    locks = [sl.Locks(engine) for _ in range(6)]
    done = [later(take_turns, each, sem) for each in locks]
    assert all(future.result(PATIENCE) == 10 for future in done)
    assert held(engine, sem) == 0


def take_turns(locks: sl.Locks, sem: str) -> int:
    for _ in range(10):
        locks.release(locks.acquire({sem: 1}, timeout=PATIENCE))
    return 10


@pytest.mark.parametrize("name", ["postgresql15", *INNODB])
def test_denial_leaves_no_rows(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, isolation_level="READ COMMITTED")
    sem, ident = made(engine, 1), unused("job")
    locks = sl.Locks(engine)
    grant = locks.acquire({sem: 1})
    with engine.connect() as a, engine.connect() as b:
        assert not a.scalar(sl.semaphore.acquire({sem: 1}, external_id=ident))
        count = f"SELECT count(*) FROM {place(name, 'permit_request')} WHERE external_id = :id"
        assert a.scalar(text(count), {"id": ident}) == 0
        if name == "postgresql15":
            # the local queue and the row are free immediately, although the transaction continues
            assert not b.scalar(
                sl.semaphore.acquire({sem: 1}, external_id=ident).execution_options(locks_wait=PATIENCE)
            )
            b.commit()
        a.commit()
    locks.release(grant)
    assert locks.acquire({sem: 1}, external_id=ident).replayed is False


@pytest.mark.parametrize("name", [*PLACES, "sqlite"])
def test_guarded_write_in_autocommit_is_refused(name: str, engine_to: MakeEngine) -> None:
    """The lock of the check would end before the write."""
    engine = engine_to(name)
    grant = sl.Locks(engine).acquire({made(engine, 1): 1}, ttl=3600)
    semaphores = table(place(name, "semaphore").rpartition(".")[2], column("name"))
    if "." in place(name, "semaphore"):
        semaphores.schema = "lock"
    write = sl.guarded(update(semaphores).where(column("name") == unused()).values(name=unused()), grant)
    with engine.connect() as connection:
        assert connection.scalar(write) is False  # no such row
        connection.rollback()
    several = [write] if name in ("postgresql15", "yugabytedb") else [write, sl.semaphore.release("x")]
    with engine_to(name, isolation_level="AUTOCOMMIT").connect() as connection:
        for operation in several:
            with pytest.raises(sl.Unsupported, match="is several statements on .*, which must be one transaction"):
                connection.scalar(operation)


@pytest.mark.parametrize("name", INNODB)
def test_uncommitted_release_is_not_counted(name: str, engine_to: MakeEngine) -> None:
    """READ UNCOMMITTED shows a release that is rolled back later: nothing is granted, or deleted, for it."""
    engine, careless = engine_to(name), engine_to(name, isolation_level="READ UNCOMMITTED")
    sem = made(engine, 1)
    grant = sl.Locks(engine).acquire({sem: 1})
    with engine.connect() as releasing, careless.connect() as caller:
        assert releasing.scalar(sl.semaphore.release(grant)) is sl.Released.RELEASED
        for _ in range(2):
            assert not caller.scalar(sl.semaphore.acquire({sem: 1}).execution_options(locks_wait=1))
            with pytest.raises(sl.SemaphoreHeld):
                caller.scalar(sl.semaphore.delete(sem).execution_options(locks_wait=1))
            caller.rollback()
        releasing.rollback()
        assert not caller.scalar(sl.semaphore.acquire({sem: 1}))
        with pytest.raises(sl.SemaphoreHeld):
            caller.scalar(sl.semaphore.delete(sem))
    assert held(engine, sem) == 1


@pytest.mark.parametrize("name", INNODB)
@pytest.mark.parametrize("what", ["an acquire", "a release", "an answer known before", "an unknown id"])
def test_repeatable_read_locks_no_other_semaphore(name: str, what: str, engine_to: MakeEngine) -> None:
    """If it locked gaps, no caller could acquire anything until it commits."""
    engine = engine_to(name, isolation_level="REPEATABLE READ")
    sem, sems = made(engine, 5), [made(engine, 5) for _ in range(2)]
    locks = sl.Locks(engine)
    grant = locks.acquire({sem: 1})
    with engine.connect() as caller:
        if what == "a release":
            assert caller.scalar(sl.semaphore.release(grant)) is sl.Released.RELEASED
        elif what == "an acquire":
            assert caller.scalar(sl.semaphore.acquire({sem: 1}))
        elif what == "an answer known before":
            assert caller.scalar(sl.semaphore.acquire({sem: 1}, external_id=grant.external_id)).replayed
        else:
            assert caller.scalar(sl.semaphore.release(f"{grant.external_id}/")) is sl.Released.UNKNOWN
            assert caller.scalar(sl.semaphore.renew(f"{grant.external_id}/")) is False
        # also next to the id that was found, and to one that was not
        before, after = grant.external_id[:-1], f"{grant.external_id}0"
        for sem, ident in zip(sems, (before, after), strict=True):
            assert locks.acquire({sem: 1}, external_id=ident, timeout=PATIENCE)
        with engine.connect() as another:
            asked = sl.semaphore.acquire({sem: 1}, external_id=f"{before}!")
            assert another.scalar(asked.execution_options(locks_wait=PATIENCE))
            another.rollback()


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("name", INNODB)
def test_semaphore_created_after_snapshot(name: str, level: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, isolation_level="READ COMMITTED")
    with engine.connect() as caller, met_newer_row(engine, level):
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
        # nor does the snapshot show the grant that it releases
        assert caller.scalar(sl.semaphore.release(ident)) is sl.Released.RELEASED
        caller.commit()
        assert held(engine, another) == 0


@pytest.mark.parametrize("name", INNODB)
def test_ttl_counts_from_after_wait_for_release(name: str, engine_to: MakeEngine, watch: Any) -> None:
    """Its ttl counts from after the wait, which is for the permits where they are summed with a lock."""
    engine, watcher = engine_to(name, isolation_level="REPEATABLE READ"), watch(name)
    if snapshot_isolation(engine):
        pytest.skip("no permits are summed behind a snapshot")
    sem, locks = made(engine, 2), sl.Locks(engine)
    locks.release(locks.acquire({sem: 1}))  # the semaphore's bound counts it as held
    with engine.connect() as caller, engine.connect() as releasing:
        caller.execute(sl.semaphore.usage()).all()
        grant = locks.acquire({sem: 1})  # the snapshot doesn't show it
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


@pytest.mark.parametrize("change", ["create", "resize"])
@places
def test_grant_after_snapshot_is_counted_after_own_change(
    name: str, level: str, change: str, engine: Engine, engine_to: MakeEngine
) -> None:
    """The transaction keeps a lease's semaphore, and so sees its own version of the row beside older permits."""
    locks, sem = sl.Locks(engine_to(name)), unused()
    locks.run(create_for_lease(sem))
    with engine.connect() as connection:
        look(connection)
        locks.acquire({sem: 1}, ttl=3600)
        try:
            connection.execute(getattr(sl.semaphore, change)(sem, 1))
            with pytest.raises(sl.SemaphoreHeld):
                connection.execute(sl.semaphore.delete(sem))
            assert not connection.scalar(sl.semaphore.acquire({sem: 1}))
        except (DBAPIError, sl.MustRollback) as error:
            transient = isinstance(error, sl.MustRollback) or backend_for(connection.dialect).is_conflict(error)
            if level == "READ COMMITTED" or not transient:
                raise
        else:
            connection.commit()
    assert held(engine, sem) == 1

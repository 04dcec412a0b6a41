"""In a transaction of the caller's own, at any isolation level: right, or an error, never an over-grant."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, OperationalError

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects import backend_for
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, later
from tests.fixtures.semaphores import INNODB, SERVERS, expire, held, made, place, unused

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
#: the level that the session tells, and the one that its next transaction is really at
HIDDEN = [("READ COMMITTED", "REPEATABLE READ"), ("REPEATABLE READ", "READ COMMITTED")]
PLACES = [*SERVERS, "postgresql18", "yugabytedb"]


def look(connection: Connection) -> None:
    """Have the transaction's snapshot made, where it has one; not of our rows, which a SERIALIZABLE read locks."""
    connection.execute(text(f"SELECT * FROM {place(connection.engine, 'locked_keys')}")).all()


def outcome(connection: Connection, operation: Any) -> str:
    """``granted``, ``denied``, or ``error`` where the engine says that the transaction can't go on."""
    try:
        grant = connection.scalar(operation)
        connection.commit()
    except DBAPIError as error:
        connection.rollback()
        if not backend_for(connection.dialect).transient(error):
            raise
        return "error"
    return "granted" if grant else "denied"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PLACES)
def test_a_snapshot_from_before_anothers_grant(name: str, level: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, isolation_level=level)
    sem = made(engine, 1)
    with engine.connect() as a, engine.connect() as b:
        look(a)
        assert outcome(b, sl.semaphore.acquire({sem: 1})) == "granted"
        got = outcome(a, sl.semaphore.acquire({sem: 1}))
    assert got == "denied" if level == "READ COMMITTED" else got in ("denied", "error")
    assert held(engine, sem) == 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PLACES)
def test_a_snapshot_from_before_anothers_release(name: str, level: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, isolation_level=level)
    sem, other = made(engine, 1), made(engine, 1)
    locks = sl.Locks(engine)
    grant = locks.acquire({sem: 1})
    with engine.connect() as a:
        look(a)
        locks.release(grant)
        # not denied: there is room
        assert outcome(a, sl.semaphore.acquire({other: 1, sem: 1})) in ("granted", "error")


@pytest.mark.parametrize("since", ["a grant", "a renewal"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PLACES)
def test_a_snapshot_from_before_what_has_expired(name: str, level: str, since: str, engine_to: MakeEngine) -> None:
    """Granted, or renewed, since the snapshot, and its time is over again: it is in nobody's way."""
    engine = engine_to(name, isolation_level=level)
    sem, full = made(engine, 2), made(engine, 1)
    locks = sl.Locks(engine)
    living = [locks.acquire({sem: 1}, ttl=3600), locks.acquire({full: 1})]
    dead = locks.acquire({sem: 1}, ttl=3600) if since == "a renewal" else None
    with engine.connect() as a:
        if dead is not None:
            # in time, with the next one's end before now as well: its stamp is another one than the snapshot's
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
            # one of the two is alive, and so there is no more
            assert outcome(a, sl.semaphore.acquire({sem: 1})) == "denied"
    assert all(locks.renew(grant) for grant in living)


@pytest.mark.parametrize("what", ["denied", "not deleted"])
@pytest.mark.parametrize("level", LEVELS[:2])
@pytest.mark.parametrize("name", SERVERS)
def test_who_finds_no_room_keeps_nobody_from_anything(name: str, level: str, what: str, engine_to: MakeEngine) -> None:
    """Not the holders from renewing and releasing, nor others from other semaphores, with ids beside its own."""
    engine = engine_to(name, isolation_level=level)
    sem, ident = made(engine, 2), f"{unused('job')} m"
    others = [made(engine, 2) for _ in range(2)]
    locks = sl.Locks(engine)
    before = locks.acquire({sem: 1}, ttl=3600)
    with engine.connect() as a:
        if level == "REPEATABLE READ" and name != "postgresql15":
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


@pytest.mark.parametrize("level", LEVELS[:2])
@pytest.mark.parametrize("name", INNODB)
def test_an_id_that_is_unknown_keeps_nobody_from_its_neighbours(name: str, level: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, isolation_level=level)
    sem, ident = made(engine, 9), f"{unused('job')} m"
    locks = sl.Locks(engine)
    with engine.connect() as a:
        assert a.scalar(sl.semaphore.release(ident)) is sl.Released.UNKNOWN
        assert a.scalar(sl.semaphore.renew(ident)) is False
        for neighbour in (f"{ident}0", f"{ident[:-1]}l"):
            asked = sl.semaphore.acquire({sem: 1}, external_id=neighbour)
            assert later(locks.run, asked.execution_options(locks_wait=PATIENCE)).result(PATIENCE).acquired
        a.rollback()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PLACES)
def test_room_that_the_transaction_has_made_itself(name: str, level: str, engine_to: MakeEngine) -> None:
    """Which nobody sees but itself."""
    engine = engine_to(name, isolation_level=level)
    sem = made(engine, 2)
    locks = sl.Locks(engine)
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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", INNODB)
def test_a_server_without_another_connection(name: str, level: str, engine_to: MakeEngine, monkeypatch: Any) -> None:
    """What would be asked on it is asked with locks: it takes back what has expired, and denies what is held."""

    def refused(run: Any) -> Any:
        raise OperationalError("connect", {}, Exception("Too many connections"))

    engine = engine_to(name, isolation_level=level)
    sem, grants = made(engine, 1), []
    locks = sl.Locks(engine)
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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PLACES)
def test_who_waited_for_the_last_permit_does_not_get_it(
    name: str, level: str, engine_to: MakeEngine, watch: Any
) -> None:
    engine, watcher = engine_to(name, isolation_level=level), watch(name)
    sem = made(engine, 1)
    with engine.connect() as a, engine.connect() as b:
        assert a.scalar(sl.semaphore.acquire({sem: 1}))
        watcher.until_nobody_waits()
        waiting = later(outcome, b, sl.semaphore.acquire({sem: 1}))
        watcher.until_waiting(waiting)
        a.commit()
        got = waiting.result(PATIENCE)
    assert got == "denied" if level == "READ COMMITTED" else got in ("denied", "error")
    assert held(engine, sem) == 1


@pytest.mark.parametrize("how", ["nothing", "a grant of its own", "a resize of its own"])
@pytest.mark.parametrize(("told", "real"), HIDDEN)
@pytest.mark.parametrize("name", INNODB)
def test_a_level_that_no_variable_tells(name: str, told: str, real: str, how: str, engine_to: MakeEngine) -> None:
    """InnoDB shows a transaction its own change of a row, and so a current fence beside permits of long ago."""
    engine = engine_to(name, isolation_level=told)
    sem = made(engine, 3)
    locks = sl.Locks(engine)
    with engine.connect() as a:
        a.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {real}")
        look(a)
        grants = [locks.acquire({sem: 1}), locks.acquire({sem: 1})]
        if how == "a grant of its own":
            assert a.scalar(sl.semaphore.acquire({sem: 1}))
        elif how == "a resize of its own":
            a.scalar(sl.semaphore.resize(sem, 2))
        else:
            grants.append(locks.acquire({sem: 1}))
        assert outcome(a, sl.semaphore.acquire({sem: 1})) == "denied"
        assert all(locks.renew(grant) for grant in grants)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PLACES)
def test_asked_again_under_a_snapshot_from_before_the_release(name: str, level: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, isolation_level=level)
    sem, ident = made(engine, 1), unused("job")
    locks = sl.Locks(engine)
    locks.acquire({sem: 1}, external_id=ident)
    with engine.connect() as a:
        look(a)
        locks.release(ident)
        assert outcome(a, sl.semaphore.acquire({sem: 1}, external_id=ident)) in ("denied", "error")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PLACES)
def test_asked_again_under_a_snapshot_from_before_the_grant(name: str, level: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, isolation_level=level)
    sem, ident = made(engine, 1), unused("job")
    with engine.connect() as a:
        look(a)
        sl.Locks(engine).acquire({sem: 1}, external_id=ident)
        assert outcome(a, sl.semaphore.acquire({sem: 1}, external_id=ident)) in ("granted", "error")
    assert held(engine, sem) == 1


@pytest.mark.parametrize("name", PLACES)
def test_locks_are_right_on_an_engine_that_is_not_at_read_committed(
    name: str, engine_to: MakeEngine, watch: Any
) -> None:
    """Through ``Locks`` nobody sees a serialization failure, however many wait."""
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
def test_a_denial_leaves_no_trace(name: str, engine_to: MakeEngine, watch: Any) -> None:
    engine = engine_to(name, isolation_level="READ COMMITTED")
    sem, ident = made(engine, 1), unused("job")
    locks = sl.Locks(engine)
    grant = locks.acquire({sem: 1})
    with engine.connect() as a, engine.connect() as b:
        assert not a.scalar(sl.semaphore.acquire({sem: 1}, external_id=ident))
        count = f"SELECT count(*) FROM {place(name, 'permit_request')} WHERE external_id = :id"
        assert a.scalar(text(count), {"id": ident}) == 0
        if name == "postgresql15":
            # the gate and the row are free at once, though the transaction goes on
            assert not b.scalar(
                sl.semaphore.acquire({sem: 1}, external_id=ident).execution_options(locks_wait=PATIENCE)
            )
            b.commit()
        a.commit()
    locks.release(grant)
    assert locks.acquire({sem: 1}, external_id=ident).replayed is False


@pytest.mark.parametrize("name", ["mysql", "mariadb", "sqlite"])
def test_several_statements_in_autocommit_are_refused(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for operation in (sl.semaphore.acquire({"x": 1}), sl.semaphore.release("x"), sl.semaphore.create(unused(), 1)):
            with pytest.raises(sl.Unsupported, match="is several statements on .*, which must be one transaction"):
                connection.scalar(operation)


def test_one_statement_in_autocommit_is_not(engine_to: MakeEngine) -> None:
    with engine_to("postgresql15", isolation_level="AUTOCOMMIT").connect() as connection:
        name = unused("semaphore")
        assert connection.scalar(sl.semaphore.create(name, 1))
        assert connection.scalar(sl.semaphore.acquire({name: 1}))
        assert not connection.scalar(sl.semaphore.acquire({name: 1}))

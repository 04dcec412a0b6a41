"""Waits for locked rows: how long they are, and what a timeout leaves behind."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from sqlalchemy import Engine, event, false, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import sessionmaker

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.sql.tables import tables
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, later
from tests.fixtures.semaphores import INNODB, SERVERS, held, made, place, request_of, unused


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("name", INNODB)
def test_timed_out_acquire_leaves_no_request(name: str, level: str, engine_to: MakeEngine) -> None:
    """InnoDB undoes the statement that waited, and not the earlier ones of the caller's transaction."""
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


@pytest.mark.parametrize("name", ["postgresql15", "yugabytedb"])
def test_refusal_leaves_the_limits_of_the_transaction(name: str, engine_to: MakeEngine) -> None:
    with engine_to(name).connect() as caller:
        no_json = sl.Queue().put(object(), unique="key")
        for operation in (sl.semaphore.acquire({unused(): 1}), sl.Mutex().acquire(unused()), no_json):
            with pytest.raises((sl.UnknownSemaphore, sl.UnknownTask, TypeError)):
                caller.scalar(operation.execution_options(locks_wait=1))
        limits = "SELECT current_setting('lock_timeout'), current_setting('statement_timeout')"
        assert caller.execute(text(limits)).one() == ("0", "0")


@pytest.mark.parametrize("name", INNODB)
def test_missing_function_of_the_app_ends_a_block_at_its_entry(name: str, engine_to: MakeEngine) -> None:
    """Its error has the number of a missing savepoint, which is a deadlock's."""
    sessions = sessionmaker(engine_to(name))

    @event.listens_for(sessions, "after_begin")
    def call(session: Any, transaction: Any, connection: Any) -> None:
        connection.exec_driver_sql("SELECT no_such_function()")

    with pytest.raises(DBAPIError, match="no_such_function"), sl.Locks(sessions).exclusive(unused()):
        pass


@pytest.mark.parametrize("name", INNODB)
def test_timed_out_release_can_be_repeated(sem: str, name: str, engine: Engine) -> None:
    grant = sl.Locks(engine).acquire({sem: 1})
    with engine.connect() as keeper, engine.connect() as caller:
        lock = f"SELECT id FROM {place(name, 'permit')} WHERE permit_request_id = :id FOR UPDATE"
        keeper.execute(text(lock), {"id": request_of(engine, grant)})
        with pytest.raises(sl.LockTimeout):
            caller.scalar(sl.semaphore.release(grant).execution_options(locks_wait=1))
        caller.commit()
    assert sl.Locks(engine).release(grant) is sl.Released.RELEASED
    assert held(engine, sem) == 0


@pytest.mark.parametrize("name", ["postgresql15", "yugabytedb"])
def test_release_during_own_guarded_write_times_out(
    sem: str, locks: sl.Locks, engine: Engine, monkeypatch: Any
) -> None:
    """Inside the block that writes, it would deadlock with itself."""
    monkeypatch.setattr("sqlalchemy_locks.core.transaction.ROW_TIMEOUT", 0.5)
    grant = locks.acquire({sem: 1})
    nothing = update(tables("lock", "").semaphore).where(false()).values(capacity=0)
    with engine.begin() as connection:
        assert connection.scalar(sl.guarded(nothing, grant)) is False
        for ask in (locks.release, locks.renew):
            with pytest.raises(sl.LockTimeout):
                later(ask, grant).result(PATIENCE)
        with engine.begin() as caller:
            before = caller.scalar(text("SHOW lock_timeout"))
            assert caller.scalar(sl.semaphore.release("unknown").execution_options(locks_wait=7)) == "UNKNOWN"
            assert caller.scalar(sl.semaphore.renew("unknown").execution_options(locks_wait=7)) is False
            assert caller.scalar(text("SHOW lock_timeout")) == before
    assert locks.renew(grant)
    assert locks.release(grant) is sl.Released.RELEASED


@pytest.mark.parametrize("name", ["postgresql15", "yugabytedb"])
def test_guarded_limits_how_long_its_transaction_may_be_idle(locks: sl.Locks, engine: Engine) -> None:
    sem = made(engine, 5)
    nothing = update(tables("lock", "").semaphore).where(false()).values(capacity=0)
    limits = [("0", 90.5, "90500ms"), ("1d", 60, "1min"), ("500ms", 60, "500ms"), ("0", None, "0"), ("1h", 1e8, "1h")]
    for present, ttl, limit in limits:
        grant = locks.acquire({sem: 1}, ttl=ttl)
        with engine.connect() as connection:
            connection.exec_driver_sql(f"SET idle_in_transaction_session_timeout = '{present}'")
            connection.commit()
            connection.scalar(sl.guarded(nothing, grant))
            show = text("SHOW idle_in_transaction_session_timeout")
            assert (present, ttl, connection.scalar(show)) == (present, ttl, limit)
            connection.commit()
            assert connection.scalar(show) == present


@pytest.mark.parametrize("level", ["READ COMMITTED", "AUTOCOMMIT"])
@pytest.mark.parametrize("name", INNODB)
def test_guarded_in_a_block_limits_how_long_its_session_may_be_idle(
    name: str, level: str, engine_to: MakeEngine
) -> None:
    """And the app's connection has its own limit again, however the block ends."""
    engine = engine_to(name, pool_size=1, max_overflow=0, isolation_level=level)
    locks, sem, number = sl.Locks(engine), made(engine, 5), text("SELECT CONNECTION_ID(), @@session.wait_timeout")
    nothing = update(tables(None, "lock_").semaphore).where(false()).values(capacity=0)
    with engine.connect() as connection:
        session, present = connection.execute(number).one()
    with contextlib.suppress(ZeroDivisionError), locks.exclusive(unused()) as held:
        for ttl, limit in [(None, present), (1e8, present), (90.5, 91), (60, 60), (70, 60)]:
            held.session.scalar(sl.guarded(nothing, held.session.scalar(sl.semaphore.acquire({sem: 1}, ttl=ttl))))
            assert held.session.execute(number).one() == (session, limit)
        raise ZeroDivisionError
    grant = locks.acquire({sem: 1}, ttl=60)
    assert locks.run(sl.guarded(nothing, grant)) is False
    with engine.connect() as connection:
        assert connection.execute(number).one() == (session, present)


@pytest.mark.parametrize("level", ["READ COMMITTED", "AUTOCOMMIT"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.parametrize("name", ["postgresql15", "yugabytedb"])
def test_longest_wait_ends_with_its_call(name: str, driver: str, level: str, engine_to: MakeEngine) -> None:
    """In a transaction, which goes on, and in autocommit."""
    sem = made(engine_to(name), 1)
    with engine_to(name, driver, isolation_level=level).connect() as caller:
        caller.execute(text("SET lock_timeout = '77s'"))
        request = sl.semaphore.acquire({sem: 1}, external_id=sem, ttl=3600)
        answers = []
        for ask in (request, sl.semaphore.renew(sem), request, sl.semaphore.release(sem), request):
            answers.append(caller.scalar(ask.execution_options(locks_wait=7)))
            assert caller.scalar(text("SHOW lock_timeout")) == "77s"
        assert [bool(answer) for answer in answers] == [True, True, True, True, False]
        denied = sl.semaphore.acquire({sem: 2}).execution_options(locks_wait=7)
        assert not caller.scalar(denied)
        assert caller.scalar(text("SHOW lock_timeout")) == "77s"


@pytest.mark.parametrize("name", SERVERS)
def test_a_longest_wait_may_be_set_inside_another(name: str, engine_to: MakeEngine) -> None:
    variable = "SHOW lock_timeout" if name == "postgresql15" else "SELECT @@session.innodb_lock_wait_timeout"
    with engine_to(name).connect() as connection:
        backend, waits = backend_for(connection.dialect), []
        for _ in range(2):
            waits.append(connection.scalar(text(variable)))
            with backend.bounded(connection, 5):
                waits.append(connection.scalar(text(variable)))
                with backend.bounded(connection, 7):
                    waits.append(connection.scalar(text(variable)))
                waits.append(connection.scalar(text(variable)))
            waits.append(connection.scalar(text(variable)))
    assert [str(wait).removesuffix("s") for wait in waits[1:4]] == ["5", "7", "5"]
    assert waits[0] == waits[4]
    assert waits[:5] == waits[5:]


def test_begin_immediate_respects_timeout(engine_to: MakeEngine) -> None:
    engine = engine_to("sqlite", connect_args={"timeout": 600})
    sl.sqlite.begin_immediate(engine)
    sem, keeper = made(engine, 1), engine.connect()
    with keeper:
        assert keeper.scalar(sl.semaphore.acquire({sem: 1}))
        with pytest.raises(sl.LockTimeout, match=r"stayed locked by others within 0.2 s: whether there is room"):
            later(sl.Locks(engine).acquire, {sem: 1}, timeout=0.2).result(PATIENCE)
        keeper.rollback()

"""A block whose transaction was lost inside it raises, whatever errors its user has ignored."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import Engine, StaticPool, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers
from tests.fixtures.parties import PATIENCE, all_of, later, until

SERVERS = ["postgresql15", "yugabytedb", "mysql", "mariadb"]
TABLE = "CREATE TABLE IF NOT EXISTS payment (id INTEGER PRIMARY KEY, note VARCHAR(20))"


@pytest.fixture(params=[*SERVERS, "sqlite"])
def engine(request: pytest.FixtureRequest, servers: Servers) -> Any:
    engine = create_engine(servers.installed(request.param, PLAIN[request.param]))
    with engine.begin() as connection:
        connection.exec_driver_sql(TABLE)
        connection.exec_driver_sql("DELETE FROM payment")
    yield engine
    engine.dispose()


def payments(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT id FROM payment ORDER BY id")))


def test_ignored_error_is_not_reported_as_success(engine: Engine) -> None:
    survives = engine.dialect.name in ("mysql", "mariadb", "sqlite")  # there a failed statement is that alone
    locks = sl.Locks(engine)

    def pay() -> None:
        with locks.exclusive("ignored") as held:
            held.session.execute(text("INSERT INTO payment (id) VALUES (1)"))
            with pytest.raises(DBAPIError):
                held.session.execute(text("SELECT * FROM no_such_table"))

    if survives:
        pay()
        assert payments(engine) == [1]
        return
    with pytest.raises(sl.LockLost):
        pay()
    assert payments(engine) == []


def test_work_after_a_rollback_is_refused(engine: Engine) -> None:
    with pytest.raises(sl.LockLost):
        with sl.Locks(engine).exclusive("rolled back") as held:
            held.session.execute(text("INSERT INTO payment (id) VALUES (1)"))
            held.session.rollback()
            with pytest.raises(sl.LockLost):
                held.session.execute(text("INSERT INTO payment (id) VALUES (2)"))
            assert held.lost
            with pytest.raises(sl.LockLost):
                held.check()
    assert payments(engine) == []


def test_session_commit_inside_the_block_keeps_the_lock(engine: Engine) -> None:
    locks = sl.Locks(engine)
    with locks.exclusive("committed") as held:
        held.session.execute(text("INSERT INTO payment (id) VALUES (1)"))
        held.session.commit()
        held.session.execute(text("INSERT INTO payment (id) VALUES (2)"))
        held.check()
        if engine.dialect.name != "sqlite":
            assert payments(engine) == []
            with Session(engine) as other:
                assert other.scalar(sl.lock.try_exclusive("committed")) is False
    assert payments(engine) == [1, 2]


@pytest.mark.parametrize("engine", ["mysql", "mariadb"], indirect=True)
def test_ignored_deadlock_is_a_lost_lock(engine: Engine) -> None:
    """InnoDB has rolled all of it back, and would go on in a new transaction that nothing guards."""
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO payment (id) VALUES (1), (2)")
        connection.exec_driver_sql("INSERT INTO payment (id) VALUES (3), (4), (5), (6), (7), (8), (9)")
    second_has_its_row, victim = threading.Event(), threading.Event()

    def other() -> None:
        with engine.begin() as connection:
            # the heavier of the two, so that the block is the victim
            connection.exec_driver_sql("UPDATE payment SET note = 'other' WHERE id >= 2")
            second_has_its_row.set()
            connection.exec_driver_sql("UPDATE payment SET note = 'other' WHERE id = 1")

    with pytest.raises(sl.LockLost):
        with sl.Locks(engine).exclusive("deadlocked") as held:
            held.session.execute(text("UPDATE payment SET note = 'mine' WHERE id = 1"))
            others = later(other)
            assert second_has_its_row.wait(PATIENCE)
            try:
                held.session.execute(text("UPDATE payment SET note = 'mine' WHERE id = 2"))
            except DBAPIError:
                victim.set()
            assert victim.is_set(), "the other one was chosen"
            held.session.execute(text("INSERT INTO payment (id) VALUES (100)"))
    others.result(PATIENCE)
    assert 100 not in payments(engine)


@pytest.mark.parametrize("option", ["stream_results", "yield_per"])
def test_lock_is_held_on_return_with_streaming_options(engine: Engine, option: str) -> None:
    streaming = engine.execution_options(**{option: 10})
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no server-side cursors")
    with Session(streaming) as session, Session(engine) as other, session.begin():
        session.execute(sl.lock.exclusive(f"streamed {option}"), execution_options={"locks_wait": 5})
        assert other.scalar(sl.lock.try_exclusive(f"streamed {option}")) is False
        if engine.dialect.name == "postgresql":
            session.execute(sl.Mutex().create(f"streamed {option}"), execution_options={"locks_wait": 5})
            limit = text("SELECT current_setting('lock_timeout')")
            assert session.scalar(limit) == other.scalar(limit)


@pytest.mark.parametrize("engine", ["postgresql15", "mysql", "mariadb"], indirect=True)
def test_lost_reply_to_commit_is_an_unknown_outcome(engine: Engine) -> None:
    def lose(connection: Any) -> None:
        # COMMIT has arrived, its answer never will
        driver = connection.connection.driver_connection
        with engine.connect() as killer:
            if engine.dialect.name == "postgresql":
                killer.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": driver.info.backend_pid})
            else:
                killer.exec_driver_sql(f"KILL {driver.thread_id()}")

    with pytest.raises(sl.OutcomeUnknown):
        with sl.Locks(engine).exclusive("unknown") as held:
            held.session.execute(text("INSERT INTO payment (id) VALUES (1)"))
            event.listen(held.session.connection(), "commit", lose, once=True)


def test_pool_that_shares_one_connection_is_refused() -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with pytest.raises(sl.Unsupported, match="StaticPool"):
        sl.Locks(engine)


@pytest.mark.parametrize("engine", ["mysql", "mariadb"], indirect=True)
def test_killed_wait_for_a_session_lock_raises(engine: Engine) -> None:
    waits = text("SELECT count(*) FROM information_schema.processlist WHERE id = :id AND state = 'User lock'")
    with engine.connect() as holder, engine.connect() as waiter, engine.connect() as killer:
        holder.execute(sl.lock.session_exclusive("killed"))
        waiter_id = waiter.connection.driver_connection.thread_id()  # type: ignore[union-attr]
        waiting = later(waiter.execute, sl.lock.session_exclusive("killed"))
        until(lambda: killer.scalar(waits, {"id": waiter_id}), unless=waiting)
        killer.exec_driver_sql(f"KILL QUERY {waiter_id}")
        with pytest.raises((sl.LockTimeout, DBAPIError)):
            waiting.result(PATIENCE)
        assert waiter.scalar(sl.lock.session_unlock("killed")) is False


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("engine", SERVERS, indirect=True)
def test_one_of_two_concurrent_tries_wins(engine: Engine, isolation: str) -> None:
    if engine.dialect.name not in ("mysql", "mariadb") and isolation != "READ COMMITTED":
        pytest.skip("this engine refuses locks above READ COMMITTED")
    keys = [f"both {isolation} {n}" for n in range(40)]
    sl.Locks(engine).run(sl.lock.create(*keys))
    barrier = threading.Barrier(2, timeout=PATIENCE)

    def tries() -> list[bool]:
        mine: list[bool] = []
        with Session(engine.execution_options(isolation_level=isolation)) as session:
            for key in keys:
                barrier.wait()
                mine.append(bool(session.scalar(sl.lock.try_exclusive(key))))
                barrier.wait()
                session.rollback()
        return mine

    results = all_of(tries, tries)
    assert [a + b for a, b in zip(*results, strict=True)] == [1] * len(keys)

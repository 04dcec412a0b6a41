"""A block whose transaction was lost inside it raises, whatever errors its user has ignored."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers
from tests.fixtures.parties import PATIENCE, later, until

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


@pytest.mark.parametrize("engine", ["mysql", "mariadb", "sqlite"], indirect=True)
def test_failed_statement_is_that_alone(engine: Engine) -> None:
    with sl.Locks(engine).exclusive("ignored") as held:
        held.session.execute(text("INSERT INTO payment (id) VALUES (1)"))
        with pytest.raises(DBAPIError):
            held.session.execute(text("SELECT * FROM no_such_table"))
    assert payments(engine) == [1]


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

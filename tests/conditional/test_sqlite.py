"""Mutexes on SQLite: the single write lock, the busy timeout, and a COMMIT that readers block."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError

import sqlalchemy_locks as sl
from tests.fixtures.parties import PATIENCE, connected, later

mutex = sl.Mutex()


def test_failed_commit_leaves_no_open_transaction(tmp_path: Any) -> None:
    """COMMIT fails while another connection reads; SQLAlchemy then regards the transaction as ended."""
    engine = create_engine(f"sqlite:///{tmp_path}/app.db?timeout=0.05", pool_size=1, max_overflow=0)
    sl.metadata().create_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE pay (what TEXT)")
    locks = sl.Locks(engine)
    locks.run(mutex.create("a"))
    reading = create_engine(f"sqlite:///{tmp_path}/app.db", poolclass=NullPool)
    with reading.connect() as reader:
        reader.exec_driver_sql("BEGIN")
        reader.exec_driver_sql("SELECT * FROM pay, lock_task_state").all()
        with pytest.raises((DBAPIError, sl.LockError)):
            with locks.exclusive("x") as held:
                held.session.execute(text("INSERT INTO pay VALUES ('paid')"))
        with pytest.raises((DBAPIError, sl.LockError)):
            locks.run(mutex.acquire("a"))
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM pay").scalar() == 0
    assert locks.mutex.acquire("a") is True
    engine.dispose()


def test_transaction_that_has_read_must_roll_back(tmp_path: Any) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/app.db?timeout=5", poolclass=NullPool)
    sl.metadata().create_all(engine)
    sl.Locks(engine).run(mutex.create("a"))
    with engine.connect() as reader, engine.connect() as writer:
        reader.exec_driver_sql("BEGIN")
        reader.exec_driver_sql("SELECT * FROM lock_task_state").all()
        writer.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(sl.MustRollback):
            reader.execute(mutex.acquire("a"))
        reader.rollback()
        writer.rollback()


@pytest.mark.parametrize("immediate", [False, True])
def test_nowait_does_not_wait_for_a_writer(immediate: bool, tmp_path: Any) -> None:
    """Not at the beginning of its transaction either, where begin_immediate would wait."""
    with connected(f"sqlite:///{tmp_path}/app.db", connect_args={"timeout": 600}) as engine:
        sl.metadata().create_all(engine)
        if immediate:
            sl.sqlite.begin_immediate(engine)
        timeout, locks = sl.Timeout(every=60), sl.Locks(engine)
        locks.run(mutex.create("a"))
        locks.run(timeout.create("a"))
        with engine.connect() as writer:
            if not immediate:
                writer.exec_driver_sql("BEGIN IMMEDIATE")
            assert writer.scalar(mutex.acquire("a")) is True
            for operation, expected in (
                (mutex.acquire("a", nowait=True), False),
                (timeout.acquire("a", nowait=True), False),
                (mutex.acquire_token("a", nowait=True), None),
            ):
                assert later(locks.run, operation).result(PATIENCE) is expected
            writer.rollback()
        assert locks.run(mutex.acquire("a", nowait=True)) is True
        with engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 600_000

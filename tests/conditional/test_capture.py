"""``capture``: several free mutexes, at most the limit, never one that another transaction has locked."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, text
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.fixtures.parties import ENGINES, all_of, connected, unused

mutex = sl.Mutex()
engines = pytest.mark.parametrize("name", ENGINES)
everywhere = pytest.mark.parametrize("name", [*ENGINES, "yugabytedb"])


def made(engine: Engine, many: int) -> tuple[str, list[str]]:
    queue, ids = unused("queue"), [f"task {n:04}" for n in range(many)]
    assert sl.Locks(engine).run(mutex.create(*ids, queue=queue)) == many
    return queue, ids


@everywhere
def test_ids_are_ordered_and_limited(engine: Engine, name: str) -> None:
    queue, ids = made(engine, 7)
    with Session(engine) as session:
        assert session.scalar(mutex.acquire(ids[1], queue=queue)) is True
        session.commit()
        assert session.scalars(mutex.capture(3, queue=queue)).all() == [ids[0], ids[2], ids[3]]
        session.commit()
        assert session.scalars(mutex.capture(9, queue=queue)).all() == ids[4:]
        assert session.scalars(mutex.capture(9, queue=queue)).all() == []
        session.rollback()
    assert sl.Locks(engine).run(mutex.capture(9, queue=queue)) == ids[4:]
    assert sl.Locks(engine).run(mutex.capture(9, queue=queue)) == []


@pytest.mark.parametrize("name", ["postgresql15", "yugabytedb", "mysql", "mariadb"])
def test_rows_locked_by_another_transaction_are_skipped(engine: Engine, name: str) -> None:
    queue, ids = made(engine, 6)
    read_committed = engine.execution_options(isolation_level="READ COMMITTED")
    with Session(read_committed) as a, Session(read_committed) as b:
        assert a.scalars(mutex.capture(2, queue=queue)).all() == ids[:2]
        assert b.scalars(mutex.capture(2, queue=queue)).all() == ids[2:4]
        a.rollback()
        assert b.scalars(mutex.capture(9, queue=queue)).all() == [*ids[:2], *ids[4:]]
        b.commit()
    with Session(engine) as a, Session(engine) as b:  # at InnoDB's default level, a scan locks every row that it reads
        assert a.scalar(mutex.release(ids[0], queue=queue)) is True
        assert len(b.scalars(mutex.capture(1, queue=made(engine, 1)[0]).execution_options(locks_wait=1)).all()) == 1


@everywhere
def test_concurrent_captures_are_disjoint(engine: Engine, name: str) -> None:
    queue, ids = made(engine, 40)

    def work() -> list[str]:
        mine: list[str] = []
        with connected(engine.url.render_as_string(hide_password=False), poolclass=NullPool) as own:
            while True:
                with Session(own.execution_options(**_patient(name))) as session, session.begin():
                    got = session.scalars(mutex.capture(3, queue=queue)).all()
                assert len(got) <= 3
                if not got:
                    return mine
                mine += got

    taken = all_of(*[work] * 6)
    assert sorted(id for mine in taken for id in mine) == ids


def _patient(name: str) -> dict[str, Any]:
    return {} if name == "sqlite" else {"isolation_level": "READ COMMITTED"}


@pytest.mark.parametrize("name", ["postgresql15"])
def test_limit_holds_with_outdated_statistics(engine: Engine, name: str) -> None:
    """With statistics of an empty table `IN (SELECT ... LIMIT 3)` acquired a thousand rows."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE lock.task_state SET (autovacuum_enabled = off)"))
        connection.execute(text("ANALYZE lock.task_state"))
    queue, ids = made(engine, 300)
    with Session(engine) as session:
        assert session.scalars(mutex.capture(3, queue=queue)).all() == ids[:3]
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE lock.task_state RESET (autovacuum_enabled)"))


@everywhere
def test_each_captured_row_spends_a_retry(engine: Engine, name: str) -> None:
    queue, ids = made(engine, 3)
    locks = sl.Locks(engine)
    locks.run(mutex.set_retries(ids[1], 0, queue=queue))
    locks.run(mutex.set_retries(ids[2], 1, queue=queue))
    with Session(engine) as session, session.begin():
        assert session.scalars(mutex.capture(9, queue=queue)).all() == [ids[0], ids[2]]
        for id in (ids[0], ids[2]):
            session.scalar(mutex.release(id, queue=queue))
        assert session.scalars(mutex.capture(9, queue=queue)).all() == [ids[0]]


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_autocommit_is_refused_for_two_statements(engine: Engine, name: str) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with pytest.raises(sl.Unsupported, match="autocommit"):
            connection.execute(mutex.capture(2))

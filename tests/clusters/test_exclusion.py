"""Of several holders on several nodes one commits, and what would be held on one node only is refused."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from sqlalchemy_locks.alembic import migration_lock
from tests.clusters.conftest import Cluster, add, crowd
from tests.fixtures.parties import PATIENCE, unused

COUNTER = Table("counter", MetaData(), Column("id", Integer, primary_key=True), Column("number", Integer))


def until_lost(session: Any) -> None:
    """Execute statements until one of them says that the lock is lost."""
    deadline = time.monotonic() + PATIENCE
    with pytest.raises(sl.LockLost):
        while time.monotonic() < deadline:
            session.execute(text("SELECT 1 FROM counter"))
            time.sleep(0.01)


@pytest.mark.parametrize("end", ["statement", "flagged", "savepoint", "commit", "rollback"])
def test_the_first_of_two_blocks_to_end_is_committed(cluster: Cluster, end: str) -> None:
    key, counter = unused(), cluster.counter()
    first, second = (sl.Locks(cluster.engine(number)) for number in (0, 1))
    blocks = first.exclusive(key), second.exclusive(key, timeout=PATIENCE)
    held, late = blocks[0].__enter__(), blocks[1].__enter__()  # each node grants it
    add(held.session, counter)
    add(late.session, counter)
    assert not late.lost
    blocks[0].__exit__(None, None, None)
    error: BaseException | None = None
    if end in ("statement", "flagged"):
        until_lost(late.session)
        assert late.lost
    if end == "savepoint":
        with pytest.raises(sl.LockLost):
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                late.check()
                time.sleep(0.01)
        assert late.lost
    if end == "flagged":
        with pytest.raises(sl.LockLost):
            late.session.execute(text("UPDATE counter SET number = 100"))
    if end == "rollback":
        cluster.catch_up()
        error = ValueError("the app's own")
        blocks[1].__exit__(ValueError, error, None)
    else:
        with pytest.raises(sl.LockLost) as raised:
            blocks[1].__exit__(None, None, None)
        assert type(raised.value) is sl.LockLost
    assert cluster.number(counter) == 1
    with second.exclusive(key, timeout=PATIENCE) as again:
        add(again.session, counter)
    assert cluster.number(counter) == 2


@pytest.mark.parametrize("tries", [False, True])
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("end", ["statement", "passed over", "commit"])
def test_the_first_of_two_sessions_to_commit_does(cluster: Cluster, tries: bool, level: str, end: str) -> None:
    make: Any = Session if level == "READ COMMITTED" else Engine.connect  # which begins with its first statement
    key, counter = unused(), cluster.counter()
    lock = sl.lock.try_exclusive(key) if tries else sl.lock.exclusive(key)
    with make(cluster.engine(0, isolation_level=level)) as one, make(cluster.engine(1, isolation_level=level)) as two:
        for session in (one, two):
            assert session.scalar(lock) is (True if tries else None)
            session.scalar(lock)  # again, in the same transaction
            add(session, counter)
        one.commit()
        if end == "statement":
            until_lost(two)
            with pytest.raises((sl.MustRollback, SQLAlchemyError)):
                two.execute(lock)
        elif end == "passed over":
            until_lost(two)
            two.execute(text("UPDATE counter SET number = 100"))
            with pytest.raises(sl.LockLost, match="for an earlier error"):
                two.commit()
        else:
            with pytest.raises(sl.LockLost):
                two.commit()
        with suppress(SQLAlchemyError, sl.LockLost):
            two.rollback()
        assert cluster.number(counter) == 1
        two.execute(lock)
        add(two, counter)
        two.commit()
    assert cluster.number(counter) == 2


def test_holder_that_writes_nothing_loses_it_as_well(cluster: Cluster) -> None:
    key = unused()
    one, two = (sl.Locks(cluster.engine(number)) for number in (0, 1))
    with pytest.raises(sl.LockLost), two.exclusive(key), one.exclusive(key):
        pass


def test_keys_under_each_option(cluster: Cluster) -> None:
    key, counter, database = unused(), cluster.counter(), cluster.engine(0).url.database
    options: list[dict[str, Any]] = [{"schema_translate_map": {None: database}}, {"locks_prefix": "lock_"}]
    for each in (*options, {"locks_one_node": True}):  # the node may change after all
        before = cluster.number(counter)
        one, two = (sl.Locks(cluster.engine(number).execution_options(**each)) for number in (0, 1))
        with pytest.raises(sl.LockLost), two.exclusive(key), one.exclusive(key) as held:
            add(held.session, counter)
        assert cluster.number(counter) == before + 1


@pytest.mark.parametrize("in_session", [False, True], ids=["block", "session"])
def test_no_update_is_lost(cluster: Cluster, in_session: bool) -> None:
    key, counter = unused(), cluster.counter()
    engines = [cluster.engine(number % 3, isolation_level="READ COMMITTED") for number in range(4)]
    locks = [sl.Locks(engine) for engine in engines]

    def run(client: int) -> bool:
        if in_session:
            with Session(engines[client]) as session:
                try:
                    session.execute(sl.lock.exclusive(key))
                    add(session, counter)
                    session.commit()
                except BaseException:
                    with suppress(SQLAlchemyError, sl.LockLost):
                        session.rollback()
                    raise
        else:
            with locks[client].exclusive(key, timeout=PATIENCE) as held:
                add(held.session, counter)
        return True

    done, errors = crowd(run, each=15)
    assert cluster.number(counter) == done > 0
    assert errors.keys() <= ({sl.LockLost, sl.MustRollback} if in_session else {sl.LockLost})


def refused(engine: Engine, row: int) -> list[Any]:
    """What is refused on a node, as functions."""
    locks = sl.Locks(engine)

    def execute(operation: Any) -> Any:
        with engine.connect() as connection, connection.begin():
            return connection.execute(operation).all()

    def migrate() -> None:
        with engine.connect() as connection, migration_lock(connection, timeout=5):
            pass

    def share() -> None:
        with locks.shared(unused()):
            pass

    return [
        lambda: execute(sl.lock.shared(unused())),
        lambda: execute(sl.lock.try_shared(unused())),
        lambda: execute(sl.lock.session_exclusive(unused())),
        lambda: execute(sl.lock.row(COUNTER, row)),
        lambda: locks.run(sl.lock.vacuum()),
        share,
        migrate,
    ]


def test_what_one_node_only_would_hold_is_refused(cluster: Cluster) -> None:
    row, engine = cluster.counter(), cluster.engine(1)
    for call in refused(engine, row):
        with pytest.raises(sl.Unsupported, match="locks_one_node=True"):
            call()
    for call in refused(engine.execution_options(locks_one_node=True), row):
        call()
    assert "keys" in sl.Locks(engine).maintain().done
    with engine.connect() as connection:  # of a connection, too
        connection.execution_options(locks_one_node=True).execute(sl.lock.shared(unused()))


def test_guarded_write_and_release_on_two_nodes(cluster: Cluster) -> None:
    """Of a write under a grant, and the end of that grant elsewhere, the first one to commit does."""
    counter, name = cluster.counter(), unused()
    one, two = sl.Locks(cluster.engine(0)), cluster.engine(1)
    one.run(sl.semaphore.create(name, 1))
    grant = one.acquire({name: 1})
    cluster.catch_up()
    write = COUNTER.update().where(COUNTER.c.id == counter).values(number=COUNTER.c.number + 1)
    with Session(two) as session:
        assert session.scalar(sl.guarded(write, grant))
        assert one.release(grant)
        with pytest.raises(SQLAlchemyError):
            session.commit()
        with suppress(SQLAlchemyError, sl.LockLost):
            session.rollback()
    assert cluster.number(counter) == 0
    grant = one.acquire({name: 1})
    cluster.catch_up()
    with Session(two) as session:
        assert session.scalar(sl.guarded(write, grant))
        session.commit()
    assert cluster.number(counter) == 1


def test_put_of_a_waiting_job_s_key_and_its_capture_on_two_nodes(cluster: Cluster) -> None:
    """A job that begins before the transaction that has put it again doesn't replace the new one."""
    queue, name = sl.Queue(), unused()
    one, two = cluster.engine(0), cluster.engine(1)
    with Session(one) as session:
        session.execute(queue.put("first", queue=name, unique="key"))
        session.commit()
    cluster.catch_up()
    with Session(two) as session:
        session.execute(queue.put("second", queue=name, unique="key"))
        assert len(sl.Locks(one).run(queue.capture(1, queue=name))) == 1
        with pytest.raises(SQLAlchemyError):
            session.commit()
        with suppress(SQLAlchemyError, sl.LockLost):
            session.rollback()
        session.execute(queue.put("second", queue=name, unique="key"))
        session.commit()
    assert [job.payload for job in sl.Locks(two).run(queue.capture(9, queue=name))] == ["second"]

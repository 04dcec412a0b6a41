"""Lists whose length the caller decides: several statements of so many keys, in one transaction; the answer is the sum."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, event

import sqlalchemy_locks as sl
from sqlalchemy_locks.core import operation
from sqlalchemy_locks.queue.acknowledge import skip_locked_rows
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ENGINES, unused

#: three batches, the last one of a few
NUMBER = 2 * operation.MAX_KEYS + 100


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, engine_to: MakeEngine) -> Engine:
    """An engine whose server allows statements of one batch, and not of all keys."""
    engine = engine_to(request.param)

    @event.listens_for(engine, "connect")
    def limit(connection: Any, record: Any) -> None:
        if request.param == "sqlite":
            connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 4 * operation.MAX_KEYS)
        elif request.param == "mysql":
            with connection.cursor() as cursor:
                cursor.execute("SET SESSION range_optimizer_max_mem_size = 250000")

    return engine


def test_jobs(engine: Engine) -> None:
    locks, queue, name = sl.Locks(engine.execution_options(locks_wait=5)), sl.Queue(), unused("queue")
    ids = sorted(uuid4() for _ in range(NUMBER))
    keys = [str(id_) for id_ in ids]

    def capture() -> list[Any]:
        jobs = locks.run(queue.capture(NUMBER, queue=name))
        assert [job.payload for job in jobs] == list(range(NUMBER))
        return list(jobs)

    with contextlib.ExitStack() as open_:
        if engine.dialect.name != "sqlite":
            # another queue's row, which stays locked: a statement that scans the table would wait for it
            other = unused("queue")
            locks.run(queue.put("other", queue=other))
            connection = open_.enter_context(engine.connect().execution_options(isolation_level="READ COMMITTED"))
            assert len(connection.execute(queue.capture(1, queue=other)).all()) == 1
        assert locks.run(queue.put(*range(NUMBER), queue=name, external_id=ids)) == ids[0]
        waiting = locks.run(queue.put(*range(NUMBER), queue=f"{name} with keys", unique=keys))
        assert locks.run(queue.put(*range(NUMBER), queue=f"{name} with keys", unique=keys)) == waiting
        assert locks.run(queue.release(capture())) == NUMBER
        assert locks.run(queue.fail(capture(), error="late", retry=False)) == NUMBER
        assert locks.run(queue.revive(queue=name, limit=NUMBER)) == NUMBER
        capture()
        assert locks.run(queue.requeue_stalled(older_than=0, queue=name, limit=NUMBER)) == NUMBER
        jobs = capture()
        assert len(locks.run(queue._claimed([(job.internal_id, job.claim) for job in jobs]))) == NUMBER
        assert locks.run(skip_locked_rows(queue.complete(jobs))) == NUMBER
        assert locks.run(queue.delete_finished(older_than=0, queue=name, limit=NUMBER)) == NUMBER


def test_batches_are_one_transaction(engine: Engine) -> None:
    if engine.dialect.name == "postgresql":
        pytest.skip("one statement, whatever their number")
    locks, queue, name = sl.Locks(engine), sl.Queue(), unused("queue")
    locks.run(queue.put(*range(NUMBER), queue=name))
    jobs = locks.run(queue.capture(NUMBER, queue=name))
    commits: list[int] = []
    event.listen(engine, "commit", lambda *_: commits.append(1))
    with engine.connect() as connection:
        assert connection.scalar(queue.complete(jobs)) == NUMBER
        connection.rollback()
    assert commits == []
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with pytest.raises(sl.Unsupported, match="execute it inside a transaction"):
            connection.execute(queue.complete(jobs))
    assert locks.run(queue.complete(jobs)) == NUMBER
    assert len(commits) == 1
    locks.run(queue.delete_finished(older_than=0, queue=name, limit=NUMBER))


def test_rows_of_tasks_and_paused_queues(engine: Engine) -> None:
    locks, mutex = sl.Locks(engine), sl.Mutex()
    names = [unused("task") for _ in range(NUMBER)]
    assert locks.run(mutex.create(*names)) == NUMBER
    assert locks.run(mutex.create(*names)) == 0
    assert set(names) <= set(locks.run(mutex.capture(10 * NUMBER)))
    assert locks.run(sl.Queue().resume(*names)) == 0


def test_holders_of_keys(engine: Engine) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite lists no holders")
    assert sl.Locks(engine).run(sl.lock.holders(*(unused() for _ in range(NUMBER)))) == []

"""psycopg's cursor is kept for the next statement of its connection: a new one takes as long as a third of a statement."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import pq
from sqlalchemy import Connection, Engine, event

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects.connections import _CURSOR
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import unused

queue = sl.Queue()


class Cursor(psycopg.Cursor[Any]):
    """A cursor that counts how many of its kind were made."""

    made = 0

    def __init__(self, *args: Any, **named: Any) -> None:
        type(self).made += 1
        super().__init__(*args, **named)


@pytest.fixture
def engine(engine_to: MakeEngine) -> Engine:
    return engine_to("postgresql15", pool_size=1, max_overflow=0, connect_args={"cursor_factory": Cursor})


def kept(engine: Engine) -> Any:
    """Return the cursor that the only connection of the pool keeps."""
    with engine.connect() as connection:
        return connection.info.get(_CURSOR)


def test_one_cursor_serves_all_statements_of_a_connection(engine: Engine) -> None:
    locks, key = sl.Locks(engine), unused("mutex")
    assert locks.mutex.acquire(key)
    cursor, made = kept(engine), Cursor.made
    assert isinstance(cursor, Cursor)
    assert locks.mutex.release(key)
    with locks.exclusive(key):
        pass
    for _ in range(10):  # psycopg prepares a statement at its sixth execution
        assert locks.mutex.acquire(key)
        assert locks.mutex.release(key)
    assert kept(engine) is cursor
    # SQLAlchemy's own statements have cursors of their own, so fewer than one for each of ours
    assert Cursor.made - made < 5


def test_each_answer_is_that_of_its_own_statement(engine: Engine) -> None:
    locks, mutex, key = sl.Locks(engine), sl.Mutex(), unused("mutex")
    locks.run(mutex.create(key))
    with engine.begin() as connection:
        for _ in range(8):
            assert connection.scalar(mutex.acquire_token(key)) > 0
            assert connection.scalar(mutex.acquire(key)) is False
            assert connection.scalar(mutex.release(key)) is True
            assert connection.scalar(mutex.release(key)) is False
            assert connection.scalar(sl.lock.try_exclusive(key)) is True


def test_an_error_ends_it(engine: Engine, engine_to: MakeEngine) -> None:
    locks, mutex, key = sl.Locks(engine), sl.Mutex(), unused("mutex")
    assert locks.mutex.acquire(key)
    assert locks.mutex.release(key)
    assert kept(engine) is not None
    with engine_to("postgresql15").connect() as other:
        assert other.scalar(mutex.acquire(key))
        with pytest.raises(sl.LockTimeout):
            locks.run(mutex.acquire(key).execution_options(locks_wait=0.05))
    assert kept(engine) is None
    assert locks.mutex.acquire(key)
    assert kept(engine) is not None


def test_it_ends_with_its_connection(engine: Engine) -> None:
    locks, key = sl.Locks(engine), unused("mutex")
    assert locks.mutex.acquire(key)
    cursor = kept(engine)
    with engine.connect() as connection:
        connection.invalidate()
    assert locks.mutex.release(key)
    assert kept(engine) is not cursor
    with engine.connect() as connection:
        assert connection.info[_CURSOR].connection is connection.connection.driver_connection


def test_the_payloads_of_jobs_are_not_kept(engine: Engine) -> None:
    with engine.begin() as connection:
        name = unused("queue")
        for _ in range(3):
            connection.execute(queue.put({"text": "x" * 1000}, queue=name))
        fetched = connection.scalar(queue._fetch([], 3, queue=name, host="h", after=None))
        assert len(fetched.jobs) == 3
        assert _CURSOR not in connection.info
        connection.rollback()


def test_statements_that_listeners_see_use_it(engine: Engine) -> None:
    locks, key, held = sl.Locks(engine), unused("mutex"), unused("mutex")
    assert locks.mutex.acquire(held)
    assert locks.mutex.acquire(key)
    cursor, seen = kept(engine), list[Any]()

    @event.listens_for(engine, "before_cursor_execute")
    def listen(connection: Connection, given: Any, *_: Any) -> None:
        seen.append(given)
        if len(seen) == 1:  # a statement inside the statement has a cursor of its own
            assert connection.scalar(sl.Mutex().acquire(held)) is False

    assert locks.mutex.release(key)
    assert locks.mutex.acquire(key)
    assert cursor is seen[0] is not seen[1]
    assert isinstance(kept(engine), Cursor)


def test_a_cursor_of_the_server_is_not_kept(engine: Engine) -> None:
    streaming = engine.execution_options(stream_results=True)
    event.listen(streaming, "before_cursor_execute", lambda *_: None)
    with streaming.connect() as connection:
        assert connection.scalar(sl.lock.try_exclusive(unused())) is True
        assert _CURSOR not in connection.info
        assert connection.scalar(sl.lock.try_exclusive(unused())) is True


def test_it_keeps_no_connection_open(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15")
    locks, key = sl.Locks(engine), unused("mutex")
    assert locks.mutex.acquire(key)
    driver = kept(engine).connection
    engine.dispose()
    assert driver.pgconn.status == pq.ConnStatus.BAD
    assert locks.mutex.release(key)

"""A live worker keeps its jobs, ends when it is told to, and fails no job for an error that isn't the job's."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, String, TypeDecorator, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers
from tests.fixtures.parties import PATIENCE, later, until
from tests.fixtures.queues import KINDS, MakeEngine, put, silenced
from tests.fixtures.worker_states import counts, queue, running

ROOT = Path(__file__).parents[2]
WORKER = [sys.executable, "-m", "tests.fixtures.worker_process"]
LOCK_TABLE = {
    "postgresql15": "LOCK TABLE lock.job, lock.worker IN ACCESS EXCLUSIVE MODE",
    "mysql": "LOCK TABLES lock_job WRITE, lock_worker WRITE",
    "mariadb": "LOCK TABLES lock_job WRITE, lock_worker WRITE",
    "sqlite": "UPDATE lock_job SET claim = claim WHERE false",
}


@pytest.mark.parametrize("name", KINDS)
def test_a_lone_worker_keeps_its_job_after_a_table_lock(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name)
    put(engine, "long")
    begun: list[Any] = []
    go_on, first = threading.Event(), threading.Event()

    def handler(job: Any) -> None:
        begun.append(job.payload)
        if job.payload == "long":
            first.set()
            assert go_on.wait(PATIENCE)

    worker = sl.Worker(queue, handler, bind=engine, concurrency=2, heartbeat=0.2, stalled_after=0.4, poll=0.05)
    with running(worker):
        assert first.wait(PATIENCE)
        with engine_to(name).connect() as blocker:
            blocker.execute(text(LOCK_TABLE[name]))
            silenced(blocker)  # as after a lock for longer than stalled_after
            time.sleep(0.6)  # the worker's fetch and its heartbeat wait for the lock meanwhile
            blocker.commit()
            if name in ("mysql", "mariadb"):
                blocker.execute(text("UNLOCK TABLES"))
        for number in range(2):
            put(engine, number)
            until(lambda: counts(engine)["completed"] == number + 1)  # noqa: B023
        assert begun == ["long", 0, 1]
        go_on.set()
        until(lambda: counts(engine)["completed"] == 3)
    assert begun == ["long", 0, 1]


class Word(TypeDecorator[str]):
    impl = String(50)
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        if value == "bad":
            raise ValueError("this word can't be decoded")
        return value


class Base(DeclarativeBase):
    pass


class TypedWorker(sl.WorkerColumns, Base):
    __tablename__ = "typed_workers"


class Typed(sl.JobColumns, Base):
    __tablename__ = "typed_jobs"
    word: Mapped[str | None] = mapped_column(Word())


@pytest.fixture
def own_tables(engine_to: MakeEngine, name: str) -> Iterator[Engine]:
    """A database with the tables of an app."""
    engine = engine_to(name)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    yield engine
    Base.metadata.drop_all(engine)


@pytest.mark.parametrize("name", KINDS)
def test_an_undecodable_job_dies_alone(own_tables: Engine) -> None:
    engine, own = own_tables, sl.Queue(Typed, workers=TypedWorker)
    with engine.begin() as connection:
        connection.execute(own.put("the app's"))
        theirs = connection.execute(own.capture(1, host="web-1")).all()
    with Session(engine) as session, session.begin():
        session.add_all(Typed(payload=number, word="bad" if number in (2, 3) else "good") for number in range(6))
    done: list[Any] = []
    table: Any = Typed.__table__

    def left() -> int:
        with engine.connect() as connection:
            ended = table.c.completed_at.is_(None) & table.c.failed_at.is_(None)
            return len(connection.execute(select(table.c.internal_id).where(ended)).all())

    options: dict[str, Any] = {"concurrency": 4, "host": "web-1", "poll": 0.05, "heartbeat": 0.5}
    with running(sl.Worker(own, lambda job: done.append(job.payload), bind=engine, **options)):
        until(lambda: left() == 1)
    assert sorted(done) == [0, 1, 4, 5]
    with engine.begin() as connection:
        assert connection.scalar(own.complete(theirs)) == 1
    with engine.connect() as connection:
        stored = connection.execute(select(table.c.error).where(table.c.failed_at.is_not(None))).scalars().all()
    assert len(stored) == 2
    assert all("this word can't be decoded" in error for error in stored)


class Late(sl.JobColumns, Base):
    __tablename__ = "late_jobs"
    customer: Mapped[str | None] = mapped_column(String(50))


@pytest.mark.parametrize("column", ["customer", "claim"])
@pytest.mark.parametrize("name", ["postgresql15"])
def test_a_table_that_lacks_a_column_ends_the_worker(own_tables: Engine, column: str) -> None:
    """It was deployed before its migration: no job is to blame, and none has lost an attempt."""
    own, table = sl.Queue(Late, workers=TypedWorker), Base.metadata.tables["late_jobs"]
    with own_tables.begin() as connection:
        connection.execute(own.put(*range(3)))
        connection.execute(text(f"ALTER TABLE late_jobs DROP COLUMN {column}"))
    with pytest.raises(DBAPIError, match=column):
        sl.Worker(own, print, bind=own_tables, poll=0.05, heartbeat=0.5).run()
    with own_tables.connect() as connection:
        left = connection.execute(select(table.c.attempts, table.c.started_at, table.c.failed_at)).all()
    assert left == [(0, None, None)] * 3


@pytest.mark.parametrize("name", ["postgresql15"])
def test_its_running_handlers_have_the_grace(own_tables: Engine) -> None:
    """And what they have done is reported."""
    own, table = sl.Queue(Late, workers=TypedWorker), Base.metadata.tables["late_jobs"]
    begun, go_on = threading.Event(), threading.Event()

    def handler(_: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    with own_tables.begin() as connection:
        connection.execute(own.put(1))
    ended = later(sl.Worker(own, handler, bind=own_tables, concurrency=2, poll=0.05, grace=PATIENCE).run)
    try:
        assert begun.wait(PATIENCE)
        with own_tables.begin() as connection:
            connection.execute(text("ALTER TABLE late_jobs DROP COLUMN customer"))
            connection.execute(table.insert().values({"payload": 2, "external_id": uuid4()}))
        with pytest.raises(FutureTimeout):
            ended.result(0.5)
    finally:
        go_on.set()
    with pytest.raises(DBAPIError):
        ended.result(PATIENCE)
    with own_tables.connect() as connection:
        found = connection.execute(select(table.c.completed_at, table.c.attempts).order_by(table.c.internal_id)).all()
    assert [(at is not None, attempts) for at, attempts in found] == [(True, 1), (False, 0)]


def test_a_prepared_statement_that_is_gone_ends_no_worker(engine_to: MakeEngine) -> None:
    """As behind a pooler: psycopg's error is a ProgrammingError, as that of a missing column is."""
    engine = engine_to("postgresql15", "psycopg", pool_size=1, max_overflow=4)
    done: list[Any] = []

    def handler(job: Any) -> None:
        done.append(job.payload)
        if len(done) == 10:
            with engine.connect() as connection:
                driver: Any = connection.connection.driver_connection
                driver.execute("DEALLOCATE ALL")
                connection.rollback()

    put(engine, *range(20))
    sl.Worker(queue, handler, bind=engine, concurrency=1, batch=1, poll=0.05).run(until_empty=True)
    assert sorted(set(done)) == list(range(20))


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_a_worker_holds_no_more_jobs_than_it_has_slots(engine: Engine) -> None:
    put(engine, *range(10))
    begun, go_on = threading.Semaphore(0), threading.Event()

    def handler(_: Any) -> None:
        begun.release()
        assert go_on.wait(PATIENCE)

    with running(sl.Worker(queue, handler, bind=engine, concurrency=4, batch=10)):
        for _ in range(4):
            assert begun.acquire(timeout=PATIENCE)
        with engine.begin() as connection:
            assert len(connection.execute(queue.capture(10)).all()) == 6
        go_on.set()
        until(lambda: counts(engine)["completed"] == 4)


@pytest.mark.parametrize(
    ("name", "driver", "kind"),
    [("postgresql15", "psycopg", "threads"), ("postgresql15", "asyncpg", "tasks"), ("mysql", "pymysql", "threads")],
)
def test_sigterm_ends_a_worker_whose_database_is_stuck(
    servers: Servers, engine_to: MakeEngine, name: str, driver: str, kind: str
) -> None:
    engine = engine_to(name)
    put(engine, 1)
    url = servers.installed(name, driver)
    worker = subprocess.Popen([*WORKER, url, "default", kind], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"begun\n"
        until(lambda: counts(engine)["completed"] == 1)
        with engine.connect() as blocker:
            blocker.execute(text(LOCK_TABLE[name]))
            time.sleep(0.5)  # its fetch waits meanwhile
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE) == 0  # after grace + 5 s, while the blocker goes on
    finally:
        worker.kill()
        worker.communicate()


def test_a_second_signal_ends_a_worker_immediately(servers: Servers, engine_to: MakeEngine) -> None:
    put(engine_to("sqlite"), 1)
    command = [*WORKER, servers.installed("sqlite", PLAIN["sqlite"]), "default", "threads", "endless"]
    worker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"begun\n"
        worker.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.5)
        # on a machine that stands still, a second signal isn't told from the first one
        until(lambda: worker.send_signal(signal.SIGTERM) or worker.poll() is not None, pause=0.1)
        assert worker.returncode == -signal.SIGTERM
    finally:
        worker.kill()
        worker.communicate()

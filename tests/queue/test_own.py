"""A queue in a table of one's own: by the mixin, under other names, as a Table."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, Index, MetaData, String, Table, create_engine, inspect, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.queue.mixin import JobColumns
from sqlalchemy_locks.sql.clock import Instant
from sqlalchemy_locks.sql.tables import ExternalId, Payload
from sqlalchemy_locks.workers.state import WorkerState
from tests.conftest import PLAIN, Servers
from tests.fixtures.queues import ENGINES, silenced


class Base(DeclarativeBase):
    pass


class Mail(JobColumns, Base):
    __tablename__ = "mail"
    customer: Mapped[str | None] = mapped_column(String(20))
    version: Mapped[int] = mapped_column(default=1)
    __mapper_args__ = {"version_id_col": version}


class Task(Base):
    """The same with names of its own."""

    __tablename__ = "odd_task"
    number: Mapped[int] = mapped_column("no", primary_key=True)
    public: Mapped[UUID] = mapped_column(ExternalId(), unique=True, default=uuid4)
    channel: Mapped[str] = mapped_column(String(50))
    body: Mapped[Any] = mapped_column(Payload())
    urgency: Mapped[int]
    due: Mapped[datetime] = mapped_column(Instant())
    claim: Mapped[int] = mapped_column(default=0)
    tries: Mapped[int] = mapped_column(default=0)
    max_tries: Mapped[int]
    worker: Mapped[str | None] = mapped_column(String(50))
    seen: Mapped[datetime | None] = mapped_column(Instant())
    created_at: Mapped[datetime | None] = mapped_column(Instant())
    started_at: Mapped[datetime | None] = mapped_column(Instant())
    completed_at: Mapped[datetime | None] = mapped_column(Instant())
    failed_at: Mapped[datetime | None] = mapped_column(Instant())
    error: Mapped[str | None] = mapped_column(String(16000))


mails = sl.Queue(Mail)
tasks = sl.Queue(
    Task,
    internal_id=Task.number,
    external_id=Task.public,
    queue_id=Task.channel,
    payload=Task.body,
    priority=Task.urgency,
    run_at=Task.due,
    attempts=Task.tries,
    max_attempts=Task.max_tries,
    processing_host=Task.worker,
    heartbeat_at=Task.seen,
)
mails.indexes()


@pytest.fixture(params=ENGINES)
def engine(servers: Servers, request: pytest.FixtureRequest) -> Any:
    engine = create_engine(servers.fresh(request.param, PLAIN[request.param]), poolclass=NullPool)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def test_entities_come_and_go(engine: Engine) -> None:
    with Session(engine) as session:
        mine, other = sorted([uuid4(), uuid4()])  # a batch with ids is put in their order
        assert session.scalars(mails.put({"a": 1}, {"a": 2}, external_id=[mine, other])).first() == mine
        assert session.scalar(mails.put("again", external_id=mine)) == mine
        session.add(Mail(payload={"a": 3}, customer="x"))
        session.commit()
        jobs = session.scalars(mails.capture(5, host="h")).all()
        assert [(type(job), job.payload, job.claim, job.version) for job in jobs] == [
            (Mail, {"a": 1}, 1, 2),
            (Mail, {"a": 2}, 1, 2),
            (Mail, {"a": 3}, 1, 2),
        ]
        assert (jobs[0].external_id, jobs[0].processing_host) == (mine, "h")
        session.commit()
        assert session.scalar(mails.complete(jobs[0])) == 1
        assert session.scalar(mails.fail(jobs[1], error="x", retry_in=0)) == 1
        assert session.scalar(mails.release(jobs[2])) == 1
        session.commit()
        assert [tuple(row)[1:5] for row in session.execute(mails.stats())] == [(2, 0, 0, 0)]
        assert len(session.scalars(mails.capture(5)).all()) == 2
        silenced(session.connection(), table=Mail.__table__)
        assert session.scalar(mails.requeue_stalled(0)) == 2
        session.commit()
        assert session.scalar(mails.delete_finished(0)) == 1
        session.commit()
        assert len(session.scalars(select(Mail)).all()) == 2


def test_names_of_its_own(engine: Engine) -> None:
    with Session(engine) as session:
        session.execute(tasks.put(1, 2, 3, queue="q"))
        session.execute(tasks.put(4, queue="q", run_in=3600))
        session.commit()
        jobs = session.scalars(tasks.capture(2, queue="q", host="h")).all()
        assert [(job.body, job.tries, job.worker) for job in jobs] == [(1, 1, "h"), (2, 1, "h")]
        assert session.scalar(tasks.heartbeat(jobs)) == 2
        assert session.scalar(tasks.complete(jobs[0])) == 1
        assert session.scalar(tasks.fail(jobs[1], error="x", retry=False)) == 1
        session.commit()
        assert [tuple(row)[:5] for row in session.execute(tasks.stats())] == [("q", 1, 1, 0, 1)]


def test_a_table_gives_rows(engine: Engine) -> None:
    table = Table("mail", MetaData(), autoload_with=engine)
    queue = sl.Queue(table)
    with engine.begin() as connection:
        connection.execute(mails.put(1, 2))
        jobs = connection.execute(queue.capture(5)).all()
        assert len(jobs) == 2
        assert connection.execute(queue.complete(jobs)).scalar() == 2


def test_its_indexes(engine: Engine) -> None:
    made = {index["name"]: index for index in inspect(engine).get_indexes("mail")}
    ready = "mail_ready" if engine.dialect.name in ("postgresql", "yugabytedb") else "mail_waiting"
    assert {ready, "mail_running", "mail_completed", "mail_dead"} <= made.keys()
    assert {"mail_ready", "mail_waiting"} - {ready} == {"mail_ready", "mail_waiting"} - made.keys()


@pytest.mark.parametrize(("dialect", "first"), [("postgresql", "priority"), ("mysql", "started_at")])
def test_the_indexes_of_one_engine(dialect: str, first: str) -> None:
    class Other(DeclarativeBase):
        pass

    class Job(JobColumns, Other):
        __tablename__ = "other_job"

    made: list[Index] = sl.Queue(Job).indexes(dialect)
    (ready,) = [index for index in made if index.name == "other_job_ready"]
    assert [column.name for column in ready.columns][:2] == ["queue_id", first]
    assert len(made) == 4


def test_what_is_no_queue_is_refused() -> None:
    class Other(DeclarativeBase):
        pass

    class Thing(Other):
        __tablename__ = "thing"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Twice(JobColumns, Other):
        __tablename__ = "twice"
        second: Mapped[int] = mapped_column(primary_key=True)

    with pytest.raises(ValueError, match="has no column 'internal_id'"):
        sl.Queue(Thing)
    with pytest.raises(ValueError, match="primary key"):
        sl.Queue(Twice)
    with pytest.raises(TypeError, match="no role 'nothing'"):
        sl.Queue(Mail, nothing=Mail.claim)
    with pytest.raises(TypeError, match="mapped class"):
        sl.Queue("mail")


@pytest.mark.parametrize("engine", ["postgresql15", "sqlite"], indirect=True)
@pytest.mark.parametrize(
    "name", ["done", "told", "chosen", "numbered", "captured", "mine", "one", "free", "beat", "jobs", "put", "there"]
)
def test_a_table_may_be_called_as_a_part_of_a_statement_might_be(engine: Engine, name: str) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(JobColumns, Base):
        __tablename__ = name

    own = sl.Queue(Job)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    try:
        with engine.begin() as connection:
            id = connection.scalar(own.put(0))
            assert connection.scalar(own.put(0, external_id=id)) == id
            connection.execute(own.put(1, 2, 3))
        shift = WorkerState(sl.Worker(own, print, bind=engine, batch=2), time.sleep)
        seen = []
        for _ in range(3):
            shift._beat = -float("inf")
            shift.turn()
            shift._beat = -float("inf")
            shift._keep()
            while (job := shift.take()) is not None:
                seen.append(job._mapping["payload"])
                shift.done(job, None)
        shift.close()
        assert seen == [0, 1, 2, 3]
        with engine.begin() as connection:
            assert connection.scalar(own.requeue_stalled(0)) == 0
            connection.execute(own.delete_finished(0))
    finally:
        Base.metadata.drop_all(engine)

"""A queue in a user's own table: by the mixin, under other column names, as a ``Table``."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import JSON, BigInteger, Engine, Index, MetaData, String, Table, create_engine, inspect, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.queue.mixin import JobColumns
from tests.conftest import PLAIN, Servers
from tests.fixtures.parties import connected
from tests.fixtures.queues import ENGINES, KINDS, silenced


class Base(DeclarativeBase):
    pass


class Mail(JobColumns, Base):
    __tablename__ = "mail"
    customer: Mapped[str | None] = mapped_column(String(20))
    version: Mapped[int] = mapped_column(default=1)
    __mapper_args__ = {"version_id_col": version}


mails = sl.Queue(Mail)


mails.indexes()


@pytest.fixture(params=ENGINES)
def engine(servers: Servers, request: pytest.FixtureRequest) -> Any:
    engine = create_engine(servers.fresh(request.param, PLAIN[request.param]), poolclass=NullPool)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def test_jobs_are_entities_in_a_session(engine: Engine) -> None:
    with Session(engine) as session:
        mine, other = sorted([uuid4(), uuid4()])  # a batch is put in the order of its ids
        assert session.scalars(mails.put({"a": 1}, {"a": 2}, external_id=[mine, other])).first() == mine
        assert session.scalar(mails.put("again", external_id=mine)) == mine
        session.add(Mail(payload={"a": 3}, customer="x"))
        session.commit()
        jobs = session.scalars(mails.capture(5, host="h")).all()
        assert [(type(job), job.payload, job.version) for job in jobs] == [
            (Mail, {"a": 1}, 2),
            (Mail, {"a": 2}, 2),
            (Mail, {"a": 3}, 2),
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


def test_a_table_gives_rows(engine: Engine) -> None:
    table = Table("mail", MetaData(), autoload_with=engine)
    queue = sl.Queue(table)
    with engine.begin() as connection:
        connection.execute(mails.put(1, 2))
        jobs = connection.execute(queue.capture(5)).all()
        assert len(jobs) == 2
        assert connection.execute(queue.complete(jobs)).scalar() == 2


def test_create_all_creates_the_indexes(engine: Engine) -> None:
    made = {index["name"]: index for index in inspect(engine).get_indexes("mail")}
    partial, complete = {"mail_ready", "mail_running"}, {"mail_waiting", "mail_unfinished"}
    here = partial if engine.dialect.name in ("postgresql", "yugabytedb") else complete
    assert here | {"mail_completed", "mail_dead"} <= made.keys()
    assert made.keys().isdisjoint((partial | complete) - here)


@pytest.mark.parametrize(("dialect", "first"), [("postgresql", "priority"), ("mysql", "started_at")])
def test_the_indexes_of_one_engine(dialect: str, first: str) -> None:
    class Other(DeclarativeBase):
        pass

    class Job(JobColumns, Other):
        __tablename__ = "other_job"

    made: list[Index] = sl.Queue(Job).indexes(dialect)
    (ready,) = [index for index in made if index.name == "other_job_ready"]
    assert [column.name for column in ready.columns][:2] == ["queue_id", first]
    assert len(made) == 5


def test_an_entity_keeps_the_claim_of_its_capture(engine: Engine) -> None:
    with Session(engine) as first, Session(engine) as second:
        first.execute(mails.put("x"))
        first.commit()
        lost = first.scalars(mails.capture()).one()
        first.commit()
        silenced(second.connection(), table=Mail.__table__)
        assert second.scalar(mails.requeue_stalled(0)) == 1
        mine = second.scalars(mails.capture()).one()
        second.commit()
        assert lost.claim == mine.claim  # refreshed: it belongs to the other owner
        first.rollback()
        assert first.scalar(mails.complete([lost])) == 0
        assert first.scalar(mails.fail(lost, error="x")) == 0
        first.rollback()
        with pytest.raises(ValueError, match="was not captured"):
            mails.complete(Mail())
        assert second.scalar(mails.complete(mine)) == 1
        second.commit()


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_entities_are_fresh_after_reports(engine: Engine) -> None:
    if engine.dialect.name == "sqlite":
        sl.sqlite.begin_immediate(engine)
    with Session(engine) as session:
        session.execute(mails.put(1, 2, 3))
        done, failed, released = session.scalars(mails.capture(3)).all()
        session.commit()
        assert released.version == 2
        with session.begin_nested() as savepoint:
            session.scalar(mails.complete(done))
            session.scalar(mails.fail([failed], error="x", retry_in=0))
            session.scalar(mails.release(released))
            assert done.completed_at is not None
            assert (failed.error, failed.started_at, released.attempts) == ("x", None, 0)
            assert released.version == 3
            savepoint.rollback()
        assert (done.completed_at, failed.error, released.attempts, released.version) == (None, None, 1, 2)
        assert session.scalar(mails.complete(done)) == 1
        done.customer = "c"
        session.commit()
        assert (done.customer, done.version) == ("c", 4)


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "sqlite"])
def test_worker_runs_jobs_with_null_payloads(servers: Servers, name: str) -> None:
    """The column of an app's own table may be nullable."""

    class Other(DeclarativeBase):
        pass

    class Note(sl.JobColumns, Other):
        __tablename__ = "note_without_payload"
        payload: Mapped[Any] = mapped_column(JSON(none_as_null=True), nullable=True)

    class NoteWorker(sl.WorkerColumns, Other):
        __tablename__ = "note_worker"

    notes = sl.Queue(Note, workers=NoteWorker)
    with connected(servers.fresh(name, PLAIN[name]), json_deserializer=json.loads) as engine:
        Other.metadata.create_all(engine)
        with Session(engine) as session:
            for number in range(3):
                session.add(Note(payload=None if number == 1 else {"number": number}))
                session.flush()
            session.commit()
        seen: list[Any] = []
        worker = sl.Worker(notes, lambda job: seen.append(job.payload), bind=engine, concurrency=1, batch=3, prefetch=3)
        worker.run(until_empty=True)
        assert seen == [None if number == 1 else {"number": number} for number in range(3)]


@pytest.mark.parametrize("engine", ["postgresql15", "yugabytedb"], indirect=True)
def test_a_timestamp_without_time_zone_is_refused(engine: Engine) -> None:
    class Other(DeclarativeBase):
        pass

    class Zoneless(sl.JobColumns, Other):
        __tablename__ = "zoneless"
        started_at: Mapped[datetime | None] = mapped_column()

    class Task(Other):
        __tablename__ = "zoneless_task"
        name: Mapped[str] = mapped_column(String(20), primary_key=True)
        status: Mapped[str]
        at: Mapped[datetime | None]

    tasks = sl.StateTransition(Task, id=Task.name, status=Task.status, updated_at=Task.at)
    for operation in (sl.Queue(Zoneless).capture(), sl.Queue(Zoneless).put(1), tasks.capture()):
        with engine.connect() as connection, pytest.raises(sl.Unsupported, match="must be DateTime"):
            connection.execute(operation)
    assert "zoneless" in str(sl.Queue(Zoneless).capture().compile(create_engine("sqlite://")))


def test_a_class_without_the_columns_is_refused() -> None:
    class Other(DeclarativeBase):
        pass

    class Thing(Other):
        __tablename__ = "thing"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Twice(JobColumns, Other):
        __tablename__ = "twice"
        second: Mapped[int] = mapped_column(primary_key=True)

    class Renamed(JobColumns, Other):
        __tablename__ = "renamed"
        claim: Mapped[int] = mapped_column("claims", BigInteger(), default=0)

    with pytest.raises(ValueError, match="has no column 'internal_id'"):
        sl.Queue(Thing)
    with pytest.raises(ValueError, match="primary key"):
        sl.Queue(Twice)
    with pytest.raises(ValueError, match="must have the name claim"):
        sl.Queue(Renamed)
    with pytest.raises(TypeError, match="mapped class"):
        sl.Queue("mail")


class Message(JobColumns, Base):
    __tablename__ = "message"
    kind: Mapped[str] = mapped_column(String(20))
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "message"}


class Sms(Message):
    number: Mapped[str | None] = mapped_column(String(20))
    __mapper_args__ = {"polymorphic_identity": "sms"}


class Push(Message):
    __mapper_args__ = {"polymorphic_identity": "push"}


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_a_queue_of_a_subclass_ignores_its_sisters(engine: Engine) -> None:
    texts, pushes = sl.Queue(Sms), sl.Queue(Push)

    def counts(connection: Any) -> Any:
        return [[tuple(row)[1:5] for row in connection.execute(queue.stats())] for queue in (texts, pushes)]

    with engine.begin() as connection:
        connection.execute(pushes.put(*range(5)))
        connection.execute(texts.put("a", "b", "c"))
        assert counts(connection) == [[(3, 0, 0, 0)], [(5, 0, 0, 0)]]
    # as workers fetch: from the head and from a position
    fetch = {"queue": "default", "host": "h"}
    with engine.begin() as connection:
        first = connection.execute(texts._fetch(2, **fetch)).all()
        (pair,) = connection.execute(texts._running_on("h", queue="default")).all()[:1]
        assert connection.scalar(texts.complete([tuple(pair)])) == 1
        rest = connection.execute(texts._fetch(9, **fetch)).all()
        assert [job.payload for job in [*first, *rest]] == ['"a"', '"b"', '"c"']
        connection.execute(pushes._fetch(1, **fetch))
        assert len(connection.execute(texts._running_on("h", queue="default")).all()) == 2
        assert counts(connection) == [[(0, 0, 2, 0)], [(4, 0, 1, 0)]]
        silenced(connection, table=Message.__table__)
        assert connection.execute(texts.requeue_stalled(0)).scalar() == 2
        assert connection.execute(texts.delete_finished(0)).scalar() == 1
        assert counts(connection) == [[(2, 0, 0, 0)], [(4, 0, 1, 0)]]
    with Session(engine) as session:
        assert [type(job) for job in session.scalars(texts.capture(9))] == [Sms, Sms]
        session.commit()

"""get, cancel, reschedule, pause, resume and unique keys, on every engine."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, MetaData, Table, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.queue.mixin import JobColumns
from tests.conftest import PLAIN, Servers
from tests.fixtures.parties import PATIENCE
from tests.fixtures.queues import KINDS, MakeEngine, put

queue = sl.Queue()
WITH_ROW_LOCKS = ["postgresql15", "yugabytedb", "mysql", "mariadb"]


@pytest.fixture(params=KINDS)
def kind(engine_to: MakeEngine, request: pytest.FixtureRequest) -> Engine:
    return engine_to(request.param)


def one(engine: Engine, operation: Any) -> Any:
    with engine.begin() as connection:
        return connection.scalar(operation)


def captured(engine: Engine, **options: Any) -> list[Any]:
    with engine.begin() as connection:
        return [job.payload for job in connection.execute(queue.capture(9, **options))]


def test_get_reads_a_job_in_any_state(engine: Engine) -> None:
    (id,) = put(engine, {"a": 1}, queue="mail")
    job = one(engine, queue.get(str(id)))
    assert (job.payload, job.queue_id, job.external_id, job.started_at) == ({"a": 1}, "mail", id, None)
    captured(engine, queue="mail")
    assert one(engine, queue.get(id)).started_at is not None
    assert one(engine, queue.get(uuid4())) is None
    assert sl.Locks(engine).run(queue.get(id)).attempts == 1


def test_cancel_ends_a_waiting_job(engine: Engine) -> None:
    first, second = put(engine, 1, 2)
    assert one(engine, queue.cancel(first)) is True
    assert captured(engine) == [2]
    job = one(engine, queue.get(first))
    assert (job.error, job.attempts, job.failed_at) == ("cancelled", 0, None)
    assert job.completed_at is not None
    # cancelled, running, unknown
    assert [one(engine, queue.cancel(id)) for id in (first, second, uuid4())] == [False, False, False]
    # its id stays known, and nothing returns it to the queue
    assert put(engine, 3, external_id=first) == [first]
    assert one(engine, queue.revive()) == one(engine, queue.requeue_stalled(0, queue="none")) == 0
    assert captured(engine) == []


@pytest.mark.parametrize("engine", WITH_ROW_LOCKS, indirect=True)
@pytest.mark.parametrize("commits", [True, False])
def test_cancel_waits_for_a_capture(engine: Engine, commits: bool) -> None:
    """A job is run or cancelled, and never both."""
    (id,) = put(engine, 1)
    told: list[Any] = []
    with engine.connect() as capturing:
        assert len(capturing.execute(queue.capture()).all()) == 1
        with pytest.raises(sl.LockTimeout):
            one(engine, queue.cancel(id).execution_options(locks_wait=0.05))
        thread = threading.Thread(target=lambda: told.append(one(engine, queue.cancel(id))))
        thread.start()
        capturing.commit() if commits else capturing.rollback()
        thread.join(PATIENCE)
    assert told == [not commits]
    assert captured(engine) == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("engine", WITH_ROW_LOCKS, indirect=True)
def test_a_wait_for_the_locked_row_of_a_job_is_limited(engine: Engine) -> None:
    put(engine, 1)
    with engine.begin() as connection:
        (job,) = connection.execute(queue.capture()).all()
    rows = build_context(engine.dialect, engine.get_execution_options()).tables.job
    with engine.begin() as other:
        other.execute(select(rows.c.internal_id).where(rows.c.internal_id == job.internal_id).with_for_update())
        for end in (queue.complete(job), queue.fail(job, error="x"), queue.release(job)):
            for wait in (0, 0.05):
                with pytest.raises(sl.LockTimeout):
                    one(engine, end.execution_options(locks_wait=wait))
    assert one(engine, queue.complete(job)) == 1


def test_reschedule(engine: Engine) -> None:
    later, soon = put(engine, "later", run_in=3600) + put(engine, "soon")
    assert one(engine, queue.reschedule(soon, run_at=datetime.now(timezone.utc) + timedelta(days=1)))
    assert captured(engine) == []
    assert one(engine, queue.reschedule(later, run_in=0))
    assert captured(engine) == ["later"]
    assert [one(engine, queue.reschedule(id, run_in=0)) for id in (later, uuid4())] == [False, False]
    assert one(engine, queue.reschedule(soon, run_in=timedelta(0)))
    assert captured(engine) == ["soon"]


def test_a_paused_queue_is_not_captured_from(engine: Engine) -> None:
    put(engine, 1, queue="mail")
    put(engine, 2, queue="sms")
    fetch = queue._fetch(9, queue="mail", host="h")

    def fetched() -> list[str]:
        with engine.begin() as connection:
            return [str(job.payload) for job in connection.execute(fetch)]

    try:
        assert one(engine, queue.pause("mail", "other")) == 2
        assert one(engine, queue.pause("mail")) == 0
        assert captured(engine, queue="mail") == fetched() == []
        assert captured(engine, queue="sms") == [2]
        with engine.connect() as connection:
            rows = {row.queue_id: (row.waiting, row.paused) for row in connection.execute(queue.stats())}
        assert rows == {"mail": (1, True), "sms": (0, False), "other": (0, True)}
    finally:
        assert one(engine, queue.resume("mail", "other", "nothing")) == 2
    assert fetched() == ["1"]
    assert sl.Locks(engine).run(queue.pause("x")) == sl.Locks(engine).run(queue.resume("x")) == 1


def test_a_pause_is_part_of_the_transaction(kind: Engine) -> None:
    put(kind, 1)
    with kind.connect() as connection:
        connection.execute(queue.pause("default"))
        assert connection.execute(queue.capture()).all() == []
        connection.rollback()
    assert captured(kind) == [1]


def test_a_unique_key_is_put_once_while_it_waits(engine: Engine) -> None:
    (first,) = put(engine, 1, unique="a")
    assert put(engine, 2, unique="a") == [first]
    assert put(engine, 3, queue="other", unique="a") != [first]
    b, again = put(engine, 4, 5, unique=["b", "a"], run_in=0)
    assert again == first != b
    assert captured(engine) == [1, 4]
    # free once it is captured, whatever becomes of the job
    (second,) = put(engine, 6, unique="a")
    assert second != first
    with engine.begin() as connection:
        running = connection.execute(select(build_context(engine.dialect, {}).tables.job)).all()
        for job in running:
            connection.execute(queue.fail(job, error="x", retry_in=0))
    assert sorted(captured(engine)) == [1, 4, 6]


def test_a_cancelled_job_frees_its_key(kind: Engine) -> None:
    (first,) = put(kind, 1, unique="a", run_in=60)
    assert one(kind, queue.cancel(first))
    assert put(kind, 2, unique="a", run_at=datetime(2020, 1, 1, tzinfo=timezone.utc)) != [first]
    assert captured(kind) == [2]


def test_concurrent_puts_of_a_key_make_one_job(engine_to: MakeEngine) -> None:
    for name in WITH_ROW_LOCKS:
        engine = engine_to(name, label_length=6)  # SQLAlchemy abbreviates what a statement refers to
        ids: list[Any] = []
        start = threading.Barrier(6, timeout=PATIENCE)

        def work(engine: Engine = engine, ids: list[Any] = ids, start: Any = start) -> None:
            start.wait()
            ids.extend(sl.Locks(engine).run(queue.put(1, 2, unique=["x", "y"])) for _ in range(5))

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ids) == 30
        assert len(set(map(str, ids))) == 1
        assert captured(engine) == [1, 2]


@pytest.mark.parametrize("engine", WITH_ROW_LOCKS, indirect=True)
def test_a_job_with_the_key_begins_after_the_commit(engine: Engine) -> None:
    """Otherwise its handler could read the state before the change that the second put reports."""
    (first,) = put(engine, 1, unique="a")
    with engine.connect() as putting:
        assert putting.scalar(queue.put(2, unique="a")) == first
        assert captured(engine) == []
        putting.commit()
    assert captured(engine) == [1]


@pytest.mark.parametrize("engine", WITH_ROW_LOCKS, indirect=True)
@pytest.mark.parametrize("commits", [True, False])
def test_a_put_waits_for_a_capture_of_its_key(engine: Engine, commits: bool) -> None:
    """A job that may have begun doesn't replace a new one."""
    (first,) = put(engine, 1, unique="a")
    ids: list[Any] = []
    with engine.connect() as capturing:
        assert len(capturing.execute(queue.capture()).all()) == 1
        with pytest.raises(sl.LockTimeout):
            one(engine, queue.put(2, unique="a").execution_options(locks_wait=0.05))
        thread = threading.Thread(target=lambda: ids.append(one(engine, queue.put(2, unique="a"))))
        thread.start()
        capturing.commit() if commits else capturing.rollback()
        thread.join(PATIENCE)
    assert (ids == [first]) is not commits
    assert captured(engine) == [2 if commits else 1]


@pytest.mark.parametrize("engine", WITH_ROW_LOCKS, indirect=True)
def test_a_put_waits_for_no_job_with_another_key(engine: Engine) -> None:
    put(engine, *range(3), unique=["a", "b", "c"])
    with engine.connect() as capturing:
        assert len(capturing.execute(queue.capture(2)).all()) == 2
        assert len(one(engine, queue.put(4, 5, unique=["c", "d"]).execution_options(locks_wait=0.05)).hex) == 32
        capturing.rollback()
    assert len(captured(engine)) == 4


def test_each_of_many_jobs_has_its_own_key(kind: Engine) -> None:
    keys = [str(number) for number in range(12_000)]
    with kind.connect() as connection:
        ids = connection.execute(queue.put(*keys, unique=keys)).scalars().all()
        again = connection.execute(queue.put("new", *keys[::-2], unique=["new", *keys[::-2]])).scalars().all()
        connection.rollback()
    assert len(set(ids)) == 12_000
    assert again[1:] == ids[::-2]


@pytest.mark.parametrize("name", ["mysql", "mariadb", "sqlite"])
def test_unique_keys_are_refused_in_autocommit(engine_to: MakeEngine, name: str) -> None:
    with engine_to(name, isolation_level="AUTOCOMMIT").connect() as connection:
        with pytest.raises(sl.Unsupported, match=r"unique=\) .* autocommit"):
            connection.execute(queue.put(1, unique="a"))


@pytest.mark.parametrize("name", ["mysql", "mariadb", "sqlite", "postgresql15"])
def test_several_jobs_are_put_together_or_not_at_all_in_autocommit(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name)
    with engine_to(name, isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(queue.put(0))
        if name == "postgresql15":
            connection.execute(queue.put(1, 2))
        else:
            with pytest.raises(sl.Unsupported, match="several jobs on .* in autocommit"):
                connection.execute(queue.put(1, 2))
    assert len(captured(engine)) == (3 if name == "postgresql15" else 1)


def test_a_repeated_put_returns_the_same_ids(kind: Engine) -> None:
    """A retry after a lost reply, when the job was captured meanwhile, puts no second one."""
    again = queue.put(1, unique="a").execution_options(locks_nonce=uuid4().hex)
    first = one(kind, again)
    assert one(kind, again) == first
    if kind.dialect.name != "sqlite":  # a connection that loses no reply
        assert captured(kind) == [1]
        assert one(kind, again) == first
        assert captured(kind) == []


class Base(DeclarativeBase):
    pass


class Mail(JobColumns, Base):
    __tablename__ = "mail_control"
    version: Mapped[int] = mapped_column(default=1)
    __mapper_args__ = {"version_id_col": version}


class Bare(JobColumns, Base):
    """With a column for keys, and without its index."""

    __tablename__ = "bare"


mails = sl.Queue(Mail)
mails.indexes()
without_key = Table(
    "without_key", MetaData(), *(column._copy() for column in Bare.__table__.columns if column.name != "unique_key")
)


@pytest.mark.parametrize("name", KINDS)
def test_a_table_of_ones_own(servers: Servers, name: str) -> None:
    """And a put into it that is repeated after a lost reply, when the jobs were captured meanwhile."""
    engine = create_engine(servers.fresh(name, PLAIN[name]), poolclass=NullPool)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        id = session.scalar(mails.put(1, unique="a", run_in=60))
        assert session.scalar(mails.put(2, unique="a")) == id
        job = session.scalar(mails.get(id))
        assert type(job) is Mail
        assert session.scalar(mails.reschedule(id, run_in=0))
        with session.begin_nested() as savepoint:
            assert session.scalar(mails.cancel(id))
            assert (job.error, job.unique_key) == ("cancelled", None)
            savepoint.rollback()
        assert (job.error, job.unique_key, job.version) == (None, "a", 2)
        assert session.scalars(mails.capture()).all() == [job]
        assert (job.unique_key, job.version) == (None, 3)
        session.commit()
    with pytest.raises(ValueError, match="only queues of the shipped table"):
        mails.pause("default")
    again = mails.put(1, 2, unique=["b", "c"]).execution_options(locks_nonce=uuid4().hex)
    id = one(engine, again)
    assert one(engine, again) == id
    if name != "sqlite":  # a connection that loses no reply
        for number in (2, 0):
            with engine.begin() as connection:
                assert len(connection.execute(mails.capture(9)).all()) == number
            assert one(engine, again) == id
    engine.dispose()


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: queue.get("x"), ValueError, "is a UUID"),
        (lambda: queue.cancel(1), TypeError, "is a UUID"),
        (lambda: queue.reschedule(uuid4()), ValueError, "run_at or run_in"),
        (lambda: queue.reschedule(uuid4(), run_in=1, run_at=datetime.now(timezone.utc)), ValueError, "not both"),
        (lambda: queue.reschedule(uuid4(), run_at=datetime(2020, 1, 1)), ValueError, "time zone"),
        (lambda: queue.pause(), ValueError, "at least one"),
        (lambda: queue.pause(1), TypeError, "a queue"),
        (lambda: queue.resume(""), ValueError, "a queue"),
        (lambda: queue.put(1, unique=""), ValueError, "a unique key"),
        (lambda: queue.put(1, unique="a" * 256), ValueError, "a unique key"),
        (lambda: queue.put(1, unique=7), TypeError, "unique key"),
        (lambda: queue.put(1, unique=[7]), TypeError, "unique key"),
        (lambda: queue.put(1, 2, unique="a"), ValueError, "2 payloads need 2 unique keys"),
        (lambda: queue.put(1, 2, unique=["a", "a"]), ValueError, "the same unique key"),
        (lambda: queue.put(1, unique="a", external_id=uuid4()), ValueError, "not both"),
        (lambda: sl.Queue(without_key).put(1, unique="a"), ValueError, "needs a column unique_key in without_key"),
        (lambda: sl.Queue(Bare).put(1, unique="a"), ValueError, "needs a unique index on bare.queue_id, bare.unique"),
    ],
)
def test_bad_input_is_refused_before_any_sql(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()

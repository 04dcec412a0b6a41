"""What a hostile reader found in the queue: each of these was wrong once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import BigInteger, Connection, Engine, String, create_engine, literal_column, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.sql.clock import Ago, Instant
from tests.conftest import PLAIN, Servers
from tests.fixtures.parties import PATIENCE, async_connected
from tests.fixtures.queues import ENGINES, MakeEngine, silenced
from tests.queue.test_queue import job_table, put, queue, scalar, take


def soon(connection: Connection) -> None:
    """Let a wait for somebody's lock end as an error."""
    innodb = connection.dialect.name in ("mysql", "mariadb")
    connection.execute(text("SET innodb_lock_wait_timeout = 1" if innodb else "SET LOCAL lock_timeout = '1s'"))


def test_a_heartbeat_waits_for_no_handler(leveled: Engine) -> None:
    put(leveled, *range(3))
    mine = take(leveled, 3)
    with leveled.connect() as handler, leveled.connect() as worker:
        assert handler.execute(queue.complete(mine[1])).scalar() == 1  # in the transaction of its work
        soon(worker)
        assert worker.execute(queue.heartbeat(mine)).scalar() == 3
        worker.commit()
        handler.commit()
    assert scalar(leveled, queue.heartbeat(mine)) == 2
    assert scalar(leveled, queue.heartbeat([])) == 0
    assert scalar(leveled, queue.complete(mine)) == 2
    assert scalar(leveled, queue.heartbeat(mine)) == 0


def test_a_heartbeat_is_heard(engine: Engine) -> None:
    put(engine, 1, 2)
    mine = take(engine, 2)
    with engine.begin() as connection:
        table = job_table(connection)
        connection.execute(table.update().values(heartbeat_at=mine[0].created_at.replace(year=2020)))
    assert scalar(engine, queue.heartbeat(mine[0])) == 1
    assert scalar(engine, queue.requeue_stalled(300)) == 1
    assert scalar(engine, queue.heartbeat(mine)) == 1


def test_a_sweep_of_one_queue(engine: Engine) -> None:
    put(engine, 1, 2, queue="slow")
    put(engine, 3, queue="fast")
    take(engine, 2, "slow")
    take(engine, 1, "fast")
    with engine.begin() as connection:
        silenced(connection)
    assert scalar(engine, queue.requeue_stalled(0, queue="fast")) == 1
    assert scalar(engine, queue.requeue_stalled(0, queue="fast")) == 0
    assert scalar(engine, queue.requeue_stalled(0, queue="slow")) == 2
    with pytest.raises(ValueError, match="queue"):
        queue.requeue_stalled(0, queue="")


class Base(DeclarativeBase):
    pass


class Letter(sl.JobColumns, Base):
    """One of whose attributes isn't named like its column."""

    __tablename__ = "letter"
    claim: Mapped[int] = mapped_column("claims", BigInteger(), default=0, server_default=text("0"))


class Chore(Base):
    __tablename__ = "chore"
    name: Mapped[str] = mapped_column(String(20), primary_key=True)
    status: Mapped[str] = mapped_column(String(20), default="new")
    claim: Mapped[int] = mapped_column(default=0)
    timeout: Mapped[int | None] = mapped_column(BigInteger())
    since: Mapped[datetime | None] = mapped_column(Instant())


class Slot(Base):
    __tablename__ = "slot"
    hall: Mapped[str] = mapped_column(String(5), primary_key=True)
    number: Mapped[int] = mapped_column("no", primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(String(5), default="free")


letters = sl.Queue(Letter)
chores = sl.StateTransition(
    Chore,
    id=Chore.name,
    status=Chore.status,
    ready=("new", "late"),
    timed_out="late",
    claim=Chore.claim,
    timeout=Chore.timeout,
    updated_at=Chore.since,
)


@pytest.fixture(params=ENGINES)
def own(servers: Servers, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = create_engine(servers.fresh(request.param, PLAIN[request.param]), poolclass=NullPool)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def test_an_entity_proves_what_it_was_captured_with(own: Engine) -> None:
    with Session(own) as first, Session(own) as second:
        first.execute(letters.put("x"))
        first.commit()
        lost = first.scalars(letters.capture()).one()
        first.commit()
        silenced(second.connection(), table=Letter.__table__)
        assert second.scalar(letters.requeue_stalled(0)) == 1
        mine = second.scalars(letters.capture()).one()
        second.commit()
        assert lost.claim == mine.claim == 2  # read anew: it is the other's
        first.rollback()
        assert [first.scalar(letters.heartbeat(lost)), first.scalar(letters.complete([lost]))] == [0, 0]
        assert first.scalar(letters.fail(lost, error="x")) == 0
        first.rollback()
        with pytest.raises(ValueError, match="was not captured"):
            letters.complete(Letter())
        assert second.scalar(letters.complete(mine)) == 1
        second.commit()


@pytest.mark.parametrize(("name", "driver"), [("postgresql15", "asyncpg"), ("mysql", "aiomysql")])
def test_an_entity_of_an_async_session_proves_it_after_a_commit(servers: Servers, name: str, driver: str) -> None:
    database = servers.database(name)
    plain = create_engine(servers.url(name, PLAIN[name], database), poolclass=NullPool)
    Base.metadata.create_all(plain)

    async def work() -> list[Any]:
        async with (
            async_connected(servers.url(name, driver, database), poolclass=NullPool) as engine,
            AsyncSession(engine) as session,
        ):
            await session.execute(letters.put(1, 2))
            jobs = (await session.scalars(letters.capture(2))).all()
            await session.commit()
            told = [await session.scalar(letters.heartbeat(jobs)), await session.scalar(letters.complete(jobs[0]))]
            told.append(await session.scalar(letters.complete(jobs)))
            await session.commit()
            return told

    assert asyncio.run(work()) == [2, 1, 1]


def test_what_was_loaded_was_not_captured(own: Engine) -> None:
    with Session(own) as session:
        session.execute(letters.put("x"))
        session.execute(letters.capture()).all()
        session.commit()
    with Session(own) as session:
        with pytest.raises(ValueError, match="was not captured"):
            letters.complete(session.scalars(select(Letter)).one())


def test_rows_of_a_class_whose_attributes_have_other_names(own: Engine) -> None:
    with own.begin() as connection:
        connection.execute(letters.put(1, 2, 3))
        jobs = connection.execute(letters.capture(3)).all()
        assert connection.execute(letters.complete(jobs[0])).scalar() == 1
        assert connection.execute(letters.complete([jobs[1]._mapping, jobs[2]])).scalar() == 2
    with Session(own) as session:
        session.execute(letters.put(4, 5))
        rows = session.execute(letters.capture(2)).all()  # an entity in each
        assert session.scalar(letters.heartbeat(rows[0])) == 1
        assert session.scalar(letters.complete(rows)) == 2


def test_a_captured_task_proves_its_claim(own: Engine) -> None:
    with Session(own) as first, Session(own) as second:
        first.add(Chore(name="a"))
        first.commit()
        lost = first.scalars(chores.capture()).one()
        first.commit()
        assert second.scalar(chores.set_status("a", "new", force=True)) is True
        mine = second.scalars(chores.capture()).one()
        second.commit()
        assert lost.claim == 2
        first.rollback()
        assert first.scalar(chores.set_status("a", "done", claim=lost)) is False
        assert first.scalar(chores.set_status(lost, "done")) is False
        assert first.scalar(chores.set_status(lost, "done", force=True)) is False
        first.rollback()
        assert second.scalar(chores.set_status("a", "done", claim=mine)) is True
        second.rollback()
        assert second.scalar(chores.set_status(mine, "done")) is True
        second.commit()
        assert mine.status == "done"
    with Session(own) as session, pytest.raises(ValueError, match="was not captured"):
        chores.set_status("a", "done", claim=session.get_one(Chore, "a"))
    with Session(own) as session, pytest.raises(ValueError, match="was not captured"):
        chores.set_status(session.get_one(Chore, "a"), "done")


def test_what_was_captured_is_the_task_that_is_meant(own: Engine) -> None:
    """An entity, a row that has one, a row of a connection or of a ``Table``; with queues and without a claim."""
    slots = sl.StateTransition(
        Slot, id=Slot.number, queue=Slot.hall, status=Slot.status, ready="free", captured="taken"
    )
    table = Slot.__table__
    rows = sl.StateTransition(table, id="no", queue="hall", status="status", ready="free", captured="taken")
    with Session(own) as session:
        session.add_all(Slot(hall=hall, number=number) for hall in "ab" for number in range(1, 7))
        session.commit()
        for number, pattern in enumerate((slots, slots, rows, slots), 1):
            found = session.execute(pattern.capture(1, queue="b"))
            (captured,) = found.scalars() if number == 1 else found
            if number < 4:
                assert session.scalar(pattern.set_status(captured, "used")) is True
        with pytest.raises(ValueError, match="leave out queue="):
            slots.set_status(captured, "used", queue="b")
        with pytest.raises(ValueError, match="was not captured"):
            chores.set_status(captured, "done")
        with pytest.raises(TypeError, match="no row of a captured task"):
            rows.set_status(session.execute(select(table.c.no, table.c.status)).first(), "used")
        assert session.scalar(slots.set_status(captured, "used")) is True
        session.commit()
    with own.begin() as connection:
        (captured,) = connection.execute(slots.capture(1, queue="b"))
        assert connection.scalar(slots.set_status(captured, "used")) is True
        used = select(Slot.hall, Slot.number).where(Slot.status == "used").order_by(Slot.number)
        assert connection.execute(used).all() == [("b", number) for number in range(1, 6)]


def test_a_timeout_without_end_keeps_no_other_from_its_own(own: Engine) -> None:
    with Session(own) as session:
        session.add_all([Chore(name="a", timeout=2**62), Chore(name="b", timeout=0)])
        session.commit()
        assert len(session.scalars(chores.capture(2)).all()) == 2
        session.execute(update(Chore).values(since=Ago(literal_column("5"))))
        session.commit()
        assert session.scalar(chores.expire()) == 1
        session.commit()
        assert session.get_one(Chore, "b").status == "late"
    with pytest.raises(ValueError, match="a hundred years"):
        sl.StateTransition().create("a", timeout=10**12)


@pytest.mark.parametrize("name", ["postgresql15", "yugabytedb"])
def test_a_timestamp_without_time_zone_is_refused(servers: Servers, name: str) -> None:
    class Other(DeclarativeBase):
        pass

    class Zoneless(sl.JobColumns, Other):
        __tablename__ = "zoneless"
        heartbeat_at: Mapped[datetime | None] = mapped_column()

    class Task(Other):
        __tablename__ = "zoneless_task"
        name: Mapped[str] = mapped_column(String(20), primary_key=True)
        status: Mapped[str]
        at: Mapped[datetime | None]

    tasks = sl.StateTransition(Task, id=Task.name, status=Task.status, updated_at=Task.at)
    engine = create_engine(servers.url(name, PLAIN[name], servers.database(name)), poolclass=NullPool)
    for operation in (sl.Queue(Zoneless).capture(), sl.Queue(Zoneless).put(1), tasks.capture()):
        with engine.connect() as connection, pytest.raises(sl.Unsupported, match="must be DateTime"):
            connection.execute(operation)
    assert "zoneless" in str(sl.Queue(Zoneless).capture().compile(create_engine("sqlite://")))


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_a_capture_holds_no_job_that_it_does_not_take(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name, isolation_level="READ COMMITTED")
    put(engine, *range(20), priority=-1, run_in=3600)
    (due,) = put(engine, "due")
    with engine.connect() as worker, engine.begin() as other:
        assert [job.external_id for job in worker.execute(queue.capture())] == [due]
        table = job_table(other)
        scheduled = select(table.c.internal_id).where(table.c.priority == -1).with_for_update(skip_locked=True)
        assert len(other.execute(scheduled).all()) == 20


def test_two_batches_with_the_same_ids(leveled: Engine) -> None:
    """In opposite orders: whoever is second waits for the first, and neither for the other."""
    for round in range(10):
        ids = [uuid4() for _ in range(30)]
        start = threading.Barrier(2, timeout=PATIENCE)
        errors: list[Exception] = []

        def work(ids: list[UUID], start: threading.Barrier = start, errors: list[Exception] = errors) -> None:
            start.wait()
            try:
                assert put(leveled, *ids_of(ids), external_id=ids) == ids
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(batch,)) for batch in (ids, ids[::-1])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == [], round
        assert len(take(leveled, 99)) == 30


def ids_of(ids: list[UUID]) -> list[str]:
    return [str(id) for id in ids]


@pytest.mark.parametrize(
    ("made", "error", "sentence"),
    [
        (lambda: queue.put(1, 2, external_id=[UUID(int=1), str(UUID(int=1))]), ValueError, "the same external_id"),
        (lambda: queue.put(1, run_in=float("inf")), ValueError, "a hundred years"),
        (lambda: queue.put(1, run_in=1e12), ValueError, "a hundred years"),
        (lambda: queue.put(1, max_attempts=2**40), ValueError, "32 bits"),
        (lambda: queue.fail((1, 1), error="x", retry_in=1e12), ValueError, "a hundred years"),
        (lambda: queue.requeue_stalled(1e12), ValueError, "a hundred years"),
        (lambda: queue.delete_finished(float("inf")), ValueError, "a hundred years"),
        (lambda: queue.capture(2**70), ValueError, "32 bits"),
        (lambda: queue.complete(42), TypeError, "42 is not a captured job"),
        (lambda: queue.complete(None), TypeError, "None is not a captured job"),
        (lambda: queue.complete([42]), TypeError, "42 is not a captured job"),
    ],
)
def test_what_no_engine_can_do_is_refused_before_any_sql(made: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        made()

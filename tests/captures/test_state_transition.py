"""State transitions: captured by one owner, which sets the next status, on the shipped table and on models."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import (
    BigInteger,
    Engine,
    Enum,
    Integer,
    String,
    TypeDecorator,
    create_engine,
    literal_column,
    select,
    update,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.sql.clock import Instant, SecondsAgo
from tests.conftest import PLAIN, Servers
from tests.fixtures.queues import KINDS, engine, engine_to, leveled

__all__ = ["engine", "engine_to", "leveled"]

tasks = sl.StateTransition()


def scalar(engine: Engine, operation: Any) -> Any:
    with engine.begin() as connection:
        return connection.execute(operation).scalar()


def capture(engine: Engine, limit: int, **options: Any) -> list[Any]:
    with engine.begin() as connection:
        return list(connection.execute(tasks.capture(limit, **options)))


def task_table(engine: Engine) -> Any:
    with engine.connect() as connection:
        return build_context(connection.dialect, {}).tables.task


def status(engine: Engine, id: str) -> str:
    table = task_table(engine)
    with engine.connect() as connection:
        return str(connection.scalar(select(table.c.status).where(table.c.id == id)))


def test_create_capture_and_set_status(engine: Engine) -> None:
    assert scalar(engine, tasks.create("task_a", "task_b", "task_c")) == 3
    assert scalar(engine, tasks.create("task_c", "task_d")) == 1
    mine = capture(engine, 3)
    assert [(task.id, task.status) for task in mine] == [
        ("task_a", "in_progress"),
        ("task_b", "in_progress"),
        ("task_c", "in_progress"),
    ]
    assert [task.id for task in capture(engine, 3)] == ["task_d"]
    assert capture(engine, 3) == []
    assert scalar(engine, tasks.set_status("task_b", "failed")) is True
    assert scalar(engine, tasks.set_status("task_a", "done")) is True
    assert scalar(engine, tasks.set_status("task_a", "done")) is False
    assert [task.id for task in capture(engine, 3)] == ["task_a", "task_b"]


def test_captures_skip_each_others_tasks(leveled: Engine) -> None:
    """The status is indexed, and InnoDB's locking searches above READ COMMITTED lock gaps of that index."""
    ids = [f"t{n:02}" for n in range(20)]
    scalar(leveled, tasks.create(*ids))
    for id in ids[::3]:
        scalar(leveled, tasks.set_status(id, "failed", force=True))
    with leveled.connect() as first, leveled.connect() as second, leveled.connect() as third:
        taken = [
            [task.id for task in connection.execute(tasks.capture(limit))]
            for connection, limit in ((first, 3), (second, 4), (third, 99))
        ]
        assert taken == [ids[:3], ids[3:7], ids[7:]]
        first.rollback()
        second.commit()
        third.rollback()
    assert [task.id for task in capture(leveled, 4)] == [*ids[:3], ids[7]]


def test_each_queue_has_its_own_tasks(engine: Engine) -> None:
    assert scalar(engine, tasks.create("a", queue="x")) == 1
    assert scalar(engine, tasks.create("a", "b", queue="y")) == 2
    assert [(task.queue_id, task.id) for task in capture(engine, 9, queue="x")] == [("x", "a")]
    assert scalar(engine, tasks.set_status("a", "done", queue="y")) is False
    assert len(capture(engine, 9, queue="y")) == 2
    assert capture(engine, 9) == []


def test_each_capture_spends_a_retry(engine: Engine) -> None:
    scalar(engine, tasks.create("a", retries=2))
    scalar(engine, tasks.create("b"))
    for left in (1, 0):
        a, b = capture(engine, 9)
        assert (a.retries_left, b.retries_left) == (left, None)
        for id in "ab":
            assert scalar(engine, tasks.set_status(id, "failed"))
    assert [task.id for task in capture(engine, 9)] == ["b"]
    assert scalar(engine, tasks.set_retries("a", 1)) is True
    assert [task.id for task in capture(engine, 9)] == ["a"]


def test_set_status_compares_the_claim(engine: Engine) -> None:
    scalar(engine, tasks.create("a"))
    (lost,) = capture(engine, 1)
    scalar(engine, tasks.set_status("a", "failed", force=True))
    (mine,) = capture(engine, 1)
    assert lost.claim != mine.claim
    assert scalar(engine, tasks.set_status("a", "done", claim=lost.claim)) is False
    assert scalar(engine, tasks.set_status("a", "done", claim=lost.claim, force=True)) is False
    assert scalar(engine, tasks.set_status(lost, "done")) is False
    assert scalar(engine, tasks.set_status(lost, "done", force=True)) is False
    assert scalar(engine, tasks.set_status("a", "done", claim=mine.claim)) is True
    assert scalar(engine, tasks.set_status(mine, "failed", force=True)) is True
    (again,) = capture(engine, 1)
    assert scalar(engine, tasks.set_status(again, "done")) is True


def test_expire_moves_tasks_to_timeout(engine: Engine) -> None:
    scalar(engine, tasks.create("fast", timeout=3600))
    scalar(engine, tasks.create("slow", timeout=86400))
    scalar(engine, tasks.create("endless"))
    assert len(capture(engine, 9)) == 3
    assert scalar(engine, tasks.expire()) == 0
    table = task_table(engine)
    with engine.begin() as connection:
        connection.execute(update(table).values(updated_at=datetime.now(timezone.utc) - timedelta(hours=2)))
    assert scalar(engine, tasks.expire()) == 1
    assert status(engine, "fast") == "timeout"
    assert scalar(engine, tasks.set_status("fast", "done")) is False
    assert capture(engine, 9) == []
    patient = sl.StateTransition(ready=("done", "failed", "timeout"))
    with engine.begin() as connection:
        assert [task.id for task in connection.execute(patient.capture(9))] == ["fast"]


def test_unknown_tasks_raise(engine: Engine) -> None:
    with pytest.raises(sl.UnknownTask, match="no 'nothing' in the queue 'default'"):
        scalar(engine, tasks.set_status("nothing", "done"))
    with pytest.raises(sl.UnknownTask):
        scalar(engine, tasks.set_retries("nothing", 1))


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: tasks.create(), ValueError, "at least one id"),
        (lambda: tasks.create(""), ValueError, "must not be empty"),
        (lambda: tasks.create("a", retries=True), TypeError, "retries"),
        (lambda: tasks.create("a", timeout="5m"), TypeError, "seconds"),
        (lambda: tasks.create("a", timeout=1.5), ValueError, "whole seconds"),
        (lambda: tasks.capture(0), ValueError, "is from 1 to"),
        (lambda: tasks.capture(1, queue="a "), ValueError, "ends with a space"),
        (lambda: tasks.set_status("a", ""), ValueError, "must not be empty"),
        (lambda: tasks.set_status("a", "x" * 65), ValueError, "64 characters"),
        (lambda: tasks.set_status("a", None), TypeError, "can't be None"),
        (lambda: tasks.set_status("a", "x", claim="1"), TypeError, "claim is an int"),
        (lambda: tasks.expire(limit=0), ValueError, "is from 1 to"),
        (lambda: sl.StateTransition(ready=()), ValueError, "at least one status"),
        (lambda: sl.StateTransition(ready="in_progress"), ValueError, "captured in another"),
        (lambda: sl.StateTransition(Own), TypeError, "needs id= and status="),
        (lambda: sl.StateTransition(Own, id=Own.name, status=Own.state).expire(), ValueError, "timeout="),
        (lambda: sl.StateTransition(Own, id=Own.name, status=Own.state).capture(1, queue="a"), ValueError, "queue="),
        (
            lambda: sl.StateTransition(Own, id=Own.name, status=Own.state).set_status("a", 1, claim=1),
            ValueError,
            "claim=",
        ),
    ],
)
def test_bad_input_is_refused_before_any_sql(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()


class State(enum.Enum):
    NEW = 1
    BUSY = 2
    DONE = 3
    LATE = 4


class Numbered(TypeDecorator[State]):
    """A status that is stored as a number."""

    impl = Integer
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        return None if value is None else value.value * 10

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return None if value is None else State(value // 10)


class Base(DeclarativeBase):
    pass


class Own(Base):
    __tablename__ = "own_task"
    pk: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(20), unique=True)
    state: Mapped[State] = mapped_column(Enum(State, name="own_state"), default=State.NEW)
    coded: Mapped[State] = mapped_column(Numbered(), default=State.NEW)
    plain: Mapped[int] = mapped_column(default=0)
    rank: Mapped[int] = mapped_column(default=0)
    claim: Mapped[int | None]
    changed: Mapped[datetime | None] = mapped_column(Instant())
    limit: Mapped[int | None]
    version: Mapped[int] = mapped_column(default=1)
    __mapper_args__ = {"version_id_col": version}


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


@pytest.fixture(params=KINDS)
def own(servers: Servers, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = create_engine(servers.fresh(request.param, PLAIN[request.param]), poolclass=NullPool)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


KINDS_OF_STATUS = {
    "state": (State.NEW, State.BUSY, State.LATE, State.DONE),
    "coded": (State.NEW, State.BUSY, State.LATE, State.DONE),
    "plain": (0, 1, 2, 3),
}


@pytest.mark.parametrize("column", KINDS_OF_STATUS)
def test_a_status_of_any_type(own: Engine, column: str) -> None:
    new, busy, late, done = KINDS_OF_STATUS[column]
    status = getattr(Own, column)
    states = sl.StateTransition(
        Own,
        id=Own.name,
        status=status,
        ready=(new, late),
        captured=busy,
        timed_out=late,
        order_by=(Own.rank.desc(), Own.name),
        claim=Own.claim,
        updated_at=Own.changed,
        timeout=Own.limit,
    )
    with Session(own) as session:
        session.add_all(Own(name=name, rank=rank) for rank, name in enumerate("abcdef"))
        session.commit()
        a = session.scalars(select(Own).where(Own.name == "f")).one()
        session.commit()
        mine = session.scalars(states.capture(2)).all()
        assert mine[0] is a
        assert [(each.name, getattr(each, column), each.version) for each in mine] == [("f", busy, 2), ("e", busy, 2)]
        claim = mine[0].claim
        session.commit()
        assert session.scalar(states.set_status("f", done, claim=claim)) is True
        assert (getattr(a, column), a.version) == (done, 3)
        assert session.scalar(states.set_status("f", done, claim=claim)) is False
        session.commit()
        session.execute(update(Own).where(Own.name == "e").values({"limit": -1}))
        session.commit()
        assert session.scalar(states.expire()) == 1
        session.commit()
        assert [each.name for each in session.scalars(states.capture(3))] == ["e", "d", "c"]
        session.commit()
        assert session.scalar(states.create("new", "f")) == 1
        session.commit()
        assert [each.name for each in session.scalars(states.capture(9))] == ["b", "a", "new"]
        session.commit()


def test_a_captured_entity_proves_its_claim(own: Engine) -> None:
    with Session(own) as first, Session(own) as second:
        first.add(Chore(name="a"))
        first.commit()
        lost = first.scalars(chores.capture()).one()
        first.commit()
        assert second.scalar(chores.set_status("a", "new", force=True)) is True
        mine = second.scalars(chores.capture()).one()
        second.commit()
        assert lost.claim == mine.claim  # refreshed
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


def test_set_status_takes_entities_and_rows(own: Engine) -> None:
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


def test_absurd_timeouts_of_a_model_do_not_stop_expire(own: Engine) -> None:
    with Session(own) as session:
        session.add_all([Chore(name="a", timeout=2**62), Chore(name="b", timeout=0)])
        session.commit()
        assert len(session.scalars(chores.capture(2)).all()) == 2
        session.execute(update(Chore).values(since=SecondsAgo(literal_column("5"))))
        session.commit()
        assert session.scalar(chores.expire()) == 1
        session.commit()
        assert session.get_one(Chore, "b").status == "late"
    with pytest.raises(ValueError, match="a hundred years"):
        sl.StateTransition().create("a", timeout=10**12)

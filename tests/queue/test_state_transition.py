"""State transitions: captured by one, given back by who has it, on the shipped table and on models."""

from __future__ import annotations

import enum
import threading
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import Engine, Enum, Integer, String, TypeDecorator, create_engine, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.sql.clock import Instant
from tests.conftest import PLAIN, Servers
from tests.fixtures.parties import PATIENCE
from tests.fixtures.queues import ENGINES, MakeEngine

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


def test_the_pattern(engine: Engine) -> None:
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


def test_two_take_different_tasks_and_neither_waits(leveled: Engine) -> None:
    """The status is in an index here, whose gaps InnoDB locks above READ COMMITTED for who searches with locks."""
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


def test_many_at_once(leveled: Engine) -> None:
    ids = [f"t{n:03}" for n in range(120)]
    scalar(leveled, tasks.create(*ids))
    taken: list[str] = []
    start = threading.Barrier(5, timeout=PATIENCE)

    def work() -> None:
        start.wait()
        while mine := once():
            taken.extend(task.id for task in mine)

    def once() -> list[Any]:
        for _ in range(100):
            try:
                return capture(leveled, 4)
            except Exception as error:
                if getattr(error, "orig", None) is None or error.orig.args[0] not in (1213, 1020):
                    raise
        raise AssertionError("a hundred times in a row")

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # a snapshot may have missed what another had captured and rolled back
    taken += [task.id for task in capture(leveled, 200)]
    assert sorted(taken) == ids


def test_queues(engine: Engine) -> None:
    assert scalar(engine, tasks.create("a", queue="x")) == 1
    assert scalar(engine, tasks.create("a", "b", queue="y")) == 2
    assert [(task.queue_id, task.id) for task in capture(engine, 9, queue="x")] == [("x", "a")]
    assert scalar(engine, tasks.set_status("a", "done", queue="y")) is False
    assert len(capture(engine, 9, queue="y")) == 2
    assert capture(engine, 9) == []


def test_retries(engine: Engine) -> None:
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


def test_a_claim_is_the_owners_proof(engine: Engine) -> None:
    scalar(engine, tasks.create("a"))
    (lost,) = capture(engine, 1)
    scalar(engine, tasks.set_status("a", "failed", force=True))
    (mine,) = capture(engine, 1)
    assert (lost.claim, mine.claim) == (1, 2)
    assert scalar(engine, tasks.set_status("a", "done", claim=lost.claim)) is False
    assert scalar(engine, tasks.set_status("a", "done", claim=lost.claim, force=True)) is False
    assert scalar(engine, tasks.set_status(lost, "done")) is False
    assert scalar(engine, tasks.set_status(lost, "done", force=True)) is False
    assert scalar(engine, tasks.set_status("a", "done", claim=mine.claim)) is True
    assert scalar(engine, tasks.set_status(mine, "failed", force=True)) is True
    (again,) = capture(engine, 1)
    assert scalar(engine, tasks.set_status(again, "done")) is True


def test_expire(engine: Engine) -> None:
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


def test_unknown(engine: Engine) -> None:
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
        (lambda: tasks.capture(0), ValueError, "at least 1"),
        (lambda: tasks.capture(1, queue="a "), ValueError, "ends with a space"),
        (lambda: tasks.set_status("a", ""), ValueError, "must not be empty"),
        (lambda: tasks.set_status("a", "x" * 65), ValueError, "64 characters"),
        (lambda: tasks.set_status("a", None), TypeError, "can't be None"),
        (lambda: tasks.set_status("a", "x", claim="1"), TypeError, "claim is an int"),
        (lambda: tasks.expire(limit=0), ValueError, "at least 1"),
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
    """A status that only Python gives a meaning."""

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


KINDS_OF_STATUS = {
    "state": (State.NEW, State.BUSY, State.LATE, State.DONE),
    "coded": (State.NEW, State.BUSY, State.LATE, State.DONE),
    "plain": (0, 1, 2, 3),
}


@pytest.mark.parametrize("column", KINDS_OF_STATUS)
@pytest.mark.parametrize("name", ENGINES)
def test_a_status_of_any_type(servers: Servers, name: str, column: str) -> None:
    new, busy, late, done = KINDS_OF_STATUS[column]
    status = getattr(Own, column)
    own = sl.StateTransition(
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
    engine = create_engine(servers.fresh(name, PLAIN[name]), poolclass=NullPool)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all(Own(name=name, rank=rank) for rank, name in enumerate("abcdef"))
        session.commit()
        a = session.scalars(select(Own).where(Own.name == "f")).one()
        session.commit()
        mine = session.scalars(own.capture(2)).all()
        assert mine[0] is a
        assert [(each.name, getattr(each, column), each.claim, each.version) for each in mine] == [
            ("f", busy, 1, 2),
            ("e", busy, 1, 2),
        ]
        session.commit()
        assert session.scalar(own.set_status("f", done, claim=1)) is True
        assert (getattr(a, column), a.version) == (done, 3)
        assert session.scalar(own.set_status("f", done, claim=1)) is False
        session.commit()
        session.execute(update(Own).where(Own.name == "e").values({"limit": -1}))
        session.commit()
        assert session.scalar(own.expire()) == 1
        session.commit()
        assert [each.name for each in session.scalars(own.capture(3))] == ["e", "d", "c"]
        session.commit()
        assert session.scalar(own.create("new", "f")) == 1
        session.commit()
        assert [each.name for each in session.scalars(own.capture(9))] == ["b", "a", "new"]
        session.commit()
    engine.dispose()


def test_a_task_that_is_held_is_not_captured(engine_to: MakeEngine) -> None:
    for name in ("postgresql15", "mysql", "mariadb"):
        engine = engine_to(name)
        scalar(engine, tasks.create("a", "b"))
        with engine.begin() as holder:
            assert holder.execute(tasks.set_status("a", "failed", force=True)).scalar() is True
            assert [task.id for task in capture(engine, 9)] == ["b"]

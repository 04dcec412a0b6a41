"""Operations and an app's events and flush settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, ORMExecuteState, Session, mapped_column

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ENGINES, seen, unused


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "note_for_events"
    id: Mapped[int] = mapped_column(primary_key=True)
    words: Mapped[str] = mapped_column(default="")


@pytest.fixture(params=["sqlite", "postgresql15"])
def engine(engine_to: MakeEngine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = engine_to(request.param)
    Base.metadata.create_all(engine)
    yield engine
    Base.metadata.drop_all(engine)


@pytest.mark.parametrize("name", ENGINES)
def test_the_engines_events_see_each_inner_statement(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name)
    constructs: list[Any] = []
    with engine.begin() as connection:
        connection.execute(sl.lock.exclusive(unused()))
    event.listen(engine, "before_execute", lambda connection, clause, *rest: constructs.append(clause))
    with engine.begin() as connection:
        connection.execute(sl.lock.exclusive(unused()))
    assert constructs
    assert not any(isinstance(construct, sl.Operation) for construct in constructs)


@pytest.mark.parametrize(
    "make", [lambda: sl.lock.exclusive(unused()), lambda: sl.lock.row(Note, 1)], ids=["key", "row"]
)
def test_the_sessions_event_sees_the_operation_once(engine: Engine, make: Any) -> None:
    with Session(engine) as session, session.begin():
        session.add(Note(id=1))
    states: list[ORMExecuteState] = []
    with Session(engine) as session:
        event.listen(session, "do_orm_execute", states.append)
        operation = make()
        session.execute(operation)
    (state,) = states
    assert state.statement is operation
    assert state.is_select is (operation.name == "lock.row")
    assert not state.is_update
    assert not state.is_relationship_load
    assert not state.is_column_load
    assert state.is_orm_statement


def test_a_session_is_flushed_before(engine: Engine) -> None:
    with Session(engine) as session:
        session.add(Note(id=2))
        with seen(engine) as statements:
            session.execute(sl.lock.exclusive(unused()))
        inserts = [n for n, statement in enumerate(statements) if statement.startswith("INSERT INTO note_for_events")]
        assert inserts == [0]
        assert len(statements) > 1


@pytest.mark.parametrize(
    "parameters", [{"lock_key": 1}, {"wait": 1}, [{"lock_key": 1}], [{"lock_key": 1}, {"lock_key": 2}]]
)
def test_parameters_are_refused(engine: Engine, parameters: Any) -> None:
    operation = sl.lock.exclusive(unused())
    with engine.connect() as connection, Session(connection) as session, seen(engine) as statements:
        for execute in (connection.execute, session.execute):
            with pytest.raises(TypeError, match="carries its own values"):
                execute(operation, parameters)
        assert statements == []


def test_the_session_continues_after_an_operation(engine: Engine) -> None:
    """An operation neither commits, nor rolls back, nor expires loaded objects."""
    with Session(engine) as session:
        session.add(Note(id=6, words="kept"))
        session.flush()
        note = session.get(Note, 6)
        transaction = session.get_transaction()
        for operation in (sl.lock.exclusive(unused()), sl.lock.unlock(unused()), sl.lock.vacuum(), sl.lock.create("a")):
            session.execute(operation)
        assert session.get_transaction() is transaction
        with seen(engine) as statements:
            assert note is not None
            assert note.words == "kept"
        assert statements == []
        session.rollback()
        assert session.scalar(select(func.count()).select_from(Note)) == 0

"""SQLAlchemy's events of ``held.session``: what follows a commit follows the COMMIT, not the flush before it."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Column, Engine, ForeignKey, Integer, MetaData, Table, event, func, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import sessionmaker

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import unused

NAMES = ["postgresql15", "mysql", "mariadb", "sqlite"]


def payments(engine: Engine) -> Table:
    """A table whose rows may refer to later ones, where the engine checks that at COMMIT."""
    metadata = MetaData()
    id_, of = Column("id", Integer, primary_key=True), Column("of", Integer, nullable=True)
    made = Table(f"payment_{unused('t').split()[-1]}", metadata, id_, of)
    if engine.dialect.name == "postgresql":
        of.append_foreign_key(ForeignKey(id_, deferrable=True, initially="DEFERRED"))
    metadata.create_all(engine)
    return made


def heard(sessions: Any, engine: Engine, table: Table) -> list[Any]:
    """Note the events, with the number of rows that other connections see."""
    told: list[Any] = []

    def listen(what: str) -> None:
        @event.listens_for(sessions, what)
        def _(*_: Any) -> None:
            seen: Any = None
            if what == "after_commit":
                with engine.connect() as other:
                    seen = other.scalar(select(func.count()).select_from(table))
            told.append((what, seen))

    for what in ("before_commit", "after_commit", "after_rollback"):
        listen(what)
    return told


@pytest.mark.parametrize("name", NAMES)
def test_after_commit_is_called_after_the_commit(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name)
    table, maker = payments(engine), sessionmaker(engine)
    told = heard(maker, engine, table)
    with sl.Locks(maker).exclusive(unused()) as held:
        held.session.execute(insert(table).values(id=1))
    assert told == [("before_commit", None), ("after_commit", 1)]
    told.clear()
    with pytest.raises(ZeroDivisionError), sl.Locks(maker).exclusive(unused()) as held:
        held.session.execute(insert(table).values(id=2))
        held.session.flush()
        raise ZeroDivisionError
    assert ("after_commit", 1) not in told


def test_after_commit_is_not_called_for_a_commit_that_fails(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15")
    table, maker = payments(engine), sessionmaker(engine)
    told = heard(maker, engine, table)
    with pytest.raises(IntegrityError), sl.Locks(maker).exclusive(unused()) as held:
        held.session.execute(insert(table).values(id=1, of=7))  # which is refused at COMMIT
    assert told == [("before_commit", None)]
    with sl.Locks(maker).exclusive(unused()) as held:
        assert held.session.scalar(select(func.count()).select_from(table)) == 0

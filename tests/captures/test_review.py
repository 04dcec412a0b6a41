"""What a hostile reader found in captures: each of these was wrong once."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Engine,
    Index,
    Integer,
    MetaData,
    Table,
    UniqueConstraint,
    create_engine,
    event,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.orm import Session, with_loader_criteria

import sqlalchemy_locks as sl
from tests.captures.conftest import MakeEngine
from tests.captures.test_capture import fill, orders, paid
from tests.fixtures.capture_models import Order

#: with an order that the UPDATE changes, a capture on SQLite is a search and an UPDATE
BY_STATUS = (Order.status, Order.id)


def shipping(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).where(Order.status == "shipping")).scalar_one()


def test_what_is_taken_is_given_whatever_the_session_shows(engine: Engine) -> None:
    """An app's criteria choose what is taken; they don't hide what it was changed into."""
    fill(engine, *orders(5))
    with Session(engine) as session:

        @event.listens_for(session, "do_orm_execute")
        def _paid_only(state: Any) -> None:
            state.statement = state.statement.options(with_loader_criteria(Order, Order.status == "paid"))

        taken = session.scalars(paid(2, where=Order.id > 1, order_by=BY_STATUS)).all()
        assert [order.id for order in taken] == [2, 3]
        session.commit()
    assert shipping(engine) == 2


def test_sqlite_in_autocommit_takes_nothing_in_steps(engine_to: MakeEngine) -> None:
    engine = engine_to("sqlite", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(insert(Order), [{"id": id, "status": "paid"} for id in range(1, 6)])
    with Session(engine) as session:
        with pytest.raises(sl.Unsupported, match="autocommit"):
            session.scalars(paid(2, order_by=BY_STATUS))
        # as one statement it is one act
        assert [order.id for order in session.scalars(paid(2))] == [1, 2]
    assert shipping(engine) == 2


def test_a_row_that_comes_up_twice_is_taken_once(engine_to: MakeEngine) -> None:
    """Where the search without locks is repeated with more rows, while others put rows before those it knows."""
    engine, other = (engine_to("mariadb", isolation_level="READ COMMITTED") for _ in range(2))
    fill(engine, *orders(8))
    looks: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def _before(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "ORDER BY" in statement:
            looks.append(statement)
            if len(looks) == 2:
                fill(other, *(Order(id=-id) for id in range(4)))

    with Session(other) as holder, Session(engine) as session:
        # all but the first and the last are somebody's, so that one search isn't enough
        holder.execute(select(Order.id).where(Order.id.between(2, 7)).with_for_update()).all()
        assert [order.id for order in session.scalars(paid(2))] == [-3, 1]
        assert len(looks) == 2
        session.rollback()


def test_a_key_that_changes_is_locked_as_one() -> None:
    """Others may refer to it by a foreign key, which the weaker row lock allows; the UPDATE would then wait."""
    table = Table(
        "keyed",
        MetaData(),
        *(Column(name, Integer, primary_key=name == "id") for name in ("id", "a", "b", "c", "d")),
        UniqueConstraint("a", "b"),
        Index("by_c", "c", unique=True),
        Index("by_d", "d", unique=True, postgresql_where=text("d > 0")),
    )
    dialect = create_engine("postgresql+psycopg://").dialect
    locks = {
        column: "FOR UPDATE SKIP"
        in str(sl.capture(table, where=table.c.id > 0, values={column: 1}).compile(dialect=dialect))
        for column in ("a", "b", "c", "d")
    }
    assert locks == {"a": True, "b": True, "c": True, "d": False}

"""lock.row as the ORM's own SELECT: loader options, criteria, identity, expiry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, inspect, update
from sqlalchemy.orm import ORMExecuteState, Session, defer, joinedload, load_only, selectinload, with_loader_criteria

import sqlalchemy_locks as sl
from tests.conftest import PLAIN
from tests.fixtures.library import Agent, Base, Customer, Order, fill
from tests.fixtures.parties import connected, seen


@pytest.fixture(scope="module", params=["postgresql15", "mysql", "mariadb", "sqlite"])
def database(servers: Any, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with connected(servers.fresh(request.param, PLAIN[request.param])) as engine:
        yield engine


@pytest.fixture
def engine(database: Engine) -> Engine:
    """With the rows in their initial state."""
    with database.begin() as connection:
        for table in reversed(Base.metadata.sorted_tables) if inspect(connection).has_table("customer") else ():
            connection.execute(table.delete())
        fill(connection)
    return database


def test_loader_options_of_the_caller(engine: Engine) -> None:
    with Session(engine) as session, seen(engine) as statements:
        customer = session.scalar(
            sl.lock.row(Customer, 1).options(selectinload(Customer.orders), joinedload(Customer.agent))
        )
        count = len(statements)
        assert [order.number for order in customer.orders] == ["a", "b", "c"]
        assert customer.agent.name == "Ada"
        assert len(statements) == count
    with Session(engine) as session:
        customer = session.scalar(sl.lock.row(Customer, 1).options(defer(Customer.name)))
        assert "name" in inspect(customer).unloaded
    with Session(engine) as session:
        customer = session.scalar(sl.lock.row(Customer, 1).options(load_only(Customer.id)))
        assert "name" in inspect(customer).unloaded
        assert session.scalar(sl.lock.row(Customer, 1)) is customer
        assert "name" not in inspect(customer).unloaded


def test_loader_criteria(engine: Engine) -> None:
    with Session(engine) as session:
        hidden = with_loader_criteria(Customer, Customer.name != "old")
        with pytest.raises(sl.UnknownRow):
            session.scalar(sl.lock.row(Customer, 1).options(hidden))
        assert session.scalar(sl.lock.row(Customer, 2).options(hidden)).name == "alone"
        some = with_loader_criteria(Order, Order.number != "b")
        customer = session.scalar(sl.lock.row(Customer, 1).options(some, selectinload(Customer.orders)))
        assert [order.number for order in customer.orders] == ["a", "c"]


def test_criteria_added_by_an_event(engine: Engine) -> None:
    """Such as soft deletion or tenants, by SQLAlchemy's documented recipe."""
    with Session(engine) as session:

        @event.listens_for(session, "do_orm_execute")
        def tenant(state: ORMExecuteState) -> None:
            if state.is_select and not state.is_column_load and not state.is_relationship_load:
                state.statement = state.statement.options(with_loader_criteria(Customer, Customer.name != "old"))

        with pytest.raises(sl.UnknownRow):
            session.scalar(sl.lock.row(Customer, 1))
        assert session.scalar(sl.lock.row(Customer, 2)).name == "alone"


def test_only_the_locked_row_is_refreshed(engine: Engine) -> None:
    with Session(engine, expire_on_commit=False) as session:
        one, two = session.get_one(Customer, 1), session.get_one(Customer, 2)
        agent = one.agent
        session.commit()
        with engine.begin() as other:
            for table in (Customer.__table__, Agent.__table__):
                other.execute(update(table).values(name="new"))
        session.scalar(sl.lock.row(Customer, 1))
        assert one.name == "new"
        assert two.__dict__["name"] == "alone"
        assert agent is not None
        assert agent.__dict__["name"] == "Ada"

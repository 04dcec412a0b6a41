"""capture of classes whose SELECT reads more than one table, and of entities that a session has loaded already."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine, inspect, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.ext.declarative import ConcreteBase
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    joinedload,
    mapped_column,
    selectinload,
    subqueryload,
    with_loader_criteria,
)
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from tests.captures.conftest import MakeEngine, _databases
from tests.captures.test_capture import fill, orders, paid
from tests.fixtures.capture_models import Car, Flower, Label, Line, Order, Parcel, Plant, Stamp, Taxi, Tree, Vehicle
from tests.fixtures.parties import async_connected
from tests.fixtures.queues import ASYNC, KINDS


@pytest.fixture(params=KINDS)
def kind(engine_to: MakeEngine, request: pytest.FixtureRequest) -> Engine:
    return engine_to(request.param)


def parcels(limit: int = 9, *options: Any, **values: Any) -> Any:
    operation = sl.capture(
        Parcel, where=Parcel.state == "new", values=values or {"state": "busy"}, order_by=Parcel.id, limit=limit
    )
    return operation.options(*options) if options else operation


def fill_parcels(engine: Engine) -> None:
    fill(engine, *(Parcel(id=n, labels=[Label(id=n), Label(id=n + 10)], stamps=[Stamp(id=n)]) for n in (1, 2, 3)))


@pytest.mark.parametrize("entity", [Vehicle, Car, Taxi])
def test_a_capture_returns_subclass_entities(kind: Engine, entity: Any) -> None:
    fill(kind, Vehicle(id=1), Car(id=2, seats=5), Taxi(id=3, licence="x"), Taxi(id=4))
    column = {"values": {"state": "busy"}, "where": Vehicle.state == "new"}
    if entity is not Vehicle:
        column = {"values": {"seats": 7}, "where": Car.seats != 7}
    # in the order of a column of the parent's table
    operation = sl.capture(entity, **column, order_by=(entity.kind, entity.id), limit=2)
    expected = {Vehicle: [Car, Taxi], Car: [Car, Taxi], Taxi: [Taxi, Taxi]}[entity]
    with Session(kind) as session, Session(kind) as other:
        taken = session.scalars(operation).all()
        assert [type(each) for each in taken] == expected
        session.expunge_all()  # everything was loaded, subclass columns too
        assert all(each.seats for each in taken if isinstance(each, Car))
        # MariaDB locks the rows of all tables that it joins
        if entity is not Taxi and kind.dialect.name in ("postgresql", "mysql"):
            rest = other.scalars(operation).all()
            assert [type(each) for each in rest] == {Vehicle: [Taxi, Vehicle], Car: [Taxi]}[entity]
    with pytest.raises(ValueError, match="not a column of car"):
        sl.capture(Car, values={"state": "busy"})


def test_subclasses_that_are_loaded_with_their_parent(kind: Engine) -> None:
    fill(kind, Plant(id=1), Tree(id=2), Flower(id=3), Plant(id=4))
    with Session(kind) as session:
        taken = session.scalars(
            sl.capture(Plant, where=Plant.state == "new", values={"state": "busy"}, order_by=Plant.id, limit=3)
        ).all()
        session.expunge_all()
        tree, flower = taken[1:]
        assert [type(each) for each in taken] == [Plant, Tree, Flower]
        assert (tree.state, tree.height, flower.colour) == ("busy", 3, "red")


def test_locks_give_detached_entities(kind: Engine) -> None:
    fill(kind, *orders(2))
    taken = sl.Locks(kind).run(paid(5))
    assert [(inspect(order).detached, order.status) for order in taken] == [(True, "shipping")] * 2
    with Session(kind) as session:
        assert session.scalars(select(Order.status)).all() == ["shipping"] * 2


@pytest.mark.parametrize("limit", [1, 2])
def test_joined_attributes_and_expressions_are_loaded(kind: Engine, limit: int) -> None:
    fill_parcels(kind)
    with Session(kind) as session:
        taken = session.scalars(parcels(limit)).all()
        session.expunge_all()
        assert [(each.id, each.state, each.shout, each.label_count) for each in taken] == [
            (n, "busy", "BUSY", 2) for n in range(1, limit + 1)
        ]
        assert [[label.id for label in each.labels] for each in taken] == [[n, n + 10] for n in range(1, limit + 1)]


@pytest.mark.parametrize("load", [joinedload, selectinload, subqueryload])
def test_loader_options_apply_to_captured_entities(kind: Engine, load: Any) -> None:
    fill(kind, *(Order(id=n, lines=[Line(id=n), Line(id=n + 10)]) for n in range(1, 4)))
    with Session(kind) as session:
        taken = session.scalars(paid(2).options(load(Order.lines))).all()
        session.expunge_all()
        assert [[line.id for line in order.lines] for order in taken] == [[1, 11], [2, 12]]


@pytest.mark.parametrize(("name", "driver"), ASYNC)
def test_an_async_session_loads_them_too(engine_to: MakeEngine, servers: Any, name: str, driver: str) -> None:
    fill_parcels(engine_to(name))

    async def take() -> None:
        async with async_connected(servers.url(name, driver, _databases[name]), poolclass=NullPool) as engine:
            async with AsyncSession(engine) as session:
                (parcel,) = (await session.scalars(parcels(1, joinedload(Parcel.stamps)))).all()
                assert (parcel.shout, parcel.label_count, len(parcel.labels), len(parcel.stamps)) == ("BUSY", 2, 2, 1)

    asyncio.run(take())


def test_a_connection_gives_rows_of_the_table(kind: Engine) -> None:
    """It joins nothing that a SELECT of the class would: a join would return a row for each label."""
    fill_parcels(kind)
    fill(kind, Car(id=2, seats=5), Taxi(id=1))
    cars = sl.capture(Car, where=Car.seats != 7, values={"seats": 7}, order_by=Car.id.desc(), limit=2)
    with kind.connect() as connection:
        assert [tuple(row) for row in connection.execute(parcels(2))] == [(1, "busy"), (2, "busy")]
        assert [(row.id, row.seats) for row in connection.execute(cars)] == [(2, 7), (1, 7)]
        assert connection.execute(cars).keys() == Car.__table__.c.keys()


def test_criteria_restrict_the_second_read(kind: Engine) -> None:
    fill_parcels(kind)
    fill(kind, Vehicle(id=1), Car(id=2), Taxi(id=3))
    criteria = with_loader_criteria(Parcel, Parcel.id != 1)
    cars = sl.capture(Car, where=Car.seats == 4, values={"seats": 7}, order_by=Car.id, limit=9)
    with Session(kind) as session:
        assert [each.id for each in session.scalars(parcels(1, criteria))] == [2]
        assert [each.id for each in session.scalars(cars.options(with_loader_criteria(Car, Car.id > 2)))] == [3]


@pytest.mark.parametrize("nested", [1, 2])
def test_a_savepoint_rollback_restores_entities(kind: Engine, nested: int) -> None:
    """The entities were loaded before, and the savepoint that is rolled back may be outside that of the capture."""
    if kind.dialect.name == "sqlite":
        sl.sqlite.begin_immediate(kind)
    fill(kind, *orders(2))
    with Session(kind) as session:
        known = session.scalars(select(Order).order_by(Order.id)).all()
        outer = session.begin_nested()
        if nested == 2:
            with session.begin_nested():
                taken = session.scalars(paid(2)).all()
        else:
            taken = session.scalars(paid(2)).all()
        assert taken == known
        outer.rollback()
        assert [(order.status, order.version) for order in taken] == [("paid", 1)] * 2
        taken[0].region = "north"
        session.commit()
    with Session(kind) as session:
        assert session.get_one(Order, 1).region == "north"


@pytest.mark.parametrize("autoflush", [False, True])
def test_pending_changes_are_flushed_or_refused(kind: Engine, autoflush: bool) -> None:
    fill(kind, *orders(2))
    with Session(kind, autoflush=autoflush) as session:
        session.get_one(Order, 2).region = "north"
        if not autoflush:
            with pytest.raises(sl.Unsupported, match="flush"):
                session.scalars(paid(2)).all()
            session.flush()
        assert [order.region for order in session.scalars(paid(2))] == [None, "north"]


def test_a_union_of_concrete_classes_is_refused() -> None:
    """Each class of a ConcreteBase is read from a union; InnoDB doesn't lock rows of a derived table."""

    class Local(DeclarativeBase):
        pass

    class Node(ConcreteBase, Local):
        __tablename__ = "node"
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str] = mapped_column(default="new")
        __mapper_args__ = {"polymorphic_identity": "node", "concrete": True}

    class Leaf(Node):
        __tablename__ = "leaf"
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str] = mapped_column(default="new")
        __mapper_args__ = {"polymorphic_identity": "leaf", "concrete": True}

    for entity in (Node, Leaf):
        with pytest.raises(ValueError, match=f"{entity.__name__}.__table__"):
            sl.capture(entity, where=entity.state == "new", values={"state": "busy"})
        with pytest.raises(ValueError, match="another table"):
            sl.StateTransition(entity, id=entity.id, status=entity.state)

"""capture: disjoint, in order, never more than the limit, with any model, on every engine."""

from __future__ import annotations

import threading
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
    exists,
    func,
    select,
    text,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, selectinload, with_loader_criteria
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from tests.captures.conftest import MakeEngine, _databases
from tests.fixtures.capture_models import Line, Order, Part, Status
from tests.fixtures.parties import PATIENCE, all_of, async_connected, later, locked_rows
from tests.fixtures.queues import ASYNC

ORDERS = Order.__table__


def orders(number: int) -> list[Order]:
    return [Order(id=id) for id in range(1, number + 1)]


def paid(limit: int, **changed: Any) -> Any:
    values = {"where": Order.status == "paid", "values": {"status": "shipping"}, "order_by": Order.id, "limit": limit}
    return sl.capture(Order, **(values | changed))


def fill(engine: Engine, *rows: Any) -> None:
    with Session(engine) as session:
        session.add_all(rows)
        session.commit()


def shipping(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).where(Order.status == "shipping")).scalar_one()


def test_two_sessions_capture_different_rows(leveled: Engine) -> None:
    fill(leveled, *orders(30))
    # the first one is closed first, so that another one that waits for it ends
    with Session(leveled) as third, Session(leveled) as second, Session(leveled) as first:
        taken = [order.id for order in first.scalars(paid(3))]
        others = [order.id for order in later(second.scalars, paid(3)).result(PATIENCE)]
        assert (taken, others) == ([1, 2, 3], [4, 5, 6])
        # the first session has not locked rows that it did not capture
        assert len(third.scalars(paid(100)).all()) == 24
        first.rollback()
        second.commit()
        third.rollback()
    with Session(leveled) as session:
        assert [order.id for order in session.scalars(paid(4))] == [1, 2, 3, 7]


def test_a_row_that_another_session_changes_is_skipped_by_every_index(leveled: Engine) -> None:
    """MySQL merges the indexes of two equalities, and waits for such a row in that plan."""
    indexed = (Column(name, Integer, index=True) for name in ("a", "b"))
    table = Table("indexed", MetaData(), Column("id", Integer, primary_key=True), *indexed, Column("taken", Integer))
    table.drop(leveled, checkfirst=True)
    table.create(leveled)
    capture = sl.capture(table, where=[table.c.a == 1, table.c.b == 1], values={"taken": 1}, limit=10)
    with leveled.begin() as connection:
        connection.execute(table.insert(), [{"id": n, "a": n % 5, "b": n // 5 % 5} for n in range(1, 101)])
    with Session(leveled) as second, Session(leveled) as first:
        first.execute(table.update().where(table.c.id == 6).values(a=2))
        captured = later(second.execute, capture).result(PATIENCE).all()
    assert sorted(row.id for row in captured) == [31, 56, 81]


def test_concurrent_captures_take_each_row_once(leveled: Engine) -> None:
    fill(leveled, *orders(150))
    taken: list[int] = []
    start = threading.Barrier(6, timeout=PATIENCE)

    def work() -> None:
        with Session(leveled) as session:
            start.wait()
            empty = 0
            while empty < 5:
                try:
                    mine = [order.id for order in session.scalars(paid(7))]
                    session.commit()
                except sl.MustRollback:  # a deadlock or a stale snapshot of InnoDB: the app runs the transaction again
                    session.rollback()
                    continue
                assert len(mine) <= 7
                taken.extend(mine)
                empty = 0 if mine else empty + 1

    all_of(*[work] * 6)
    assert sorted(taken) == list(range(1, 151))


def test_an_old_snapshot_finds_the_remaining_rows(engine_to: MakeEngine) -> None:
    """Above READ COMMITTED on InnoDB, where the search reads the snapshot of the transaction's first read."""
    for name in ("mysql", "mariadb"):
        engine = engine_to(name, isolation_level="REPEATABLE READ")
        fill(engine, *orders(50))
        with Session(engine) as old, Session(engine) as other:
            assert old.scalar(select(func.count()).select_from(Order)) == 50
            other.scalars(paid(30)).all()
            other.commit()
            assert [order.id for order in old.scalars(paid(5))] == [31, 32, 33, 34, 35]


@pytest.mark.parametrize(
    "order",
    [
        (Part.weight, Part.shelf, Part.number),
        (Part.weight.desc(), Part.number.desc()),
        (Part.shelf.desc(), Part.weight, Part.number),
        (func.abs(Part.weight - 5), Part.number),
        (Part.status, Part.number.desc()),
    ],
    ids=["ascending", "descending", "mixed", "expression", "enum"],
)
def test_rows_come_in_order(engine: Engine, order: Any) -> None:
    fill(engine, *(Part(shelf="ab"[n % 2], number=n, weight=n % 6 or None) for n in range(1, 20)))
    with Session(engine) as session:
        expected = [(part.shelf, part.number) for part in session.scalars(select(Part).order_by(*order).limit(11))]
        session.rollback()
        operation = sl.capture(
            Part, where=Part.status == Status.NEW, values={Part.status: Status.TAKEN}, order_by=order, limit=11
        )
        taken = session.scalars(operation).all()
        assert [(part.shelf, part.number) for part in taken] == expected
        assert {part.status for part in taken} == {Status.TAKEN}
        session.rollback()
    with engine.connect() as connection:
        rows = connection.execute(operation).all()
        assert [(row.shelf, row.no) for row in rows] == expected
        assert {row.status for row in rows} == {Status.TAKEN}
        connection.rollback()


def test_order_by_a_column_that_is_set(engine: Engine) -> None:
    fill(engine, *(Order(id=id, rank=100 - id) for id in range(1, 10)))
    with Session(engine) as session:
        taken = session.scalars(paid(3, order_by=Order.rank, values={"status": "x", "rank": Order.id})).all()
        assert [(order.id, order.rank) for order in taken] == [(9, 9), (8, 8), (7, 7)]


def test_a_random_order_captures_the_limit(engine_to: MakeEngine) -> None:
    """On SQLite, the search before the UPDATE could then find different rows than the UPDATE."""
    engine = engine_to("sqlite")
    fill(engine, *orders(50))
    with Session(engine) as session:
        captured = [order.id for order in session.scalars(paid(5, order_by=func.random()))]
        assert len(set(captured)) == 5
        session.commit()
    assert shipping(engine) == 5


def test_sqlite_autocommit_captures_in_one_statement(engine_to: MakeEngine) -> None:
    """A capture with an order is two statements, and another session could write in between."""
    engine = engine_to("sqlite", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(ORDERS.insert(), [{"id": id, "status": "paid", "version": 1} for id in range(1, 6)])
    with Session(engine) as session:
        with pytest.raises(sl.Unsupported, match="autocommit"):
            session.scalars(paid(2))
        assert shipping(engine) == 0
        assert [order.id for order in session.scalars(paid(1))] == [1]
        assert len(session.scalars(paid(2, order_by=())).all()) == 2
    assert shipping(engine) == 3


def test_entities_are_refreshed_in_the_identity_map(engine: Engine) -> None:
    fill(engine, *orders(3))
    with Session(engine, expire_on_commit=False) as session:
        known = session.get_one(Order, 2)
        session.commit()
        with engine.begin() as other:
            other.execute(update(ORDERS).values(region="north"))
        assert known.region is None
        taken = session.scalars(paid(2)).all()
        assert taken[1] is known
        assert (known.status, known.region, known.version) == ("shipping", "north", 2)
        assert not session.dirty


def test_a_rollback_undoes_the_capture(engine: Engine) -> None:
    fill(engine, *orders(2))
    with Session(engine) as session:
        assert len(session.scalars(paid(2)).all()) == 2
        session.rollback()
    with engine.connect() as connection:
        assert len(connection.execute(paid(2)).all()) == 2
        connection.rollback()
    with Session(engine) as session:
        assert session.scalar(select(func.count()).where(Order.status == "paid", Order.version == 1)) == 2


def test_criteria_and_options_of_the_session_apply(engine: Engine) -> None:
    fill(engine, *(Order(id=n, region="ns"[n % 2], lines=[Line(id=n)]) for n in range(1, 7)))
    with Session(engine) as session:

        @event.listens_for(session, "do_orm_execute")
        def only_south(state: Any) -> None:
            if state.is_select:
                state.statement = state.statement.options(with_loader_criteria(Order, Order.region == "s"))

        taken = session.scalars(paid(2).options(selectinload(Order.lines))).all()
        assert [order.id for order in taken] == [1, 3]
        session.expunge_all()
        assert [line.id for order in taken for line in order.lines] == [1, 3]


def test_criteria_dont_hide_captured_rows(engine: Engine) -> None:
    """An app's criteria restrict what is captured; the captured rows no longer meet them."""
    fill(engine, *orders(5))
    with Session(engine) as session:

        @event.listens_for(session, "do_orm_execute")
        def paid_only(state: Any) -> None:
            state.statement = state.statement.options(with_loader_criteria(Order, Order.status == "paid"))

        captured = session.scalars(paid(2, where=Order.id > 1, order_by=(Order.status, Order.id))).all()
        assert [order.id for order in captured] == [2, 3]
        session.commit()
    assert shipping(engine) == 2


def test_a_condition_on_another_table(engine: Engine) -> None:
    fill(engine, *(Order(id=n, lines=[Line(id=n)] if n > 2 else []) for n in range(1, 5)))
    with Session(engine) as session:
        complete = exists().where(Line.order_id == Order.id)
        taken = session.scalars(paid(9, where=[Order.status == "paid", complete])).all()
        assert [order.id for order in taken] == [3, 4]
    with pytest.raises(ValueError, match=r"join line .*exists"):
        paid(9, where=Line.order_id == Order.id)


def test_a_table_returns_rows(engine: Engine) -> None:
    fill(engine, *orders(3))
    operation = sl.capture(
        ORDERS, where=ORDERS.c.status == "paid", values={ORDERS.c.status: "x"}, order_by=ORDERS.c.id.desc(), limit=2
    )
    with Session(engine) as session:
        assert [(row.id, row.status) for row in session.execute(operation)] == [(3, "x"), (2, "x")]
        assert session.execute(operation).all() == [(1, "x", None, None, 1)]
        assert session.execute(operation).all() == []
        assert list(session.execute(operation).keys()) == ["id", "status", "region", "rank", "version"]


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_innodb_refuses_autocommit_and_serializable(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with pytest.raises(sl.Unsupported, match="autocommit"):
            connection.execute(paid(1))
    with engine.connect().execution_options(isolation_level="SERIALIZABLE") as connection:
        with pytest.raises(sl.Unsupported, match="SERIALIZABLE"):
            connection.execute(paid(1))


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_innodb_locks_few_other_rows(engine_to: MakeEngine, name: str) -> None:
    for level in ("READ COMMITTED", "REPEATABLE READ"):
        engine = engine_to(name, isolation_level=level)
        with engine.begin() as connection:
            connection.execute(ORDERS.delete())
            rows = [{"id": n, "status": "paid", "version": 1} for n in range(1, 3001)]
            connection.execute(ORDERS.insert(), rows)
        with engine.connect() as connection:
            assert len(connection.execute(paid(10)).all()) == 10
            assert locked_rows(engine, connection) <= 40
            connection.rollback()


def test_mariadb_repeats_a_search_and_takes_rows_once(engine_to: MakeEngine) -> None:
    """The search without locks is repeated with more rows, while another session inserts rows before them."""
    engine, other = (engine_to("mariadb", isolation_level="READ COMMITTED") for _ in range(2))
    fill(engine, *orders(8))
    searches: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def before(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "ORDER BY" in statement:
            searches.append(statement)
            if len(searches) == 2:
                fill(other, *(Order(id=-id) for id in range(4)))

    with Session(other) as holder, Session(engine) as session:
        # all but the first and the last are locked, so that one search isn't enough
        holder.execute(select(Order.id).where(Order.id.between(2, 7)).with_for_update()).all()
        assert [order.id for order in session.scalars(paid(2))] == [-3, 1]
        assert len(searches) == 2
        session.rollback()


def test_setting_a_key_locks_for_update() -> None:
    """The weaker row lock allows a foreign key to refer to the old key, for which the UPDATE would then wait."""
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


@pytest.mark.parametrize(("name", "driver"), ASYNC)
def test_async_drivers_capture(engine_to: MakeEngine, servers: Any, name: str, driver: str) -> None:
    import asyncio

    fill(engine_to(name), *orders(5))

    async def take() -> list[tuple[int, str]]:
        async with async_connected(servers.url(name, driver, _databases[name]), poolclass=NullPool) as engine:
            async with AsyncSession(engine) as session:
                known = await session.get_one(Order, 2)
                taken = (await session.scalars(paid(3))).all()
                assert taken[1] is known
                found = [(order.id, order.status) for order in taken]
                await session.rollback()
            async with engine.connect() as connection:
                rows = (await connection.execute(paid(3))).all()
                assert [(row.id, row.status) for row in rows] == found
            return found

    assert asyncio.run(take()) == [(1, "shipping"), (2, "shipping"), (3, "shipping")]


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"limit": 0}, ValueError, "is from 1 to"),
        ({"limit": True}, TypeError, "limit is an int"),
        ({"limit": "3"}, TypeError, "limit is an int"),
        ({"values": {}}, ValueError, "must not be empty"),
        ({"values": {"nothing": 1}}, ValueError, "no column 'nothing'"),
        ({"values": {Line.id: 1}}, ValueError, "not a column of orders"),
    ],
)
def test_bad_arguments_are_refused(changed: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        paid(**({"limit": 1} | changed))
    with pytest.raises(TypeError, match="mapped class or a Table"):
        sl.capture(object(), values={"a": 1})

"""lock.row: a row of the app, locked and refreshed, on every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conftest import PLAIN
from tests.fixtures.library import ABSENT, STOCK, Base, Customer, Engineer, Manager, Order, Person, fill
from tests.fixtures.parties import PATIENCE, Watch, async_connected, connected, later, seen, snapshot_isolation

CUSTOMER, ORDERS = Base.metadata.tables["customer"], Base.metadata.tables["orders"]
NAMES = ["postgresql15", "mysql", "mariadb", "sqlite"]


@pytest.fixture(scope="module")
def urls(servers: Any) -> Callable[[str], str]:
    """The URL of a database with the rows; row locks don't need this library's tables."""
    made: dict[str, str] = {}

    def url(name: str) -> str:
        if name not in made:
            made[name] = servers.fresh(name, PLAIN[name])
            with connected(made[name]) as engine, engine.begin() as connection:
                fill(connection)
        return made[name]

    return url


@pytest.fixture(params=NAMES)
def engine(urls: Callable[[str], str], request: pytest.FixtureRequest) -> Iterator[Engine]:
    with connected(urls(request.param)) as engine:
        yield engine


def free(engine: Engine, entity: Any, *criteria: Any) -> bool:
    """Whether another transaction can lock those rows without a wait."""
    with engine.connect() as other:
        try:
            if engine.dialect.name == "sqlite":
                other.exec_driver_sql("PRAGMA busy_timeout = 0")
                other.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                other.execute(select(entity).where(*criteria).with_for_update(nowait=True)).all()
        except DBAPIError:
            return False
        finally:
            other.invalidate()
        return True


def test_row_is_locked_exclusively(engine: Engine) -> None:
    with Session(engine) as session:
        customer = session.scalar(sl.lock.row(Customer, 1))
        assert (customer.id, customer.name) == (1, "old")
        assert session.get(Customer, 1) is customer
        assert not free(engine, CUSTOMER, CUSTOMER.c.id == 1)
        assert free(engine, CUSTOMER, CUSTOMER.c.id == 2) is (engine.dialect.name != "sqlite")
        session.rollback()
        assert free(engine, CUSTOMER, CUSTOMER.c.id == 1)


def test_loaded_entity_is_refreshed(engine: Engine) -> None:
    with Session(engine) as session:
        customer = session.get_one(Customer, 2)
        if engine.dialect.name != "postgresql":
            session.rollback()  # so that it is neither MustRollback nor an old snapshot: only the object is old
            session.get_one(Customer, 2)
        session.expire_on_commit = False
        session.commit()
        assert customer.__dict__["name"] == "alone"
        with engine.begin() as other:
            other.execute(update(CUSTOMER).where(CUSTOMER.c.id == 2).values(name="new"))
        assert session.scalar(sl.lock.row(Customer, 2)) is customer
        assert customer.name == "new"
        session.rollback()
        with engine.begin() as other:
            other.execute(update(CUSTOMER).where(CUSTOMER.c.id == 2).values(name="alone"))


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
def test_waiter_sees_the_commit_of_the_holder(
    urls: Callable[[str], str], watch: Callable[[str], Watch], name: str
) -> None:
    with connected(urls(name)) as engine:
        with Session(engine) as first, Session(engine) as second:
            amount = first.scalar(sl.lock.row(Order, (1, "a"))).amount
            waiting = later(lambda: second.scalar(sl.lock.row(Order, (1, "a"))).amount)
            watched = watch(name)
            watched.engine = engine.execution_options(isolation_level="AUTOCOMMIT")
            watched.until_waiting(waiting)
            first.scalar(sl.lock.row(Order, (1, "a"))).amount += 1
            first.commit()
            assert waiting.result(PATIENCE) == amount + 1


def test_forms_of_a_primary_key(engine: Engine) -> None:
    with Session(engine) as session:
        for ident in ((1, "b"), [1, "b"], {"customer_id": 1, "number": "b"}, {"number": "b", "customer_id": 1}):
            assert session.scalar(sl.lock.row(Order, ident)).number == "b"
        assert not free(engine, ORDERS, ORDERS.c.no == "b")
        for ident in (1, (1,), [1], {"id": 1}):
            assert session.scalar(sl.lock.row(Customer, ident)).id == 1


def test_key_of_another_type_is_refused() -> None:
    """MySQL and MariaDB would convert it, and lock '42-eu' for 42, or 42 for '42-eu'."""
    for entity, ident in ((Order, (1, 2)), (STOCK, (1, 2)), (STOCK, {"shop": 1, "item": b"cup"})):
        with pytest.raises(TypeError, match="is a text, not"):
            sl.lock.row(entity, ident)
    for given in ("1", "1-eu", b"1"):
        with pytest.raises(TypeError, match="is a number, not"):
            sl.lock.row(Customer, given)


def test_row_of_a_table(engine: Engine) -> None:
    with engine.connect() as connection:
        row = connection.execute(sl.lock.row(STOCK, (1, "cup"))).one()
        assert row == (1, "cup", 9)
        assert row.pieces == 9
        assert connection.execute(sl.lock.row(STOCK, {"shop": 2, "item": "cup"})).one().pieces == 4
        assert not free(engine, STOCK, STOCK.c.shop == 2)
    with Session(engine) as session:
        assert session.execute(sl.lock.row(STOCK, (1, "cup"))).one().item == "cup"


def test_joined_inheritance_locks_both_tables(engine: Engine) -> None:
    person, engineer = Person.__table__, Engineer.__table__
    with Session(engine) as session:
        found = session.scalar(sl.lock.row(Engineer, 2))
        assert (type(found), found.name, found.machine) == (Engineer, "E", "loom")
        assert not free(engine, person, person.c.id == 2)
        assert not free(engine, engineer, engineer.c.id == 2)
        session.rollback()
        assert type(session.scalar(sl.lock.row(Person, 2))) is Engineer
        assert not free(engine, person, person.c.id == 2)


def test_row_of_another_subclass_is_unknown(engine: Engine) -> None:
    with Session(engine) as session:
        assert session.scalar(sl.lock.row(Manager, 3)).name == "M"
        for entity, ident in ((Manager, 2), (Manager, 1), (Engineer, 3), (Engineer, 1)):
            with pytest.raises(sl.UnknownRow, match=rf"lock\.row\({entity.__name__}, {ident}\): there is no such row"):
                session.scalar(sl.lock.row(entity, ident))


def test_unknown_row(engine: Engine) -> None:
    with Session(engine) as session:
        for entity, ident, words in ((Customer, 99, "Customer, 99"), (STOCK, (1, "x"), "stock, 1, 'x'")):
            with pytest.raises(sl.UnknownRow, match=words):
                session.execute(sl.lock.row(entity, ident))
            with pytest.raises(sl.UnknownRow):
                session.connection().execute(sl.lock.row(entity, ident))
        assert session.scalar(sl.lock.row(Customer, 1)).name == "old"


def test_eager_join_is_not_loaded(engine: Engine) -> None:
    """PostgreSQL can't lock the nullable side, and joined rows would repeat the requested one."""
    with Session(engine) as session, seen(engine) as statements:
        assert session.scalars(sl.lock.row(Customer, 2)).one().agent is None
        customer = session.execute(sl.lock.row(Customer, 1)).scalars().all()[0]
        assert not any("JOIN" in statement for statement in statements if "customer" in statement)
        assert customer.agent.name == "Ada"
        assert [order.number for order in customer.orders] == ["a", "b", "c"]


def test_missing_table_of_the_app_raises_the_driver_error(engine: Engine) -> None:
    """Even if its name contains "lock": the missing table isn't the library's."""
    with pytest.raises(DBAPIError, match="clock"), engine.connect() as connection:
        connection.execute(sl.lock.row(ABSENT, 1))


@pytest.mark.parametrize("name", NAMES)
def test_row_lock_in_async_session(urls: Callable[[str], str], servers: Any, name: str) -> None:
    driver = {"postgresql15": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}.get(name, "mysql+aiomysql")
    url = f"{driver}://{urls(name).partition('://')[2]}"

    async def main() -> None:
        async with async_connected(url) as engine, AsyncSession(engine) as session:
            customer = await session.scalar(sl.lock.row(Customer, 1))
            assert customer.name == "old"
            assert (await session.scalars(sl.lock.row(Customer, 1))).one() is customer
            with pytest.raises(sl.UnknownRow):
                await session.scalar(sl.lock.row(Customer, 99))
            customer.name = "changed"
            assert await session.scalar(sl.lock.row(Customer, 1)) is customer
            assert customer.name == "changed"  # it was flushed before

    asyncio.run(main())


def replace(connection: Any, name: str) -> None:
    """Delete a customer and insert it again, by another name."""
    connection.execute(CUSTOMER.delete().where(CUSTOMER.c.id == 2))
    connection.execute(CUSTOMER.insert(), {"id": 2, "name": name})


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("name", NAMES)
def test_row_that_its_holder_replaces_or_deletes(
    urls: Callable[[str], str], watch: Callable[[str], Watch], name: str, level: str, replaced: bool
) -> None:
    level = "SERIALIZABLE" if name == "sqlite" else level
    with connected(urls(name), isolation_level=level) as engine:
        with Session(engine) as holder, Session(engine) as second:
            holder.scalar(sl.lock.row(Customer, 2))
            waiting = later(lambda: second.scalar(sl.lock.row(Customer, 2)).name)
            watched = watch(name)
            watched.engine = engine.execution_options(isolation_level="AUTOCOMMIT")
            watched.until_waiting(waiting)
            if replaced:
                replace(holder.connection(), "replaced")
            else:
                holder.connection().execute(CUSTOMER.delete().where(CUSTOMER.c.id == 2))
            holder.commit()
            if name == "postgresql15" and level != "READ COMMITTED":
                with pytest.raises(DBAPIError, match="could not serialize"):
                    waiting.result(PATIENCE)
            elif level == "SERIALIZABLE" and snapshot_isolation(engine):
                with pytest.raises(sl.MustRollback):
                    waiting.result(PATIENCE)
            elif replaced:
                assert waiting.result(PATIENCE) == "replaced"
                assert not free(engine, CUSTOMER, CUSTOMER.c.id == 2)
            else:
                with pytest.raises(sl.UnknownRow, match="Customer, 2"):
                    waiting.result(PATIENCE)
        with engine.begin() as connection:
            replace(connection, "alone")

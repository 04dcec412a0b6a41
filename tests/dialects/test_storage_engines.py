"""MySQL and MariaDB keep a table in one of several storage engines, of which some have no transactions."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import ForeignKey, Integer, String, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import INNODB, seen

KEPT_BY = [("mysql", "MyISAM"), ("mariadb", "MyISAM"), ("mariadb", "Aria")]


class Base(DeclarativeBase):
    pass


class Page(Base):
    __tablename__ = "stored_page"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    state: Mapped[str] = mapped_column(String(20), default="new")
    taken: Mapped[bool] = mapped_column(default=False)


class Letter(sl.JobColumns, Base):
    __tablename__ = "stored_letter"
    external_id: Mapped[Any] = mapped_column(String(36), unique=True)
    queue: Mapped[str] = mapped_column(String(20))
    payload: Mapped[Any] = mapped_column(String(20))
    error: Mapped[str | None] = mapped_column(String(20))


class Parent(Base):
    __tablename__ = "stored_parent"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)


class Child(Parent):
    __tablename__ = "stored_child"
    id: Mapped[int] = mapped_column(ForeignKey(Parent.id), primary_key=True)


pages = sl.StateTransition(Page, id=Page.id, status=Page.state, ready="new", captured="busy")
OPERATIONS: dict[str, Any] = {
    "row": lambda: sl.lock.row(Page, 1),
    "row of a table": lambda: sl.lock.row(Page.__table__, 1),
    "row of a joined class": lambda: sl.lock.row(Child, 1),
    "capture": lambda: sl.capture(Page, where=Page.state == "new", values={"state": "busy"}),
    "transition": lambda: pages.capture(),
    "mutex": lambda: sl.Mutex(Page, id=Page.id, acquired=Page.taken).acquire(1),
    "queue": lambda: sl.Queue(Letter).capture(),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize(("name", "kept_by"), KEPT_BY)
def test_tables_without_transactions_are_refused(
    engine_to: MakeEngine, name: str, kept_by: str, operation: Any
) -> None:
    engine, tables = engine_to(name), Base.metadata.sorted_tables
    Base.metadata.drop_all(engine)
    with engine.begin() as connection:
        connection.execute(text("SET default_storage_engine = InnoDB"))
        Base.metadata.create_all(connection)
        connection.execute(text("ALTER TABLE stored_child DROP FOREIGN KEY stored_child_ibfk_1"))
        for table in (table for table in tables if table.name != "stored_child"):
            connection.execute(text(f"ALTER TABLE {table.name} ENGINE={kept_by}"))
        connection.execute(Page.__table__.insert(), [{"id": 1}])  # type: ignore[attr-defined]
        connection.execute(text("INSERT INTO stored_parent VALUES (1)"))
        connection.execute(text("INSERT INTO stored_child VALUES (1)"))
    for _ in range(2):
        with Session(engine) as session, pytest.raises(sl.Unsupported, match=f"kept by {kept_by}.*ENGINE=InnoDB"):
            session.execute(operation())
    with Session(engine) as session:
        assert session.get_one(Page, 1).state == "new"
        for table in tables:
            session.execute(text(f"ALTER TABLE {table.name} ENGINE=InnoDB"))
        session.execute(operation())
    Base.metadata.drop_all(engine)


@pytest.mark.parametrize("name", INNODB)
@pytest.mark.parametrize("operation", ["row", "row of a table"])
def test_first_look_at_a_table_makes_no_snapshot(engine_to: MakeEngine, name: str, operation: str) -> None:
    """Above READ COMMITTED, what the holder reads afterwards would be older than its lock."""
    engine = engine_to(name, isolation_level="REPEATABLE READ")
    Base.metadata.create_all(engine)
    with Session(engine) as session, Session(engine) as other:
        other.add_all([Page(id=1), Page(id=2)])
        other.commit()
        session.execute(OPERATIONS[operation]())
        other.get_one(Page, 2).state = "new one"
        other.commit()
        assert session.get_one(Page, 2).state == "new one"
    Base.metadata.drop_all(engine)


@pytest.mark.parametrize("name", INNODB)
def test_storage_engine_is_looked_up_once_per_table(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name)
    Base.metadata.create_all(engine)
    with seen(engine) as statements:
        for schema in (None, None, engine.url.database):
            with Session(engine.execution_options(schema_translate_map={None: schema})) as session:
                session.execute(OPERATIONS["capture"]())
                session.execute(OPERATIONS["transition"]())
                session.execute(sl.Queue().put("q", [1]))
    assert len([line for line in statements if line.startswith("SHOW CREATE TABLE")]) == 2
    Base.metadata.drop_all(engine)

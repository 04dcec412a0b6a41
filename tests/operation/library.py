"""Mapped classes for the tests of ``lock.row``: what an app may have."""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, Integer, MetaData, String, Table
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

INNODB = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"
    __table_args__ = INNODB
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(50))
    agent_id: Mapped[int | None] = mapped_column(ForeignKey("agent.id"))
    # eager, and its row may be absent: an outer join, whose nullable side PostgreSQL can't lock
    agent: Mapped[Agent | None] = relationship(lazy="joined")
    orders: Mapped[list[Order]] = relationship(lazy="joined", order_by="Order.number", back_populates="customer")


class Agent(Base):
    __tablename__ = "agent"
    __table_args__ = INNODB
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(50))


class Order(Base):
    """A composite key, whose attributes are called other than its columns."""

    __tablename__ = "orders"
    __table_args__ = INNODB
    customer_id: Mapped[int] = mapped_column("customer", ForeignKey("customer.id"), primary_key=True)
    number: Mapped[str] = mapped_column("no", String(20), primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)
    customer: Mapped[Customer] = relationship(back_populates="orders")


class Person(Base):
    """Joined inheritance."""

    __tablename__ = "person"
    __table_args__ = INNODB
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "person"}
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    name: Mapped[str] = mapped_column(String(50))


class Engineer(Person):
    __tablename__ = "engineer"
    __table_args__ = INNODB
    __mapper_args__ = {"polymorphic_identity": "engineer"}
    id: Mapped[int] = mapped_column(ForeignKey("person.id"), primary_key=True)
    machine: Mapped[str] = mapped_column(String(50))


class Manager(Person):
    """Single-table inheritance."""

    __mapper_args__ = {"polymorphic_identity": "manager"}


#: a table without a class
STOCK = Table(
    "stock",
    Base.metadata,
    Column("shop", Integer, primary_key=True, autoincrement=False),
    Column("item", String(20), primary_key=True),
    Column("pieces", Integer),
    mysql_engine="InnoDB",
    mariadb_engine="InnoDB",
)
#: a table that no database has
ABSENT = Table("clock", MetaData(), Column("id", Integer, primary_key=True))


def fill(connection: object) -> None:
    """Create the tables, with rows that the tests read."""
    from sqlalchemy.engine import Connection

    assert isinstance(connection, Connection)
    Base.metadata.create_all(connection)
    tables = Base.metadata.tables
    for name, rows in {
        "agent": [{"id": 1, "name": "Ada"}],
        "customer": [{"id": 1, "name": "old", "agent_id": 1}, {"id": 2, "name": "alone", "agent_id": None}],
        "orders": [{"customer": 1, "no": number, "amount": 5} for number in ("a", "b", "c")],
        "person": [
            {"id": 1, "kind": "person", "name": "P"},
            {"id": 2, "kind": "engineer", "name": "E"},
            {"id": 3, "kind": "manager", "name": "M"},
        ],
        "engineer": [{"id": 2, "machine": "loom"}],
        "stock": [{"shop": 1, "item": "cup", "pieces": 9}, {"shop": 2, "item": "cup", "pieces": 4}],
    }.items():
        connection.execute(tables[name].insert(), rows)

"""Tables of an app's own, to be captured."""

from __future__ import annotations

import enum

from sqlalchemy import Enum, ForeignKey, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


class Status(enum.Enum):
    NEW = "new"
    TAKEN = "taken"
    DONE = "done"


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(String(20), default="paid")
    region: Mapped[str | None] = mapped_column(String(20))
    rank: Mapped[int | None]
    version: Mapped[int] = mapped_column(default=1)
    lines: Mapped[list[Line]] = relationship(back_populates="order")
    __mapper_args__ = {"version_id_col": version}


class Line(Base):
    __tablename__ = "line"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))
    order: Mapped[Order] = relationship(back_populates="lines")


class Part(Base):
    """A key of two columns, one of which has another name in Python; a status of a type that SQL doesn't know."""

    __tablename__ = "part"
    shelf: Mapped[str] = mapped_column(String(20), primary_key=True)
    number: Mapped[int] = mapped_column("no", primary_key=True, autoincrement=False)
    status: Mapped[Status] = mapped_column(Enum(Status, name="part_status"), default=Status.NEW)
    weight: Mapped[int | None]


class Animal(Base):
    """One table for all kinds."""

    __tablename__ = "animal"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(20))
    fed: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"polymorphic_on": kind, "polymorphic_identity": "animal"}


class Cat(Animal):
    __mapper_args__ = {"polymorphic_identity": "cat"}


class Dog(Animal):
    __mapper_args__ = {"polymorphic_identity": "dog"}


class Person(Base):
    __tablename__ = "person"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(20))
    name: Mapped[str] = mapped_column(String(20))
    __mapper_args__ = {"polymorphic_on": kind, "polymorphic_identity": "person"}


class Engineer(Person):
    """A table of its own beside its parent's."""

    __tablename__ = "engineer"
    id: Mapped[int] = mapped_column(ForeignKey("person.id"), primary_key=True, autoincrement=False)
    busy: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"polymorphic_identity": "engineer"}

"""A user's own classes, with the roles of locks among their columns."""

from __future__ import annotations

import enum
import uuid

from sqlalchemy import BigInteger, ForeignKey, Integer, String, Uuid
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlalchemy_locks as sl


class Base(DeclarativeBase):
    pass


class Import(Base):
    """Everything at once: a key made by the server, a counted version, a nonce that is a UUID."""

    __tablename__ = "own_import"
    pk: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column("import_name", String(60), unique=True)
    locked: Mapped[bool]
    tries: Mapped[int | None]
    by: Mapped[str | None] = mapped_column(String(60))
    nonce: Mapped[uuid.UUID | None] = mapped_column(Uuid())
    ts: Mapped[int | None] = mapped_column(BigInteger)
    period: Mapped[int | None] = mapped_column(BigInteger)
    fence: Mapped[int] = sl.Fence()
    body: Mapped[str | None] = mapped_column(String(60))
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}


class Kind(enum.Enum):
    MAIL = "mail"
    SMS = "sms"


class Slot(Base):
    """A composite key with an enum in it, an integer flag, and a queue."""

    __tablename__ = "own_slot"
    kind: Mapped[Kind] = mapped_column(primary_key=True)
    queue: Mapped[int] = mapped_column(primary_key=True)
    taken: Mapped[int | None] = mapped_column(Integer)


class Animal(Base):
    """Sister classes in one table."""

    __tablename__ = "own_animal"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    caged: Mapped[bool | None]
    __mapper_args__ = {"polymorphic_on": kind, "polymorphic_identity": "animal"}


class Cat(Animal):
    __mapper_args__ = {"polymorphic_identity": "cat"}


class Dog(Animal):
    __mapper_args__ = {"polymorphic_identity": "dog"}


class Parent(Base):
    __tablename__ = "own_parent"
    id: Mapped[int] = mapped_column(primary_key=True)
    locked: Mapped[bool]


class Child(Parent):
    """Joined to its parent's table."""

    __tablename__ = "own_child"
    id: Mapped[int] = mapped_column(ForeignKey("own_parent.id"), primary_key=True)
    sealed: Mapped[bool]


class Loose(Base):
    """Whose names nothing keeps unique."""

    __tablename__ = "own_loose"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(60))
    locked: Mapped[bool]


imports = sl.Mutex(
    Import,
    id=Import.name,
    acquired=Import.locked,
    retries=Import.tries,
    owner=Import.by,
    token=Import.nonce,
    fence=Import.fence,
)
slots = sl.Mutex(Slot, id=Slot.kind, queue=Slot.queue, acquired=Slot.taken)

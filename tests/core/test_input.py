"""Bad input is refused before any SQL, by an exception that names it."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import seen


class Base(DeclarativeBase):
    pass


class Pair(Base):
    __tablename__ = "pair"
    left: Mapped[int] = mapped_column(primary_key=True)
    right: Mapped[int] = mapped_column(primary_key=True)


class Loner(Base):
    __tablename__ = "loner"
    id: Mapped[int] = mapped_column("ident", primary_key=True)


class Unmapped:
    pass


class Numbered(int, enum.Enum):
    ONE = 1


class Count(enum.IntEnum):
    ONE = 1


class Word(str, enum.Enum):
    A = "a"


KEYLESS = Table("keyless", MetaData(), Column("x", Integer))

NO_NAMES = {
    "empty": ("", ValueError),
    "NUL": ("a\0b", ValueError),
    "surrogate": ("\ud800", ValueError),
    "True": (True, TypeError),
    "NaN": (math.nan, TypeError),
    "None": (None, TypeError),
    "bytes": (b"a", TypeError),
    "tuple": (("a",), TypeError),
    "object": (object(), TypeError),
    "operation": (sl.lock.exclusive("a"), TypeError),
    "2**63": (2**63, ValueError),
    "-2**63-1": (-(2**63) - 1, ValueError),
}
NAMED: list[Any] = [
    sl.lock.exclusive,
    sl.lock.shared,
    sl.lock.try_exclusive,
    sl.lock.try_shared,
    sl.lock.unlock,
    sl.lock.create,
    sl.lock.session_exclusive,
    sl.lock.session_unlock,
]
NO_DURATIONS = {
    "str": ("5", TypeError),
    "True": (True, TypeError),
    "Decimal": (Decimal(5), TypeError),
    "NaN": (math.nan, ValueError),
    "negative": (-1, ValueError),
    "negative timedelta": (timedelta(seconds=-1), ValueError),
}
NO_IDENTS = {
    "too few": (Pair, 1, ValueError),
    "too many": (Pair, (1, 2, 3), ValueError),
    "none of them": (Pair, (), ValueError),
    "another key": (Pair, {"left": 1, "middle": 2}, ValueError),
    "the column's name for the attribute's": (Loner, {"ident": 1}, ValueError),
    "None": (Loner, None, ValueError),
    "None in it": (Pair, (1, None), ValueError),
    "unmapped": (Unmapped, 1, TypeError),
    "an instance": (Loner(id=1), 1, TypeError),
    "an alias": (aliased(Loner), 1, TypeError),
    "a name": ("loner", 1, TypeError),
    "a declarative base": (Base, 1, TypeError),
    "no primary key": (KEYLESS, 1, ValueError),
}


@pytest.fixture
def engine(engine_to: MakeEngine) -> Iterator[Engine]:
    engine = engine_to("sqlite")
    with engine.connect():
        pass  # SQLAlchemy has sent its first queries on the new connection
    with seen(engine) as statements:
        yield engine
    assert statements == []


@pytest.mark.parametrize(("value", "error"), NO_NAMES.values(), ids=NO_NAMES)
def test_invalid_names_are_refused(engine: Engine, value: Any, error: type[Exception]) -> None:
    for make in NAMED:
        with pytest.raises(error, match="a lock's|a key's|the key|lock"), Session(engine) as session:
            session.execute(make(value))
    for block in (sl.Locks(engine).exclusive, sl.Locks(engine).shared):
        with pytest.raises(error):
            block("fine", value)


@pytest.mark.parametrize("value", [value for value, _ in NO_NAMES.values() if not isinstance(value, int)])
def test_invalid_parts_of_a_key_are_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        sl.lock.key("fine", value)
    with pytest.raises(TypeError):
        sl.lock.key("fine", True)


def test_calls_without_a_name_are_refused(engine: Engine) -> None:
    locks = sl.Locks(engine)
    for call in (sl.lock.create, sl.lock.key, locks.exclusive, locks.shared):
        with pytest.raises(ValueError, match="at least one"):
            call()
    for make in NAMED:
        with pytest.raises((TypeError, ValueError)):
            make()
    with pytest.raises(TypeError):
        sl.lock.exclusive("a", True)  # type: ignore[call-arg]


@pytest.mark.parametrize(("value", "error"), NO_DURATIONS.values(), ids=NO_DURATIONS)
def test_invalid_durations_are_refused(engine: Engine, value: Any, error: type[Exception]) -> None:
    locks = sl.Locks(engine)
    with pytest.raises(error, match="timeout"):
        locks.exclusive("a", timeout=value)
    with pytest.raises(error, match="timeout"):
        locks.shared("a", timeout=value)
    operation = sl.lock.exclusive("a").execution_options(locks_wait=value)
    with pytest.raises(error, match="locks_wait"), engine.connect() as connection:
        connection.execute(operation)
    with pytest.raises(error, match="locks_wait"), Session(engine) as session:
        session.execute(sl.lock.shared("a"), execution_options={"locks_wait": value})


@pytest.mark.parametrize(("entity", "ident", "error"), NO_IDENTS.values(), ids=NO_IDENTS)
def test_invalid_rows_are_refused(engine: Engine, entity: Any, ident: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"primary key|lock\.row takes"), Session(engine) as session:
        session.execute(sl.lock.row(entity, ident))


@pytest.mark.parametrize("bind", [None, "sqlite://", Engine, Base, 1], ids=str)
def test_invalid_engines_are_refused(bind: Any) -> None:
    for locks in (sl.Locks, sl.AsyncLocks):
        with pytest.raises(TypeError, match="takes an"):
            locks(bind)


def test_an_engine_of_the_other_kind(engine: Engine) -> None:
    with pytest.raises(TypeError, match=r"\(Locks an Engine\)"):
        sl.AsyncLocks(engine)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"\(AsyncLocks an AsyncEngine\)"):
        sl.Locks(create_async_engine("sqlite+aiosqlite://"))  # type: ignore[arg-type]
    with Session(engine) as session, pytest.raises(TypeError, match="an Engine"):
        sl.Locks(session)  # type: ignore[arg-type]


@pytest.mark.parametrize("member", [Numbered.ONE, Count.ONE], ids=["Enum", "IntEnum"])
@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb", "sqlite"])
def test_an_int_enum_member_is_its_value(engine_to: MakeEngine, name: str, member: Any) -> None:
    with engine_to(name, isolation_level=None if name == "sqlite" else "READ COMMITTED").begin() as connection:
        assert connection.scalar(sl.lock.try_exclusive(member)) is True
        if name == "postgresql15":
            assert connection.scalars(text("SELECT key FROM lock.locked_keys")).all() == [1]
        elif name != "sqlite":
            assert connection.scalar(text("SELECT count(*) FROM lock_locked_keys WHERE `key` = 1")) == 1

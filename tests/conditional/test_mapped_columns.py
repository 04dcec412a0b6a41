"""Mutexes and timeouts on columns of the user's own classes and tables, in a session."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    NullPool,
    Numeric,
    SmallInteger,
    String,
    Table,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.orm.exc import StaleDataError

import sqlalchemy_locks as sl
from tests.fixtures.parties import ASYNC, ENGINES, async_connected, connected, installed, unused
from tests.fixtures.task_models import Animal, Base, Cat, Child, Dog, Import, Kind, Loose, Parent, Slot, imports, slots

plain = sl.Mutex(Import.__table__, id="pk", acquired=Import.__table__.c.locked)
timeouts = sl.Timeout(Import, id=Import.name, ts=Import.ts, timeout=Import.period, fence=Import.fence)


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """With the tables of an app."""
    Base.metadata.create_all(engine)
    return engine


engines = pytest.mark.parametrize("name", ENGINES)


@engines
def test_all_roles_in_one_model(engine: Engine, name: str) -> None:
    a, b = unused(), unused()
    with Session(engine) as session:
        assert session.scalar(imports.create(a, b, retries=3)) == 2
        assert session.scalar(imports.create(a, retries=9)) == 0
        loaded = session.scalars(select(Import).where(Import.name == a)).one()
        assert (loaded.version, loaded.tries, loaded.locked, loaded.fence) == (1, 3, False, 0)
        assert session.scalar(imports.acquire(a, owner="ann")) is True
        assert (loaded.version, loaded.tries, loaded.locked, loaded.fence, loaded.by) == (2, 2, True, 1, "ann")
        assert loaded.nonce is not None
        assert session.scalar(imports.acquire(a)) is False
        assert session.scalar(plain.acquire(loaded.pk)) is False
        assert session.scalar(imports.release(a, owner="bob")) is False
        assert session.scalar(imports.release(a, owner="ann")) is True
        assert (loaded.locked, loaded.version) == (False, 3)
        assert session.scalar(imports.acquire_token(a)) == 2
        assert {a, b}.intersection(session.scalars(imports.capture(99))) == {b}
        session.commit()
    locks = sl.Locks(engine)
    assert locks.run(imports.release(b)) is True
    assert locks.run(imports.acquire(b)) is True
    assert locks.run(imports.release(a)) is True
    assert locks.run(imports.release(b)) is True


@engines
def test_enum_id_integer_flag_and_queue(engine: Engine, name: str) -> None:
    queue = int(unused().rpartition(" ")[2])
    with Session(engine) as session:
        assert session.scalar(slots.create(Kind.MAIL, Kind.SMS, queue=queue)) == 2
        assert session.scalar(slots.create(Kind.MAIL, queue=-queue)) == 1
        loaded = session.get_one(Slot, (Kind.MAIL, queue))
        assert session.scalar(slots.acquire(Kind.MAIL, queue=queue)) is True
        assert loaded.taken == 1
        assert session.scalar(slots.acquire(Kind.MAIL, queue=queue)) is False
        assert session.scalar(slots.acquire(Kind.MAIL, queue=-queue)) is True
        assert session.scalars(slots.capture(5, queue=queue)).all() == [Kind.SMS]
        loaded.taken = None
        session.flush()
        assert session.scalar(slots.acquire(Kind.MAIL, queue=queue, nowait=True)) is True
        assert loaded.taken == 1
        with pytest.raises(ValueError, match="pass queue="):
            slots.acquire(Kind.MAIL)


@engines
def test_timeout_with_a_period_per_row(engine: Engine, name: str) -> None:
    a, clock = unused(), [1000]
    own = sl.Timeout(Import, id=Import.name, ts=Import.ts, timeout=Import.period, clock=lambda: clock[0])
    with Session(engine) as session:
        session.add(Import(name=a, locked=False, period=10))
        session.flush()
        assert session.scalar(own.acquire(a)) is True  # never acquired: ts is NULL
        clock[0] = 1010
        assert session.scalar(own.acquire(a)) is False
        clock[0] = 1011
        assert session.scalar(own.acquire(a)) is True
        assert session.scalar(select(Import.ts).where(Import.name == a)) == 1011
        assert session.scalar(timeouts.acquire_token(a)) == 1


@engines
def test_flushing_values_loaded_before_raises_stale_data(engine: Engine, name: str) -> None:
    a = unused()
    with Session(engine) as session, Session(engine) as other:
        session.scalar(imports.create(a))
        session.commit()
        stale = other.scalars(select(Import).where(Import.name == a)).one()
        other.commit()
        other.refresh(stale)
        other.commit()
        version = stale.version
        other.expunge(stale)
        other.commit()
        assert session.scalar(imports.acquire(a)) is True
        session.commit()
        other.add(stale)
        assert version == 1
        stale.body = "undoes nothing"
        stale.locked = False
        with pytest.raises(StaleDataError):
            other.flush()
        other.rollback()
        assert session.scalar(imports.acquire(a)) is False


@pytest.mark.parametrize("asynchronous", ASYNC)
def test_async_session_reads_refreshed_attributes(servers: Any, asynchronous: str) -> None:
    name, driver = ASYNC[asynchronous]
    with connected(installed(servers, name), poolclass=NullPool) as engine:
        Base.metadata.create_all(engine)

    async def main() -> None:
        a = unused()
        async with async_connected(installed(servers, name, driver), poolclass=NullPool) as engine:
            async with AsyncSession(engine) as session:
                assert await session.scalar(imports.create(a)) == 1
                loaded = (await session.scalars(select(Import).where(Import.name == a))).one()
                assert await session.scalar(imports.acquire_token(a)) == 1
                assert (loaded.locked, loaded.fence, loaded.version) == (True, 1, 2)
                written = sl.fenced(update(Import).where(Import.pk == loaded.pk).values(body="x"), Import.fence, 1)
                assert await session.scalar(written) is True
                assert (loaded.body, loaded.version) == ("x", 3)

    asyncio.run(main())


@engines
def test_rows_of_sibling_classes_are_not_touched(engine: Engine, name: str) -> None:
    cats = sl.Mutex(Cat, id=Cat.id, acquired=Cat.caged)
    with Session(engine) as session:
        cat, dog = Cat(caged=None), Dog(caged=None)
        session.add_all([cat, dog])
        session.flush()
        assert session.scalar(cats.acquire(cat.id)) is True
        assert cat.caged is True
        with pytest.raises(sl.UnknownTask):
            session.scalar(cats.acquire(dog.id))
        assert session.scalars(cats.capture(9)).all() == []
        animals = sl.Mutex(Animal, id=Animal.id, acquired=Animal.caged)
        assert session.scalar(animals.acquire(cat.id)) is False
        assert session.scalar(animals.acquire(dog.id)) is True
        assert dog.caged is True
        session.rollback()


@engines
def test_locks_releases_only_its_own_acquisition(engine: Engine, name: str) -> None:
    a = unused()
    mine, theirs = sl.Locks(engine).mutexes(imports), sl.Locks(engine).mutexes(imports)
    with pytest.raises(sl.UnknownTask):
        mine.acquire(a)
    sl.Locks(engine).run(imports.create(a))
    assert mine.acquire(a) is True
    assert theirs.acquire(a) is False
    assert theirs.release(a) is True  # not acquired there: releases any acquisition
    assert theirs.acquire_token(a) == 2
    assert mine.release(a) is False
    assert theirs.release(a) is True
    with pytest.raises(ValueError, match="name it by token="):
        sl.Locks(engine).mutexes(plain)


def test_columns_of_other_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="joined parent"):
        sl.Mutex(Child, id=Child.id, acquired=Child.locked)
    assert sl.Mutex(Child, id=Child.id, acquired=Child.sealed) is not None
    with pytest.raises(ValueError, match="not a column of own_import"):
        sl.Mutex(Import, id=Import.name, acquired=Parent.locked)
    with pytest.raises(ValueError, match="no column 'nope'"):
        sl.Mutex(Import, id="nope", acquired=Import.locked)
    with pytest.raises(TypeError, match="is a column of Import"):
        sl.Mutex(Import, id=3, acquired=Import.locked)
    with pytest.raises(TypeError, match="must be Boolean or Integer"):
        sl.Mutex(Import, id=Import.pk, acquired=Import.body)
    with pytest.raises(TypeError, match="needs id= and acquired="):
        sl.Mutex(Import, id=Import.pk)
    with pytest.raises(TypeError, match="mapped class or a Table"):
        sl.Mutex("import", id="a", acquired="b")
    with pytest.raises(TypeError, match="none was given"):
        sl.Mutex(id=Import.pk, acquired=Import.locked)
    with pytest.raises(TypeError, match="needs id= and ts="):
        sl.Timeout(Import, id=Import.pk)
    with pytest.raises(ValueError, match="name it by timeout="):
        sl.Timeout(Import, id=Import.pk, ts=Import.ts)
    with pytest.raises(ValueError, match="name it by fence="):
        plain.acquire_token(1)
    with pytest.raises(ValueError, match="name it by retries="):
        plain.create(1, retries=2)
    with pytest.raises(ValueError, match="name it by owner="):
        plain.acquire(1, owner="ann")
    with pytest.raises(ValueError, match="no queues without a column"):
        plain.acquire(1, queue="mail")


def test_version_counted_by_python_is_refused() -> None:
    class Other(DeclarativeBase):
        pass

    class Counted(Other):
        __tablename__ = "own_counted"
        id: Mapped[int] = mapped_column(primary_key=True)
        locked: Mapped[bool]
        version: Mapped[str] = mapped_column(String(32))
        __mapper_args__ = {"version_id_col": version, "version_id_generator": lambda version: uuid4().hex}

    with pytest.raises(ValueError, match="counted by Python code"):
        sl.Mutex(Counted, id=Counted.id, acquired=Counted.locked)


def test_columns_of_the_wrong_type_are_refused() -> None:
    t = Table(
        "own_table",
        MetaData(),
        Column("id", Integer, primary_key=True),
        Column("flag", Boolean),
        Column("short", String(8)),
        Column("number", BigInteger),
        Column("name", String(40), unique=True),
        Column("real", Float),
        Column("small", SmallInteger),
        Column("five", Numeric(5, 2)),
    )
    for role, column in (
        ("token", "short"),
        ("token", "number"),
        ("owner", "number"),
        ("retries", "name"),
        ("fence", "name"),
        ("acquired_at", "name"),
    ):
        with pytest.raises(TypeError, match=role):
            sl.Mutex(t, id="id", acquired="flag", **{role: column})
    with pytest.raises(ValueError, match="two roles"):
        sl.Mutex(t, id="name", acquired="flag", owner="name")
    for column in ("real", "small", "five", "name"):
        with pytest.raises(TypeError, match="ts="):
            sl.Timeout(t, id="id", ts=column, every=10)
    for id in ("7", 7.0, True, [7]):
        with pytest.raises(TypeError, match="an id is int"):
            sl.Mutex(t, id="id", acquired="flag").acquire(id)
    with pytest.raises(TypeError, match="an id is str"):
        sl.Mutex(t, id="name", acquired="flag").acquire(7)
    for every in (10**19, float("inf")):
        with pytest.raises(ValueError, match="at most 50 years"):
            sl.Timeout(every=every)


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
def test_acquiring_refreshes_every_attribute_of_a_version(engine: Engine, name: str) -> None:
    """An acquisition increments the version, so all loaded attributes must show the row's values."""
    a = unused()
    read_committed = engine.execution_options(isolation_level="READ COMMITTED")
    with Session(read_committed) as session:
        session.scalar(imports.create(a))
        session.commit()
        mine = session.scalars(select(Import).where(Import.name == a)).one()
        assert mine.body is None
        with Session(engine) as other, other.begin():
            other.scalars(select(Import).where(Import.name == a)).one().body = "sold"
        assert session.scalar(imports.acquire(a)) is True
        assert (mine.body, mine.locked) == ("sold", True)
        session.rollback()


def test_discriminator_in_another_table_is_refused() -> None:
    class Root(DeclarativeBase):
        pass

    class Top(Root):
        __tablename__ = "top"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str] = mapped_column(String(20))
        __mapper_args__ = {"polymorphic_on": kind, "polymorphic_identity": "top"}

    class Joined(Top):
        __tablename__ = "joined"
        id: Mapped[int] = mapped_column(ForeignKey("top.id"), primary_key=True)
        locked: Mapped[bool]
        __mapper_args__ = {"polymorphic_identity": "joined"}

    with pytest.raises(ValueError, match="is in another table"):
        sl.Mutex(Joined, id=Joined.id, acquired=Joined.locked)


def test_ids_without_a_unique_constraint_are_refused() -> None:
    t = Table(
        "own_partial",
        MetaData(),
        Column("pk", Integer, primary_key=True),
        Column("name", String(40)),
        Column("queue", String(40)),
        Column("seconds", Integer),
        Column("locked", Boolean, nullable=False),
    )
    Index("own_partial_alive", t.c.name, unique=True, postgresql_where=~t.c.locked, sqlite_where=~t.c.locked)
    Index("own_partial_queues", t.c.name, t.c.queue, unique=True)
    for make in (
        lambda: sl.Mutex(Loose, id=Loose.name, acquired=Loose.locked),
        lambda: sl.Mutex(t, id=t.c.name, acquired=t.c.locked),
        lambda: sl.Timeout(t, every=60, id=t.c.name, ts=t.c.seconds),
        lambda: sl.StateTransition(t, id=t.c.name, status=t.c.seconds, ready=0, captured=1),
    ):
        with pytest.raises(ValueError, match=r"two locks with one name: give \(name\) of \w+ a unique constraint"):
            make()
    assert sl.Mutex(t, id=t.c.name, acquired=t.c.locked, queue=t.c.queue) is not None

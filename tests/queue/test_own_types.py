"""A queue in a user's own table whose columns have types of their own: what is put is what is captured, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import JSON, TIMESTAMP, Engine, String, Text, TypeDecorator, Uuid, text
from sqlalchemy.exc import DataError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine

NAMES = ["postgresql15", "mysql", "mariadb", "sqlite"]


class Reversed(TypeDecorator[Any]):
    """A text that must not be stored as it is, as one that is encrypted."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        return None if value is None else value[::-1]

    process_result_value = process_bind_param


class Wrapped(TypeDecorator[Any]):
    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        return {"wrapped": value}

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return value["wrapped"]


class Base(DeclarativeBase):
    pass


class Secret(sl.JobColumns, Base):
    __tablename__ = "own_types_secret"
    payload: Mapped[Any] = mapped_column(Reversed())


class Enveloped(sl.JobColumns, Base):
    __tablename__ = "own_types_enveloped"
    payload: Mapped[Any] = mapped_column(Wrapped())


class Narrow(sl.JobColumns, Base):
    __tablename__ = "own_types_narrow"
    queue_id: Mapped[str] = mapped_column(String(20))
    payload: Mapped[Any] = mapped_column(String(20))
    unique_key: Mapped[str | None] = mapped_column(String(20))


class Plain(sl.JobColumns, Base):
    __tablename__ = "own_types_plain"
    external_id: Mapped[UUID] = mapped_column(Uuid(native_uuid=False), default=uuid4, unique=True)


@pytest.fixture(params=NAMES)
def engine(engine_to: MakeEngine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = engine_to(request.param)
    for model in (Secret, Enveloped, Narrow, Plain):
        table: Any = model.__table__
        table.indexes.clear()  # those of the engine before
        sl.Queue(model).indexes(engine.dialect.name)
    tables = [each.__table__ for each in (Secret, Enveloped, Narrow, Plain)]
    Base.metadata.create_all(engine, tables)
    yield engine
    Base.metadata.drop_all(engine)


@pytest.mark.parametrize(("model", "stored"), [(Secret, "terces"), (Enveloped, "wrapped")])
def test_the_payload_s_own_type_is_applied(engine: Engine, model: Any, stored: str) -> None:
    queue = sl.Queue(model)
    with Session(engine) as session:
        session.execute(queue.put("secret"))
        session.commit()
        (found,) = session.scalars(text(f"SELECT payload FROM {model.__tablename__}")).all()
        assert stored in found
        assert [job.payload for job in session.scalars(queue.capture(5))] == ["secret"]


def test_what_is_too_long_is_refused_and_not_cut_off(engine: Engine) -> None:
    queue, jobs = sl.Queue(Narrow), sl.Locks(engine)
    with_room = engine.dialect.name == "sqlite"  # which ignores the length
    for options in ({"unique": "customer:0000000000000001"}, {"queue": "newsletter:customer-0001"}, {}):
        payload = "short" if options else "longer than its column is"
        if with_room:
            jobs.run(queue.put(payload, **options))
            continue
        with pytest.raises(DataError):
            jobs.run(queue.put(payload, **options))
    jobs.run(queue.put("short", unique="customer:01", queue="mail"))
    with Session(engine) as session:
        assert [job.payload for job in session.scalars(queue.capture(5, queue="mail"))] == ["short"]


def test_ids_are_stored_as_their_type_reads_them(engine: Engine) -> None:
    queue = sl.Queue(Plain)
    with Session(engine) as session:
        (id,) = session.scalars(queue.put("a")).all()
        session.commit()
        assert session.scalars(queue.get(id)).one().payload == "a"
        assert [job.external_id for job in session.scalars(queue.capture(5))] == [id]


def test_names_that_differ_in_case_are_two(engine: Engine) -> None:
    queue = sl.Queue(Enveloped)
    with Session(engine) as session:
        session.execute(queue.put("1", "2", unique=["Invoice:aB", "Invoice:Ab"], queue="tenant"))
        session.execute(queue.put("3", queue="Tenant"))
        session.commit()
        found = [job.payload for job in session.scalars(queue.capture(5, queue="tenant"))]
        assert sorted(found) == ["1", "2"]


class Zoned(sl.JobColumns, Base):
    __tablename__ = "own_types_zoned"
    run_at: Mapped[datetime] = mapped_column(TIMESTAMP(timezone=True))


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_timestamps_of_a_session_s_time_zone_are_refused(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name)
    Zoned.__table__.create(engine)  # type: ignore[attr-defined]
    with engine.connect() as connection, pytest.raises(sl.Unsupported, match="run_at must be DATETIME"):
        connection.execute(sl.Queue(Zoned).capture())

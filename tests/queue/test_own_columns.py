"""Further columns of a queue's own table: defaults and ``onupdate`` that Python computes, and unique ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, String, TypeDecorator, create_engine, func, select, text
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.sql.clock import Instant
from tests.conftest import PLAIN, Servers
from tests.fixtures.parties import async_connected
from tests.fixtures.queues import ENGINES


class Base(DeclarativeBase):
    pass


class Ticket(sl.JobColumns, Base):
    __tablename__ = "ticket"
    token: Mapped[str] = mapped_column(String(40), default=lambda: str(uuid4()))
    touched_at: Mapped[datetime | None] = mapped_column(Instant(), onupdate=lambda: datetime.now(timezone.utc))
    touched_by: Mapped[str] = mapped_column(String(20), default="nobody", onupdate="a worker")


class Invoice(sl.JobColumns, Base):
    """Of its jobs only one may exist, as of a column that the app sets."""

    __tablename__ = "invoice"
    number: Mapped[int] = mapped_column(server_default="7", unique=True)


class Parcel(sl.JobColumns, Base):
    """All at once, and its ids are texts."""

    __tablename__ = "parcel"
    external_id: Mapped[str] = mapped_column(String(36), unique=True)  # type: ignore[assignment]
    label: Mapped[str] = mapped_column(String(40), default=lambda: str(uuid4()))


class Reversed(TypeDecorator[Any]):
    """A text that must not be stored as it is, as one that is encrypted."""

    impl = String(20)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        return value[::-1]

    process_result_value = process_bind_param


class Secret(sl.JobColumns, Base):
    __tablename__ = "secret"
    payload: Mapped[Any] = mapped_column(Reversed())


class TicketWorker(sl.WorkerColumns, Base):
    __tablename__ = "ticket_worker"


tickets = sl.Queue(Ticket, workers=TicketWorker)
invoices, parcels = sl.Queue(Invoice), sl.Queue(Parcel)
for each in (tickets, invoices, parcels):
    each.indexes()


@pytest.fixture
def engine(servers: Servers, name: str) -> Iterator[Engine]:
    engine = create_engine(servers.fresh(name, PLAIN[name]), poolclass=NullPool)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def tokens(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(Ticket.token)).scalars())


@pytest.mark.parametrize("name", ENGINES)
def test_each_job_of_a_batch_has_its_own_default(engine: Engine) -> None:
    with engine.begin() as connection:
        ids = connection.execute(tickets.put({"a": 1}, [2], None, run_in=0)).scalars().all()
        assert (
            connection.execute(tickets.put({"a": 1}, {"a": 4}, external_id=[ids[0], uuid4()])).scalars().first()
            == ids[0]
        )
        first = connection.scalar(tickets.put(5, unique="k"))
        assert connection.scalar(tickets.put(6, unique="k")) == first
    assert len(set(tokens(engine))) == 5
    with Session(engine) as session, session.begin():
        jobs = session.scalars(tickets.capture(9)).all()
        assert [job.payload for job in jobs] == [{"a": 1}, [2], None, {"a": 4}, 5]
        assert all(job.touched_at is not None for job in jobs)


@pytest.mark.parametrize(
    ("name", "driver"),
    [("postgresql15", "psycopg"), ("postgresql15", "asyncpg"), ("mysql", "aiomysql"), ("sqlite", "aiosqlite")],
)
def test_and_so_it_has_with_an_async_driver(servers: Servers, engine: Engine, name: str, driver: str) -> None:
    database = Path(str(engine.url.database)).stem

    async def main() -> None:
        async with async_connected(servers.url(name, driver, database)) as bind:
            async with bind.begin() as connection:
                await connection.execute(tickets.put({"a": 1}, 2, run_in=0))
                await connection.execute(tickets.put(3, unique="k"))

            async def handler(job: Any) -> None:
                pass

            await sl.AsyncWorker(tickets, handler, bind=bind).run(until_empty=True)

    asyncio.run(main())
    assert len(set(tokens(engine))) == 3
    with engine.connect() as connection:
        assert connection.scalar(select(func.count(Ticket.completed_at))) == 3


@pytest.mark.parametrize("name", ["postgresql15"])
def test_more_keys_than_a_statement_has_parameters(servers: Servers, engine: Engine, name: str) -> None:
    database = Path(str(engine.url.database)).stem

    async def main() -> list[Any]:
        async with async_connected(servers.url(name, "asyncpg", database)) as bind, bind.begin() as connection:
            keys = [str(number) for number in range(33_000)]
            return list((await connection.execute(tickets.put(*keys, unique=keys))).scalars())

    ids = asyncio.run(main())
    with engine.connect() as connection:
        rows = connection.execute(select(Ticket.payload, Ticket.external_id)).all()
    assert {row.external_id: row.payload for row in rows} == {id: str(number) for number, id in enumerate(ids)}


@pytest.mark.parametrize("name", ENGINES)
def test_a_worker_computes_onupdate_for_each_job(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with engine.begin() as connection:
        connection.execute(tickets.put(*range(5)))
    seen: list[Any] = []
    sl.Worker(tickets, lambda job: seen.append(job.payload), bind=engine, concurrency=2, batch=2).run(until_empty=True)
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert "fetch failed" not in caplog.text
    with Session(engine) as session:
        jobs = session.scalars(select(Ticket)).all()
        assert {(job.attempts, job.touched_by) for job in jobs} == {(1, "a worker")}
        assert all(job.completed_at is not None and job.touched_at is not None for job in jobs)


@pytest.mark.parametrize("name", ["postgresql15"])
def test_listening_workers_are_notified(engine: Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as listener:
        listener.exec_driver_sql("LISTEN sqlalchemy_locks_job")
        driver: Any = listener.connection.driver_connection
        for operation in (tickets.put(1, 2), tickets.put(1, 2, unique=["a", "b"])):
            with engine.begin() as connection:
                connection.execute(operation)
            assert [each.payload for each in driver.notifies(timeout=10, stop_after=1)] == ["ticket:default"]
        with pytest.raises(sl.Unsupported, match="autocommit"):
            listener.execute(tickets.put(1, 2))


@pytest.mark.parametrize("name", ENGINES)
def test_a_job_that_another_unique_column_refuses_is_an_error(engine: Engine) -> None:
    if engine.dialect.name in ("mysql", "mariadb"):  # where the INSERT would ignore it
        with engine.connect() as connection, pytest.raises(sl.Unsupported, match="would ignore a job whose number"):
            connection.execute(invoices.put({"a": 1}))
        return
    with engine.begin() as connection:
        id = connection.scalar(invoices.put({"a": 1}, unique="k"))
    for again in (invoices.put({"a": 2}), invoices.put({"a": 2}, unique="l"), invoices.put(2, external_id=uuid4())):
        with engine.connect() as connection, pytest.raises(IntegrityError):
            connection.execute(again)
    with engine.begin() as connection:
        assert connection.scalar(invoices.put({"a": 2}, external_id=id)) == id
        assert connection.scalar(invoices.put({"a": 2}, unique="k")) == id
        assert connection.scalar(select(func.count()).select_from(Invoice)) == 1


@pytest.mark.parametrize("name", ENGINES)
def test_ids_may_be_texts(engine: Engine) -> None:
    with engine.begin() as connection:
        ids = connection.execute(parcels.put({"a": 1}, "two")).scalars().all()
        assert connection.scalar(parcels.put("again", external_id=ids[0])) == ids[0]
        first = connection.scalar(parcels.put(3, unique="k"))
        assert connection.scalar(parcels.put(4, unique="k")) == first
        for bad in (float("nan"), "\0", "\ud800"):
            with pytest.raises(ValueError, match="payload"):
                connection.execute(parcels.put({"a": bad}))
        assert connection.scalar(select(func.count()).select_from(Parcel)) == 3


@pytest.mark.parametrize("name", ENGINES)
def test_the_payload_s_own_type_is_applied(engine: Engine) -> None:
    secrets = sl.Queue(Secret)
    with Session(engine) as session:
        session.execute(secrets.put("secret"))
        session.commit()
        assert session.scalars(text("SELECT payload FROM secret")).all() == ["terces"]
        assert [job.payload for job in session.scalars(secrets.capture(5))] == ["secret"]
        if engine.dialect.name != "sqlite":  # which ignores the length
            with pytest.raises(DataError):
                session.execute(secrets.put("longer than its column is"))

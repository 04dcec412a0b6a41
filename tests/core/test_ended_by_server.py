"""InnoDB ends a whole transaction for some errors, with its locks: an operation says so, and so does each after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects import mariadb, mysql
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import async_connected, installed, unused


class Base(DeclarativeBase):
    pass


class Bill(Base):
    __tablename__ = "bill_of_an_ended_transaction"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    note: Mapped[int] = mapped_column(default=0)
    fence: Mapped[int] = sl.Fence()


QUEUE, TASKS, MUTEX, DAILY = sl.Queue(), sl.StateTransition(), sl.Mutex(), sl.Timeout(every=86400)


def isolated(raw: Any, _: Any) -> None:
    cursor = raw.cursor()
    cursor.execute("SET SESSION innodb_snapshot_isolation = ON")
    cursor.close()


def key_of(make: Any) -> Any:
    """An operation on a key whose row the other commits."""
    return lambda other, name: ((lambda: other.execute(sl.lock.create(name))), lambda: make(name))


def changed(prepare: Any, change: Any, make: Any) -> Any:
    """An operation on what is prepared before the transaction's snapshot, and changed after it."""

    def case(other: Connection, name: str) -> Any:
        made = other.execute(prepare(name)).all()
        other.commit()
        return (lambda: other.execute(change(name))), lambda: make(name, made)

    return case


def of_a_bill(make: Any) -> Any:
    def case(other: Connection, name: str) -> Any:
        number = sl.lock.key(name) % 2**31
        other.execute(Bill.__table__.insert().values(id=number))  # type: ignore[attr-defined]
        other.commit()
        return (lambda: other.execute(update(Bill).where(Bill.id == number).values(note=1))), lambda: make(number)

    return case


def of_a_job(make: Any, running: bool = True) -> Any:
    """An operation on a job, given its queue and, if it is running, the job."""

    def case(other: Connection, name: str) -> Any:
        other.execute(QUEUE.put({}, queue=name, unique=name))
        other.commit()
        jobs = other.execute(QUEUE.capture(1, queue=name)).all() if running else []
        other.commit()
        where = {"queue": name}
        touch = text("UPDATE lock_job SET priority = priority + 1 WHERE queue_id = :queue")
        return (lambda: other.execute(touch, where)), lambda: make(name, *jobs)

    return case


def granted(other: Connection, name: str) -> Any:
    other.execute(sl.semaphore.create(name, capacity=2))
    other.commit()
    grant = other.scalar(sl.semaphore.acquire({name: 1}, ttl=3600))
    other.commit()
    return grant


def renewed(other: Connection, name: str) -> Any:
    grant, number = granted(other, name), sl.lock.key(name) % 2**31
    write = update(Bill).where(Bill.id == number).values(note=1)
    return (lambda: other.scalar(sl.semaphore.renew(grant))), lambda: sl.guarded(write, grant)


def acquired(other: Connection, name: str) -> Any:
    granted(other, name)
    again = sl.semaphore.acquire({name: 1}, ttl=3600)
    return (lambda: other.scalar(again)), lambda: sl.semaphore.acquire({name: 1}, ttl=3600)


CASES: dict[str, Callable[[Connection, str], Any]] = {
    **{
        make.__name__: key_of(make)
        for make in (sl.lock.exclusive, sl.lock.shared, sl.lock.try_exclusive, sl.lock.try_shared)
    },
    "mutex": changed(MUTEX.create, MUTEX.acquire, lambda name, _: MUTEX.acquire(name)),
    "timeout": changed(DAILY.create, DAILY.acquire, lambda name, _: DAILY.acquire(name)),
    "transition": changed(
        lambda name: TASKS.create("a", queue=name),
        lambda name: TASKS.capture(1, queue=name),
        lambda name, _: TASKS.set_status("a", "done", queue=name, force=True),
    ),
    "job captured": of_a_job(lambda name: QUEUE.capture(1, queue=name), running=False),
    "job put": of_a_job(lambda name: QUEUE.put({}, queue=name, unique=name), running=False),
    "job completed": of_a_job(lambda name, job: QUEUE.complete(job)),
    "lock.row": of_a_bill(lambda number: sl.lock.row(Bill, number)),
    "lock.row of a table": of_a_bill(lambda number: sl.lock.row(Bill.__table__, number)),
    "fenced": of_a_bill(lambda number: sl.fenced(update(Bill).where(Bill.id == number).values(note=2), Bill.fence, 7)),
    "guarded": renewed,
    "semaphore": acquired,
}


@pytest.fixture
def engine(engine_to: MakeEngine) -> Engine:
    engine = engine_to("mariadb", isolation_level="REPEATABLE READ")
    event.listen(engine, "connect", isolated)
    Base.metadata.create_all(engine)
    return engine


@pytest.mark.parametrize("case", CASES)
def test_what_is_newer_than_the_snapshot(engine: Engine, case: str) -> None:
    """MariaDB with innodb_snapshot_isolation=ON, its default from 11.6.2."""
    name, before = unused(), unused()
    with Session(engine) as session, engine.connect() as other, engine.connect() as third:
        change, make = CASES[case](other, name)
        session.execute(sl.lock.exclusive(before))
        session.execute(text("SELECT count(*) FROM lock_installed"))
        change()
        other.commit()
        with pytest.raises(sl.MustRollback, match="every lock that it held.* lock before the first read"):
            session.execute(make())
        assert third.scalar(sl.lock.try_exclusive(before)) is True
        third.rollback()
        with pytest.raises(sl.MustRollback, match="every lock that it held"):
            session.scalar(sl.lock.try_exclusive(before))
        session.rollback()
        session.execute(make())
        session.rollback()


@pytest.mark.parametrize("driver", ["mariadb+aiomysql", "mariadb+asyncmy"])
def test_what_is_newer_than_the_snapshot_of_an_async_session(servers: Any, engine: Engine, driver: str) -> None:
    async def main() -> None:
        url = installed(servers, "mariadb", driver)
        async with async_connected(url, isolation_level="REPEATABLE READ") as bind, AsyncSession(bind) as session:
            event.listen(bind.sync_engine, "connect", isolated)
            await session.execute(text("SELECT count(*) FROM lock_installed"))
            with engine.begin() as other:
                other.execute(sl.lock.create(name))
            with pytest.raises(sl.MustRollback, match="lock before the first read"):
                await session.execute(sl.lock.exclusive(name))
            with pytest.raises(sl.MustRollback, match="earlier error"):
                await session.execute(sl.lock.exclusive(name))
            await session.rollback()
            await session.execute(sl.lock.exclusive(name))

    name = unused()
    asyncio.run(main())


@pytest.mark.parametrize("code", [1020, 1030, 1180, 1206, 1213, 3101])
@pytest.mark.parametrize("backend", [mysql.BACKEND, mariadb.BACKEND], ids=lambda backend: backend.name)
def test_errors_that_end_a_transaction(backend: Any, code: int) -> None:
    said = {1030: "Got error 153 from storage engine", 1180: "Got error 149 during COMMIT"}
    error = DBAPIError("UPDATE", {}, Exception(code, said.get(code, "the server's message")))
    assert isinstance(backend.translate(error), sl.MustRollback)
    assert backend.ends_transaction(error)
    assert backend.is_conflict(error)  # Locks run it again


@pytest.mark.parametrize("level", ["REPEATABLE READ", "READ COMMITTED"])
def test_check_tells(engine: Engine, level: str) -> None:
    with engine.connect().execution_options(isolation_level=level) as connection:
        warnings = [each.subject for each in mariadb.BACKEND.findings(connection) if each.level == "warning"]
    assert ("snapshot isolation" in warnings) is (level != "READ COMMITTED")

"""SQLite: the one write lock, and the transactions that can never acquire it."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, NullPool, Table, create_engine, event, text
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conftest import install
from tests.dialects.test_settings import driver_arguments
from tests.fixtures.parties import PATIENCE, async_connected, later

PAGE = Table("page", MetaData(), Column("id", Integer, primary_key=True), Column("n", Integer))
WAITS: list[Any] = [
    lambda: sl.lock.exclusive("a"),
    lambda: sl.lock.row(PAGE, 1),
    lambda: sl.lock.row(PAGE, 1).execution_options(locks_wait=PATIENCE),
]
Make = Callable[..., Engine]

waits = pytest.mark.parametrize("wait", WAITS, ids=["exclusive", "row", "bounded row"])


@pytest.fixture(params=["wal", "delete"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A database with the locks in it, with a write-ahead log or a rollback journal."""
    path = tmp_path / "app.db"
    connection = sqlite3.connect(path)
    assert connection.execute(f"PRAGMA journal_mode = {request.param}").fetchone() == (request.param,)
    connection.close()
    install(f"sqlite:///{path}")
    return path


@pytest.fixture
def make(path: Path) -> Iterator[Make]:
    """Engines for it; ``deferred=True`` begins transactions as SQLAlchemy's documentation recommends."""
    made: list[Engine] = []

    def engine(*, deferred: bool = False, timeout: float = PATIENCE, **options: Any) -> Engine:
        engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": timeout}, **options)
        if deferred:
            begin_deferred(engine)
        made.append(engine)
        return engine

    with engine().begin() as connection:
        PAGE.create(connection)
        connection.execute(PAGE.insert().values(id=1, n=0))
    yield engine
    for one in made:
        one.dispose()


def begin_deferred(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")


def read(connection: Any) -> Any:
    return connection.execute(text("SELECT n FROM page")).scalar()


def write(connection: Any) -> None:
    connection.execute(text("UPDATE page SET n = n + 1"))


@waits
def test_a_reader_must_roll_back_after_a_write(make: Make, wait: Any) -> None:
    """Its snapshot stays old, however long it waits."""
    with make(deferred=True).connect() as reader, make().connect() as writer:
        read(reader)
        write(writer)
        if writer.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal":
            writer.commit()
        with pytest.raises(sl.MustRollback, match="roll back and lock first, or install .*begin_immediate"):
            reader.execute(wait())
        reader.rollback()
        writer.commit()
        reader.execute(wait())
        assert read(reader) == 1


@waits
def test_a_reader_must_roll_back_during_a_write(make: Make, wait: Any) -> None:
    with make(deferred=True).connect() as reader, make().connect() as writer:
        read(reader)
        writer.execute(sl.lock.exclusive("b"))
        with pytest.raises(sl.MustRollback):
            reader.execute(wait())
        writer.rollback()


@waits
def test_not_free_in_time(make: Make, wait: Any) -> None:
    """A transaction that hasn't read before waits, and gets LockTimeout."""
    operation = wait().execution_options(locks_wait=0.05)
    for deferred in (False, True):
        with make(deferred=deferred, timeout=0.05).connect() as waiter, make().connect() as holder:
            holder.execute(sl.lock.exclusive("b"))
            for _ in range(2):
                with pytest.raises(sl.LockTimeout, match="busy timeout"):
                    waiter.execute(operation)
            with pytest.raises(sl.LockTimeout):
                waiter.execute(sl.lock.exclusive("a"))
            holder.rollback()
            waiter.execute(operation)


@pytest.mark.parametrize("immediate", [False, True])
@pytest.mark.parametrize("operation", [sl.Mutex().capture(1), sl.StateTransition().expire()])
def test_wait_of_locks_for_a_writer_is_limited(make: Make, immediate: bool, operation: Any) -> None:
    """Whatever the operation, and where BEGIN waits; the busy timeout is much longer."""
    engine = make()
    if immediate:
        sl.sqlite.begin_immediate(engine)
    run = sl.Locks(engine).run
    with make().connect() as writer:
        writer.execute(sl.lock.exclusive("b"))
        with pytest.raises(sl.LockTimeout, match=rf"{operation.name}.*: the database"):
            later(run, operation.execution_options(locks_wait=0.05)).result(PATIENCE / 4)
        writer.rollback()


@pytest.mark.parametrize("make_try", [sl.lock.try_exclusive, sl.lock.try_shared])
def test_a_try_of_a_reader_returns_false_during_a_write(make: Make, make_try: Any) -> None:
    with make(deferred=True).connect() as reader, make().connect() as writer:
        read(reader)
        write(writer)
        assert reader.scalar(make_try("a")) is False
        writer.rollback()
        assert reader.scalar(make_try("a")) is True


@waits
def test_begin_immediate_is_the_cure(make: Make, wait: Any) -> None:
    engine = make()
    sl.sqlite.begin_immediate(engine)
    with engine.connect() as reader, make().connect() as writer:
        read(reader)
        writing = later(write, writer)
        reader.execute(wait())  # it has been the writer since it began
        reader.commit()
        writing.result(PATIENCE)
        writer.commit()
    with engine.connect() as reader:
        assert read(reader) == 1
        assert other_can_write(make) is False


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_locks_wait_for_their_timeout_with_begin_immediate(make: Make, timeout: float) -> None:
    """And not for as long as the driver would wait at BEGIN."""
    engine = make(timeout=2 * PATIENCE)
    sl.sqlite.begin_immediate(engine)
    with make().connect() as holder:
        write(holder)

        def enter() -> None:
            with sl.Locks(engine).exclusive("a", timeout=timeout):
                raise AssertionError("another connection holds it")

        with pytest.raises(sl.LockTimeout):
            later(enter).result(PATIENCE)


@pytest.mark.parametrize("name", ["postgresql+psycopg", "mysql+pymysql", "mariadb+pymysql"])
def test_begin_immediate_is_for_sqlite(name: str) -> None:
    with pytest.raises(sl.Unsupported, match="begin_immediate is for SQLite"):
        sl.sqlite.begin_immediate(create_engine(f"{name}://"))


EVERY = [*WAITS, lambda: sl.lock.try_exclusive("a"), lambda: sl.lock.try_shared("a")]


@pytest.mark.parametrize("number", range(len(EVERY)))
def test_a_read_only_file_or_connection_is_refused(make: Make, path: Path, number: int) -> None:
    query_only = make()
    event.listen(query_only, "connect", lambda connection, record: connection.execute("PRAGMA query_only = 1"))
    read_only = create_engine(f"sqlite:///file:{path}?mode=ro&uri=true")
    for engine in (query_only, read_only):
        with engine.connect() as connection:
            for _ in range(2):
                with pytest.raises(sl.NotWritable):
                    connection.execute(EVERY[number]())
        with pytest.raises(sl.NotWritable), sl.Locks(engine).exclusive("a", timeout=5):
            pass
        engine.dispose()


def test_what_switches_off_locks_or_their_end_is_refused(path: Path) -> None:
    without_locks = create_engine(f"sqlite:///file:{path}?nolock=1&uri=true", poolclass=NullPool)
    without_rollback = create_engine(f"sqlite:///{path}", poolclass=NullPool, skip_autocommit_rollback=True)
    for engine in (without_locks, without_rollback):
        with pytest.raises(sl.Unsupported, match="leave (it|them) out"):
            sl.Locks(engine).exclusive("a").__enter__()


def test_an_engine_in_autocommit_whose_listener_reads(make: Make) -> None:
    engine, queue, jobs = make(isolation_level="AUTOCOMMIT"), sl.Queue(), []
    event.listen(engine, "engine_connect", lambda connection: connection.exec_driver_sql("SELECT 1"))
    with sl.Locks(engine).exclusive("a"):
        assert not other_can_write(make)
    sl.Locks(engine).run(queue.put(1, 2, 3))
    assert len(sl.Locks(engine).run(queue.capture(2))) == 2
    sl.Worker(queue, jobs.append, bind=engine).run(until_empty=True)
    assert [job.payload for job in jobs] == [3]


AUTOCOMMIT = driver_arguments(True)


def test_a_driver_that_ignores_commit_is_refused(make: Make, path: Path) -> None:
    """A semaphore would be granted twice, and a job never be put."""
    engine = create_engine(f"sqlite:///{path}", connect_args=AUTOCOMMIT)
    locks, permanent = sl.Locks(engine), [sl.semaphore.create("s", 1), sl.Queue().put("q", [1])]
    for operation in permanent:
        with pytest.raises(sl.Unsupported, match="leave it out"):
            locks.run(operation)
    with pytest.raises(sl.Unsupported, match="leave it out"), locks.exclusive("a"):
        pass
    for wait in WAITS if sys.version_info >= (3, 12) else []:
        with pytest.raises(sl.Unsupported, match="in autocommit"), engine.connect() as connection:
            connection.execute(wait())
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert other_can_write(make)
    engine.dispose()

    async def main() -> None:
        async with async_connected(f"sqlite+aiosqlite:///{path}", connect_args=AUTOCOMMIT) as engine:
            for operation in permanent:
                with pytest.raises(sl.Unsupported, match="leave it out"):
                    await sl.AsyncLocks(engine).run(operation)

    asyncio.run(main())
    assert other_can_write(make)


def other_can_write(make: Make) -> bool:
    with make(timeout=0).connect() as connection:
        got: bool = connection.scalar(sl.lock.try_exclusive("c"))
        return got


@pytest.mark.parametrize("how", ["driver's default", "deferred", "autocommit"])
def test_a_lock_in_a_savepoint_that_may_be_the_outermost_one_is_refused(make: Make, how: str) -> None:
    """Python's driver sends no BEGIN before SAVEPOINT, so that RELEASE would commit."""
    engine = make(isolation_level="AUTOCOMMIT") if how == "autocommit" else make(deferred=how == "deferred")
    for operation in (sl.lock.exclusive("a"), sl.lock.try_shared("a"), sl.Queue().put(1)):
        with Session(engine) as session, session.begin(), session.begin_nested():
            with pytest.raises(sl.Unsupported, match="lock before begin_nested.*begin_immediate"):
                session.execute(operation)
            assert other_can_write(make)


@pytest.mark.parametrize("how", ["driver's default", "deferred", "immediate", "block"])
def test_a_lock_acquired_in_a_savepoint_is_held_until_the_transaction_ends(make: Make, how: str) -> None:
    engine = make(deferred=how == "deferred")
    if how == "immediate":
        sl.sqlite.begin_immediate(engine)
    with ExitStack() as stack:
        if how == "block":
            session = stack.enter_context(sl.Locks(engine).exclusive("b")).session
        else:
            session = stack.enter_context(Session(engine))
            stack.enter_context(session.begin())
        if how in ("driver's default", "deferred"):
            session.execute(sl.lock.exclusive("b"))
        for _ in range(2):
            with session.begin_nested():
                session.execute(sl.lock.exclusive("a"))
            assert not other_can_write(make)
            with session.begin_nested() as savepoint:
                session.execute(sl.lock.exclusive("a"))
                savepoint.rollback()
            assert not other_can_write(make)
    assert other_can_write(make)


def test_a_savepoint_of_a_block_begins_no_transaction_in_the_place_of_a_lost_one(make: Make) -> None:
    engine = make()
    with pytest.raises(sl.LockLost), sl.Locks(engine).exclusive("a") as held:
        held.session.connection().connection.dbapi_connection.rollback()  # type: ignore[union-attr]
        assert other_can_write(make)
        with held.session.begin_nested():
            write(held.session)
    with engine.connect() as connection:
        assert read(connection) == 0

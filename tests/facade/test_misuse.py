"""Misused blocks: inside them, the keys are either held or reported as lost."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, insert, select, text
from sqlalchemy.exc import ResourceClosedError
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import sqlalchemy_locks as sl
from sqlalchemy_locks.testing import Clock
from tests.faults.drivers import free
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ENGINES, INNODB, PATIENCE, SERVERS, Watch, async_connected, installed, later, unused


class Base(DeclarativeBase): ...


class Note(Base):
    __tablename__ = "misuse"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    read: Mapped[int] = mapped_column(default=0)


@pytest.fixture
def noting(engine_to: MakeEngine) -> Iterator[Callable[..., Engine]]:
    """Engines with an empty table of notes."""
    made: list[Engine] = []

    def make(name: str, driver: str | None = None) -> Engine:
        made.append(engine_to(name, driver))
        Base.metadata.drop_all(made[-1])
        Base.metadata.create_all(made[-1])
        return made[-1]

    yield make
    for engine in made:
        Base.metadata.drop_all(engine)


def notes(engine: Engine) -> list[int]:
    with Session(engine) as session:
        return sorted(session.query(Note.id).all())


# one block, several users


@pytest.mark.parametrize("name", SERVERS)
def test_second_use_of_a_waiting_block_is_refused(
    engine_to: MakeEngine, watch: Callable[[str], Watch], name: str
) -> None:
    engine, key, server = engine_to(name), unused(), watch(name)
    locks = sl.Locks(engine)
    locks.run(sl.lock.create(key))
    shared = locks.shared(key)
    with locks.exclusive(key):
        first = later(shared.__enter__)
        server.until_waiting()
        with pytest.raises(sl.ReentryError, match="entered already"):
            later(shared.__enter__).result(PATIENCE)
    held = first.result(PATIENCE)
    assert not held.lost
    shared.__exit__(None, None, None)
    with shared:
        pass


def test_block_is_usable_after_a_failed_entry(engine_to: MakeEngine) -> None:
    engine, key = engine_to("postgresql15"), unused()
    block = sl.Locks(engine).exclusive(key, timeout=0)
    with sl.Locks(engine_to("postgresql15")).exclusive(key), pytest.raises(sl.LockTimeout):
        later(block.__enter__).result(PATIENCE)
    with block:
        pass


@pytest.mark.parametrize("which", ["postgresql15/asyncpg", "mysql/aiomysql"])
def test_two_tasks_with_one_block(servers: Any, which: str) -> None:
    name, driver = which.split("/")

    async def main() -> None:
        async with async_connected(installed(servers, name, driver)) as engine:
            block, refused = sl.AsyncLocks(engine).shared(unused()), 0

            async def use() -> bool:
                try:
                    async with block as held:
                        await held.check()
                        return True
                except sl.ReentryError:
                    return False

            assert sorted(await asyncio.gather(use(), use())) == [False, True]
            assert refused == engine.pool.checkedout() == 0  # type: ignore[attr-defined]

    asyncio.run(main())


# the listeners


class Full(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("no space is left for logs")


def test_failing_log_handler_loses_no_lock(
    engine_to: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "sqlalchemy_locks")
    monkeypatch.setattr(logging.getLogger("sqlalchemy_locks"), "handlers", [Full()])
    engine, key = engine_to("postgresql15"), unused()
    locks = sl.Locks(engine)

    def breaks(seen_events: sl.LockEvent) -> None:
        raise RuntimeError("the listener's")

    event.listen(locks, "acquired", breaks)
    with locks.exclusive(key):
        assert not free(engine, key)
    assert free(engine, key)
    assert locks.mutex.acquire(key)
    assert locks.mutex.release(key)
    assert locks.once_per(key, every=3600)
    with locks.lease(key, ttl=3600) as grant:
        grant.check()


# sessions


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("option", [{"autobegin": False}, {"twophase": True}], ids=str)
def test_session_with_explicit_begin(noting: Callable[..., Engine], name: str, option: dict[str, bool]) -> None:
    engine = noting(name)
    locks = sl.Locks(sessionmaker(engine, **option))  # type: ignore[call-overload]
    with locks.exclusive(unused()) as held:
        with held.session.begin():
            held.session.add(Note(id=1))
        with held.session.begin():
            held.session.add(Note(id=2))
    assert notes(engine) == [(1,), (2,)]
    (note,) = locks.run(sl.capture(Note, where=Note.id == 1, values={"read": 1}, order_by=Note.id, limit=1))
    assert note.read == 1


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("name", ENGINES)
def test_a_session_that_is_closed_inside_its_block_rolls_back(
    noting: Callable[..., Engine], name: str, end: str
) -> None:
    """The block would commit what was flushed, and not the rest."""
    engine = noting(name)
    locks, key = sl.Locks(engine), unused()
    for flushes in (True, False):
        with pytest.raises(sl.LockLost, match="closed inside the block"):
            with locks.exclusive(key) as held:
                held.session.add(Note(id=1))
                if flushes:
                    held.session.flush()
                else:
                    held.session.execute(insert(Note).values(id=2))
                held.session.add(Note(id=3))
                getattr(held.session, end)()
                assert held.lost
    with locks.exclusive(key) as held:
        getattr(held.session, end)()  # it was not used
        held.session.add(Note(id=4))
    getattr(held.session, end)()
    assert notes(engine) == [(4,)]


def test_an_async_session_that_is_closed_inside_its_block_rolls_back(
    noting: Callable[..., Engine], servers: Any
) -> None:
    engine = noting("postgresql15")

    async def main() -> None:
        async with async_connected(installed(servers, "postgresql15", "asyncpg")) as asynchronous:
            locks = sl.AsyncLocks(async_sessionmaker(asynchronous, autobegin=False))
            with pytest.raises(sl.LockLost, match="closed inside the block"):
                async with locks.exclusive(unused()) as held, held.session as session:
                    await session.begin()
                    session.add(Note(id=1))
                    await session.flush()
            async with locks.exclusive(unused()) as held, held.session.begin():
                held.session.add(Note(id=2))

    asyncio.run(main())
    assert notes(engine) == [(2,)]


@pytest.mark.parametrize("name", ENGINES)
def test_session_is_unusable_after_the_block(noting: Callable[..., Engine], name: str) -> None:
    """Code that runs after the block (a stream, a thread) would run without the lock."""
    engine = noting(name)
    with sl.Locks(engine).exclusive(unused()) as held:
        held.session.add(Note(id=1))
    for late in (lambda: held.session.execute(text("SELECT 1")), lambda: held.session.get(Note, 1)):
        with pytest.raises(ResourceClosedError, match="closed"):
            late()
    held.session.add(Note(id=2))
    with pytest.raises(ResourceClosedError, match="closed"):
        held.session.commit()
    assert notes(engine) == [(1,)]


@pytest.mark.parametrize("name", ENGINES)
def test_check_releases_no_savepoint(noting: Callable[..., Engine], name: str) -> None:
    engine = noting(name)
    with sl.Locks(engine).exclusive(unused()) as held:
        session = held.session
        for kept in (True, False):
            with contextlib.suppress(KeyError), session.begin_nested():
                session.add(Note(id=int(kept)))
                session.flush()
                if name in INNODB:
                    with pytest.raises(sl.Unsupported, match="begin_nested"):
                        held.check()
                else:
                    held.check()
                if not kept:
                    raise KeyError
            held.check()
    assert notes(engine) == [(1,)]


# SQLAlchemy's listeners


@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
@pytest.mark.parametrize("what", ["begin", "commit", "rollback"])
def test_settings_are_restored_after_a_listener_raised(engine_to: MakeEngine, name: str, what: str) -> None:
    engine, key = engine_to(name, isolation_level="SERIALIZABLE", pool_size=1, max_overflow=0), unused()

    def settings() -> Any:
        with engine.connect() as connection:
            raw: Any = connection.connection.dbapi_connection
            own = raw.get_autocommit() if name == "mysql" else (raw.autocommit, raw.isolation_level)
            return connection.get_isolation_level(), own

    def breaks(*_: Any) -> None:
        raise RuntimeError("the listener's")

    was, locks = settings(), sl.Locks(engine)
    for end in (None, KeyError()):
        event.listen(engine, what, breaks)
        with contextlib.suppress(KeyError), contextlib.suppress(RuntimeError):
            with locks.exclusive(key) as held:
                held.session.execute(text("SELECT 1"))
                if end is not None:
                    raise end
        event.remove(engine, what, breaks)
        assert settings() == was
        assert free_at_all(locks, key)


def free_at_all(locks: sl.Locks, key: str) -> bool:
    with locks.exclusive(key, timeout=0):
        return True


@pytest.mark.parametrize("what", ["connect", "checkout"])
@pytest.mark.parametrize("name", SERVERS)
def test_listener_that_leaves_a_transaction_open(engine_to: MakeEngine, name: str, what: str) -> None:
    engine, key = engine_to(name), unused()
    table = "lock_semaphore" if name in INNODB else "lock.semaphore"

    def reads(raw: Any, *_: Any) -> None:
        with contextlib.closing(raw.cursor()) as cursor:
            cursor.execute(f"SELECT count(*) FROM {table}")

    event.listen(engine, what, reads)
    locks = sl.Locks(engine)
    for _ in range(2):  # with a new connection, and with a pooled one
        with locks.exclusive(key, timeout=0) as held:
            assert held.session.scalar(text("SELECT 1")) == 1
            held.check()
        with locks.lease(key, timeout=0) as grant:
            grant.check()
        assert locks.mutex.acquire(key)
        assert locks.mutex.release(key)


@pytest.mark.parametrize("name", INNODB)
def test_begin_listener_that_reads_is_refused(engine_to: MakeEngine, name: str) -> None:
    engine, key = engine_to(name), unused()

    def reads(connection: Connection) -> None:
        connection.exec_driver_sql("SELECT count(*) FROM lock_semaphore")

    event.listen(engine, "begin", reads)
    with pytest.raises(sl.Unsupported, match='in a listener of "checkout" instead'), sl.Locks(engine).exclusive(key):
        pass
    event.remove(engine, "begin", reads)
    assert free_at_all(sl.Locks(engine), key)


def test_async_locks_without_greenlet_name_the_extra() -> None:
    code = "import sys; sys.modules['greenlet'] = None; import sqlalchemy_locks as sl; sl.Locks; sl.AsyncLocks"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert "ImportError: AsyncLocks need greenlet" in done.stderr
    assert "[asyncpg]" in done.stderr


def test_errors_about_arguments_show_no_password() -> None:
    url = "postgresql+psycopg://user:secret@localhost/db"
    for make in (sl.Locks, sl.AsyncLocks, lambda bind: sl.Worker(sl.Queue(), print, bind=bind)):
        with pytest.raises(TypeError, match="str") as caught:
            make(url)
        assert "secret" not in str(caught.value)


def test_what_is_no_mutex_no_engine_or_no_name_is_refused(engine_to: MakeEngine) -> None:
    locks = sl.Locks(engine_to("sqlite"))
    for wrong in (None, "m", sl.Mutex):
        with pytest.raises(TypeError, match=r"takes a sl\.Mutex, not"):
            locks.mutexes(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes an operation of this library"):
        locks.run(select(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Clock takes an Engine"):
        Clock("sqlite://")  # type: ignore[arg-type]
    for named in ({"prefix": None}, {"schema": 1}):
        with pytest.raises(TypeError):
            sl.metadata(**named)
    for named in ({"prefix": ""}, {"schema": ""}):
        with pytest.raises(ValueError, match="empty"):
            sl.metadata(**named)


def test_a_block_that_is_not_entered_is_neither_true_nor_false_nor_left(servers: Any, engine_to: MakeEngine) -> None:
    """Other libraries' ``if lock.acquire(timeout=0):`` would lock nothing here."""
    locks = sl.Locks(engine_to("sqlite"))
    unentered = "use it in a with statement, or as a decorator"
    for block in (locks.exclusive("a", timeout=0), locks.lease("a", timeout=0), locks.semaphore("a")):
        with pytest.raises(TypeError, match=unentered):
            bool(block)
        with pytest.raises(sl.ReentryError, match="not entered"):
            block.__exit__(None, None, None)

    async def main() -> None:
        async with async_connected(installed(servers, "sqlite", "aiosqlite")) as engine:
            for block in (sl.AsyncLocks(engine).lease("a"), sl.AsyncLocks(engine).exclusive("a")):
                with pytest.raises(TypeError, match=unentered):
                    bool(block)
                with pytest.raises(sl.ReentryError, match="not entered"):
                    await block.__aexit__(None, None, None)

    asyncio.run(main())
    with pytest.raises(TypeError, match=r"not function; a decorator takes it, as in @locks.exclusive\('report'\)"):
        locks.exclusive(lambda: None)  # type: ignore[arg-type]
    with (
        locks.exclusive("a"),
        pytest.raises(sl.ReentryError, match="work in the held.session of the block"),
        locks.exclusive("a"),
    ):
        pass


def test_errors_cross_process_borders() -> None:
    for error in (sl.RequestOver("over", "EXPIRED"), sl.StaleToken("stale", 7), sl.LockTimeout("late", kind="lock")):
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert (str(twin), vars(twin)) == (str(error), vars(error))


def test_alive_is_a_function(engine_to: MakeEngine) -> None:
    locks: Any = sl.Locks(engine_to("sqlite"))
    for call in (locks.sweep, locks.maintain):
        with pytest.raises(TypeError, match="alive"):
            call(alive=5)

"""SQLite's write lock: how long waiters wait, which ones wait, and what a wait must not leave behind.

Here an engine simulates a process: two engines share nothing in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conftest import install
from tests.fixtures.parties import PATIENCE, async_connected, connected, later, until, waiting_writers

Inside = contextlib.AbstractContextManager[Any]


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite:///{tmp_path / 'app.db'}"
    install(made)
    with connected(made) as engine:
        locks = sl.Locks(engine)
        locks.run(sl.semaphore.create("s", capacity=10))
        locks.run(sl.Mutex().create("m"))
        locks.run(sl.Queue().put({"to": "somebody"}))
    return made


@contextlib.contextmanager
def held(url: str) -> Iterator[Callable[[], None]]:
    """Another process holds the write lock; yields what releases it."""
    with connected(url) as engine, engine.connect() as connection:
        connection.execute(sl.lock.exclusive("k"))
        yield connection.rollback


def journal_mode(url: str, mode: str) -> None:
    with connected(url) as engine, engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA journal_mode = {mode}")


def in_session(operation: Callable[[], Any]) -> Callable[[Engine], Inside]:
    @contextlib.contextmanager
    def enter(engine: Engine) -> Iterator[None]:
        with Session(engine) as session, session.begin():
            session.execute(operation())
            yield

    return enter


#: ways to take the write lock, for as long as a block runs
WAYS: dict[str, Callable[[Engine], Inside]] = {
    "locks": lambda engine: sl.Locks(engine).exclusive("k"),
    "session": in_session(lambda: sl.lock.exclusive("k")),
    "immediate": in_session(lambda: text("SELECT 1")),
    "semaphore": in_session(lambda: sl.semaphore.acquire({"s": 1}, ttl=3600)),
}


@pytest.mark.parametrize("way", WAYS)
def test_waiters_get_the_lock_one_after_another(url: str, way: str) -> None:
    inside: list[int] = []
    served: list[int] = []

    def enter(number: int) -> None:
        with connected(url, connect_args={"timeout": PATIENCE}) as engine:
            if way == "immediate":
                sl.sqlite.begin_immediate(engine)
            with WAYS[way](engine):
                inside.append(number)
                assert inside == [number]
                inside.remove(number)
                served.append(number)

    with held(url) as release, connected(url) as watcher:
        waiters = [later(enter, number) for number in range(3)]
        until(lambda: waiting_writers(watcher) == 3)
        release()
        for waiter in waiters:
            waiter.result(PATIENCE)
        assert sorted(served) == [0, 1, 2]
        assert waiting_writers(watcher) == 0


def test_a_wait_ends_in_time(url: str) -> None:
    with held(url), connected(url) as engine, connected(url, connect_args={"timeout": 0.1}) as impatient:
        with pytest.raises(sl.LockTimeout), sl.Locks(engine).exclusive("k", timeout=0.1):
            pass
        with Session(impatient) as session, pytest.raises(sl.LockTimeout):
            session.execute(sl.lock.exclusive("k"))
        with Session(engine) as session, pytest.raises(sl.LockTimeout):
            session.execute(sl.lock.exclusive("k"), execution_options={"locks_wait": 0.1})
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        with engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 5000
        sl.sqlite.begin_immediate(impatient)
        # SQLite's own error: the transaction has no lock of this library
        with pytest.raises(OperationalError, match="database is locked"), impatient.connect() as connection:
            connection.execute(text("SELECT 1"))


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_a_connection_with_an_unfinished_select_is_refused(url: str, journal: str) -> None:
    """The holder's COMMIT waits until these rows are fetched, so waiting for the holder would deadlock."""
    journal_mode(url, journal)
    with held(url) as release, connected(url) as engine, Session(engine) as session:
        rows = session.execute(text("SELECT 1 FROM lock_semaphore UNION ALL SELECT 2"))
        rows.fetchone()
        with pytest.raises(sl.MustRollback):
            session.execute(sl.lock.exclusive("k"), execution_options={"locks_wait": PATIENCE})
        rows.close()
        session.rollback()
        release()
        session.execute(sl.lock.exclusive("k"))


def test_readers_dont_wait_for_writers(url: str) -> None:
    journal_mode(url, "wal")
    reads: list[Callable[[], Any]] = [
        lambda: sl.Queue().stats(),
        sl.semaphore.usage,
        lambda: sl.semaphore.holders("s"),
        lambda: sl.lock.unlock("k"),
        sl.lock.vacuum,
    ]
    with held(url), connected(url, connect_args={"timeout": PATIENCE}) as engine:
        for read in reads:
            sl.Locks(engine).run(read())
            with Session(engine) as session:
                session.execute(read())


@pytest.mark.parametrize("listener", ["the app's", "ours"])
@pytest.mark.parametrize("what", ["exclusive", "mutex", "capture"])
def test_a_transaction_that_waited_at_begin_is_one(url: str, what: str, listener: str) -> None:
    """The event waits, once; the statement that begins the transaction doesn't."""
    with connected(url) as engine, engine.begin() as connection:
        connection.execute(text("CREATE TABLE written (id INTEGER PRIMARY KEY)"))
    operation: Any = {
        "exclusive": lambda: sl.lock.exclusive("k"),
        "mutex": lambda: sl.Mutex().acquire("m"),
        "capture": lambda: sl.Queue().capture(1, host="me"),
    }[what]
    begun = threading.Event()

    def begin(connection: Any) -> None:
        begun.set()
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    def work() -> None:
        with engine.connect() as connection:
            connection.execute(operation())
            connection.execute(text("INSERT INTO written VALUES (1)"))
            connection.rollback()

    with held(url) as release, connected(url, connect_args={"timeout": PATIENCE}) as engine:
        if listener == "ours":
            sl.sqlite.begin_immediate(engine)
        else:
            event.listen(engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
            event.listen(engine, "begin", begin)
        working = later(work)
        until((lambda: waiting_writers(engine) == 1) if listener == "ours" else begun.is_set, unless=working)
        release()
        working.result(PATIENCE)
        with engine.begin() as connection:
            assert connection.scalar(text("SELECT count(*) FROM written")) == 0
            assert connection.scalar(sl.Mutex().acquire("m"))
            assert len(connection.execute(sl.Queue().capture(1, host="me")).all()) == 1


def test_a_failed_begin_closes_its_connection(url: str) -> None:
    """SQLAlchemy would execute what follows in autocommit."""
    with held(url) as release, connected(url) as engine:
        sl.sqlite.begin_immediate(engine)
        with engine.connect() as connection:
            with pytest.raises(sl.LockTimeout):
                connection.execute(sl.Mutex().acquire("m"), execution_options={"locks_wait": 0.01})
            assert connection.closed
        release()
        for _ in range(2):
            with engine.connect() as connection:
                assert connection.scalar(sl.Mutex().acquire("m"))


def test_the_event_loop_runs_during_a_wait(url: str) -> None:
    """And a waiter can be cancelled."""

    async def main() -> None:
        at = url.replace("sqlite:", "sqlite+aiosqlite:")
        async with async_connected(at) as one, async_connected(at) as other, async_connected(at) as third:

            async def wait(engine: Any) -> None:
                async with sl.AsyncLocks(engine).exclusive("k"):
                    pass

            async with sl.AsyncLocks(one).exclusive("k"):
                waiting, cancelled = (asyncio.ensure_future(wait(engine)) for engine in (other, third))
                while waiting_writers(one.sync_engine) < 2:
                    await asyncio.sleep(0.001)
                    assert not waiting.done()
                cancelled.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
                assert waiting_writers(one.sync_engine) == 1
                assert third.pool.checkedout() == 0  # type: ignore[attr-defined]
            await asyncio.wait_for(waiting, PATIENCE)

    asyncio.run(main())


def test_a_cancelled_call_leaves_no_lock_on_the_file(url: str) -> None:
    """A cursor that was cancelled in its thread keeps the file locked, even if closed, while it is referenced."""
    errors: list[BaseException] = []

    def free() -> bool:
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=0)) as other:
            try:
                other.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError:
                return False
        return True

    async def main() -> None:
        for turn in range(100):
            async with async_connected(url.replace("sqlite:", "sqlite+aiosqlite:")) as engine:
                locks = sl.AsyncLocks(engine)
                call = asyncio.ensure_future(locks.acquire({"s": 10}, ttl=3600, timeout=PATIENCE))
                for _ in range(5 * turn):
                    await asyncio.sleep(0)
                call.cancel()
                try:
                    await call
                except asyncio.CancelledError as error:
                    errors.append(error)
            until(free)

    with connected(url) as engine:
        grant = sl.Locks(engine).acquire({"s": 1}, ttl=3600)
        asyncio.run(main())
        sl.Locks(engine).release(grant)
    assert len(errors) == 100


def leave(locks: sl.Locks) -> None:
    with locks.lease("y", ttl=60):
        pass


WRITES: dict[str, Callable[[sl.Locks], Any]] = {
    "lease": leave,
    "put": lambda locks: locks.run(sl.Queue().put({"to": "somebody"})),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_write_in_a_block_of_the_same_caller_is_refused(url: str, what: str) -> None:
    """It would wait for the block's own write lock; another thread waits for it, and reads don't."""
    with connected(url) as engine:
        locks = sl.Locks(engine)
        with locks.shared("x"):
            with pytest.raises(sl.ReentryError, match="held.session"):
                WRITES[what](locks)
            assert [row.used for row in locks.run(sl.semaphore.usage())] == [0]
            waiting = later(WRITES[what], locks)
            until(lambda: waiting_writers(engine) == 1, unless=waiting)
        waiting.result(PATIENCE)
        WRITES[what](locks)

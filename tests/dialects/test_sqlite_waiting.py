"""SQLite's write lock: how long waiters wait, which ones wait, and what a wait must not leave behind.

Here an engine simulates a process: two engines share nothing in memory.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conftest import install
from tests.fixtures.parties import PATIENCE, async_connected, connected, later, until, waiting_writers

WAYS = ("locks", "shared", "session", "immediate", "mutex", "semaphore")


class Party:
    """A holder or waiter with an engine of its own, which takes the write lock in one of several ways."""

    def __init__(self, url: str, way: str) -> None:
        self.way = way
        self.engine = create_engine(url, connect_args={"timeout": PATIENCE})
        if way == "immediate":
            sl.sqlite.begin_immediate(self.engine)
        self.locks = sl.Locks(self.engine)
        self.inside, self.out = threading.Event(), threading.Event()

    def take(self, entered: Callable[[Party], object]) -> None:
        """Acquire it, call ``entered``, and hold it until ``out`` is set."""
        match self.way:
            case "locks" | "shared":
                with self.locks.shared("k") if self.way == "shared" else self.locks.exclusive("k"):
                    self._stay(entered)
            case "session" | "immediate":
                with Session(self.engine) as session, session.begin():
                    if self.way == "session":
                        session.execute(sl.lock.exclusive("k"))
                    else:
                        session.execute(text("SELECT 1"))
                    self._stay(entered)
            case "mutex" | "semaphore":
                with Session(self.engine) as session, session.begin():
                    if self.way == "mutex":
                        session.execute(sl.Mutex().acquire("m"))
                    else:
                        session.execute(sl.semaphore.acquire({"s": 1}, ttl=3600))
                    self._stay(entered)

    def _stay(self, entered: Callable[[Party], object]) -> None:
        entered(self)
        self.inside.set()
        assert self.out.wait(PATIENCE)


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite:///{tmp_path / 'app.db'}"
    install(made)
    with connected(made) as engine:
        locks = sl.Locks(engine)
        locks.run(sl.semaphore.create("s", capacity=10))
        locks.run(sl.Mutex().create("m"))
    return made


@pytest.mark.parametrize("journal", ["delete", "wal"])
@pytest.mark.parametrize("way", WAYS)
def test_waiters_get_the_lock_one_after_another(url: str, way: str, journal: str) -> None:
    with connected(url) as engine, engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA journal_mode = {journal}")
    parties = [Party(url, way) for _ in range(4)]
    inside: list[Party] = []
    served: list[Party] = []

    def enter(party: Party) -> None:
        inside.append(party)
        assert inside == [party]
        inside.remove(party)
        served.append(party)

    first = parties[0]
    futures = [later(first.take, enter)]
    until(first.inside.is_set, unless=futures[0])
    for party in parties[1:]:
        futures.append(later(party.take, enter))
    until(lambda: waiting_writers(first.engine) == 3)
    for party in parties:
        party.out.set()
    for future in futures:
        future.result(PATIENCE)
    assert len(served) == 4
    assert waiting_writers(first.engine) == 0
    for party in parties:
        party.engine.dispose()


def test_a_wait_ends_in_time(url: str) -> None:
    holder = Party(url, "locks")
    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    with connected(url) as engine, connected(url, connect_args={"timeout": 0.1}) as impatient:
        with pytest.raises(sl.LockTimeout):
            with sl.Locks(engine).exclusive("k", timeout=0.1):
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
    holder.out.set()
    held.result(PATIENCE)
    holder.engine.dispose()


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_a_connection_with_an_unfinished_select_is_refused(url: str, journal: str) -> None:
    """The holder's COMMIT waits until these rows are fetched, so waiting for the holder would deadlock."""
    with connected(url) as engine, engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA journal_mode = {journal}")
    holder, waits = Party(url, "locks"), {"locks_wait": PATIENCE}
    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    with connected(url) as engine, Session(engine) as session:
        rows = session.execute(text("SELECT 1 FROM lock_semaphore UNION ALL SELECT 2"))
        rows.fetchone()
        with pytest.raises(sl.LockError):
            session.execute(sl.lock.exclusive("k"), execution_options=waits)
        holder.out.set()
        rows.close()
        session.rollback()
        held.result(PATIENCE)
        session.execute(sl.lock.exclusive("k"))
    holder.engine.dispose()


READS: dict[str, Callable[[], Any]] = {
    "stats": lambda: sl.Queue().stats(),
    "usage": sl.semaphore.usage,
    "holders": lambda: sl.semaphore.holders("s"),
    "unlock": lambda: sl.lock.unlock("k"),
    "vacuum": sl.lock.vacuum,
    "create": lambda: sl.lock.create("k"),
}


@pytest.mark.parametrize("what", READS)
def test_readers_dont_wait_for_writers(url: str, what: str) -> None:
    with connected(url) as engine, engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = wal")
    holder, waiter = Party(url, "locks"), Party(url, "session")
    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    waiting = later(waiter.take, lambda party: None)
    until(lambda: waiting_writers(holder.engine) == 1, unless=waiting)
    # neither of them releases before this has returned
    with connected(url, connect_args={"timeout": PATIENCE}) as engine:
        sl.Locks(engine).run(READS[what]())
        with Session(engine) as session:
            session.execute(READS[what]())
    for party in (holder, waiter):
        party.out.set()
    for future in (held, waiting):
        future.result(PATIENCE)
    for party in (holder, waiter):
        party.engine.dispose()


@pytest.mark.parametrize("listener", ["the app's", "ours"])
@pytest.mark.parametrize("what", ["exclusive", "try_exclusive", "mutex", "capture"])
def test_a_transaction_that_waited_at_begin_is_one(url: str, what: str, listener: str) -> None:
    """The app's event listener waits, once; the statement that begins the transaction doesn't."""
    with connected(url) as engine, engine.begin() as connection:
        connection.execute(text("CREATE TABLE written (id INTEGER PRIMARY KEY)"))
        connection.execute(sl.Queue().put({"to": "somebody"}))
    holder = Party(url, "locks")
    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    operation = {
        "exclusive": lambda: sl.lock.exclusive("k"),
        "try_exclusive": lambda: sl.lock.try_exclusive("k"),
        "mutex": lambda: sl.Mutex().acquire("m"),
        "capture": lambda: sl.Queue().capture(1, host="me"),
    }[what]

    def work() -> None:
        with engine.connect() as connection:
            connection.execute(operation())
            connection.execute(text("INSERT INTO written VALUES (1)"))
            connection.rollback()

    with connected(url, connect_args={"timeout": PATIENCE}) as engine:
        if listener == "ours":
            sl.sqlite.begin_immediate(engine)
        else:
            event.listen(engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
            event.listen(engine, "begin", lambda connection: waits(connection))
        asked = threading.Event()

        def waits(connection: Any) -> None:
            asked.set()
            connection.exec_driver_sql("BEGIN IMMEDIATE")

        working = later(work)
        until((lambda: waiting_writers(engine) == 1) if listener == "ours" else asked.is_set, unless=working)
        holder.out.set()
        working.result(PATIENCE)
        held.result(PATIENCE)
        with engine.begin() as connection:
            assert connection.scalar(text("SELECT count(*) FROM written")) == 0
            assert connection.scalar(sl.Mutex().acquire("m"))
            assert len(connection.execute(sl.Queue().capture(1, host="me")).all()) == 1
    holder.engine.dispose()


def test_an_autocommit_write_admits_no_new_readers(url: str) -> None:
    """Otherwise overlapping readers would starve it."""
    at = url.removeprefix("sqlite:///")
    reader = sqlite3.connect(at, isolation_level=None)
    rows = reader.execute("SELECT 1 FROM lock_semaphore UNION ALL SELECT 2")
    rows.fetchone()

    def refused() -> bool:
        other = sqlite3.connect(at, timeout=0)
        try:
            other.execute("SELECT count(*) FROM lock_semaphore").fetchone()
        except sqlite3.OperationalError:
            return True
        finally:
            other.close()
        return False

    with connected(url, isolation_level="AUTOCOMMIT", connect_args={"timeout": PATIENCE}) as engine:

        def write() -> Any:
            with engine.connect() as connection:
                return connection.scalar(sl.Mutex().acquire("m"))

        writing = later(write)
        until(refused, unless=writing)
        for _ in range(10_000):
            assert refused()
        rows.close()
        assert writing.result(PATIENCE)
    reader.close()


def test_the_event_loop_runs_during_a_wait(url: str) -> None:
    async def main() -> None:
        at = url.replace("sqlite:", "sqlite+aiosqlite:")
        async with async_connected(at) as one, async_connected(at) as other:
            first, second = sl.AsyncLocks(one), sl.AsyncLocks(other)
            inside, out = asyncio.Event(), asyncio.Event()

            async def hold() -> None:
                async with first.exclusive("k"):
                    inside.set()
                    await out.wait()

            async def wait(locks: sl.AsyncLocks) -> None:
                async with locks.exclusive("k"):
                    pass

            holding = asyncio.ensure_future(hold())
            await inside.wait()
            waiting, cancelled = (asyncio.ensure_future(wait(locks)) for locks in (second, sl.AsyncLocks(third)))
            while waiting_writers(one.sync_engine) < 2:
                await asyncio.sleep(0.001)
                assert not waiting.done()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert waiting_writers(one.sync_engine) == 1
            assert third.pool.checkedout() == 0  # type: ignore[attr-defined]
            out.set()
            await asyncio.wait_for(asyncio.gather(holding, waiting), PATIENCE)

    third = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))

    async def all_of_it() -> None:
        try:
            await main()
        finally:
            await third.dispose()

    asyncio.run(all_of_it())


@pytest.mark.parametrize("what", ["acquire", "mutex"])
def test_a_cancelled_call_leaves_no_lock_on_the_file(url: str, what: str) -> None:
    """A cursor that was cancelled in its thread keeps the file locked, even if closed, while it is referenced."""
    at = url.removeprefix("sqlite:///")
    errors: list[BaseException] = []

    def free() -> bool:
        other = sqlite3.connect(at, timeout=0, isolation_level=None)
        try:
            other.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            return False
        finally:
            other.close()
        return True

    async def mutex(locks: sl.AsyncLocks) -> None:
        while True:
            await locks.mutex.acquire("m")

    async def main() -> None:
        for turn in range(150):
            async with async_connected(url.replace("sqlite:", "sqlite+aiosqlite:")) as engine:
                locks = sl.AsyncLocks(engine)
                asking: asyncio.Future[Any] = asyncio.ensure_future(
                    locks.acquire({"s": 10}, ttl=3600, timeout=PATIENCE) if what == "acquire" else mutex(locks)
                )
                for _ in range(5 * turn):
                    await asyncio.sleep(0)
                asking.cancel()
                try:
                    await asking
                except asyncio.CancelledError as error:
                    errors.append(error)
            until(free)

    with connected(url) as engine:
        grant = sl.Locks(engine).acquire({"s": 1}, ttl=3600)
        asyncio.run(main())
        sl.Locks(engine).release(grant)
    assert len(errors) == 150


@pytest.mark.parametrize("times", [1, 2])
def test_a_cancelled_select_that_is_still_referenced_leaves_no_lock(
    url: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite interrupts a ROLLBACK, too, while a SELECT has rows left; a tracer may keep its cursor."""
    execute = aiosqlite.Connection._execute
    task: asyncio.Task[None]
    kept: list[Any] = []

    async def cancelling(self: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        answer = await execute(self, function, *arguments, **named)
        if kept and asyncio.current_task() is task and arguments and "sqlite_master" in str(arguments[0]):
            # the rows are not fetched yet
            for number in range(times):
                asyncio.get_running_loop().call_later(number * 0.0005, task.cancel)
            await asyncio.sleep(PATIENCE)
        return answer

    async def main() -> None:
        nonlocal task
        async with async_connected(url.replace("sqlite:", "sqlite+aiosqlite:")) as engine:

            async def work() -> None:
                async with sl.AsyncLocks(engine).exclusive("k") as held:
                    await held.session.connection()
                    event.listen(engine.sync_engine, "before_cursor_execute", lambda *seen: kept.append(seen[1]))
                    await held.session.execute(text("SELECT name FROM sqlite_master"))

            task = asyncio.ensure_future(work())
            await asyncio.wait({task})
            assert task.cancelled()
            await asyncio.to_thread(lock_elsewhere)

    def lock_elsewhere() -> None:
        # not committed: a referenced SELECT keeps writers from committing, for as long as its owner refers to it
        other = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=10, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        other.close()

    monkeypatch.setattr(aiosqlite.Connection, "_execute", cancelling)
    asyncio.run(main())


def leave(locks: sl.Locks) -> None:
    with locks.lease("y", ttl=60):
        pass


INSIDE: dict[str, Callable[[sl.Locks], Any]] = {
    "lease": leave,
    "acquire": lambda locks: locks.acquire({"s": 1}),
    "mutex": lambda locks: locks.mutex.acquire("m"),
    "put": lambda locks: locks.run(sl.Queue().put({"to": "somebody"})),
    "sweep": lambda locks: locks.sweep(),
}


@pytest.mark.parametrize("outer", ["exclusive", "shared"])
@pytest.mark.parametrize("what", INSIDE)
def test_a_write_in_a_block_of_the_same_caller_is_refused(url: str, what: str, outer: str) -> None:
    """It would wait for the block's own write lock; another thread waits for it, and reads don't."""
    with connected(url) as engine:
        locks = sl.Locks(engine)
        with locks.exclusive("x") if outer == "exclusive" else locks.shared("x"):
            with pytest.raises(sl.ReentryError, match="held.session"):
                INSIDE[what](locks)
            assert [row.used for row in locks.run(sl.semaphore.usage())] == [0]
            waiting = later(INSIDE[what], locks)
            until(lambda: waiting_writers(engine) == 1, unless=waiting)
        waiting.result(PATIENCE)
        INSIDE[what](locks)


def test_a_lease_in_a_block_of_the_same_task_is_refused(url: str) -> None:
    async def main() -> None:
        async with async_connected(url.replace("sqlite:", "sqlite+aiosqlite:")) as engine:
            locks = sl.AsyncLocks(engine)
            async with locks.exclusive("x"):
                with pytest.raises(sl.ReentryError, match="held.session"):
                    async with locks.lease("y"):
                        pass
                with pytest.raises(sl.ReentryError, match="held.session"):
                    await locks.mutex.acquire("m")
            async with locks.lease("y"), locks.exclusive("x") as held:
                assert await held.session.scalar(sl.Mutex().acquire("m"))

    asyncio.run(main())


def test_a_begin_event_may_acquire_a_lock(url: str) -> None:
    with connected(url) as engine:

        @event.listens_for(engine, "begin")
        def lock(connection: Any) -> None:
            connection.execute(sl.lock.exclusive("k"))

        with engine.begin() as connection:
            assert connection.connection.dbapi_connection.in_transaction  # type: ignore[union-attr]


class OfTheApp(Exception):
    """An app's own exception for the driver's errors, as oslo.db raises them."""


@pytest.mark.parametrize("way", ["locks", "session", "immediate"])
def test_an_app_with_its_own_errors_waits_as_well(url: str, way: str) -> None:
    holder, waiter = Party(url, "locks"), Party(url, way)

    @event.listens_for(waiter.engine, "handle_error")
    def handle(context: Any) -> None:
        raise OfTheApp from context.original_exception

    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    waiting = later(waiter.take, lambda party: None)
    until(lambda: waiting_writers(holder.engine) == 1, unless=waiting)
    for party in (holder, waiter):
        party.out.set()
    for future in (held, waiting):
        future.result(PATIENCE)
    for party in (holder, waiter):
        party.engine.dispose()


def test_a_failed_begin_begins_nothing(url: str) -> None:
    """The next statement begins a transaction, and is not committed by itself."""
    holder = Party(url, "locks")
    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    with connected(url) as engine:
        sl.sqlite.begin_immediate(engine)
        with engine.connect() as connection:
            with pytest.raises(sl.LockTimeout):
                connection.execute(sl.Mutex().acquire("m"), execution_options={"locks_wait": 0.01})
            holder.out.set()
            held.result(PATIENCE)
            assert connection.execute(sl.Mutex().acquire("m")).scalar()
            connection.rollback()
            assert connection.execute(sl.Mutex().acquire("m")).scalar()
    holder.engine.dispose()

"""SQLite: who waits for the write lock, or for room, is served in turn, whatever process it is of.

An engine stands for a process here: two engines have nothing in common in memory.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects.sqlite import BACKEND
from sqlalchemy_locks.dialects.sqlite_line import IDLE, Line
from tests.conftest import install
from tests.fixtures.parties import PATIENCE, async_connected, connected, later, queued, until

pytestmark = pytest.mark.usefixtures("never_cut")

WAYS = ("locks", "shared", "session", "immediate", "mutex", "semaphore")


class Party:
    """Somebody with an engine of its own, who takes the write lock in one of the ways there are."""

    def __init__(self, url: str, way: str) -> None:
        self.way = way
        self.engine = create_engine(url, connect_args={"timeout": PATIENCE})
        if way == "immediate":
            sl.sqlite.begin_immediate(self.engine)
        self.locks = sl.Locks(self.engine)
        self.inside, self.out = threading.Event(), threading.Event()

    def take(self, told: Callable[[Party], object]) -> None:
        """Take it, tell so, and keep it until told to leave."""
        match self.way:
            case "locks" | "shared":
                with self.locks.shared("k") if self.way == "shared" else self.locks.exclusive("k"):
                    self._stay(told)
            case "session" | "immediate":
                with Session(self.engine) as session, session.begin():
                    if self.way == "session":
                        session.execute(sl.lock.exclusive("k"))
                    else:
                        session.execute(text("SELECT 1"))
                    self._stay(told)
            case "mutex" | "semaphore":
                with Session(self.engine) as session, session.begin():
                    if self.way == "mutex":
                        session.execute(sl.Mutex().acquire("m"))
                    else:
                        session.execute(sl.semaphore.acquire({"s": 1}, ttl=3600))
                    self._stay(told)

    def _stay(self, told: Callable[[Party], object]) -> None:
        told(self)
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


def line(url: str) -> Path:
    return Path(f"{url.removeprefix('sqlite:///')}-sqlalchemy-locks")


@pytest.mark.parametrize("journal", ["delete", "wal"])
@pytest.mark.parametrize("way", WAYS)
def test_whoever_came_first_is_served_first(url: str, way: str, journal: str) -> None:
    """The one that gives it up and asks again at once comes last: SQLite by itself gives it that one."""
    with connected(url) as engine, engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA journal_mode = {journal}")
    parties = [Party(url, way) for _ in range(4)]
    order: list[Party] = []
    first = parties[0]
    futures = [later(first.take, order.append)]
    until(first.inside.is_set, unless=futures[0])
    for number, party in enumerate(parties[1:], 1):
        futures.append(later(party.take, order.append))
        until(lambda number=number: queued(first.engine, 0) == number, unless=futures[-1])
    again = Party(url, way)

    def once_more(first_is_over: Future[Any]) -> None:
        futures.append(later(again.take, order.append))

    futures[0].add_done_callback(once_more)
    for party in (*parties, again):
        party.out.set()
    until(lambda: len(futures) == 5)
    for future in futures:
        future.result(PATIENCE)
    assert order == [*parties, again]
    assert not line(url).exists()
    for party in (*parties, again):
        party.engine.dispose()


def test_there_is_no_file_where_nobody_waits(url: str) -> None:
    with connected(url) as engine:
        locks = sl.Locks(engine)
        with locks.exclusive("k"):
            assert not line(url).exists()
        with locks.lease("nightly"):
            assert not line(url).exists()
    assert os.listdir(line(url).parent) == ["app.db"]


def test_a_wait_in_line_ends_in_time(url: str) -> None:
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
        # as SQLite says it: an app that has no locks of ours in this transaction knows nothing of our errors
        with pytest.raises(OperationalError, match="database is locked"), impatient.connect() as connection:
            connection.execute(text("SELECT 1"))
    assert not line(url).exists()
    holder.out.set()
    held.result(PATIENCE)
    holder.engine.dispose()


def test_who_is_not_first_gives_up_in_time_as_well(url: str) -> None:
    holder, front = Party(url, "locks"), Party(url, "session")
    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    waiting = later(front.take, lambda party: None)
    until(lambda: queued(front.engine, 0) == 1, unless=waiting)
    with connected(url) as engine, pytest.raises(sl.LockTimeout):
        with sl.Locks(engine).exclusive("k", timeout=0.1):
            pass
    assert queued(front.engine, 0) == 1
    holder.out.set()
    until(front.inside.is_set, unless=waiting)
    front.out.set()
    for future in (held, waiting):
        future.result(PATIENCE)
    for party in (holder, front):
        party.engine.dispose()


def test_a_transaction_that_has_read_stands_in_no_line(url: str) -> None:
    """The holder's commit would wait for it, and it for the holder."""
    holder = Party(url, "locks")
    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    with connected(url) as engine, engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        connection.execute(text("SELECT count(*) FROM lock_semaphore")).all()
        with pytest.raises(sl.MustRollback):
            connection.execute(sl.lock.exclusive("k"))
        assert not line(url).exists()
    holder.out.set()
    held.result(PATIENCE)
    holder.engine.dispose()


WAITER = """
import sys
from sqlalchemy import create_engine
import sqlalchemy_locks as sl

engine = create_engine(sys.argv[1])
with sl.Locks(engine).exclusive("k"):
    print("inside", flush=True)
engine.dispose()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_in_line_holds_nobody_up(
    url: str, end: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    if end == signal.SIGSTOP:  # who is dead is seen to be so
        monkeypatch.setattr("sqlalchemy_locks.dialects.sqlite_line.IDLE", IDLE)
    holder, behind = Party(url, "locks"), Party(url, "locks")
    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    with subprocess.Popen([sys.executable, "-c", WAITER, url], stdout=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: queued(holder.engine, 0) == 1)
            waiting = later(behind.take, lambda party: None)
            until(lambda: queued(holder.engine, 0) == 2, unless=waiting)
            process.send_signal(end)
            if end == signal.SIGKILL:
                process.wait(PATIENCE)
            holder.out.set()
            until(behind.inside.is_set, unless=waiting)
            behind.out.set()
            for future in (held, waiting):
                future.result(PATIENCE)
            process.send_signal(signal.SIGCONT)
            said, _ = process.communicate(timeout=PATIENCE)
            assert said == ("" if end == signal.SIGKILL else "inside\n")
        finally:
            process.kill()
    # who comes takes away what the dead have left
    after = Party(url, "locks")
    after.out.set()
    after.take(lambda party: None)
    until(lambda: not line(url).exists())
    for party in (holder, behind, after):
        party.engine.dispose()


@pytest.mark.parametrize("trouble", ["taken away", "not a database", "emptied", "a folder", "locked"])
def test_whatever_becomes_of_the_file_the_lock_is_had(url: str, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one at a time, and by everybody in the end: the file tells the order, and nothing else."""
    monkeypatch.setattr("sqlalchemy_locks.dialects.sqlite_line.IDLE", IDLE)
    if trouble == "a folder":
        line(url).mkdir()
    holder = Party(url, "locks")
    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    waiters = [Party(url, way) for way in ("locks", "session", "immediate")]
    inside: list[Party] = []

    def come(party: Party) -> None:
        inside.append(party)
        assert inside == [party]
        inside.remove(party)

    waiting = [later(party.take, come) for party in waiters]
    if trouble != "a folder":
        until(lambda: queued(holder.engine, 0) == 3)
    match trouble:
        case "taken away":
            line(url).unlink()
        case "not a database":
            line(url).write_bytes(b"no database" * 1000)
        case "emptied":
            line(url).write_bytes(b"")
        case "locked":
            somebody = sqlite3.connect(line(url), timeout=PATIENCE, isolation_level=None)
            somebody.execute("BEGIN EXCLUSIVE")
    for party in (*waiters, holder):
        party.out.set()
    for future in (held, *waiting):
        future.result(PATIENCE)
    if trouble == "a folder":
        line(url).rmdir()
    if trouble == "locked":
        somebody.execute("ROLLBACK")
        somebody.close()
    # what is left of it is taken away by who comes next
    beside = BACKEND.line_beside(holder.engine)
    assert beside is not None
    until(lambda: not beside.anybody(0))
    for party in (*waiters, holder):
        party.engine.dispose()
    assert not line(url).exists()


def test_an_empty_file_is_taken_away(url: str) -> None:
    """As one is left by who is killed while he makes it."""
    line(url).write_bytes(b"")
    with connected(url) as engine, sl.Locks(engine).exclusive("k"):
        pass
    assert not line(url).exists()


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_who_has_rows_to_fetch_stands_in_no_line(url: str, journal: str) -> None:
    """The holder's commit waits until they are fetched, and they would not be until the holder had committed."""
    with connected(url) as engine, engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA journal_mode = {journal}")
    holder, waits = Party(url, "locks"), {"locks_wait": 0.01 if journal == "wal" else PATIENCE}
    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    with connected(url) as engine, Session(engine) as session:
        rows = session.execute(text("SELECT 1 FROM lock_semaphore UNION ALL SELECT 2"))
        rows.fetchone()
        with pytest.raises(sl.LockError):
            session.execute(sl.lock.exclusive("k"), execution_options=waits)
        assert not line(url).exists()
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
def test_who_reads_stands_in_no_line(url: str, what: str) -> None:
    with connected(url) as engine, engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = wal")
    holder, waiter = Party(url, "locks"), Party(url, "session")
    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    waiting = later(waiter.take, lambda party: None)
    until(lambda: queued(holder.engine, 0) == 1, unless=waiting)
    # for ever, if it stood in line: neither of them leaves before it has its answer
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
def test_a_transaction_that_begins_as_a_writer_is_one_whoever_waits(url: str, what: str, listener: str) -> None:
    """The first statement on a connection may be ours; what waits then is the event, once, and not the statement."""
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
        until((lambda: queued(engine, 0) == 1) if listener == "ours" else asked.is_set, unless=working)
        holder.out.set()
        working.result(PATIENCE)
        held.result(PATIENCE)
        with engine.begin() as connection:
            assert connection.scalar(text("SELECT count(*) FROM written")) == 0
            assert connection.scalar(sl.Mutex().acquire("m"))
            assert len(connection.execute(sl.Queue().capture(1, host="me")).all()) == 1
    holder.engine.dispose()


def test_what_commits_by_itself_lets_no_new_readers_in(url: str) -> None:
    """Readers that overlap would keep it from being committed for ever."""
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
        until(lambda: queued(engine, 0) == 1, unless=writing)
        until(refused, unless=writing)
        for _ in range(10_000):
            assert refused()
        rows.close()
        assert writing.result(PATIENCE)
    reader.close()


def test_a_loop_goes_on_while_one_waits_in_line(url: str) -> None:
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
            while queued(one.sync_engine, 0) < 2:
                await asyncio.sleep(0.001)
                assert not waiting.done()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert queued(one.sync_engine, 0) == 1
            assert third.pool.checkedout() == 0  # type: ignore[attr-defined]
            out.set()
            await asyncio.wait_for(asyncio.gather(holding, waiting), PATIENCE)
            assert not line(url).exists()

    third = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))

    async def all_of_it() -> None:
        try:
            await main()
        finally:
            await third.dispose()

    asyncio.run(all_of_it())


def test_the_file_is_made_as_the_database_was(url: str) -> None:
    database = Path(url.removeprefix("sqlite:///"))
    database.chmod(0o660)
    before = os.umask(0o077)
    try:
        with Line(str(database)).ticket(0):
            assert line(url).stat().st_mode & 0o777 == 0o660
    finally:
        os.umask(before)


def test_a_relative_name_is_the_same_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = line(url).parent
    holder = Party(url, "locks")
    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    monkeypatch.chdir(folder)
    (folder / "link.db").symlink_to("app.db")
    parties = [Party(f"sqlite:///{name}", "locks") for name in ("app.db", "file:app.db?uri=true", "link.db")]
    waiting = []
    for number, party in enumerate(parties, 1):
        waiting.append(later(party.take, lambda party: None))
        until(lambda number=number: queued(holder.engine, 0) == number, unless=waiting[-1])
    for party in (*parties, holder):
        party.out.set()
    for future in (held, *waiting):
        future.result(PATIENCE)
    for party in (*parties, holder):
        party.engine.dispose()
    assert sorted(os.listdir(folder)) == ["app.db", "link.db"]


@pytest.mark.parametrize("what", ["acquire", "mutex"])
def test_who_is_cancelled_leaves_no_lock_on_the_file(url: str, what: str) -> None:
    """A cursor that was cancelled in its thread keeps the file locked, closed or not, while somebody knows of it."""
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

    others = {*threading.enumerate()}

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
            # of a connection that was cancelled nobody awaits the end, and it tells this loop
            while any("_connection_worker" in thread.name for thread in {*threading.enumerate()} - others):
                await asyncio.sleep(0.001)

    with connected(url) as engine:
        grant = sl.Locks(engine).acquire({"s": 1}, ttl=3600)
        asyncio.run(main())
        sl.Locks(engine).release(grant)
    assert len(errors) == 150


def test_a_lock_may_be_taken_as_a_transaction_begins(url: str) -> None:
    with connected(url) as engine:

        @event.listens_for(engine, "begin")
        def lock(connection: Any) -> None:
            connection.execute(sl.lock.exclusive("k"))

        with engine.begin() as connection:
            assert connection.connection.dbapi_connection.in_transaction  # type: ignore[union-attr]


class OfTheApp(Exception):
    """What an app makes of the driver's errors, as oslo.db does."""


@pytest.mark.parametrize("way", ["locks", "session", "immediate"])
def test_an_app_with_errors_of_its_own_waits_as_others_do(url: str, way: str) -> None:
    holder, waiter = Party(url, "locks"), Party(url, way)

    @event.listens_for(waiter.engine, "handle_error")
    def handle(context: Any) -> None:
        raise OfTheApp from context.original_exception

    held = later(holder.take, lambda party: None)
    until(holder.inside.is_set, unless=held)
    waiting = later(waiter.take, lambda party: None)
    until(lambda: queued(holder.engine, 0) == 1, unless=waiting)
    for party in (holder, waiter):
        party.out.set()
    for future in (held, waiting):
        future.result(PATIENCE)
    for party in (holder, waiter):
        party.engine.dispose()


def test_a_begin_that_fails_is_none(url: str) -> None:
    """What comes after it begins a transaction, and is not committed statement by statement."""
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

"""SQLite: the waiters of a semaphore, across processes, queue in a file in the database's folder.

The order itself is tested for all engines (tests/facade/test_semaphore_queues.py). Here an engine simulates a process.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects.sqlite import BACKEND
from sqlalchemy_locks.dialects.sqlite_queue import IDLE_WRITER, FileQueue
from tests.conftest import install
from tests.fixtures.parties import PATIENCE, connected, later, queued, until

pytestmark = pytest.mark.usefixtures("never_cut")


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite:///{tmp_path / 'app.db'}"
    install(made)
    with connected(made) as engine:
        sl.Locks(engine).run(sl.semaphore.create("s", capacity=1))
    return made


@pytest.fixture
def parties(url: str) -> Iterator[list[sl.Locks]]:
    """Four waiters that share nothing but the file."""
    with ExitStack() as opened:
        yield [sl.Locks(opened.enter_context(connected(url))) for _ in range(4)]


def line(url: str) -> Path:
    return Path(f"{url.removeprefix('sqlite:///')}-sqlalchemy-locks")


def turn(locks: sl.Locks) -> int:
    """Acquire and release it; return the fence."""
    grant = locks.acquire({"s": 1}, ttl=3600, timeout=PATIENCE)
    locks.release(grant)
    return grant.fence["s"]


def test_no_file_without_waiters(url: str) -> None:
    with connected(url) as engine:
        locks = sl.Locks(engine)
        with locks.exclusive("k"), connected(url, connect_args={"timeout": 0.05}) as impatient:
            with pytest.raises(sl.LockTimeout), sl.Locks(impatient).exclusive("k", timeout=0.05):
                pass
        with locks.lease("nightly"), locks.semaphore("s"):
            assert not line(url).exists()
    assert os.listdir(line(url).parent) == ["app.db"]


def test_a_timeout_leaves_the_queue(url: str, parties: list[sl.Locks]) -> None:
    holder, front, behind, _ = parties
    grant = holder.acquire({"s": 1}, ttl=3600)
    waiting = later(turn, front)
    until(lambda: queued(front._engine) == 1, unless=waiting)
    with pytest.raises(sl.LockTimeout):
        behind.acquire({"s": 1}, timeout=0.1)
    assert queued(front._engine) == 1
    holder.release(grant)
    waiting.result(PATIENCE)
    assert not line(url).exists()


WAITER = """
import sys
from sqlalchemy import create_engine
import sqlalchemy_locks as sl

engine = create_engine(sys.argv[1])
with sl.Locks(engine).semaphore("s"):
    print("inside", flush=True)
engine.dispose()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_waiter_is_skipped(
    url: str, parties: list[sl.Locks], end: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    if end == signal.SIGSTOP:  # a dead process is recognized by its number
        monkeypatch.setattr("sqlalchemy_locks.dialects.sqlite_queue.IDLE_WRITER", IDLE_WRITER)
    holder, behind, after, _ = parties
    with holder._engine.connect() as connection:
        # otherwise a process that is stopped during a read keeps every COMMIT waiting
        connection.exec_driver_sql("PRAGMA journal_mode = wal")
    grant = holder.acquire({"s": 1}, ttl=3600)
    with subprocess.Popen([sys.executable, "-c", WAITER, url], stdout=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: queued(holder._engine) == 1)
            waiting = later(turn, behind)
            until(lambda: queued(holder._engine) == 2, unless=waiting)
            process.send_signal(end)
            if end == signal.SIGKILL:
                process.wait(PATIENCE)
            holder.release(grant)
            waiting.result(PATIENCE)
            process.send_signal(signal.SIGCONT)
            said, _ = process.communicate(timeout=PATIENCE)
            assert said == ("" if end == signal.SIGKILL else "inside\n")
        finally:
            process.kill()
    # the next request removes what the dead process has left
    turn(after)
    until(lambda: not line(url).exists())


@pytest.mark.parametrize("trouble", ["taken away", "not a database", "emptied", "a folder", "locked"])
def test_permits_are_granted_whatever_happens_to_the_file(
    url: str, parties: list[sl.Locks], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One holder at a time, and every waiter is granted in the end: only the order depends on the file."""
    monkeypatch.setattr("sqlalchemy_locks.dialects.sqlite_queue.IDLE_WRITER", IDLE_WRITER)
    if trouble == "a folder":
        line(url).mkdir()
    holder, *waiters = parties
    grant = holder.acquire({"s": 1}, ttl=3600)
    waiting = [later(turn, locks) for locks in waiters]
    if trouble != "a folder":
        until(lambda: queued(holder._engine) == 3)
    match trouble:
        case "taken away":
            line(url).unlink()
        case "not a database":
            line(url).write_bytes(b"no database" * 1000)
        case "emptied":
            line(url).write_bytes(b"")
        case "locked":
            other = sqlite3.connect(line(url), timeout=PATIENCE, isolation_level=None)
            other.execute("BEGIN EXCLUSIVE")
    holder.release(grant)
    assert sorted(future.result(PATIENCE) for future in waiting) == [2, 3, 4]
    if trouble == "a folder":
        line(url).rmdir()
    if trouble == "locked":
        other.execute("ROLLBACK")
        other.close()
    # the next check removes its remains
    beside = BACKEND.file_queue(holder._engine)
    assert beside is not None
    until(lambda: not beside.has_waiters(0))
    assert not line(url).exists()


def test_an_empty_file_is_removed(url: str, parties: list[sl.Locks]) -> None:
    """A process that is killed while it creates the file leaves an empty one."""
    line(url).write_bytes(b"")
    turn(parties[0])
    assert not line(url).exists()


def test_the_file_has_the_permissions_of_the_database(url: str) -> None:
    database = Path(url.removeprefix("sqlite:///"))
    database.chmod(0o660)
    before = os.umask(0o077)
    try:
        with FileQueue(str(database)).ticket(0):
            assert line(url).stat().st_mode & 0o777 == 0o660
    finally:
        os.umask(before)


def test_every_name_of_a_file_has_the_same_queue(
    url: str, parties: list[sl.Locks], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, holder = line(url).parent, parties[0]
    grant = holder.acquire({"s": 1}, ttl=3600)
    monkeypatch.chdir(folder)
    (folder / "link.db").symlink_to("app.db")
    waiting = []
    with ExitStack() as opened:
        for number, name in enumerate(("app.db", "file:app.db?uri=true", "link.db"), 1):
            other = opened.enter_context(connected(f"sqlite:///{name}"))
            waiting.append(later(turn, sl.Locks(other)))
            until(lambda number=number: queued(holder._engine) == number, unless=waiting[-1])  # type: ignore[misc]
        holder.release(grant)
        assert [future.result(PATIENCE) for future in waiting] == [2, 3, 4]
    assert sorted(os.listdir(folder)) == ["app.db", "link.db"]

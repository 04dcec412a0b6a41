"""SQLite: a COMMIT waits for readers, raises LockTimeout when that takes too long, and isn't retried."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

import sqlalchemy_locks as sl
from tests.conftest import install
from tests.fixtures.parties import PATIENCE, async_connected, connected, later, until, unused

REFUSED = "COMMIT waits for readers"


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = f"{tmp_path / 'of_its_own'}.db"
    install(f"sqlite:///{path}")
    return path


@pytest.fixture
def engine(file: str) -> Iterator[Engine]:
    with connected(f"sqlite:///{file}?timeout=0.1") as engine:
        yield engine


class Reader:
    """A reader in the middle of a SELECT, as a process that was stopped there."""

    def __init__(self, file: str) -> None:
        self._file = sqlite3.connect(file, check_same_thread=False)

    def __enter__(self) -> Reader:
        self._rows = self._file.execute("SELECT 1 FROM sqlite_master")
        assert self._rows.fetchone() == (1,)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def commits(engine: Engine) -> list[None]:
    """Records each attempted COMMIT."""
    tried: list[None] = []
    event.listen(engine, "commit", lambda connection: tried.append(None))
    return tried


def mutex(locks: sl.Locks, grant: sl.Grant) -> Any:
    return locks.mutex.acquire("task")


def put(locks: sl.Locks, grant: sl.Grant) -> Any:
    return locks.run(sl.Queue().put({}))


def written(locks: sl.Locks, grant: sl.Grant) -> Any:
    with locks.exclusive(unused()) as held:
        held.session.execute(text("INSERT INTO work VALUES (1)"))
    return True


WORKS: list[Callable[[sl.Locks, sl.Grant], Any]] = [mutex, put, written]


@pytest.mark.parametrize("work", WORKS)
def test_it_is_refused_once_and_nothing_is_done(
    engine: Engine, file: str, work: Callable[[sl.Locks, sl.Grant], Any]
) -> None:
    locks, told = sl.Locks(engine), []
    event.listen(locks, "retried", lambda one: told.append(one))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE work (value INTEGER)")
    locks.run(sl.semaphore.create("room", capacity=1))
    locks.mutex.acquire("task")
    locks.mutex.release("task")
    locks.run(sl.Timeout(every=86400).create("daily"))
    grant = locks.acquire({"room": 1}, ttl=3600)
    tried = commits(engine)
    with Reader(file):
        with pytest.raises(sl.LockTimeout, match=REFUSED):
            work(locks, grant)
        assert len(tried) == 1
    assert told == []
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert [row.used for row in locks.run(sl.semaphore.usage())] == [1]
    assert work(locks, grant)


def test_room_is_waited_for_as_long_as_asked(file: str) -> None:
    """Whatever busy timeout the app has set."""
    with connected(f"sqlite:///{file}?timeout={PATIENCE}") as engine:
        locks = sl.Locks(engine)
        locks.run(sl.semaphore.create("room", capacity=1))
        tried = commits(engine)
        with Reader(file), pytest.raises(sl.LockTimeout):
            locks.acquire({"room": 1}, timeout=0.2)
        assert tried
        with Reader(file), pytest.raises(sl.LockTimeout, match=REFUSED):
            locks.run(sl.Queue().put({}).execution_options(locks_wait=0.1))


def test_it_ends_when_no_client_reads(file: str) -> None:
    with connected(f"sqlite:///{file}?timeout={PATIENCE}") as engine:
        tried = commits(engine)
        with Reader(file):
            waiting = later(sl.Locks(engine).run, sl.Queue().put({}))
            until(lambda: tried, unless=waiting)
        waiting.result(PATIENCE)
        assert len(tried) == 1


def test_async_commits_are_tried_once(file: str) -> None:
    async def main() -> None:
        async with async_connected(f"sqlite+aiosqlite:///{file}?timeout=0.1") as engine:
            locks = sl.AsyncLocks(engine)
            tried = commits(engine.sync_engine)
            with Reader(file), pytest.raises(sl.LockTimeout, match=REFUSED):
                await locks.run(sl.Queue().put({}))
            assert len(tried) == 1
            with Reader(file), pytest.raises(sl.LockTimeout, match=REFUSED):
                async with locks.exclusive("work") as held:
                    await held.session.execute(text("CREATE TABLE work (value INTEGER)"))
            assert await locks.mutex.acquire("task")

    asyncio.run(main())

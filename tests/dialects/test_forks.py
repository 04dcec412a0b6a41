"""Forks of a process whose engines are in use: child and parent never hold one lock, and the parent goes on."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import install
from tests.fixtures.parties import PATIENCE, installed, unused


def run(script: str, *arguments: str) -> list[str]:
    """Run a script in a process of its own, which forks; return its lines."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


#: the parent ends its connections while the child holds the lock, and a third process asks for it
FILE = """
    import os, sqlite3, subprocess, sys
    import sqlalchemy as sa
    import sqlalchemy_locks as sl

    url, path, journal, inherited = sys.argv[1:]
    with sqlite3.connect(path) as made:
        made.execute(f"PRAGMA journal_mode = {journal}")
    made.close()
    engine, other = sa.create_engine(url), sa.create_engine(url)
    locks = sl.Locks(engine)
    with locks.exclusive("before"):
        pass
    used = None
    if inherited == "checked out":
        used = engine.connect()
        used.execute(sa.text("SELECT count(*) FROM sqlite_master")).all()
    elif inherited == "of another engine":
        with other.connect() as connection:
            connection.execute(sa.text("SELECT count(*) FROM sqlite_master")).all()
    elif inherited == "in a block":
        block = locks.exclusive("the parent's")
        block.__enter__()
    (told, tell), (ended, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with (sl.Locks(sa.create_engine(url)) if inherited == "in a block" else locks).exclusive("k", timeout=5) as held:
                held.session.execute(sa.text("CREATE TABLE of_the_child (x)"))
                os.write(tell, b"held")
                os.read(ended, 1)
        except sl.LockError as error:
            os.write(tell, type(error).__name__.encode())
        os._exit(0)
    print(os.read(told, 20).decode())
    if inherited == "in a block":
        block.__exit__(None, None, None)
    if used is not None:
        used.close()
    for each in (engine, other):
        each.dispose()
    third = '''
    import sys, sqlalchemy as sa, sqlalchemy_locks as sl
    try:
        with sl.Locks(sa.create_engine(sys.argv[1])).exclusive("k", timeout=0.5):
            print("a third one holds it", flush=True)
    except sl.LockTimeout:
        print("locked", flush=True)
    '''
    import textwrap
    subprocess.run([sys.executable, "-c", textwrap.dedent(third), url])
    os.write(end, b".")
    os.waitpid(child, 0)
    with sqlite3.connect(path) as made:
        print(*made.execute("SELECT name FROM sqlite_master WHERE name = 'of_the_child'").fetchall())
    made.close()
"""


@pytest.mark.parametrize("journal", ["delete", "wal"])
@pytest.mark.parametrize("inherited", ["idle", "checked out", "of another engine", "in a block"])
def test_a_child_holds_a_sqlite_file_or_is_refused(tmp_path: Path, journal: str, inherited: str) -> None:
    """What the parent has open makes SQLite believe, in the child, that the file is locked already."""
    path = tmp_path / "app.db"
    install(f"sqlite:///{path}")
    lines = [line for line in run(FILE, f"sqlite:///{path}", str(path), journal, inherited) if line]
    if inherited == "idle":
        assert lines == ["held", "locked", "('of_the_child',)"]
    else:
        assert lines == ["Unsupported", "a third one holds it"]


#: a child closes the descriptors that it has inherited, as a daemon does, or the connection itself; other files then
#: have their numbers
DAEMON = """
    import os, sys
    import sqlalchemy as sa
    import sqlalchemy_locks as sl

    url, how = sys.argv[1:]
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = wal")
    locks = sl.Locks(engine)
    used = engine.connect()
    used.execute(sa.text("SELECT count(*) FROM sqlite_master")).all()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        if how == "connection":
            used.connection.dbapi_connection.close()
        else:
            os.dup2(tell, 200)
            os.closerange(3, 200)
            tell = 200
        if how == "descriptors, and forks" and os.fork():
            os._exit(0)
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)
        try:
            with locks.exclusive("k", timeout=5):
                os.write(tell, b"held")
        except sl.Unsupported as error:
            os.write(tell, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    print(os.read(told, 1000).decode())
"""


@pytest.mark.parametrize("how", ["descriptors", "descriptors, and forks", "connection"])
def test_a_child_that_closed_the_inherited_file_is_refused(tmp_path: Path, how: str) -> None:
    """What SQLite believes to hold of the file stays in the child's memory."""
    path = tmp_path / "app.db"
    install(f"sqlite:///{path}")
    (answer,) = run(DAEMON, f"sqlite:///{path}", how)
    assert answer.startswith(f"this process was forked while {path} was open")
    assert "dispose of the file's engines before the fork" in answer


#: a thread connects while the idle connections are closed for a fork: SQLite may then be writing a checkpoint
CONNECTING = """
    import os, sys, threading
    import sqlalchemy as sa
    import sqlalchemy_locks as sl

    engine = sa.create_engine(sys.argv[1])
    locks = sl.Locks(engine)
    with locks.exclusive("before"):
        pass
    closing, connected, forked = threading.Event(), threading.Event(), threading.Event()

    @sa.event.listens_for(engine, "close")
    def close(*_):
        if not connected.is_set():
            closing.set()
            assert connected.wait(60)

    def use():
        assert closing.wait(60)
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1").all()
            connected.set()
            assert forked.wait(60)

    counts = []
    user = threading.Thread(target=use)
    user.start()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    counts.append(engine.pool.checkedout())
    forked.set()
    user.join()
    counts.append(engine.pool.checkedout())
    print(*counts, flush=True)
    child = os.fork()
    if child == 0:
        try:
            with locks.exclusive("k", timeout=5):
                print("held", flush=True)
        except sl.LockError as error:
            print(type(error).__name__, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_connection_that_is_made_at_a_fork_is_counted_by_its_pool(tmp_path: Path) -> None:
    """Otherwise the pool would look in use for ever, and no later fork would close the file."""
    install(f"sqlite:///{tmp_path / 'app.db'}")
    assert run(CONNECTING, f"sqlite:///{tmp_path / 'app.db'}") == ["1 0", "held"]


AIOSQLITE = """
    import asyncio, multiprocessing, sys
    from sqlalchemy.ext.asyncio import create_async_engine
    import sqlalchemy_locks as sl

    engine = create_async_engine(sys.argv[1])
    locks = sl.AsyncLocks(engine)

    async def hold():
        async with locks.exclusive("k", timeout=5):
            pass

    def child():
        try:
            asyncio.run(hold())
        except sl.Unsupported as error:
            print("dispose of the file's engines before the fork" in str(error), flush=True)

    def fork():
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()

    async def main():
        await hold()
        fork()
        await hold()
        await engine.dispose()

    asyncio.run(main())
"""


def test_a_child_with_an_inherited_aiosqlite_connection_is_refused(tmp_path: Path) -> None:
    install(f"sqlite:///{tmp_path / 'app.db'}")
    assert run(AIOSQLITE, f"sqlite+aiosqlite:///{tmp_path / 'app.db'}") == ["True"]


#: the selector of the parent's event loop is shared: a child that collects the parent's connections must not change it
COLLECTED = """
    import asyncio, multiprocessing, os, sys
    from sqlalchemy.ext.asyncio import create_async_engine
    import sqlalchemy_locks as sl

    def child():
        import gc
        gc.collect()

    async def main():
        locks = sl.AsyncLocks(create_async_engine(sys.argv[1]))
        async with locks.exclusive(sys.argv[2]):
            pass
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        await asyncio.to_thread(process.join)

        async def use():
            async with locks.exclusive(sys.argv[2], timeout=5):
                pass

        used = asyncio.ensure_future(use())
        done, _ = await asyncio.wait({used}, timeout=60)
        print(process.exitcode, bool(done) and used.exception(), flush=True)
        os._exit(0)

    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("name", "driver"),
    [("postgresql15", "asyncpg"), ("postgresql15", "psycopg"), ("mysql", "aiomysql"), ("mysql", "asyncmy")],
)
def test_a_parents_event_loop_hears_its_sockets_after_a_fork(servers: Any, name: str, driver: str) -> None:
    assert run(COLLECTED, installed(servers, name, driver), unused()) == ["0 None"]


POOLS = """
    import os, sys
    import sqlalchemy as sa
    import sqlalchemy_locks as sl
    from sqlalchemy.pool import AssertionPool, QueuePool

    class Own(AssertionPool):
        pass

    engine = sa.create_engine(sys.argv[1], poolclass={"AssertionPool": AssertionPool, "Own": Own}[sys.argv[3]])
    locks = sl.Locks(engine)
    with locks.exclusive(sys.argv[2]):
        pass
    (told, tell), (ended, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with locks.exclusive(sys.argv[2]):
            os.write(tell, b".")
            os.read(ended, 1)
        os._exit(0)
    os.read(told, 1)
    try:
        with locks.exclusive(sys.argv[2], timeout=1):
            print("both hold it")
    except sl.LockTimeout:
        print("locked")
    os.write(end, b".")
    print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("pool", ["AssertionPool", "Own"])
@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_every_kind_of_pool_is_replaced_in_a_child(servers: Any, name: str, pool: str) -> None:
    assert run(POOLS, installed(servers, name), unused(), pool) == ["locked", "0"]

"""Forks of a process whose engines are in use: child and parent never hold one lock, and the parent goes on."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.forks import main
from tests.fixtures.parties import installed, unused


def run(script: str, folder: Path, *arguments: str) -> list[str]:
    """Run a script in a process of its own, which forks; return its lines."""
    status, out, err = main(textwrap.dedent(script), folder, *arguments)
    assert status == 0, err[-2000:]
    return out.splitlines()


#: a child that leaves its parent's block, and ends
FORKED = """
    import os, sys
    from sqlalchemy import create_engine, text
    import sqlalchemy_locks as sl

    def free():
        engine = create_engine(sys.argv[1])
        try:
            with engine.connect() as connection, connection.begin():
                return connection.scalar(sl.lock.try_exclusive(sys.argv[2]))
        finally:
            engine.dispose()

    engine = create_engine(sys.argv[1])
    locks = sl.Locks(engine)
    child = None
    try:
        with locks.exclusive(sys.argv[2]) as held:
            held.session.execute(text("SELECT 1"))
            held.session.execute(sl.Mutex().create(sys.argv[2]))
            child = os.fork()
            if not child:
                seen_events = [held.lost]
                try:
                    held.check()
                except sl.LockLost:
                    seen_events.append("check")
                try:
                    with locks.exclusive(sys.argv[2], timeout=0):
                        seen_events.append("two holders")
                except sl.LockTimeout:
                    seen_events.append("waits as others do")
                print(*seen_events, flush=True)
                if sys.argv[3] == "raises":
                    raise KeyError("the child's")
            else:
                os.waitpid(child, 0)
                held.check()
                print(held.lost, free(), flush=True)
    except (sl.LockLost, KeyError) as error:
        print(type(error).__name__, flush=True)
    if child:
        print(free(), locks.run(sl.Mutex().acquire(sys.argv[2])), flush=True)
"""


@pytest.mark.parametrize(("name", "how"), [("postgresql15", "ends"), ("postgresql15", "raises"), ("mysql", "ends")])
def test_a_block_is_lost_in_a_child_and_intact_in_its_parent(servers: Any, name: str, how: str, tmp_path: Path) -> None:
    assert run(FORKED, tmp_path, installed(servers, name), unused("fork"), how) == [
        "True check waits as others do",
        "LockLost" if how == "ends" else "KeyError",
        "False False",
        "True True",
    ]


#: Children of a process that has used its engine: on one of its connections, two would hold the same lock.
CHILDREN = """
    import multiprocessing, os, sys, tempfile
    import sqlalchemy
    from sqlalchemy import create_engine
    import sqlalchemy_locks as sl

    url, key, pool = sys.argv[1:]
    engine = create_engine(url, poolclass=getattr(sqlalchemy.pool, pool))
    locks = sl.Locks(engine)
    with locks.exclusive(key):
        pass
    witness = os.path.join(tempfile.mkdtemp(), "inside")

    def child():
        for _ in range(30):
            with locks.exclusive(key, timeout=60):
                os.close(os.open(witness, os.O_CREAT | os.O_EXCL))
                os.unlink(witness)

    context = multiprocessing.get_context("fork")
    children = [context.Process(target=child) for _ in range(4)]
    for each in children:
        each.start()
    for each in children:
        each.join()
    with locks.exclusive(key):
        pass
    print([each.exitcode for each in children])
"""


@pytest.mark.parametrize(
    ("name", "pool"),
    [("postgresql15", "QueuePool"), ("postgresql15", "AssertionPool"), ("mysql", "QueuePool"), ("sqlite", "QueuePool")],
)
def test_children_of_a_process_with_open_connections_exclude_each_other(
    servers: Any, name: str, pool: str, tmp_path: Path
) -> None:
    assert run(CHILDREN, tmp_path, installed(servers, name), unused("forks"), pool) == ["[0, 0, 0, 0]"]


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
            async with locks.exclusive(sys.argv[2], timeout=50):
                pass

        used = asyncio.ensure_future(use())
        done, _ = await asyncio.wait({used}, timeout=60)
        print(process.exitcode, bool(done) and used.exception(), flush=True)
        os._exit(0)

    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("name", "driver"), [("postgresql15", "asyncpg"), ("postgresql15", "psycopg"), ("mysql", "aiomysql")]
)
def test_a_parents_event_loop_hears_its_sockets_after_a_fork(
    servers: Any, name: str, driver: str, tmp_path: Path
) -> None:
    assert run(COLLECTED, tmp_path, installed(servers, name, driver), unused()) == ["0 None"]

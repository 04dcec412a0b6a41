"""A lock is gone with its holder's process, transaction or connection, and the pool is as good as new afterwards."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.parties import PATIENCE, async_connected, connected

SYNC = [
    ("postgresql15", "psycopg"),
    ("postgresql15", "psycopg2"),
    ("yugabytedb", "yugabytedb"),
    ("mysql", "pymysql"),
    ("mariadb", "mariadb+pymysql"),
]
ASYNC = [("postgresql15", "psycopg"), ("postgresql15", "asyncpg"), ("mysql", "aiomysql"), ("mysql", "asyncmy")]

HOLDER = """
import sys
from sqlalchemy import create_engine
import sqlalchemy_locks as sl

with sl.Locks(create_engine(sys.argv[1])).exclusive("of a process"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def one_connection() -> Iterator[Callable[..., Engine]]:
    """Engines with one connection."""
    with ExitStack() as opened:
        yield lambda url, **options: opened.enter_context(
            connected(url, pool_size=1, max_overflow=0, pool_timeout=PATIENCE, **options)
        )


def one_async_connection(url: str) -> AbstractAsyncContextManager[AsyncEngine]:
    return async_connected(url, pool_size=1, max_overflow=0, pool_timeout=PATIENCE)


def cut(plain: Engine, backend: int) -> None:
    """End another connection, as an administrator would."""
    with plain.connect() as connection:
        if plain.dialect.name in ("mysql", "mariadb"):
            connection.exec_driver_sql(f"KILL {backend}")
        else:
            connection.execute(text("SELECT pg_terminate_backend(:backend)"), {"backend": backend})


def backend_of(engine: Engine) -> str:
    return "SELECT connection_id()" if engine.dialect.name in ("mysql", "mariadb") else "SELECT pg_backend_pid()"


def usable(engine: Engine) -> None:
    """Nothing is leaked, and nothing is left over on what the pool hands out."""
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    with sl.Locks(engine).exclusive("usable", timeout=PATIENCE):
        pass
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@pytest.fixture
def plain(servers: Servers) -> Any:
    made: list[Engine] = []

    def make(name: str) -> Engine:
        made.append(create_engine(servers.installed(name, PLAIN[name]), poolclass=NullPool))
        return made[-1]

    yield make
    for engine in made:
        engine.dispose()


@pytest.mark.parametrize("name", [*PLAIN])
def test_killed_process_releases_its_lock(servers: Servers, name: str) -> None:
    url = servers.installed(name, PLAIN[name])
    locks = sl.Locks(create_engine(url, poolclass=NullPool))
    command = [sys.executable, "-c", HOLDER, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(sl.LockTimeout):
                with locks.exclusive("of a process", timeout=0):
                    pass
        finally:
            holder.kill()
    with locks.exclusive("of a process", timeout=PATIENCE):
        pass


@pytest.mark.parametrize(("name", "driver"), SYNC)
@pytest.mark.parametrize("checks", [True, False], ids=["check", "exit"])
def test_cut_connection_is_a_lost_lock(
    servers: Servers,
    plain: Callable[[str], Engine],
    name: str,
    driver: str,
    checks: bool,
    one_connection: Callable[..., Engine],
) -> None:
    engine, other = one_connection(servers.installed(name, driver)), plain(name)
    with sl.Locks(engine).exclusive("cut") as held:
        held.check()
        assert held.lost is False
    with pytest.raises(sl.LockLost) as raised:
        with sl.Locks(engine).exclusive("cut") as held:
            backend = held.session.scalar(text(backend_of(engine)))
            cut(other, backend)
            with sl.Locks(other).exclusive("cut", timeout=PATIENCE):  # free for others by now
                if checks:
                    with pytest.raises(sl.LockLost):
                        held.check()
                    assert held.lost
    if checks or name in ("mysql", "mariadb"):
        assert type(raised.value) is sl.LockLost
        assert str(raised.value).endswith("nothing that was done in it after that is committed")
    else:  # PostgreSQL's drivers see the end of a session at its next statement only, which is the COMMIT
        assert isinstance(raised.value, sl.LockLost)
    usable(engine)


@pytest.mark.parametrize(("name", "driver"), [*SYNC, ("sqlite", "pysqlite")])
def test_timeout_leaks_no_connection(
    servers: Servers, plain: Callable[[str], Engine], name: str, driver: str, one_connection: Callable[..., Engine]
) -> None:
    engine, other = one_connection(servers.installed(name, driver)), plain(name)
    with sl.Locks(other).exclusive("taken"):
        for timeout in (0, 0.1):
            with pytest.raises(sl.LockTimeout, match="'taken'"):
                with sl.Locks(engine).exclusive("taken", timeout=timeout):
                    pass
    usable(engine)


async def usable_again(engine: AsyncEngine) -> None:
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    async with sl.AsyncLocks(engine).exclusive("usable", timeout=PATIENCE):
        pass
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "driver"), ASYNC)
def test_cancelled_waiter_leaks_nothing(
    servers: Servers, plain: Callable[[str], Engine], name: str, driver: str
) -> None:
    other = plain(name)

    async def story() -> None:
        async with one_async_connection(servers.installed(name, driver)) as engine:
            locks = sl.AsyncLocks(engine)

            async def wait() -> None:
                async with locks.exclusive("cancelled"):
                    raise AssertionError("it was let in")

            with sl.Locks(other).exclusive("cancelled"):
                # at several points: while it connects, while it waits
                for steps in (1, 2, 5, 20, 200):
                    task = asyncio.create_task(wait())
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    if steps == 200:
                        await asyncio.sleep(0.1)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
            with sl.Locks(other).exclusive("cancelled", timeout=PATIENCE):
                pass
            await usable_again(engine)

    asyncio.run(story())


@pytest.mark.parametrize(("name", "driver"), ASYNC)
def test_cancelled_holder_releases(servers: Servers, plain: Callable[[str], Engine], name: str, driver: str) -> None:
    other = plain(name)

    async def story() -> None:
        inside = asyncio.Event()
        async with one_async_connection(servers.installed(name, driver)) as engine:

            async def hold() -> None:
                async with sl.AsyncLocks(engine).exclusive("cancelled inside"):
                    inside.set()
                    await asyncio.sleep(3600)

            task = asyncio.create_task(hold())
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with sl.Locks(other).exclusive("cancelled inside", timeout=PATIENCE):
                pass
            await usable_again(engine)

    asyncio.run(story())


LEVEL = {
    "postgresql15": "SELECT current_setting('transaction_isolation')",
    "yugabytedb": "SELECT current_setting('transaction_isolation')",
    "mysql": "SELECT lower(@@transaction_isolation)",
    "mariadb": "SELECT lower(@@tx_isolation)",
}


def app_settings(engine: Engine, name: str) -> tuple[Any, ...]:
    """What an app finds on the connection that it gets."""
    wait = "SELECT @@innodb_lock_wait_timeout" if name in ("mysql", "mariadb") else "SHOW lock_timeout"
    with engine.connect() as connection:
        raw: Any = connection.connection.dbapi_connection
        autocommit = raw.get_autocommit() if hasattr(raw, "get_autocommit") else raw.autocommit
        level = str(connection.scalar(text(LEVEL[name]))).replace("-", " ")
        return level, connection.scalar(text(wait)), bool(autocommit)


@pytest.mark.parametrize(("name", "driver"), SYNC)
@pytest.mark.parametrize("how", ["option", "event", "autocommit"])
def test_settings_of_the_app_are_restored(
    servers: Servers,
    plain: Callable[[str], Engine],
    name: str,
    driver: str,
    how: str,
    one_connection: Callable[..., Engine],
) -> None:
    if how == "event" and name in ("postgresql15", "yugabytedb"):
        pytest.skip("SQLAlchemy restores the level of the engine: a level belongs there")
    level = {"option": "SERIALIZABLE", "event": None, "autocommit": "AUTOCOMMIT"}[how]
    engine = one_connection(servers.installed(name, driver), **({"isolation_level": level} if level else {}))
    if how == "event":

        @event.listens_for(engine, "connect")
        def serializable(connection: Any, record: Any) -> None:
            cursor = connection.cursor()
            cursor.execute(
                "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE"
                if name in ("mysql", "mariadb")
                else "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE"
            )
            cursor.close()
            connection.commit()

    before = app_settings(engine, name)
    assert how == "autocommit" or before[0] == "serializable"
    locks = sl.Locks(engine)
    with locks.exclusive("settings"), sl.Locks(plain(name)).exclusive("taken by another"):
        pass
    assert app_settings(engine, name) == before
    with locks.exclusive("settings", timeout=PATIENCE) as held:
        level_inside = str(held.session.scalar(text(LEVEL[name])))
        # MySQL's variable tells the session's level, not the transaction's
        assert level_inside == "read committed" or name in ("mysql", "mariadb")
    assert app_settings(engine, name) == before
    with sl.Locks(plain(name)).exclusive("settings"):
        for timeout in (0, 0.1):
            with pytest.raises(sl.LockTimeout):
                with locks.exclusive("settings", timeout=timeout):
                    pass
    assert app_settings(engine, name) == before
    with pytest.raises(KeyError):
        with locks.exclusive("settings", timeout=PATIENCE):
            raise KeyError
    locks.run(sl.lock.vacuum())
    assert app_settings(engine, name) == before


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
def test_block_works_after_a_server_restart(servers: Servers, name: str, one_connection: Callable[..., Engine]) -> None:
    from tests import servers as real

    server: Any = real.start(name)
    try:
        server.create_database("restarted")
        url = server.url(PLAIN[name], "restarted")
        install(url)
        engine = one_connection(url)
        locks = sl.Locks(engine)
        with locks.exclusive("restart"):
            pass
        server.restart()
        with locks.exclusive("restart"):
            pass
        usable(engine)
        with pytest.raises(sl.LockLost):
            with locks.exclusive("restart"):
                server.restart()
        usable(engine)
    finally:
        server.close()


def test_blocks_with_keys_in_another_order_never_deadlock(servers: Servers) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def work(names: tuple[str, str]) -> int:
        for _ in range(100):
            with locks.exclusive(*names, timeout=PATIENCE):
                pass
        return 100

    with connected(servers.installed("postgresql15", "psycopg")) as engine, ThreadPoolExecutor(4) as threads:
        locks = sl.Locks(engine)
        assert list(threads.map(work, [("first", "second"), ("second", "first")] * 2)) == [100] * 4

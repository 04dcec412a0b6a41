"""A wait that is cancelled or interrupted leaves nothing behind: no lock, no connection, no place in a queue."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

import sqlalchemy_locks as sl
from tests.faults.proxy import Proxy, Request
from tests.fixtures.engines import MakeEngine
from tests.fixtures.holders import Process, hold_key
from tests.fixtures.parties import ASYNC, PATIENCE, Watch, async_connected, installed, unused

SERVERS_ASYNC = [which for which in ASYNC if not which.startswith("sqlite")]


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test with a limit, which ends it if it hangs."""
    asyncio.run(asyncio.wait_for(main, PATIENCE))


async def by_cancel(task: asyncio.Task[Any], rounds: Callable[[], int] = lambda: 0) -> None:
    # repeatedly: asyncmy connects within asyncio.wait_for, which may lose a cancellation before Python 3.12. Then the
    # task continues with its rounds, and is cancelled in one of them
    while not task.done():
        task.cancel()
        told = rounds()
        for _ in range(100):
            if task.done() or rounds() > told + 1:
                break
            await asyncio.wait([task], timeout=0.05)
    assert task.cancelled()


async def became(true: Callable[[], Any]) -> None:
    """Wait until the server's tables show that a condition is true."""
    while not await asyncio.to_thread(true):
        await asyncio.sleep(0.13)  # InnoDB refreshes its table of transactions only this often


@asynccontextmanager
async def contenders(servers: Any, which: str) -> AsyncIterator[tuple[sl.AsyncLocks, sl.AsyncLocks]]:
    """Locks on a pool of two connections, and those of another process."""
    url = installed(servers, *ASYNC[which])
    async with async_connected(url, pool_size=2, max_overflow=0) as engine, async_connected(url) as other:
        yield sl.AsyncLocks(engine), sl.AsyncLocks(other)


def checked_out(engine: AsyncEngine) -> int:
    return int(engine.pool.checkedout())  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["exclusive", "shared"])
@pytest.mark.parametrize("which", SERVERS_ASYNC)
def test_cancelled_wait_for_a_key(servers: Any, watch: Callable[[str], Watch], which: str, how: str) -> None:
    server = watch(ASYNC[which][0])

    async def main() -> None:
        key = unused()
        async with contenders(servers, which) as (locks, holder):

            async def wait() -> None:
                async with getattr(locks, how)(key):
                    raise AssertionError("it was had")

            await holder.run(sl.lock.create(key))
            async with holder.exclusive(key):
                task = asyncio.create_task(wait())
                await became(lambda: server.waiting() > 0)
                await by_cancel(task)
                assert checked_out(locks._engine) == 0
                # the server may keep waiting for a disconnected client until it notices the disconnection
            async with locks.exclusive(key):
                pass
            async with holder.exclusive(key):
                pass
            await became(lambda: server.waiting() == 0)
            assert checked_out(locks._engine) == 0

    run(main())


@pytest.mark.parametrize("which", SERVERS_ASYNC)
def test_cancelled_wait_for_a_row(servers: Any, watch: Callable[[str], Watch], which: str) -> None:
    server = watch(ASYNC[which][0])

    async def main() -> None:
        key, mutex = unused(), sl.Mutex()
        async with contenders(servers, which) as (locks, other):
            await locks.run(mutex.create(key))
            async with other._engine.begin() as holder:
                assert await holder.scalar(mutex.acquire(key))
                task = asyncio.create_task(locks.mutex.acquire(key))
                await became(lambda: server.waiting() > 0)
                await by_cancel(task)
                assert checked_out(locks._engine) == 0
            await locks.run(mutex.release(key))
            assert await locks.mutex.acquire(key)

    run(main())


class LateProxy(Proxy):
    """A proxy that keeps back the last of some requests until the test sends it, whatever has become of the client."""

    expected: tuple[bytes, ...] = ()

    def open_links(self) -> int:
        return len(self._links)

    def keep(self, *requests: bytes) -> None:
        self.arrived, self.sent = threading.Event(), threading.Event()
        self.expected = requests

    def fate_of(self, request: Request) -> Callable[[], object] | bool:
        if self.expected and self.expected[0] in request.text:
            self.expected = self.expected[1:]
            if not self.expected:
                self.arrived.set()
                assert self.sent.wait(PATIENCE)
        return super().fate_of(request)


@pytest.mark.parametrize("level", [None, "AUTOCOMMIT"])
@pytest.mark.parametrize("last", ["UPDATE", "COMMIT"])
@pytest.mark.parametrize("which", [which for which in SERVERS_ASYNC if which.startswith(("mysql", "mariadb"))])
def test_release_after_a_cancelled_acquire_precedes_its_statement(
    servers: Any, watch: Callable[[str], Watch], which: str, last: str, level: str | None
) -> None:
    """The server gets the cancelled statement late. PostgreSQL's drivers wait until it has ended."""
    name, driver = ASYNC[which]
    server = watch(name)

    async def main(proxy: LateProxy) -> None:
        key, options = unused(), {} if level is None else {"isolation_level": level}
        async with async_connected(proxy.url, pool_size=2, max_overflow=0, **options) as engine:
            locks = sl.AsyncLocks(engine)
            assert await locks.mutex.acquire(key)
            assert await locks.mutex.release(key)
            await became(lambda: server.waiting() == 0)
            # 3: a query; an engine in AUTOCOMMIT sends another COMMIT before the UPDATE
            proxy.keep(*[b"\x03UPDATE", b"\x03COMMIT"][: 1 if last == "UPDATE" else 2])
            task = asyncio.create_task(locks.mutex.acquire(key))
            await became(proxy.arrived.is_set)
            await by_cancel(task)
            release = asyncio.create_task(locks.mutex.release(key))
            if last == "COMMIT":
                await became(lambda: server.waiting() > 0)
            else:
                assert not await release
            links = proxy.open_links()
            proxy.sent.set()
            assert await release is (last == "COMMIT")
            await became(lambda: proxy.open_links() < links)
            assert await locks.mutex.acquire(key)

    with LateProxy(installed(servers, name, driver)) as proxy:
        run(main(proxy))


def test_cancelled_statement_of_sqlite(servers: Any) -> None:
    """The driver refuses a second statement on a connection that is invalidated, with its own error."""
    entered, goes_on = threading.Event(), threading.Event()

    def executing(statement: str) -> None:
        if statement.startswith("UPDATE"):
            entered.set()
            goes_on.wait(PATIENCE)

    async def main() -> None:
        key = unused()
        async with async_connected(installed(servers, *ASYNC["sqlite/aiosqlite"])) as engine:
            locks = sl.AsyncLocks(engine)
            await locks.run(sl.Mutex().create(key))
            async with engine.connect() as connection:
                raw = await connection.get_raw_connection()
                driver: Any = raw.driver_connection
                await driver.set_trace_callback(executing)
            task = asyncio.create_task(locks.mutex.acquire(key))
            try:
                await became(entered.is_set)
                task.cancel()
            finally:
                goes_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert checked_out(engine) == 0

    run(main())


@pytest.mark.parametrize("which", ["postgresql15/asyncpg", "mysql/aiomysql"])
def test_cancelled_wait_in_the_local_queue(servers: Any, watch: Callable[[str], Watch], which: str) -> None:
    """The second waits behind the first, without a connection; one that is cancelled leaves the others in their order."""
    server = watch(ASYNC[which][0])

    async def main() -> None:
        key, had = unused(), []

        async def wait(number: int) -> None:
            async with locks.exclusive(key, timeout=600):
                had.append(number)

        async with contenders(servers, which) as (locks, holder):
            await holder.run(sl.lock.create(key))
            async with holder.exclusive(key):
                tasks = [asyncio.create_task(wait(number)) for number in range(5)]
                await became(lambda: server.waiting() > 0)
                assert checked_out(locks._engine) == 1
                await by_cancel(tasks[2])  # in the middle of the queue
                await by_cancel(tasks[0])  # at the head of the queue, on the connection
                await became(lambda: checked_out(locks._engine) == 1)
            await asyncio.gather(*(tasks[number] for number in (1, 3, 4)))
            assert had == [1, 3, 4]
            assert checked_out(locks._engine) == 0

    run(main())


# from Python 3.13 on, sqlite3 reports what aiosqlite opens for a task that is cancelled meanwhile
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
@pytest.mark.parametrize("which", ASYNC)
def test_cancelled_at_every_await(servers: Any, which: str) -> None:
    """A task that acquires locks in a loop is cancelled after each number of steps of the event loop."""
    name, driver = ASYNC[which]

    async def main() -> None:
        key, rounds = unused(), 0

        async def work() -> None:
            nonlocal rounds
            while True:
                async with locks.exclusive(key, timeout=PATIENCE):
                    pass
                await locks.mutex.acquire(key)
                await locks.mutex.release(key)
                rounds += 1

        async with async_connected(installed(servers, name, driver), pool_size=2, max_overflow=0) as engine:
            locks = sl.AsyncLocks(engine)
            for steps in range(40):
                task = asyncio.create_task(work())
                for _ in range(steps):
                    await asyncio.sleep(0)
                await by_cancel(task, lambda: rounds)
                assert checked_out(engine) == 0
            async with locks.exclusive(key, timeout=PATIENCE):
                pass

    run(main())


@pytest.mark.parametrize("which", [which for which in ASYNC if "my" in which])
def test_cancelled_while_the_level_is_reset(servers: Any, which: str) -> None:
    """SQLAlchemy would take the connection's place out of the pool for good."""

    async def main() -> None:
        pool = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 1, "pool_reset_on_return": None}
        url = installed(servers, *ASYNC[which])
        async with async_connected(url, isolation_level="AUTOCOMMIT", **pool) as engine:
            locks, key = sl.AsyncLocks(engine), unused()

            async def work() -> None:
                async with locks.exclusive(key, timeout=PATIENCE):
                    event.listen(engine.sync_engine, "reset", lambda *_: task.cancel(), once=True)

            for _ in range(2):
                task = asyncio.create_task(work())
                await asyncio.wait([task])
                assert task.cancelled()
                assert checked_out(engine) == 0
            async with locks.exclusive(key, timeout=PATIENCE):
                pass

    run(main())


@pytest.mark.parametrize(("name", "driver"), [("postgresql15", "psycopg"), ("mysql", "pymysql")])
def test_keyboard_interrupt_during_a_wait(
    engine_to: MakeEngine, watch: Callable[[str], Watch], servers: Any, name: str, driver: str
) -> None:
    """psycopg2 raises the interrupt after its wait: it waits in C, in libpq."""
    key, server = unused(), watch(name)
    holder = sl.Locks(engine_to(name))
    holder.run(sl.lock.create(key))
    with ExitStack() as opened:
        with holder.exclusive(key):
            process = opened.enter_context(Process(hold_key, installed(servers, name, driver), key))
            server.until_waiting()
            os.kill(process.pid, signal.SIGINT)
            assert process.hear() == "interrupted, 0 in use"
        assert process.asked("again") == "holds, 1 in use"


@pytest.mark.parametrize("which", SERVERS_ASYNC)
def test_statement_cancelled_inside_a_block_loses_the_lock(
    servers: Any, watch: Callable[[str], Watch], engine_to: MakeEngine, which: str
) -> None:
    """The driver closes its connection, or aborts the statement and with it the transaction: ``finally`` has no lock."""
    name, driver = ASYNC[which]
    key, waited_for, watched = unused(), unused(), watch(name)
    lost: list[bool] = []

    async def take(locks: sl.AsyncLocks) -> None:
        async with locks.exclusive(key, timeout=PATIENCE):
            pass

    async def work(locks: sl.AsyncLocks, other: sl.AsyncLocks) -> None:
        async with locks.exclusive(key) as held:
            try:
                await held.session.execute(sl.lock.exclusive(waited_for))
            finally:
                lost.append(held.lost)
                if name.startswith("postgresql"):  # the others raise it when their wait is over
                    await asyncio.create_task(take(other))

    async def main(holder: Any) -> None:
        url = installed(servers, name, driver)
        async with async_connected(url) as engine, async_connected(url) as another:
            working = asyncio.create_task(work(sl.AsyncLocks(engine), sl.AsyncLocks(another)))
            await became(watched.waiting)
            working.cancel()
            with pytest.raises(asyncio.CancelledError):
                await working
            await asyncio.to_thread(holder.rollback)
            await take(sl.AsyncLocks(another))

    with engine_to(name).connect() as holder:
        holder.execute(sl.lock.exclusive(waited_for))
        run(main(holder))
    assert lost == [True]


@pytest.mark.parametrize("level", ["READ COMMITTED", "AUTOCOMMIT"])
def test_cancelled_call_leaves_no_setting_behind(servers: Any, level: str) -> None:
    """psycopg yields to the event loop after it has changed an attribute of the connection."""

    async def story() -> None:
        url = installed(servers, "postgresql15", "psycopg")
        async with async_connected(url, pool_size=1, max_overflow=0, isolation_level=level) as engine:
            locks, returned = sl.AsyncLocks(engine), set()
            await locks.mutex.acquire("cancelled early")

            @event.listens_for(engine.sync_engine, "checkin")
            def checked_in(connection: Any, record: Any) -> None:
                if connection is not None:
                    returned.add(connection.autocommit)

            async def enter(block: Any) -> None:
                async with block:
                    pass

            for block in (locks.exclusive, locks.lease):
                for steps in range(1, 20):
                    await locks.mutex.release("cancelled early")  # the pool has a connection
                    task: asyncio.Task[Any] = asyncio.ensure_future(enter(block("cancelled early")))
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
            assert returned == {level == "AUTOCOMMIT"}

    run(story())

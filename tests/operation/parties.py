"""What the tests of an operation, of the dialects and of the faults share: engines, threads, and who waits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from sqlalchemy import Engine, NullPool, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

T = TypeVar("T")

#: what ends a test that hangs, in seconds: never what a machine may be too slow for
PATIENCE = 240
#: the six databases that the locks are installed in, with a synchronous driver of each
EVERYWHERE = {
    "postgresql15": "psycopg",
    "postgresql15-table": "psycopg",
    "postgresql18": "psycopg",
    "yugabytedb": "psycopg2",
    "mysql": "pymysql",
    "mariadb": "mariadb+pymysql",
    "sqlite": "pysqlite",
}
#: all but those that differ from another one in the bodies of the functions only
ENGINES = {name: EVERYWHERE[name] for name in ("postgresql15", "mysql", "mariadb", "sqlite")}
SERVERS = {name: EVERYWHERE[name] for name in ("postgresql15", "mysql", "mariadb")}
INNODB = {name: EVERYWHERE[name] for name in ("mysql", "mariadb")}
ASYNC = {
    "postgresql15/psycopg": ("postgresql15", "psycopg"),
    "postgresql15/asyncpg": ("postgresql15", "asyncpg"),
    "mysql/aiomysql": ("mysql", "aiomysql"),
    "mysql/asyncmy": ("mysql", "asyncmy"),
    "mariadb/aiomysql": ("mariadb", "mariadb+aiomysql"),
    "sqlite/aiosqlite": ("sqlite", "aiosqlite"),
}

#: the shortest wait in seconds that a server can be told of: InnoDB counts whole ones
BRIEFLY = {name: 1 if name in INNODB else 0.1 for name in EVERYWHERE}
#: what each driver has to be told of PgBouncer in transaction mode: a prepared statement is another session's next time
POOLED: dict[str, dict[str, Any]] = {
    "psycopg": {"prepare_threshold": None},
    "psycopg2": {},
    "asyncpg": {
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": lambda: f"__asyncpg_{uuid.uuid4()}__",
    },
}

_numbers = itertools.count(1)


def unused(what: str = "key") -> str:
    """A name that no other test locks."""
    return f"{what} no. {next(_numbers)}"


def installed(servers: Any, name: str, driver: str | None = None) -> str:
    """The URL of a database with the locks in it; ``-table`` behind a name asks for PostgreSQL's table bodies."""
    engine, _, locking = name.partition("-")
    url: str = servers.installed(engine, driver or EVERYWHERE[name], locking or "native")
    return url


@contextmanager
def connected(url: str, **options: Any) -> Iterator[Engine]:
    """An engine, disposed of afterwards."""
    engine = create_engine(url, **options)
    try:
        yield engine
    finally:
        engine.dispose()


@asynccontextmanager
async def async_connected(url: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    """An asynchronous engine, disposed of afterwards."""
    engine = create_async_engine(url, **options)
    try:
        yield engine
    finally:
        await engine.dispose()


@contextmanager
def seen(engine: Engine | AsyncEngine) -> Iterator[list[str]]:
    """The statements that reach the driver meanwhile."""
    statements: list[str] = []
    sync: Engine = getattr(engine, "sync_engine", engine)

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        statements.append(statement)

    event.listen(sync, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(sync, "before_cursor_execute", note)


def later(call: Callable[..., T], *arguments: Any, **named: Any) -> Future[T]:
    """Make a call in a thread of its own, which doesn't keep the process alive when it never returns."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments, **named))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def all_of(*calls: Callable[[], T]) -> list[T]:
    """Make calls at the same time and wait for all of them; the first error is raised."""
    return [future.result(PATIENCE) for future in [later(call) for call in calls]]


async def cancelled_at_every_await(task: asyncio.Task[Any]) -> None:
    """Cancel a task as the scopes of anyio do, and so Starlette and FastAPI: again and again, until it has ended."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


def in_one_day(test: Callable[[], None], *zones: str) -> None:
    """Run what must not be cut in two by a midnight; once more when one came in between and it failed."""

    def days() -> list[Any]:
        return [datetime.now(ZoneInfo(zone)).date() for zone in ("UTC", *zones)]

    began = days()
    try:
        test()
    except AssertionError:
        if days() == began:
            raise
        test()


def until(
    true: Callable[[], Any], *, pause: float = 0.005, unless: Future[Any] | None = None, patience: float = PATIENCE
) -> None:
    """Return when something has become true; fail when a call returned that should still be under way."""
    deadline = time.monotonic() + patience
    while not true():
        assert unless is None or not unless.done(), f"it did not wait: {unless}"
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(pause)


class Watch:
    """Who waits for a lock in a database, and who holds one, by the server's own account."""

    def __init__(self, servers: Any, name: str) -> None:
        self.name = name
        self.innodb = name in INNODB
        self.engine = create_engine(installed(servers, name), poolclass=NullPool, isolation_level="AUTOCOMMIT")

    def ask(self, statement: str, **values: Any) -> Any:
        with self.engine.connect() as connection:
            result = connection.execute(text(statement), values)
            return result.scalar() if result.returns_rows else None

    def waiting(self) -> int:
        """How many wait for a lock."""
        if self.name == "sqlite":
            return queued(self.engine, in_front=False)
        if self.innodb:
            return int(
                self.ask(
                    "SELECT (SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT')"
                    " + (SELECT count(*) FROM information_schema.processlist"
                    " WHERE state = 'User lock' AND db = DATABASE())"
                )
            )
        return int(
            self.ask(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )

    def until_waiting(self, future: Future[Any] | None = None, *, besides: int = 0) -> None:
        """Return when somebody more than ``besides`` waits."""
        # InnoDB refreshes its table of transactions only when nobody has read it for a tenth of a second
        until(lambda: self.waiting() > besides, pause=0.13 if self.innodb else 0.005, unless=future)

    def until_nobody_waits(self) -> None:
        """Return when the last test's waiters are forgotten."""
        until(lambda: self.waiting() == 0, pause=0.13 if self.innodb else 0.005)

    def backend(self, connection: Any) -> int:
        """The server's number of a connection."""
        return int(connection.exec_driver_sql(backend_statement(self.name)).scalar())

    def kill(self, backend: int) -> None:
        """Cut a connection off at the server, and wait until the server has forgotten it."""
        if self.innodb:
            self.ask(f"KILL {backend}")
            gone = "SELECT count(*) = 0 FROM information_schema.processlist WHERE id = :id"
        else:
            self.ask("SELECT pg_terminate_backend(:id)", id=backend)
            gone = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = :id"
        until(lambda: self.ask(gone, id=backend))

    def close(self) -> None:
        self.engine.dispose()


def queued(engine: Engine, key: int | None = None, *, in_front: bool = True) -> int:
    """How many stand in the lines beside an SQLite database: in that of a key, or in all of them.

    :param in_front: those, too, who are the first in line for room in a semaphore, and look.
    """
    line = Path(f"{engine.url.database}-sqlalchemy-locks")
    if not line.exists():
        return 0
    with contextlib.closing(sqlite3.connect(line, timeout=PATIENCE)) as file:
        try:
            counted = dict(file.execute("SELECT key, count(*) FROM line GROUP BY key"))
        except sqlite3.OperationalError:  # it has just been made, or is gone
            return 0
    if key is not None:
        return counted.get(key, 0)
    return sum(count if key == 0 or in_front else count - 1 for key, count in counted.items())


def locked_rows(watcher: Engine, connection: Any) -> int:
    """How many rows a transaction of InnoDB has locked."""
    mine = connection.exec_driver_sql("SELECT CONNECTION_ID()").scalar()
    statement = text("SELECT trx_rows_locked FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = :mine")
    found: list[int] = []

    def known() -> bool:
        with watcher.connect() as other:
            found[:] = other.scalars(statement, {"mine": mine})
        return bool(found and found[0])

    time.sleep(0.13)
    # refreshed only when nobody has read it for a tenth of a second
    until(known, pause=0.13)
    return found[0]


def backend_statement(name: str) -> str:
    """What tells a connection its number at the server."""
    return "SELECT CONNECTION_ID()" if name in INNODB else "SELECT pg_backend_pid()"

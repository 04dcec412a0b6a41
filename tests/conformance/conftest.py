"""One suite over engine, driver and runner: ``world`` is one such combination, and makes clients of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from sqlalchemy import Engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.lock import innodb
from tests.conformance.clients import ASYNC, SYNC, Client, Places
from tests.conftest import PLAIN, PLAIN_OF_CLUSTERS, Servers
from tests.fixtures.parties import POOLED, until, waiters
from tests.fixtures.semaphores import expire

T = TypeVar("T")

#: Session, Connection and Locks, and their asynchronous counterparts
S, C, L = "Session", "Connection", "Locks"
AS, AL = "AsyncSession", "AsyncLocks"
#: Of each engine, a session and a block of ``Locks``, which hold locks differently, by different drivers: each driver is
#: tried with one of them at least, and PostgreSQL's psycopg with a Connection as well, which differs from a Session in
#: SQLAlchemy only. What PgBouncer, another server version or another dialect name have of their own is about connections.
RUNNERS: dict[str, dict[str, tuple[str, ...]]] = {
    "postgresql15": {"psycopg": (S, C, L, AS, AL), "psycopg2": (L,), "asyncpg": (AS, AL)},
    "postgresql18": {"psycopg": (S,), "asyncpg": (AL,)},
    "postgresql15-table": {"psycopg": (S, L)},
    "postgresql15-pgbouncer": {"psycopg": (S,), "asyncpg": (AL,)},
    "yugabytedb": {"psycopg2": (S,), "yugabytedb": (L,)},
    "yugabytedb-advisory": {"psycopg2": (S, L)},
    "mysql": {"pymysql": (S, L), "aiomysql": (AS,), "asyncmy": (AL,)},
    "mariadb": {"pymysql": (S,), "mariadb+pymysql": (L,), "aiomysql": (AL,)},
    "sqlite": {"pysqlite": (S, L), "aiosqlite": (AS, AL)},
}
#: Mutexes and semaphores are rows, whoever reads them: each engine has them by a session and by ``Locks``. The functions
#: of ``-table`` and ``-advisory`` are those of locks; tests/pgbouncer runs each operation of ``Locks``.
RUNNERS_OF_ROWS: dict[str, dict[str, tuple[str, ...]]] = {
    "postgresql15": {"psycopg": (S, AL), "psycopg2": (L,), "asyncpg": (AS,)},
    "postgresql18": {"psycopg": (L,)},
    "postgresql15-pgbouncer": {"asyncpg": (AS,)},
    "yugabytedb": {"psycopg2": (S,), "yugabytedb": (L,)},
    "mysql": {"pymysql": (S,), "aiomysql": (AL,), "asyncmy": (AS,)},
    "mariadb": {"pymysql": (S,), "mariadb+pymysql": (L,), "aiomysql": (AL,)},
    "sqlite": {"pysqlite": (C, L), "aiosqlite": (AS,)},
}


@dataclass(frozen=True)
class Combination:
    engine: str
    driver: str
    runner: str

    def __str__(self) -> str:
        return f"{self.engine}/{self.driver}/{self.runner}"


def combinations(runners: dict[str, dict[str, tuple[str, ...]]]) -> list[Combination]:
    return [
        Combination(engine, driver, runner)
        for engine, drivers in runners.items()
        for driver, names in drivers.items()
        for runner in names
    ]


_names = itertools.count()


class World:
    """An engine, a driver and a runner, with the locks installed."""

    def __init__(self, servers: Servers, combination: Combination, places: Places) -> None:
        self.servers = servers
        self._places = places
        self.combination = combination
        self.engine_name, _, mode = combination.engine.partition("-")
        pooled = mode == "pgbouncer"
        self.locking = "native" if pooled else mode or "native"
        self._options = {"connect_args": POOLED[combination.driver]} if pooled else {}
        self.clients: list[Client] = []
        self.url = (
            servers.pooled(combination.driver)
            if pooled
            else servers.installed(self.engine_name, combination.driver, self.locking)
        )
        driver = (PLAIN | PLAIN_OF_CLUSTERS)[self.engine_name]
        plain = servers.installed(self.engine_name, driver, self.locking)
        place, self._leave = places.enter(plain, False, {})
        #: for what a test itself does
        self.plain: Engine = place.engine

    #: the facts that tests ask for, by name
    @property
    def is_sqlite(self) -> bool:
        return self.engine_name == "sqlite"

    @property
    def is_innodb(self) -> bool:
        return self.engine_name in ("mysql", "mariadb", *PLAIN_OF_CLUSTERS)

    @property
    def advisory(self) -> bool:
        native = "advisory" if self.engine_name == "yugabytedb" else "native"
        return self.locking == native and not (self.is_innodb or self.is_sqlite)

    @property
    def table(self) -> str | None:
        """The table of keys, where there is one with rows in it."""
        if self.advisory or self.is_sqlite:
            return None
        return "lock_locked_keys" if self.is_innodb else "lock.locked_keys"

    def client(self) -> Client:
        client = (SYNC | ASYNC)[self.combination.runner](self._places, self.url, self._options)
        self.clients.append(client)
        return client

    def key(self, what: str = "key") -> str:
        """A name that no other test has used."""
        return f"{what}:{next(_names)}"

    def waits(self, future: Future[Any]) -> None:
        """Return when the server shows a lock waiter; fail when the call returned instead."""
        until(lambda: waiters(self.plain), unless=future)

    def age(self, grant: Any) -> None:
        """Make a grant a day older, as if it had been renewed a day earlier."""
        with self.plain.begin() as connection:
            expire(connection, grant)

    def despite_deadlocks(self, client: Client, turn: Callable[[], T]) -> T:
        """Take a turn again, as an app would: InnoDB may choose the client's own transaction as a deadlock's victim."""
        for _ in range(1000):
            try:
                return turn()
            except sl.MustRollback:
                if not self.is_innodb:
                    raise
                client.end(rollback=True)
        raise AssertionError("a thousand times in a row")

    def close(self) -> None:
        # holders first: a client that still waits can't be closed before it has got, or lost, what it waits for
        for client in sorted(self.clients, key=lambda client: client.busy):
            client.close()
        self._leave()


@pytest.fixture(scope="module")
def places() -> Iterator[Places]:
    places = Places()
    yield places
    places.close()


@pytest.fixture(params=combinations(RUNNERS_OF_ROWS), ids=str)
def world(request: pytest.FixtureRequest, servers: Servers, places: Places) -> Iterator[World]:
    world = World(servers, request.param, places)
    try:
        yield world
    finally:
        world.close()


@pytest.fixture
def spares_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a vacuum on InnoDB delete keys that are younger than a minute, too."""
    monkeypatch.setattr(innodb, "_YOUNG", 0)

"""On a hot standby, and on a connection that only reads, every operation of both façades is refused with a sentence.

A standby grants advisory locks of its own, and a failed UPDATE doesn't tell whether the lock is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import make_url

import sqlalchemy_locks as sl
from tests.conformance.faces import ASYNC, OPERATIONS, SYNC, opened
from tests.conftest import PLAIN, Servers, install
from tests.servers import PostgreSQL

ROOM, REQUEST = "a room", "a request"


def block_of_held_permits(locks: Any) -> None:
    with locks.semaphore(ROOM, ttl=60):
        raise AssertionError("no dialect has them")


REFUSED: dict[str, Callable[[Any], object]] = {
    # but for the sweep that finds nothing to write
    **{name: use for name, use in OPERATIONS.items() if name != "sweep"},
    "acquired": lambda locks: locks.acquire({ROOM: 1}, ttl=60),
    "acquired_at_once": lambda locks: locks.acquire({ROOM: 1}, ttl=60, timeout=0),
    "acquired_again": lambda locks: locks.acquire({ROOM: 1}, external_id=REQUEST, ttl=3600),
    "released": lambda locks: locks.release(REQUEST),
    "renewed": lambda locks: locks.renew(REQUEST),
    "block_of_held_permits": block_of_held_permits,
    "mutex_token": lambda locks: locks.mutex.acquire_token("a mutex"),
    "mutex_release": lambda locks: locks.mutex.release("a mutex"),
    "captured": lambda locks: locks.run(sl.StateTransition().capture(1, queue="q")),
    "captured_job": lambda locks: locks.run(sl.Queue().capture(1, queue="q")),
    "vacuum": lambda locks: locks.run(sl.lock.vacuum()),
    "swept": lambda locks: locks.sweep(alive=lambda owners: []),
}


@dataclass(frozen=True)
class Reader:
    """An engine that only reads."""

    server: str
    driver: str
    face: str
    options: dict[str, Any] = field(default_factory=dict)
    standby: bool = False


SETTING = {"connect_args": {"options": "-c default_transaction_read_only=on"}}
INNODB = {"connect_args": {"init_command": "SET SESSION TRANSACTION READ ONLY"}}
READERS = {
    "standby, psycopg": Reader("postgresql15", "psycopg", SYNC, standby=True),
    "read only, asyncpg": Reader(
        "postgresql15", "asyncpg", ASYNC, {"connect_args": {"server_settings": {"default_transaction_read_only": "on"}}}
    ),
    "read only, YugabyteDB": Reader("yugabytedb", "psycopg2", SYNC, SETTING),
    "read only, MySQL": Reader("mysql", "pymysql", SYNC, INNODB),
    "read only, MariaDB": Reader("mariadb", "aiomysql", ASYNC, INNODB),
    "read only, SQLite": Reader("sqlite", "pysqlite", SYNC),
}


@pytest.fixture(scope="module")
def standby(servers: Servers) -> Iterator[PostgreSQL]:
    primary = servers.server("postgresql15")
    assert isinstance(primary, PostgreSQL)
    with primary.standby() as standby:
        yield standby


@pytest.fixture(scope="module", params=READERS)
def locks(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Any]:
    reader = READERS[request.param]
    database = servers.database(reader.server)
    plain = servers.url(reader.server, PLAIN[reader.server], database)
    install(plain)
    with opened(SYNC, plain) as (writes, _):
        writes.run(sl.lock.create("a key"))
        writes.run(sl.semaphore.create(ROOM, capacity=2))
        writes.acquire({ROOM: 1}, external_id=REQUEST, ttl=3600)
        assert writes.mutex.acquire("a mutex")
        writes.run(sl.StateTransition().create("a", queue="q"))
        writes.run(sl.Queue().put({}, queue="q"))
    url = servers.url(reader.server, reader.driver, database)
    if reader.standby:
        replica = request.getfixturevalue("standby")
        replica.catch_up()
        url = replica.url(reader.driver, database)
    if reader.server == "sqlite":
        file = make_url(url)
        url = f"{file.drivername}:///file:{file.database}?mode=ro&uri=true"
    with opened(reader.face, url, **reader.options) as (locks, _):
        yield locks


@pytest.mark.parametrize("operation", REFUSED)
def test_is_refused_with_a_sentence(locks: Any, operation: str) -> None:
    if locks.engine_name == "SQLite" and operation in ("keys", "vacuum"):
        REFUSED[operation](locks)  # PostgreSQL keeps no rows of keys, and so writes nothing
        return
    if locks.engine_name in ("MySQL", "MariaDB") and operation == "vacuum":
        REFUSED[operation](locks)  # by a connection of its own: the server accepts writes, only these sessions don't
        return
    with pytest.raises(sl.NotWritable, match="primary|read-write transaction"):
        REFUSED[operation](locks)

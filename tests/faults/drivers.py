"""The drivers that the faults are tried with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

import sqlalchemy_locks as sl
from tests.conformance import faces
from tests.conformance.faces import opened
from tests.faults.proxy import Proxy, encryption
from tests.fixtures.parties import PATIENCE, connected, installed

SYNC = [
    ("postgresql15", "psycopg"),
    ("postgresql15", "psycopg2"),
    ("yugabytedb", "yugabytedb"),
    ("mysql", "pymysql"),
    ("mariadb", "mariadb+pymysql"),
]
ASYNC = [
    ("postgresql15", "psycopg"),
    ("postgresql15", "asyncpg"),
    ("mysql", "aiomysql"),
    ("mysql", "asyncmy"),
    ("mariadb", "mariadb+aiomysql"),
]

sync = pytest.mark.parametrize(("name", "driver"), SYNC, ids=["-".join(pair) for pair in SYNC])

#: every driver, on its façade
EVERY = [*((*pair, faces.SYNC) for pair in SYNC), *((*pair, faces.ASYNC) for pair in ASYNC)]
every = pytest.mark.parametrize(("name", "driver", "face"), EVERY)

ONE: dict[str, Any] = {"pool_size": 1, "max_overflow": 0, "pool_timeout": PATIENCE}


def clear(driver: str) -> dict[str, Any]:
    """The options of an engine whose requests the proxy can read."""
    return {"connect_args": encryption(driver, tls=False)}


@contextlib.contextmanager
def through_a_proxy(servers: Any, name: str, driver: str, **options: Any) -> Iterator[tuple[Engine, Proxy]]:
    """An engine with one connection, which can be cut."""
    with Proxy(installed(servers, name, driver)) as proxy, connected(proxy.url, **{**ONE, **options}) as engine:
        yield engine, proxy


@contextlib.contextmanager
def blocking_through_a_proxy(servers: Any, name: str, driver: str, face: str) -> Iterator[tuple[Any, Engine, Proxy]]:
    """A façade that blocks, its engine with one connection, and the proxy."""
    with Proxy(installed(servers, name, driver)) as proxy, opened(face, proxy.url, **ONE) as (locks, engine):
        yield locks, engine, proxy


def free(engine: Engine, key: str) -> bool:
    """Whether nobody holds a key."""
    with engine.connect() as connection, connection.begin():
        return bool(connection.scalar(sl.lock.try_exclusive(key)))


@contextlib.contextmanager
def losing(locks: Any, said: str = "what was done in it after that is not committed$") -> Iterator[None]:
    """What raises ``LockLost``, and tells once that the lock is lost."""
    events: list[object] = []
    event.listen(getattr(locks, "_target", locks), "lost", events.append)
    with pytest.raises(sl.LockLost, match=said) as raised:
        yield
    assert type(raised.value) is sl.LockLost
    assert len(events) == 1


def good_as_new(locks: Any, engine: Engine) -> None:
    """Nothing is leaked, and the one connection that there is can lock and work."""
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    for _ in range(2):
        with locks.exclusive("good as new", timeout=PATIENCE) as held:
            held.session.execute(text("SELECT 1"))
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]

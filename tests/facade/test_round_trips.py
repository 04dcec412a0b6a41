"""How many times a pair of operations waits for the server, counted on the wire."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import make_url

import sqlalchemy_locks as sl
from benchmarks.wire import Wire
from tests.fixtures.parties import connected, installed, unused


def mutex(locks: sl.Locks, name: str) -> None:
    assert locks.mutex.acquire(name)
    assert locks.mutex.release(name)


def exclusive(locks: sl.Locks, name: str) -> None:
    with locks.exclusive(name):
        pass


def exclusive_within(locks: sl.Locks, name: str) -> None:
    with locks.exclusive(name, timeout=60):
        pass


def semaphore(locks: sl.Locks, name: str) -> None:
    locks.release(locks.acquire({name: 1}, ttl=60))


def lease(locks: sl.Locks, name: str) -> None:
    with locks.lease(f"lease of {name}"):
        pass


def semaphore_without_ttl(locks: sl.Locks, name: str) -> None:
    locks.release(locks.acquire({name: 1}))


PAIRS = (mutex, exclusive, exclusive_within, semaphore, semaphore_without_ttl, lease)
#: of each driver, in the order of the pairs
EXPECTED = {
    "postgresql15/psycopg": (2, 3, 3, 2, 2, 2),
    "postgresql15/psycopg2": (2, 3, 3, 2, 2, 2),
    "postgresql18/psycopg": (2, 3, 3, 2, 2, 2),
    # the pool's own ROLLBACK is one of them, as it is after a transaction of the app's
    "mysql/pymysql": (6, 4, 6, 18, 17, 18),
    "mariadb/mariadb+pymysql": (6, 4, 6, 18, 17, 18),
}


@pytest.mark.parametrize(
    ("where", "pair", "expected"),
    [(where, *each) for where, counts in EXPECTED.items() for each in zip(PAIRS, counts, strict=True)],
)
def test_round_trips_of_a_pair(servers: Any, where: str, pair: Callable[[sl.Locks, str], None], expected: int) -> None:
    name, driver = where.split("/")
    url, used = make_url(installed(servers, name, driver)), unused()
    with closing(Wire(url.host or "", url.port or 0)) as wire:
        with connected(url.set(port=wire.port).render_as_string(hide_password=False)) as engine:
            locks = sl.Locks(engine)
            locks.run(sl.semaphore.create(used, 10))
            for _ in range(2):  # prepared statements, the pool's first connection, settings that are read once
                pair(locks, used)
            counts = []
            for _ in range(3):
                before = wire.round_trips
                pair(locks, used)
                counts.append(wire.round_trips - before)
            assert min(counts) == expected

"""MySQL and MariaDB: everything at once on a few keys, watched by a witness in this process."""

from __future__ import annotations

import collections
import functools
import random
import threading
import time
from typing import Any

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

import sqlalchemy_locks as sl
from tests.operation.fixtures import MakeEngine
from tests.operation.parties import INNODB, all_of, unused

THREADS, SECONDS = 7, 1.2
DEADLOCK = 1213


class Witness:
    """Who is where, by what the threads themselves do between lock and commit."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._inside: dict[str, list[bool]] = collections.defaultdict(list)
        self.overlaps: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def enter(self, key: str, shared: bool, what: str) -> None:
        with self._guard:
            others = self._inside[key]
            if others and not (shared and all(others)):
                self.overlaps.append(f"{key}: {what} beside {others}")
            others.append(shared)
            self.counts[what] += 1

    def leave(self, key: str, shared: bool) -> None:
        with self._guard:
            self._inside[key].remove(shared)


def turn(connection: Connection, keys: list[str], chance: random.Random, witness: Witness, level: str) -> None:
    """One transaction: take a key in some way, be in it, unlock or not, commit or roll back."""
    key, shared, tries = chance.choice(keys), chance.random() < 0.4, chance.random() < 0.6
    make: Any = getattr(sl.lock, f"{'try_' if tries else ''}{'shared' if shared else 'exclusive'}")
    try:
        got = connection.scalar(make(key))
    except OperationalError as error:
        # said in the docs: above READ COMMITTED a wait for a new key may end as a deadlock, never a try
        assert not tries, error
        assert level != "READ COMMITTED", error
        assert error.orig is not None
        assert error.orig.args[0] == DEADLOCK
        connection.rollback()
        return
    if got is not False:
        witness.enter(key, shared, make.__name__)
        if chance.random() < 0.5:
            connection.execute(sl.lock.unlock(key))
        time.sleep(0)
        witness.leave(key, shared)
    connection.commit() if chance.random() < 0.7 else connection.rollback()


def work(engine: Engine, keys: list[str], witness: Witness, level: str, seed: int) -> None:
    chance, end = random.Random(seed), time.monotonic() + SECONDS
    locks = sl.Locks(engine)
    with engine.connect() as connection:
        while time.monotonic() < end:
            turn(connection, keys, chance, witness, level)
            if seed == 0 and chance.random() < 0.3:
                witness.counts["vacuum"] += locks.run(sl.lock.vacuum()) or 0
            if seed == 1 and chance.random() < 0.2:
                witness.counts["create"] += locks.run(sl.lock.create(*keys)) or 0


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("name", INNODB)
def test_no_overlap_and_no_error(engine_to: MakeEngine, name: str, level: str) -> None:
    engine = engine_to(name, isolation_level=level, pool_size=2 * THREADS)
    keys, witness = [unused() for _ in range(3)], Witness()
    all_of(*[functools.partial(work, engine, keys, witness, level, seed) for seed in range(THREADS)])
    assert witness.overlaps == []
    assert set(witness.counts) == {"exclusive", "shared", "try_exclusive", "try_shared", "vacuum", "create"}
    assert min(witness.counts.values()) > 0, witness.counts

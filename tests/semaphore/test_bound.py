"""The bound of a semaphore, above which no permits are held: while it leaves room, they aren't summed."""

from __future__ import annotations

import random

import pytest
from sqlalchemy import Engine, text

import sqlalchemy_locks as sl
from tests.fixtures.semaphores import EVERYWHERE, INNODB, held, made, place


def bound_of(engine: Engine, name: str) -> int | None:
    with engine.connect() as connection:
        of = text(f"SELECT used_at_most FROM {place(engine, 'semaphore')} WHERE name = :name")
        bound: int | None = connection.scalar(of, {"name": name})
        return bound


@pytest.mark.parametrize("name", EVERYWHERE)
def test_random_walk_never_exceeds_the_capacity(locks: sl.Locks, name: str, engine: Engine) -> None:
    """Grants, releases, denials, rollbacks and resizes of one client; the bound never is too low."""
    chance = random.Random(name)
    if name == "sqlite":
        sl.sqlite.begin_immediate(engine)
    capacity = 12
    sem, grants = made(engine, capacity), list[sl.Grant]()
    for _ in range(120):
        before, what = held(engine, sem), chance.choice(["acquire"] * 3 + ["release"] * 2 + ["roll back", "resize"])
        count = chance.choice([1, 1, 2, 5])
        acquire = sl.semaphore.acquire({sem: count}, ttl=chance.choice([None, 3600]))
        if what == "acquire":
            grant = locks.run(acquire)
            assert grant.acquired == (before + count <= capacity)
            grants += [grant] if grant else []
        elif what == "release" and grants:
            assert locks.release(grants.pop(chance.randrange(len(grants)))) is sl.Released.RELEASED
        elif what == "roll back":
            with engine.connect() as connection, connection.begin():
                outer = connection.begin_nested()
                if grants:
                    connection.execute(sl.semaphore.release(chance.choice(grants)))
                connection.execute(acquire)
                outer.rollback()
        elif what == "resize":
            capacity = chance.choice([3, 12, 40])
            locks.run(sl.semaphore.resize(sem, capacity))
        bound = bound_of(engine, sem)
        assert bound is None or bound >= held(engine, sem)


@pytest.mark.parametrize("ttl", [None, 3600])
@pytest.mark.parametrize("name", INNODB)
def test_uncommitted_release_lowers_no_bound(locks: sl.Locks, ttl: float | None, engine: Engine) -> None:
    """A level that no variable shows: the transaction's own grant is legitimate, and misleads no other caller."""
    sem = made(engine, 100)
    big = locks.acquire({sem: 90})
    locks.release(locks.acquire({sem: 10}))
    with engine.connect() as releasing, engine.connect() as hidden:
        releasing.execute(sl.semaphore.release(big))
        hidden.execute(text("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED"))
        assert hidden.scalar(sl.semaphore.acquire({sem: 1}, ttl=ttl))
        hidden.commit()
        releasing.rollback()
    while locks.run(sl.semaphore.acquire({sem: 3})):
        pass
    assert held(engine, sem) == 100

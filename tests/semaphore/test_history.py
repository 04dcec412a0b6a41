"""The records of creations, resizes and deletions: the last ones, reading no more rows than are returned."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

import sqlalchemy_locks as sl
from tests.fixtures.semaphores import ENGINES, unused


def capacities(rows: Any) -> list[tuple[str, int | None, int | None]]:
    return [(row.name, row.old_capacity, row.new_capacity) for row in rows]


@pytest.mark.parametrize("name", ENGINES)
def test_history_is_newest_first(sem: str, locks: sl.Locks, engine: Engine) -> None:
    other = unused()
    for capacity in (2, 3, 3, 4):
        locks.run(sl.semaphore.resize(sem, capacity, by="ops"))
    locks.run(sl.semaphore.create(other, 7))
    locks.run(sl.semaphore.delete(sem))
    with engine.connect() as connection:
        found = connection.execute(sl.semaphore.history(sem)).all()
    assert capacities(found) == [(sem, 4, None), (sem, 3, 4), (sem, 2, 3), (sem, 1, 2), (sem, None, 1)]
    assert [row.changed_by for row in found] == [None, "ops", "ops", "ops", None]
    assert capacities(locks.run(sl.semaphore.history(sem, limit=2))) == [(sem, 4, None), (sem, 3, 4)]
    assert capacities(locks.run(sl.semaphore.history(limit=2))) == [(sem, 4, None), (other, None, 7)]
    assert locks.run(sl.semaphore.history(unused())) == []

"""The records of creations, resizes and deletions: the last ones, reading no more rows than are returned."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.semaphores import EVERYWHERE, made, place, unused
from tests.semaphore.test_plans import NUMBERS, plan

#: so many that the planner doesn't choose to read all of them
MANY = 20_000
WHOLE = {
    "postgresql15": ("Sort", "Seq Scan on semaphore_history"),
    "mysql": ("filesort",),
    "mariadb": ("filesort",),
    "sqlite": ("B-TREE",),
}


def capacities(rows: Any) -> list[tuple[str, int | None, int | None]]:
    return [(row.name, row.old_capacity, row.new_capacity) for row in rows]


@pytest.mark.parametrize("name", EVERYWHERE)
def test_history_is_newest_first(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    locks = sl.Locks(engine)
    sem, other = made(engine, 1), unused()
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


@pytest.mark.parametrize("name", NUMBERS)
def test_history_reads_only_its_limit(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    sem = made(engine, 1)
    table = place(engine, "semaphore_history")
    with engine.begin() as connection:
        if name == "mysql":
            connection.exec_driver_sql("SET SESSION cte_max_recursion_depth = 1000000")
        connection.execute(
            text(
                f"INSERT INTO {table} (semaphore_id, old_capacity, new_capacity, changed_by)"
                f" SELECT s.id, many.n, many.n + 1, 'many' FROM {place(engine, 'semaphore')} AS s,"
                f" ({NUMBERS[name].format(MANY)}) AS many WHERE s.name = :name"
            ),
            {"name": sem},
        )
    analyze = {"sqlite": "ANALYZE", "postgresql15": f"ANALYZE {table}"}.get(name, f"ANALYZE TABLE {table}")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(analyze)
    try:
        for called in (None, sem):
            operation = sl.semaphore.history(called, limit=10)
            shown = str(operation.compile(dialect=engine.dialect, compile_kwargs={"literal_binds": True}))
            found = plan(engine, shown.replace(":", "\\:"))
            assert not [word for word in WHOLE[name] if word in found], found
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DELETE FROM {table} WHERE changed_by = 'many'"))

"""A row that is deleted and inserted again while an operation waits for it: the new row's state decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, insert, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ENGINES, PATIENCE, Watch, later, unused

Case = tuple[str, dict[str, Any], Callable[[str], Any], Any]

MUTEX, DAILY, TASKS = sl.Mutex(), sl.Timeout(every=86400), sl.StateTransition()
TAKEN = {"acquired": 1, "owner": "me"}
CASES: dict[str, Case] = {
    "mutex.acquire": ("task_state", {}, MUTEX.acquire, True),
    "mutex.acquire_token": ("task_state", {"fence": 6}, MUTEX.acquire_token, 7),
    "mutex.acquire of what was taken": ("task_state", {}, MUTEX.acquire, False),
    "mutex.release of an owner's": ("task_state", TAKEN, lambda id: MUTEX.release(id, owner="me"), True),
    "mutex.release of another's": ("task_state", TAKEN, lambda id: MUTEX.release(id, owner="me"), False),
    "mutex.set_retries": ("task_state", {}, lambda id: MUTEX.set_retries(id, 3), True),
    "timeout.acquire": ("task_timeout", {"ts": 0, "timeout": 60}, DAILY.acquire, True),
    "set_status by force": ("task", {"status": "x"}, lambda id: TASKS.set_status(id, "done", force=True), True),
    "set_status with its claim": (
        "task",
        {"status": "in_progress", "claim": 5},
        lambda id: TASKS.set_status(id, "done", claim=5),
        True,
    ),
}
#: the replacing row, where it differs
BECOMES = {"mutex.acquire of what was taken": TAKEN, "mutex.release of another's": TAKEN | {"owner": "another"}}
DEFAULTS: dict[str, dict[str, Any]] = {
    "task_state": {"acquired": 0, "fence": 0},
    "task_timeout": {"fence": 0},
    "task": {"claim": 0},
}


def table_of(engine: Engine, name: str) -> Any:
    return getattr(build_context(engine.dialect, {}).tables, name)


@pytest.mark.parametrize("way", ["session", "locks.run"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ENGINES)
def test_waiting_operation_applies_to_the_replacement(
    name: str, case: str, way: str, engine_to: MakeEngine, watch: Callable[[str], Watch]
) -> None:
    engine, watched, id = engine_to(name), watch(name), unused()
    where, new, operation, expected = CASES[case]
    table = table_of(engine, where)
    row = {"queue_id": "default", "id": id, **DEFAULTS[where], **new}
    with engine.begin() as connection:
        connection.execute(insert(table), row)

    def wait() -> Any:
        if way == "locks.run":
            return sl.Locks(engine).run(operation(id))
        with Session(engine) as session:
            value = session.scalar(operation(id).execution_options(locks_wait=PATIENCE))
            session.commit()
            return value

    with engine.connect() as holder:
        watched.until_none_wait()
        holder.execute(table.delete().where(table.c.id == id))
        waiting = later(wait)
        watched.until_waiting(waiting)
        holder.execute(insert(table), row | BECOMES.get(case, {}))
        holder.commit()
        assert waiting.result(PATIENCE) == expected


@pytest.mark.parametrize("name", ENGINES)
def test_release_without_owner_ignores_the_replacement(
    name: str, engine_to: MakeEngine, watch: Callable[[str], Watch]
) -> None:
    """A second try of a release without an owner could release another caller's acquisition."""
    engine, watched, id = engine_to(name), watch(name), unused()
    table = table_of(engine, "task_state")
    row = {"queue_id": "default", "id": id, "fence": 0}
    with engine.begin() as connection:
        connection.execute(insert(table), row | {"acquired": 1})
    with engine.connect() as holder:
        watched.until_none_wait()
        holder.execute(table.delete().where(table.c.id == id))
        waiting = later(lambda: sl.Locks(engine).run(MUTEX.release(id)))
        watched.until_waiting(waiting)
        holder.execute(insert(table), row | {"acquired": 1})
        holder.commit()
        assert waiting.result(PATIENCE) is (name != "postgresql15")


def test_older_snapshot_is_a_serialization_failure(engine_to: MakeEngine, watch: Callable[[str], Watch]) -> None:
    engine, watched, id = engine_to("postgresql15", isolation_level="REPEATABLE READ"), watch("postgresql15"), unused()
    table = table_of(engine, "task_state")
    with engine.begin() as connection:
        connection.execute(insert(table), {"queue_id": "default", "id": id, "acquired": 0, "fence": 0})
    with engine.connect() as holder, Session(engine) as session:
        holder.execute(table.delete().where(table.c.id == id))
        waiting = later(session.scalar, MUTEX.acquire(id))
        watched.until_waiting(waiting)
        holder.commit()
        with pytest.raises(DBAPIError, match="could not serialize"):
            waiting.result(PATIENCE)


@pytest.mark.parametrize("name", ENGINES)
def test_waiting_fenced_write_applies_to_the_replacement(
    name: str, engine_to: MakeEngine, watch: Callable[[str], Watch]
) -> None:
    engine, watched, id = engine_to(name), watch(name), unused()
    table = table_of(engine, "task_state")
    row = {"queue_id": "default", "id": id, "acquired": 0, "fence": 5}
    write = update(table).where(table.c.id == id, table.c.queue_id == "default").values(owner="written")
    with engine.begin() as connection:
        connection.execute(insert(table), row)
    for fence, expected in ((6, True), (8, sl.StaleToken)):
        with engine.connect() as holder:
            watched.until_none_wait()
            holder.execute(table.delete().where(table.c.id == id))
            waiting = later(lambda: sl.Locks(engine).run(sl.fenced(write, table.c.fence, 7)))
            watched.until_waiting(waiting)
            holder.execute(insert(table), row | {"fence": fence})
            holder.commit()
            if expected is True:
                assert waiting.result(PATIENCE) is True
            else:
                with pytest.raises(sl.StaleToken):
                    waiting.result(PATIENCE)

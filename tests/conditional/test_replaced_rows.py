"""A row that is deleted and inserted again while an operation waits for it: the new row's state decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, insert, select, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from tests.fixtures.parties import ENGINES, PATIENCE, Watch, later

MUTEX = sl.Mutex()


def table_of(engine: Engine, name: str) -> Any:
    return getattr(build_context(engine.dialect, {}).tables, name)


@pytest.mark.parametrize("holds", [False, True], ids=["free", "held"])
@pytest.mark.parametrize("name", ENGINES)
def test_waiting_acquire_never_makes_two_holders(
    id: str, name: str, holds: bool, engine: Engine, watch: Callable[[str], Watch]
) -> None:
    """PostgreSQL's UPDATE misses the new row, and answers ``False`` though it is free."""
    watched = watch(name)
    table = table_of(engine, "task_state")
    row = {"queue_id": "default", "id": id, "fence": 6}
    with engine.begin() as connection:
        connection.execute(insert(table), row | {"acquired": 0})
    with engine.connect() as holder:
        holder.execute(table.delete().where(table.c.id == id))
        waiting = later(lambda: sl.Locks(engine).run(MUTEX.acquire_token(id)))
        watched.until_waiting(waiting)
        holder.execute(insert(table), row | {"acquired": int(holds)})
        holder.commit()
        token = waiting.result(PATIENCE)
    assert token in ([None] if holds else [None, 7])
    assert sl.Locks(engine).run(MUTEX.acquire(id)) is (token is None and not holds)


@pytest.mark.parametrize("name", ENGINES)
def test_waiting_fenced_write_is_judged_by_the_replacement(
    id: str, name: str, engine: Engine, watch: Callable[[str], Watch]
) -> None:
    """PostgreSQL's UPDATE misses the new row, and answers ``False``: nothing is written."""
    watched = watch(name)
    table = table_of(engine, "task_state")
    row = {"queue_id": "default", "id": id, "acquired": 0, "fence": 5}
    write = update(table).where(table.c.id == id, table.c.queue_id == "default").values(owner="written")
    with engine.begin() as connection:
        connection.execute(insert(table), row)
    for fence, expected in ((6, True), (8, sl.StaleToken)):
        with engine.connect() as holder:
            holder.execute(table.delete().where(table.c.id == id))
            waiting = later(lambda: sl.Locks(engine).run(sl.fenced(write, table.c.fence, 7)))
            watched.until_waiting(waiting)
            holder.execute(insert(table), row | {"fence": fence})
            holder.commit()
            if expected is True:
                written = waiting.result(PATIENCE)
                assert written is (name != "postgresql15")
                with engine.connect() as connection:
                    row_now = select(table.c.owner, table.c.fence).where(table.c.id == id)
                    assert tuple(connection.execute(row_now).one()) == (("written", 7) if written else (None, 6))
            else:
                with pytest.raises(sl.StaleToken):
                    waiting.result(PATIENCE)

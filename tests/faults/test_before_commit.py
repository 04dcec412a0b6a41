"""A connection that dies before COMMIT: nothing of the block, or of the operation, is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import Watch, backend_statement, unused
from tests.fixtures.semaphores import held, made

SYNC = [("mysql", "pymysql"), ("mariadb", "mariadb+pymysql")]
LAST = "RELEASE SAVEPOINT sqlalchemy_locks"


@contextmanager
def dying(engine: Engine, watched: Watch) -> Iterator[list[int]]:
    """The next connection that comes to its last statement before COMMIT is cut off there; which one it was."""
    cut: list[int] = []

    def before(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement == LAST and not cut:
            cut.append(0)
            cut[0] = watched.backend(connection)
            watched.kill(cut[0])

    event.listen(engine, "before_cursor_execute", before)
    try:
        yield cut
    finally:
        event.remove(engine, "before_cursor_execute", before)


@pytest.mark.parametrize(("name", "driver"), SYNC)
def test_block_raises_lock_lost(engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, driver: str) -> None:
    """Only its user can do the work again."""
    engine, watched = engine_to(name, driver), watch(name)
    with dying(engine, watched) as cut:
        with pytest.raises(sl.LockLost, match="nothing that was done in it after that is committed$") as raised:
            with sl.Locks(engine).exclusive(unused()) as lock:
                mine = lock.session.scalar(text(backend_statement(name)))
    assert type(raised.value) is sl.LockLost
    assert cut == [mine]


@pytest.mark.parametrize(("name", "driver"), SYNC)
def test_operation_that_dies_at_each_attempt_raises_lock_lost(
    engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, driver: str
) -> None:
    """Killed after its last statement: COMMIT is not sent, and nothing is granted."""
    engine, watched, sem = engine_to(name, driver), watch(name), made(engine_to(name, driver), 1)
    killed: list[int] = []

    def after(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("INSERT INTO lock_permit "):
            killed.append(watched.backend(connection))
            watched.kill(killed[-1])

    event.listen(engine, "after_cursor_execute", after)
    with pytest.raises(sl.LockLost) as raised:
        sl.Locks(engine).run(sl.semaphore.acquire({sem: 1}))
    event.remove(engine, "after_cursor_execute", after)
    # the driver sees the end of its session at COMMIT: whether that was carried out is unknown to it
    assert isinstance(raised.value, sl.OutcomeUnknown)
    assert len(killed) == len(set(killed)) == 4
    assert held(engine, sem) == 0

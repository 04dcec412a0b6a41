"""An ALTER TABLE of another session that waits for the caller's transaction, on MySQL and MariaDB.

What the caller then asks on a second connection would wait behind the ALTER, a deadlock that the server doesn't detect.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import INNODB, PATIENCE, later, until, unused
from tests.fixtures.semaphores import made

WAITING = text(
    "SELECT count(*) FROM information_schema.processlist"
    " WHERE db = DATABASE() AND state = 'Waiting for table metadata lock'"
)


@contextmanager
def waiting_alter(engine: Engine, table: str) -> Iterator[Future[Any]]:
    """Lock a table as an ALTER does, in a thread that waits for the open transactions on it."""
    with engine.connect() as alters, engine.connect() as watch:
        altering = later(alters.execute, text(f"LOCK TABLES {table} WRITE"))
        until(lambda: watch.scalar(WAITING), unless=altering)
        yield altering
        altering.result(PATIENCE)
        alters.execute(text("UNLOCK TABLES"))


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("name", INNODB)
def test_full_semaphore_is_denied(name: str, level: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name, isolation_level=level)
    full, free = made(engine, 1), made(engine, 1)
    sl.Locks(engine).acquire({full: 1})
    with engine.connect() as caller:
        assert caller.scalar(sl.semaphore.acquire({free: 1}))
        with waiting_alter(engine, "lock_permit_request"):
            denied = later(caller.scalar, sl.semaphore.acquire({full: 1})).result(PATIENCE)
            caller.rollback()
    assert not denied.acquired


@pytest.mark.parametrize(
    ("mode", "answer"), [(sl.lock.exclusive, None), (sl.lock.shared, None), (sl.lock.try_exclusive, False)]
)
def test_new_key_is_locked_by_a_row_of_the_transaction(mode: Any, answer: Any, engine_to: MakeEngine) -> None:
    """A try, which may not wait for that row, is refused, whatever the server's own limit is."""
    engine = engine_to("mysql", isolation_level="REPEATABLE READ")
    with engine.connect() as caller:
        caller.execute(sl.lock.exclusive(unused()))
        caller.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {2 * PATIENCE}")
        with waiting_alter(engine, "lock_locked_keys"):
            assert later(caller.scalar, mode(unused())).result(PATIENCE) is answer
            caller.rollback()

"""An acquisition in turn doesn't overtake the waiters, and a denial by their queue leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.semaphore.acquire import in_turn
from sqlalchemy_locks.semaphore.availability import exhausted_in
from tests.fixtures.engines import MakeEngine
from tests.fixtures.semaphores import held

QUEUES = pytest.mark.parametrize("name", ["postgresql15"])


@pytest.fixture
def engine(engine_to: MakeEngine, name: str) -> Engine:
    return engine_to(name, isolation_level="READ COMMITTED")


@pytest.fixture
def key() -> int:
    """The key of a semaphore's queue."""
    return uuid4().int >> 65


@QUEUES
def test_denial_keeps_no_lock_of_the_queue(sem: str, engine: Engine, key: int) -> None:
    sl.Locks(engine).acquire({sem: 1})
    with engine.connect() as denied, engine.connect() as waiter:
        assert not denied.scalar(in_turn(sl.semaphore.acquire({sem: 1}), [key]))
        assert waiter.scalar(sl.lock.try_exclusive(key)) is True


@QUEUES
def test_queue_denies_a_request_once_and_no_retry(sem: str, engine: Engine, key: int) -> None:
    """A first attempt whose reply was lost may still be granted: a denial of the retry would hide that."""
    sl.Locks(engine).run(sl.lock.create(key))
    request: Any = in_turn(sl.semaphore.acquire({sem: 1}), [key])
    with engine.connect() as waiter, engine.connect() as caller:
        waiter.execute(sl.lock.exclusive(key))
        grant = caller.scalar(request)
        assert (grant.acquired, grant.exhausted) == (False, (sem,))
        caller.rollback()
        assert caller.scalar(request.execution_options(locks_again=True)).acquired
        caller.commit()
        assert caller.scalar(request).replayed
    assert held(engine, sem) == 1


def test_sum_of_a_killed_statement_tells_nothing() -> None:
    """MySQL and MariaDB return NULL for a sum whose statement was killed, without an error."""
    rows = [SimpleNamespace(name="s", capacity=1, used=used, known=False) for used in (None, 1)]
    assert [exhausted_in([row], {"s": 1}) for row in rows] == [[], ["s"]]

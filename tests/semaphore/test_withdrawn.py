"""A request whose caller has gone: it may still be executed, and no caller would release its permits."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.semaphore.release import withdraw
from tests.fixtures.parties import later
from tests.fixtures.semaphores import ENGINES, SERVERS, held, unused


@pytest.mark.parametrize("name", SERVERS)
def test_withdrawal_waits_for_request_under_way(
    sem: str, locks: sl.Locks, engine: Engine, watch: Any, name: str
) -> None:
    told = watch(name)
    ident = unused("job")
    with engine.connect() as connection, connection.begin():
        assert connection.execute(sl.semaphore.acquire({sem: 1}, external_id=ident)).scalar_one().acquired
        withdrawn = later(locks.run, withdraw(ident))
        told.until_waiting(withdrawn)
    assert withdrawn.result() is sl.Released.RELEASED
    assert held(engine, sem) == 0


@pytest.mark.parametrize("name", ENGINES)
def test_request_after_withdrawal_is_not_granted(sem: str, locks: sl.Locks, engine: Engine) -> None:
    ident = unused("job")
    assert locks.run(withdraw(ident)) is sl.Released.ALREADY_RELEASED
    with pytest.raises(sl.IdempotencyConflict):
        locks.run(sl.semaphore.acquire({sem: 1}, external_id=ident))
    assert held(engine, sem) == 0
    assert locks.run(withdraw(ident)) is sl.Released.ALREADY_RELEASED

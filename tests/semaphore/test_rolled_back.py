"""A grant of a rolled-back transaction identifies no request, although its row's number may be reused.

SQLite reuses it immediately, with or without AUTOINCREMENT; a server does after a crash before it was written.
"""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, Engine, MetaData, Table, text, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.semaphore.availability import is_held
from tests.fixtures.engines import MakeEngine
from tests.fixtures.semaphores import EVERYWHERE, held, made, place, request_of, unused

ROWS = Table("of_rolled_back", MetaData(), Column("id", BigInteger(), primary_key=True, autoincrement=False))


def same_number(engine: Engine, grant: sl.Grant, number: int) -> None:
    """Give the row of a grant the number that an engine which reuses numbers would give it."""
    old = request_of(engine, grant)
    values = {"new": number, "old": old}
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {place(engine, 'permit_request')} SET id = :new WHERE id = :old"), values)
        moved = f"UPDATE {place(engine, 'permit')} SET permit_request_id = :new WHERE permit_request_id = :old"
        connection.execute(text(moved), values)


@pytest.fixture(params=EVERYWHERE)
def engine(request: pytest.FixtureRequest, engine_to: MakeEngine) -> Engine:
    return engine_to(request.param)


def rolled_back_and_again(engine: Engine, again: bool) -> tuple[str, sl.Grant, sl.Grant]:
    """A grant that was rolled back, and another with the same id and the same number."""
    sem = made(engine, 5)
    acquire = sl.semaphore.acquire({sem: 1}, external_id=unused("job"), ttl=3600)
    seen = text(f"SELECT id FROM {place(engine, 'permit_request')} WHERE external_id = :id")
    with engine.connect() as connection:
        gone = connection.scalar(acquire)
        assert gone
        number = connection.scalar(seen, {"id": gone.external_id})
        connection.rollback()
    # the same operation, executed again, or another one with the same id
    later: Any = sl.Locks(engine).run(
        acquire if again else sl.semaphore.acquire({sem: 1}, external_id=gone.external_id)
    )
    if request_of(engine, later) != number:
        same_number(engine, later, number)
    return sem, gone, later


@pytest.mark.parametrize("again", [True, False])
def test_rolled_back_grant_releases_nothing(engine: Engine, again: bool) -> None:
    sem, gone, later = rolled_back_and_again(engine, again)
    locks = sl.Locks(engine)
    assert locks.release(gone) is sl.Released.UNKNOWN
    with engine.begin() as connection:
        assert connection.scalar(sl.semaphore.release(gone)) == "UNKNOWN"
    assert held(engine, sem) == 1
    assert locks.release(later) is sl.Released.RELEASED


def test_rolled_back_grant_is_not_held(engine: Engine) -> None:
    _, gone, later = rolled_back_and_again(engine, again=True)
    locks = sl.Locks(engine)
    assert locks.renew(gone) is False
    assert locks.renew(later) is True
    assert locks.run(is_held(gone)) == 0
    assert locks.run(is_held(later)) == 1


def test_rolled_back_grant_guards_no_write(engine: Engine) -> None:
    ROWS.create(engine, checkfirst=True)
    _, gone, later = rolled_back_and_again(engine, again=True)
    locks, write = sl.Locks(engine), update(ROWS).where(ROWS.c.id == 1).values(id=1)
    with pytest.raises(sl.LockLost):
        locks.run(sl.guarded(write, gone))
    assert locks.run(sl.guarded(write, later)) is False


def test_replay_stands_for_original_request(engine: Engine) -> None:
    sem, ident = made(engine, 5), unused("job")
    locks = sl.Locks(engine)
    first = locks.acquire({sem: 1}, external_id=ident)
    again = locks.acquire({sem: 1}, external_id=ident)
    assert again.replayed
    assert again.token == first.token
    assert locks.release(again) is sl.Released.RELEASED
    assert locks.release(first) is sl.Released.ALREADY_RELEASED

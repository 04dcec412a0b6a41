"""A grant stands for its own request, and for no other of the same id."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, Engine, MetaData, Table, text, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.semaphore.availability import is_held
from tests.fixtures.semaphores import EVERYWHERE, held, made, place, request_of, unused

ROWS = Table("of_a_grant", MetaData(), Column("id", BigInteger(), primary_key=True, autoincrement=False))
Acquire = sl.Operation[Any]


def denied(engine: Engine, sem: str, acquire: Acquire) -> tuple[Any, Any]:
    """Another caller is granted the id as soon as there is room."""
    locks = sl.Locks(engine)
    before = locks.acquire({sem: 1})
    stale = locks.run(acquire)
    assert not stale
    locks.release(before)
    return stale, locks.run(acquire)


def rolled_back(engine: Engine, sem: str, acquire: Acquire) -> tuple[Any, Any]:
    """SQLite reuses the number of its row at once, and a server does after a crash."""
    number = text(f"SELECT id FROM {place(engine, 'permit_request')} WHERE external_id = :id")
    with engine.connect() as connection:
        stale = connection.scalar(acquire)
        reused = connection.scalar(number, {"id": stale.external_id})
        connection.rollback()
    later = sl.Locks(engine).run(acquire)
    own = request_of(engine, later)
    if own != reused:
        with engine.begin() as connection:
            for table, column in (("permit_request", "id"), ("permit", "permit_request_id")):
                moved = f"UPDATE {place(engine, table)} SET {column} = :new WHERE {column} = :old"
                connection.execute(text(moved), {"new": reused, "old": own})
    return stale, later


def cleaned_up(engine: Engine, sem: str, acquire: Acquire) -> tuple[Any, Any]:
    locks = sl.Locks(engine)
    stale: Any = locks.run(acquire)
    assert locks.release(stale) is sl.Released.RELEASED
    assert locks.release(stale) is sl.Released.ALREADY_RELEASED
    while locks.run(sl.semaphore.clean(older_than=0)):
        pass
    return stale, locks.run(acquire)


def without_token(engine: Engine, sem: str, acquire: Acquire) -> tuple[Any, Any]:
    """As a grant that was built by hand, or stored without its token."""
    later: Any = sl.Locks(engine).run(acquire)
    stored = {**vars(later)}
    del stored["token"]
    return pickle.loads(pickle.dumps(sl.Grant(**stored))), later


@pytest.mark.parametrize("case", [denied, rolled_back, cleaned_up, without_token])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_stale_grant_matches_no_later_request(
    sem: str, locks: sl.Locks, case: Callable[..., Any], engine: Engine
) -> None:
    ROWS.create(engine, checkfirst=True)
    stale, later = case(engine, sem, sl.semaphore.acquire({sem: 1}, external_id=unused("job"), ttl=3600))
    assert locks.release(stale) is sl.Released.UNKNOWN
    assert locks.renew(stale) is False
    assert locks.run(is_held(stale)) == 0
    with engine.begin() as connection:
        assert connection.scalar(sl.semaphore.release(stale)) == "UNKNOWN"
        assert connection.scalar(sl.semaphore.renew(stale)) is False
    write = update(ROWS).where(ROWS.c.id == 1).values(id=1)
    with pytest.raises(sl.LockLost):
        locks.run(sl.guarded(write, stale))
    assert locks.run(sl.guarded(write, later)) is False
    assert (held(engine, sem), locks.run(is_held(later)), locks.renew(later)) == (1, 1, True)
    assert locks.renew(later.external_id)
    assert locks.release(later) is sl.Released.RELEASED


@pytest.mark.parametrize("name", EVERYWHERE)
def test_replay_stands_for_original_request(locks: sl.Locks, engine: Engine) -> None:
    sem, ident = made(engine, 5), unused("job")
    first = locks.acquire({sem: 1}, external_id=ident)
    again = locks.acquire({sem: 1}, external_id=ident)
    assert again.replayed
    assert (again.token, len({first, again})) == (first.token, 2)
    assert locks.release(again) is sl.Released.RELEASED
    assert locks.release(first) is sl.Released.ALREADY_RELEASED

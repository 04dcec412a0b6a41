"""Tries against exclusive and vacuum, on a few keys whose rows come and go: no overlap and no error."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects import backend_for
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, connected

#: above READ COMMITTED each try on MySQL makes a connection of its own
TURNS = {"READ COMMITTED": 120, "REPEATABLE READ": 60}


@pytest.mark.parametrize("size", [10, 60, 900])
@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_vacuum_never_waits(servers: Servers, name: str, size: int) -> None:
    """However many keys there are, even if the server prefers a scan of the table to look-ups."""
    url, names = servers.fresh(name, PLAIN[name]), [f"key {number}" for number in range(size)]
    install(url)
    with connected(url) as engine:
        locks = sl.Locks(engine)
        locks.run(sl.lock.create(*names))
        with locks.exclusive(names[size // 2]):
            assert locks.run(sl.lock.vacuum()) == size - 1


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_vacuum_causes_no_overlap_and_no_error(engine_to: MakeEngine, name: str, level: str) -> None:
    engine = engine_to(name, isolation_level=level, pool_size=10)
    guard, turns = threading.Lock(), TURNS[level]
    inside: dict[str, int] = {}
    overlaps: list[str] = []

    def enter(key: str) -> None:
        with guard:
            if inside.get(key):
                overlaps.append(key)
            inside[key] = inside.get(key, 0) + 1

    def leave(key: str) -> None:
        with guard:
            inside[key] -= 1

    def take(tries: bool) -> int:
        entered = 0
        with Session(engine) as session:
            for turn in range(turns):
                key = f"comes and goes {level} {turn % 3}"
                entered += turn_of(session, key, tries)
        return entered

    def turn_of(session: Session, key: str, tries: bool) -> bool:
        while True:
            try:
                got = session.scalar((sl.lock.try_exclusive if tries else sl.lock.exclusive)(key)) is not False
            except DBAPIError as error:
                # a waiter for a deleted row may be chosen as a deadlock's victim, and is retried; a try never is
                if tries or not backend_for(engine.dialect).transient(error):
                    raise
                session.rollback()
                continue
            if got:
                enter(key)
                leave(key)
            session.commit()
            return got

    def vacuum(_: bool) -> int:
        with Session(engine) as session:
            for _turn in range(turns // 4):
                session.scalar(sl.lock.vacuum())
                session.commit()
        return turns

    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(work, tries) for work, tries in [(take, True), (take, False)] * 2 + [(vacuum, True)]]
        entered = [call.result(PATIENCE) for call in calls]
    assert overlaps == []
    assert entered[1] == entered[3] == turns

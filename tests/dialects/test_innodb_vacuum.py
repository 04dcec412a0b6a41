"""Tries against exclusive and vacuum, on a few keys that come and go: no overlap and no error."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers

TURNS = 120


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_no_overlap_and_no_error(servers: Servers, name: str, level: str) -> None:
    engine = create_engine(servers.installed(name, PLAIN[name]), isolation_level=level, pool_size=10)
    guard = threading.Lock()
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
            for turn in range(TURNS):
                key = f"comes and goes {level} {turn % 3}"
                if tries:
                    got = session.scalar(sl.lock.try_exclusive(key))
                else:
                    session.execute(sl.lock.exclusive(key))
                    got = True
                if got:
                    entered += 1
                    enter(key)
                    leave(key)
                session.commit()
        return entered

    def vacuum(_: bool) -> int:
        with Session(engine) as session:
            for _turn in range(TURNS // 4):
                session.scalar(sl.lock.vacuum())
                session.commit()
        return TURNS

    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(work, tries) for work, tries in [(take, True), (take, False)] * 2 + [(vacuum, True)]]
        entered = [call.result(120) for call in calls]
    assert overlaps == []
    assert entered[1] == entered[3] == TURNS
    engine.dispose()

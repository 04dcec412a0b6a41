"""Unread data of a driver is no sign that a lock is lost, whatever thread asks, at any time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError

import sqlalchemy_locks as sl
from tests.fixtures.parties import ENGINES, connected, installed, later, unused

SYNC = pytest.mark.parametrize(("name", "driver"), [*ENGINES.items(), ("postgresql15", "psycopg2")])
#: more than a driver reads in one go
_ROWS = "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 900) SELECT n, CAST(:wide AS CHAR(999)) FROM n"


@SYNC
def test_unread_rows_are_no_loss(servers: Any, name: str, driver: str) -> None:
    """After the block nothing is held, and nothing is lost."""
    events: list[object] = []
    with connected(installed(servers, name, driver)) as engine:
        locks = sl.Locks(engine)
        event.listen(locks, "lost", events.append)
        with locks.exclusive(unused()) as held:
            rows = held.session.execute(text(_ROWS), {"wide": "x" * 999}, execution_options={"yield_per": 10})
            assert not any(held.lost for _ in rows)
            held.check()
        assert held.lost
    assert not events


@SYNC
def test_reply_to_another_thread_is_no_loss(servers: Any, name: str, driver: str) -> None:
    over = threading.Event()

    def lost(held: Any) -> bool:
        while not over.is_set():
            if held.lost:
                return True
        return False

    with connected(installed(servers, name, driver)) as engine, sl.Locks(engine).exclusive(unused()) as held:
        held.session.execute(text("SELECT 1"))
        found = later(lost, held)
        try:
            for _ in range(50):
                with pytest.raises(DBAPIError), held.session.begin_nested():
                    held.session.execute(text("SELECT * FROM not_there"))
                held.session.execute(text("SELECT 1"))
        finally:
            over.set()
        assert not found.result()

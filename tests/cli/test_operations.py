"""The operations that the command line shows, and that others use as well."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

import sqlalchemy_locks as sl
from tests.cli.conftest import Cli

QUEUE = sl.Queue()


def test_mutex_held_lists_taken_mutexes(cli: Cli) -> None:
    locks = cli.locks
    for id in ("held-1", "held-2", "freed"):
        assert locks.mutex.acquire(id, queue="seen", owner="web-1")
    locks.mutex.release("freed", queue="seen")
    rows: list[Any] = [row for row in locks.run(sl.Mutex().held()) if row.queue == "seen"]
    assert [(row.id, row.owner) for row in rows] == [("held-1", "web-1"), ("held-2", "web-1")]
    for row in rows:
        assert row.acquired_at.tzinfo is not None
        assert abs(datetime.now(timezone.utc) - row.acquired_at) < timedelta(hours=1)
    assert len(locks.run(sl.Mutex().held(1))) == 1


def test_timeout_listed_shows_free_in(cli: Cli) -> None:
    locks = cli.locks
    assert locks.once_per("taken", every=86400, queue="seen")
    locks.run(sl.Timeout(every=60).create("never-taken", queue="seen", retries=3))
    rows: list[Any] = locks.run(sl.Timeout().listed())
    told = {row.id: row for row in rows if row.queue == "seen"}
    assert (told["taken"].every, told["taken"].retries) == (86400, None)
    assert 80000 < told["taken"].free_in <= 86400
    assert (told["never-taken"].every, told["never-taken"].retries) == (60, 3)
    assert told["never-taken"].free_in < 0


def test_limit_below_one_is_refused() -> None:
    for listing in (sl.Mutex().held, sl.Timeout().listed):
        with pytest.raises(ValueError, match="limit is from 1 to 2147483647, not"):
            listing(0)

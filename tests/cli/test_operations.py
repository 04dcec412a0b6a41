"""The operations that the command line shows, and that others use as well."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from tests.cli.conftest import Cli

QUEUE = sl.Queue()


def dead(cli: Cli, payload: Any, name: str) -> UUID:
    engine = create_engine(cli.url, poolclass=NullPool)
    with engine.begin() as connection:
        (external_id,) = connection.execute(QUEUE.put(payload, queue=name)).scalars()
    with engine.begin() as connection:
        jobs = connection.execute(QUEUE.capture(1, queue=name)).all()
        assert connection.execute(QUEUE.fail(jobs, error="no route", retry=False)).scalar() == 1
    return UUID(str(external_id))


def counts(cli: Cli, name: str) -> tuple[int, int]:
    rows: Any = cli.locks.run(QUEUE.stats())
    return next(((row.waiting, row.dead) for row in rows if row.queue_id == name), (0, 0))


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


def test_revive_requeues_dead_jobs(cli: Cli) -> None:
    for number in range(3):
        dead(cli, number, "mended")
    dead(cli, 1, "another")
    locks = cli.locks
    assert locks.run(QUEUE.revive(queue="mended", limit=2)) == 2
    assert locks.run(QUEUE.revive(queue="mended")) == 1
    assert counts(cli, "mended") == (3, 0)
    assert counts(cli, "another") == (0, 1)
    (job,) = locks.run(QUEUE.capture(1, queue="mended"))
    assert job.attempts == 1
    assert locks.run(QUEUE.revive()) == 1
    assert counts(cli, "another") == (1, 0)


def test_revive_one_dead_job(cli: Cli) -> None:
    first, _ = dead(cli, 1, "one"), dead(cli, 2, "one")
    locks = cli.locks
    assert locks.run(QUEUE.revive(external_id=str(first))) == 1
    assert locks.run(QUEUE.revive(external_id=first)) == 0
    assert locks.run(QUEUE.revive(external_id=uuid4())) == 0
    assert counts(cli, "one") == (1, 1)
    with pytest.raises(ValueError, match="not both"):
        QUEUE.revive(queue="one", external_id=first)

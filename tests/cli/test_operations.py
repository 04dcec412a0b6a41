"""The operations that the command line shows, and that others use as well."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
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


@pytest.mark.parametrize("limit", [0, -1, 2**31])
def test_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="limit is from 1 to 2147483647, not"):
        sl.Mutex().held(limit)
    with pytest.raises(ValueError, match="limit is from 1 to 2147483647, not"):
        sl.Timeout().listed(limit)


@pytest.mark.parametrize("limit", [True, "3", 1.5])
def test_limit_of_wrong_type_is_refused(limit: Any) -> None:
    with pytest.raises(TypeError, match="limit is an int"):
        sl.Mutex().held(limit)


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


def test_usage_counts_holders(cli: Cli) -> None:
    locks = cli.locks
    locks.run(sl.semaphore.create("counted", 10))
    for count in (1, 3):
        locks.acquire({"counted": count}, ttl=3600)
    locks.release(locks.acquire({"counted": 1}, ttl=3600))
    rows: Any = locks.run(sl.semaphore.usage())
    assert [(row.used, row.holders) for row in rows if row.name == "counted"] == [(4, 2)]


def test_operations_awaited(postgresql: Cli) -> None:
    async def ask() -> tuple[Any, ...]:
        engine = create_async_engine(postgresql.url.replace("+psycopg:", "+asyncpg:"))
        try:
            locks = sl.AsyncLocks(engine)
            return (
                await locks.run(sl.Mutex().held()),
                await locks.run(sl.Timeout().listed()),
                await locks.run(QUEUE.revive(queue="unknown")),
            )
        finally:
            await engine.dispose()

    mutexes, timeouts, revived = asyncio.run(ask())
    assert isinstance(mutexes, list)
    assert isinstance(timeouts, list)
    assert revived == 0

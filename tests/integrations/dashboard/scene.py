"""A database with activity of every kind, as in production."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Engine, insert, select, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.sql.clock import Now, PlusSeconds, SecondsAgo
from tests.fixtures.parties import PATIENCE, later, until

#: name, capacity, and of each holder: who, how many, since when and for how long, in seconds
SEMAPHORES: dict[str, tuple[int, list[tuple[str, int, float, float | None]]]] = {
    "api-calls": (40, [(f"worker-{n}", 4 + n % 5, 4 + 7 * n, 600) for n in range(5)]),
    "backup-slots": (
        6,
        [
            ("db-3.example.org", 1, 8_100, 14_400),
            ("db-1.example.org", 1, 2_460, 7_200),
            ("files.example.org", 2, 760, 3_600),
            ("mail.example.org", 1, 95, 3_600),
        ],
    ),
    "gpu": (4, [("train-7", 2, 19_000, None), ("train-9", 2, 4_200, 86_400)]),
    "pdf-renderer": (8, [("web-2:4711", 1, 900, 300)]),
    "warehouse-sync": (1, []),
}
QUEUES = {"invoices": (14, 2, 3, 0, 0), "mail": (132, 40, 8, 1, 3), "reports": (0, 5, 1, 0, 0)}


def play(engine: Engine) -> sl.Locks:
    """Fill a database that has the locks installed and no other users."""
    locks = sl.Locks(engine, owner="web-1.example.org:4242")
    locks.maintain()
    _semaphores(engine, locks)
    _queues(engine)
    locks.mutex.acquire("nightly-import", owner="worker-3")
    locks.mutex.acquire("search-index", queue="shop", owner="worker-1")
    for name, every in (("daily-report", 86400), ("exchange-rates", 3600), ("heartbeat", 60)):
        assert locks.once_per(name, every=every)
    return locks


def _semaphores(engine: Engine, locks: sl.Locks) -> None:
    request = build_context(engine.dialect, {}).tables.permit_request
    history = build_context(engine.dialect, {}).tables.semaphore_history
    for name, (capacity, holders) in SEMAPHORES.items():
        locks.run(sl.semaphore.create(name, capacity, by="deploy"))
        for who, count, since, ttl in holders:
            external_id = f"{name}/{who}"
            assert locks.acquire({name: count}, external_id=external_id, owner=who, ttl=ttl)
            began = {column: SecondsAgo(since) for column in ("created_at", "renewed_at", "updated_at")}
            with engine.begin() as connection:
                connection.execute(update(request).where(request.c.external_id == external_id).values(began))
    with engine.begin() as connection:
        connection.execute(update(history).values(changed_at=SecondsAgo(9 * 86400)))
    locks.run(sl.semaphore.resize("api-calls", 50, by="alice@example.org"))
    locks.run(sl.semaphore.resize("api-calls", 40, by="bob@example.org"))


def _queues(engine: Engine) -> None:
    job: Any = build_context(engine.dialect, {}).tables.job
    queue, worker = sl.Queue(), build_context(engine.dialect, {}).tables.worker
    with engine.begin() as connection:
        # it doesn't run: all its jobs would stall while a slow machine looks
        lively = {"host": "worker-1", "heartbeat_at": PlusSeconds(Now(), 3600.0), "started_at": SecondsAgo(9000)}
        connection.execute(insert(worker).values(lively))
        for name, (waiting, scheduled, running, stalled, dead) in QUEUES.items():
            for number in (dead, running):
                if not number:
                    continue
                connection.execute(queue.put(*range(number), queue=name))
                jobs = list(connection.execute(queue.capture(number, queue=name, host="worker-1")))
                if number == dead:
                    connection.execute(queue.fail(jobs, error="550 no such user", retry=False))
                    continue
                # nobody works on them: they would stall, all of them, while a slow machine looks
                ids = [each.internal_id for each in jobs]
                lively = update(job).where(job.c.internal_id.in_(ids)).values(started_at=PlusSeconds(Now(), 3600.0))
                connection.execute(lively)
                if stalled:
                    # captured without a worker, 15 minutes ago
                    old = job.c.internal_id.in_([each.internal_id for each in jobs[:stalled]])
                    silent = {"started_at": SecondsAgo(900), "processing_host": "worker-2"}
                    connection.execute(update(job).where(old).values(silent))
            if waiting:
                connection.execute(queue.put(*range(waiting), queue=name))
            if scheduled:
                connection.execute(queue.put(*range(scheduled), queue=name))
                newest = select(job.c.internal_id).order_by(job.c.internal_id.desc()).limit(scheduled)
                ids = list(connection.execute(newest).scalars())
                connection.execute(
                    update(job).where(job.c.internal_id.in_(ids)).values(run_at=PlusSeconds(Now(), 3600.0))
                )
        connection.execute(
            update(job).where(job.c.started_at.is_(None), job.c.run_at < Now()).values(run_at=SecondsAgo(140))
        )
    _completed(engine, job)


def _completed(engine: Engine, job: Any) -> None:
    """An hour's work, more of it in the middle than at its ends, and a minute in which there was none."""
    with engine.begin() as connection:
        for minute in range(60):
            number = 0 if minute == 41 else 6 + (minute * 7) % 11 + (14 if 18 < minute < 34 else 0)
            for index in range(number):
                name = ("mail", "mail", "invoices", "reports")[index % 4]
                connection.execute(
                    insert(job).values(
                        external_id=uuid.uuid4(),
                        queue_id=name,
                        payload={},
                        started_at=SecondsAgo(minute * 60 + 31.0),
                        completed_at=SecondsAgo(minute * 60 + 30.0),
                    )
                )


@contextlib.contextmanager
def contended(engine: Engine, locks: sl.Locks) -> Iterator[None]:
    """A key with one holder and two waiters, where the server lists keys."""
    over, holds = threading.Event(), threading.Event()

    def hold() -> None:
        with locks.exclusive("invoice:42"), locks.shared("prices"):
            holds.set()
            over.wait(PATIENCE)

    def wait(shared: bool) -> None:
        other = sl.Locks(engine)
        with (other.shared if shared else other.exclusive)("invoice:42", timeout=PATIENCE):
            pass

    # MariaDB: until its row is committed, a sharer waits for it as one that wants it alone
    locks.run(sl.lock.create("invoice:42", "prices"))
    calls = [later(hold)]
    try:
        assert holds.wait(PATIENCE)
        calls += [later(wait, False), later(wait, True)]
        until(lambda: sum(len(each.waiting) for each in locks.run(sl.lock.holders())) >= 2, pause=0.13)
        yield
    finally:
        over.set()
        for call in calls:
            call.result(PATIENCE)

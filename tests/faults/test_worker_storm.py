"""Workers under one fault after another: each job is done once by a worker that lives, and none dies unbegun."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    func,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from tests import servers as real
from tests.conftest import PLAIN, install
from tests.fixtures.forks import FORKS
from tests.fixtures.parties import PATIENCE, until
from tests.fixtures.queues import put

JOBS, WORKERS = 200, 3
HEARTBEAT, STALLED = 0.5, 3.0
LOCK_TABLE = {
    "postgresql15": ["LOCK TABLE lock.job IN ACCESS EXCLUSIVE MODE"],
    "mysql": ["LOCK TABLES lock_job WRITE"],
    "mariadb": ["LOCK TABLES lock_job WRITE"],
    "sqlite": ["BEGIN IMMEDIATE"],
}

#: a run of a handler: ``begun`` and ``ended`` are written in transactions of their own
runs = Table(
    "runs",
    MetaData(),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("job", Integer, nullable=False, index=True),
    Column("process", Integer, nullable=False),
    Column("what", String(10), nullable=False),
    mysql_engine="InnoDB",
)


def decoded(payload: Any) -> Any:
    """Decode a payload; one of them can't be."""
    found = json.loads(payload)
    if found == "bad":
        raise ValueError("impossible to decode")
    return found


def work(url: str, worker_url: str, started: Event) -> None:
    """Run a worker whose handlers write down what they do, and sometimes hold all connections of its pool.

    :param worker_url: with an async driver for an ``AsyncWorker``.
    """
    pool: dict[str, Any] = {"pool_size": 2, "max_overflow": 0, "pool_timeout": 600, "json_deserializer": decoded}
    log = create_engine(url)
    process = os.getpid()
    settings: dict[str, Any] = {
        "concurrency": 3,
        "heartbeat": HEARTBEAT,
        "stalled_after": STALLED,
        "poll": 0.5,
        "grace": 2 * STALLED,
        "host": str(process),
    }

    def note(job: int, what: str) -> None:
        values = {"id": time.time_ns(), "job": job, "process": process, "what": what}
        for _ in range(600):  # the server may be down
            try:
                with log.begin() as connection:
                    connection.execute(runs.insert(), values)
                return
            except IntegrityError:
                return  # its COMMIT was done, and the reply was lost
            except Exception:
                time.sleep(0.1)

    def handle(job: Any) -> None:
        note(job.payload, "begun")
        if job.payload % 97 == 0:
            with engine.connect():  # its pool is drained
                time.sleep(1.5 * STALLED)
        elif job.payload % 10 == 0:
            time.sleep(0.05)
        note(job.payload, "ended")

    async def handle_in_task(job: Any) -> None:
        await asyncio.to_thread(note, job.payload, "begun")
        if job.payload % 97 == 0:
            async with async_engine.connect():
                await asyncio.sleep(1.5 * STALLED)
        elif job.payload % 10 == 0:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(note, job.payload, "ended")

    async def work_in_tasks() -> None:
        # which leaves a handler of the process's own alone
        task = asyncio.create_task(sl.AsyncWorker(sl.Queue(), handle_in_task, bind=async_engine, **settings).run())
        await asyncio.sleep(0)
        started.set()
        await task

    if make_url(worker_url).get_dialect().is_async:
        async_engine = create_async_engine(worker_url, **pool)
        asyncio.run(work_in_tasks())
    else:
        engine = create_engine(worker_url, **pool)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until the worker has a handler of its own
        started.set()
        sl.Worker(sl.Queue(), handle, bind=engine, **settings).run()


class Storm:
    """The processes, and which of them were killed or suspended, so that others have run their jobs again."""

    def __init__(self, url: str, worker_url: str) -> None:
        self.urls = url, worker_url
        self.alive: list[Any] = []
        self.silenced: set[int] = set()

    def start(self) -> None:
        started = FORKS.Event()
        process = FORKS.Process(target=work, args=(*self.urls, started), daemon=True)
        process.start()
        assert started.wait(PATIENCE)
        self.alive.append(process)

    def end(self, number: signal.Signals) -> None:
        process = self.alive.pop(random.randrange(len(self.alive)))
        if number == signal.SIGKILL:
            self.silenced.add(process.pid)
        os.kill(process.pid, number)
        process.join(5 * STALLED)
        assert process.exitcode == (-number if number == signal.SIGKILL else 0)
        self.start()

    def suspend(self) -> None:
        pid = random.choice(self.alive).pid
        self.silenced.add(pid)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2 * STALLED)
        os.kill(pid, signal.SIGCONT)


def left(engine: Engine) -> int:
    with engine.connect() as connection:
        job = build_context(connection.dialect, {}).tables.job
        return int(
            connection.scalar(select(func.count()).where(job.c.completed_at.is_(None), job.c.failed_at.is_(None)))
        )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "driver"),
    [("postgresql15", "asyncpg"), ("mysql", "pymysql"), ("mariadb", "mariadb+aiomysql"), ("sqlite", "pysqlite")],
)
def test_a_storm_of_faults(name: str, driver: str, tmp_path: Path) -> None:
    """Of ``AsyncWorker`` where the driver is async; on SQLite, without the server's crash."""
    with ExitStack() as stack:
        if name == "sqlite":
            server, url = None, f"sqlite:///{tmp_path}/storm.db"
            worker_url = url
        else:
            server = real.start(name)
            assert isinstance(server, real.SQLServer)
            stack.callback(server.close)
            server.create_database("storm")
            url, worker_url = (server.url(each, "storm") for each in (PLAIN[name], driver))
        install(url)
        # the workers may keep SQLite's write lock busy for long
        options = {"connect_args": {"timeout": 60}} if name == "sqlite" else {}
        engine = create_engine(url, poolclass=NullPool, **options)
        runs.create(engine)
        (bad,) = put(engine, "bad")
        storm = Storm(url, worker_url)
        stack.callback(lambda: [process.kill() for process in storm.alive])
        for _ in range(WORKERS):
            storm.start()
        portions = iter(range(4))

        def busy() -> None:
            """Put a quarter of the jobs, and wait until the workers are in the middle of them."""
            portion = next(portions)
            put(engine, *range(portion * JOBS // 4, (portion + 1) * JOBS // 4), max_attempts=20)
            until(lambda: left(engine) < JOBS // 5)

        busy()
        for number in (signal.SIGKILL, signal.SIGTERM):
            storm.end(number)
        busy()
        storm.suspend()
        busy()
        with engine.connect() as connection:
            for statement in LOCK_TABLE[name]:
                connection.execute(text(statement))
            time.sleep(2 * STALLED)
            connection.commit()
            if name in ("mysql", "mariadb"):
                connection.execute(text("UNLOCK TABLES"))
        busy()
        if server is not None:
            server.kill()
            time.sleep(2 * STALLED)
            server.restart()
        storm.end(signal.SIGKILL)
        until(lambda: not left(engine))
        while storm.alive:
            process = storm.alive.pop()
            os.kill(process.pid, signal.SIGTERM)
            process.join(5 * STALLED)
            assert process.exitcode == 0
        check(engine, storm.silenced, bad)


def check(engine: Engine, silenced: set[int], bad: Any) -> None:
    with engine.connect() as connection:
        job = build_context(connection.dialect, {}).tables.job
        rows = connection.execute(select(job)).all()
        found = connection.execute(select(runs).order_by(runs.c.id)).all()
    assert len(rows) == JOBS + 1
    begun = Counter(each.job for each in found if each.what == "begun")
    assert {row.external_id for row in rows if row.failed_at is not None} == {bad}
    good = [row for row in rows if row.external_id != bad]
    assert all(row.completed_at is not None for row in good)
    assert set(begun) == set(range(JOBS))
    # a job runs once for each attempt at most
    assert [row.payload for row in good if begun[row.payload] > row.attempts] == []
    # by workers that lived: once
    by_living = Counter(each.job for each in found if each.what == "begun" and each.process not in silenced)
    again = {each for each, times in by_living.items() if times > 1}
    assert not [(each.id, each.job, each.process, each.what) for each in found if each.job in again], silenced
    # what the others had begun, or not yet reported
    assert begun.total() - len(begun) <= 12 * len(silenced)

"""Worker processes of the tests, which work until they are told to stop.

What a handler does is written into the table ``seen`` of the same database, in a transaction of its own.
"""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine, event

import sqlalchemy_locks as sl

seen = Table(
    "seen",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("job", Integer, nullable=False),
    Column("worker", String(20), nullable=False),
    mysql_engine="InnoDB",
)


def engine_to(url: str) -> Engine:
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        # eight processes that write all the time: the default of 5 s can pass without one's turn
        @event.listens_for(engine, "connect")
        def patient(raw: object, _: object) -> None:
            raw.execute("PRAGMA busy_timeout = 60000")  # type: ignore[attr-defined]
            raw.execute("PRAGMA journal_mode = WAL")  # type: ignore[attr-defined]
            raw.execute("PRAGMA synchronous = NORMAL")  # type: ignore[attr-defined]

    return engine


def work(url: str, told: Connection, hold: bool = False, stalled_after: float = 30) -> None:
    engine = engine_to(url)
    name = str(os.getpid())
    once = threading.Event()
    with engine.connect():
        told.send("ready")

    def handler(job: object) -> None:
        if not once.is_set():
            once.set()
            told.send("working")
        with engine.begin() as connection:
            connection.execute(seen.insert(), {"job": job.payload, "worker": name})  # type: ignore[attr-defined]

    sl.Worker(
        sl.Queue(),
        handler,
        bind=engine,
        concurrency=2,
        batch=10,
        heartbeat=1,
        stalled_after=stalled_after,
        poll=0.1,
        hold=hold,
        host=name,
    ).run()

"""Features of a server's session: refused in transaction mode, and available in session mode."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, text

import sqlalchemy_locks as sl
from tests.fixtures.parties import PATIENCE, async_connected, connected, later, until, unused

SESSION_MODE: dict[str, Any] = {"pool_mode": "session", "default_pool_size": 10}
MINE: dict[str, Any] = {"execution_options": {"locks_session_pooling": True}}


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.usefixtures("nothing_is_left")
def test_session_lock_is_refused(driver: str, through: Any) -> None:
    url, connect_args = through(driver)
    with connected(url, connect_args=connect_args) as engine, engine.connect() as connection:
        for operation in (sl.lock.session_exclusive("nightly"), sl.lock.session_unlock("nightly")):
            with pytest.raises(sl.Unsupported, match=r"PgBouncer is in between.*use lock\.exclusive"):
                connection.execute(operation)
        connection.rollback()
        autocommit = connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(sl.Unsupported, match="PgBouncer"):
            autocommit.execute(sl.lock.session_exclusive("nightly"))


@pytest.mark.usefixtures("nothing_is_left")
def test_session_lock_is_refused_with_asyncpg(through: Any) -> None:
    url, connect_args = through("asyncpg")

    async def main() -> None:
        async with async_connected(url, connect_args=connect_args) as engine, engine.connect() as connection:
            with pytest.raises(sl.Unsupported, match="PgBouncer"):
                await connection.execute(sl.lock.session_exclusive("nightly"))

    asyncio.run(main())


def test_session_lock_in_session_mode(through: Any) -> None:
    """A pooler doesn't report its mode, so they are refused in session mode as well, unless the app sets the option."""
    url, connect_args = through("psycopg", **SESSION_MODE)
    key, options = unused(), {"connect_args": connect_args, "poolclass": NullPool}
    with connected(url, **options) as untold, untold.connect() as connection:
        with pytest.raises(sl.Unsupported, match="locks_session_pooling=True"):
            connection.execute(sl.lock.session_exclusive(key))
    with connected(url, **options, **MINE) as engine, engine.connect() as connection, engine.connect() as other:
        connection.execute(sl.lock.session_exclusive(key))
        connection.commit()
        assert other.scalar(sl.lock.try_exclusive(key)) is False
        assert connection.scalar(sl.lock.session_unlock(key)) is True
        assert other.scalar(sl.lock.try_exclusive(key)) is True


def listening(engine: Any) -> int:
    """How many sessions of the server listen in this database, including those that serve other clients now."""
    statement = text(
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN %' AND datname = current_database()"
    )
    with engine.connect() as connection:
        return int(connection.scalar(statement))


@pytest.mark.usefixtures("nothing_is_left")
def test_worker_polls(through: Any, caplog: pytest.LogCaptureFixture) -> None:
    url, connect_args = through("psycopg")
    jobs, queue = sl.Queue(), unused("queue")
    done: list[Any] = []
    all_done = threading.Event()

    def handler(job: Any) -> None:
        done.append(job.payload)
        if len(done) >= 5:
            all_done.set()

    caplog.set_level(logging.INFO, "sqlalchemy_locks.worker")
    with connected(url, connect_args=connect_args) as engine:
        locks = sl.Locks(engine)
        for number in range(5):
            locks.run(jobs.put(number, queue=queue))
        worker = sl.Worker(jobs, handler, bind=engine, name=queue, concurrency=1, poll=0.05)
        running = later(worker.run)
        try:
            assert all_done.wait(PATIENCE)
            until(lambda: "Polling instead of listening: a pooler" in caplog.text, unless=running)
        finally:
            worker.stop()
            running.result(PATIENCE)
        assert sorted(done) == list(range(5))
    assert caplog.text.count("instead of listening") == 1


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.usefixtures("nothing_is_left")
def test_async_worker_polls(through: Any, driver: str, caplog: pytest.LogCaptureFixture) -> None:
    url, connect_args = through(driver)
    jobs, queue = sl.Queue(), unused("queue")
    done: list[Any] = []
    caplog.set_level(logging.INFO, "sqlalchemy_locks.worker")

    async def main() -> None:
        async with async_connected(url, connect_args=connect_args) as engine:
            locks = sl.AsyncLocks(engine)

            async def handler(job: Any) -> None:
                done.append(job.payload)
                if len(done) == 5:
                    worker.stop()

            for number in range(5):
                await locks.run(jobs.put(number, queue=queue))
            worker = sl.AsyncWorker(jobs, handler, bind=engine, name=queue, concurrency=2, poll=0.05)
            await asyncio.wait_for(worker.run(), PATIENCE)

    asyncio.run(main())
    assert sorted(done) == list(range(5))
    assert "LISTEN" not in caplog.text


def test_worker_listens_in_session_mode(through: Any) -> None:
    url, connect_args = through("psycopg", **SESSION_MODE)
    jobs, queue, done = sl.Queue(), unused("queue"), threading.Event()
    with connected(url, connect_args=connect_args, **MINE) as engine:
        worker = sl.Worker(jobs, lambda job: done.set(), bind=engine, name=queue, concurrency=1, poll=3600)
        running = later(worker.run)
        try:
            until(lambda: listening(engine), unless=running)
            with engine.begin() as connection:
                connection.execute(jobs.put({}, queue=queue))
            assert done.wait(PATIENCE)  # an hour before its next poll
        finally:
            worker.stop()
            running.result(PATIENCE)


def test_no_limit_is_set_on_a_session_of_others(servers: Any) -> None:
    engine = create_engine(servers.pooled("psycopg2"), isolation_level="AUTOCOMMIT")
    operation = sl.Mutex().set_retries("none", 3).execution_options(locks_wait=7)
    with engine.connect() as connection, pytest.raises(sl.Unsupported, match="locks_wait in autocommit"):
        connection.execute(operation)
    engine.dispose()

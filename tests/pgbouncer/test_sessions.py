"""Features of a server's session: refused in transaction mode, and available in session mode."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from sqlalchemy import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.health import examine
from tests.fixtures.parties import PATIENCE, connected, later, until, unused

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


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_check_names_the_pooler(driver: str, through: Any) -> None:
    url, connect_args = through(driver)
    with connected(url, connect_args=connect_args) as engine, engine.connect() as connection:
        (finding,) = (finding for finding in examine(connection) if finding.subject == "pooler")
    assert (finding.level, "PgBouncer" in finding.says) == ("warning", True)

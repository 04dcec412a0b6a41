"""A database that is unavailable, or refuses some statements: everything else is still reported."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import OperationalError

import sqlalchemy_locks as sl
from sqlalchemy_locks.workers.state import WorkerState
from tests import servers as real
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.parties import PATIENCE, connected, seen, until
from tests.fixtures.queues import put, silenced
from tests.fixtures.worker_states import beat, counts, finish_all, queue, running, state_of

CAPTURE, COMPLETE, FAIL = "processing_host=", "completed_at=", "failed_at=CASE"


@contextmanager
def refusing(engine: Engine, *parts: str) -> Iterator[None]:
    """Make the database refuse statements that contain one of these texts, as after a statement timeout."""

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if any(part in statement.replace("`", "") for part in parts):
            raise OperationalError(statement, {}, Exception("interrupted"))

    event.listen(engine, "before_cursor_execute", look)
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", look)


def age_heartbeats(engine: Engine, state: WorkerState) -> None:
    """Set the last heartbeat of the worker, and the captures of its jobs, to years ago; then it sends one."""
    with engine.begin() as connection:
        silenced(connection)
    beat(state)


def stalled(engine: Engine) -> int:
    with engine.begin() as connection:
        number: int = connection.scalar(queue.requeue_stalled(1800))
        return number


def three_taken(engine: Engine) -> tuple[WorkerState, list[Any]]:
    put(engine, *range(10), max_attempts=1)
    state = state_of(engine, batch=3, concurrency=4, heartbeat=600)
    state.cycle()
    jobs = [state.take(), state.take(), state.take()]
    assert None not in jobs
    return state, jobs


def test_failing_captures_keep_no_report_from_being_sent(engine: Engine) -> None:
    state, jobs = three_taken(engine)
    state.done(jobs[0], None)
    age_heartbeats(engine, state)
    with refusing(engine, CAPTURE):
        state.cycle()
    assert state._error_pause > 0  # the capture was refused
    assert counts(engine) == {"all": 10, "completed": 1, "dead": 0, "running": 2, "waiting": 7}
    assert stalled(engine) == 0
    state.done(jobs[1], RuntimeError("wrong"))
    state.done(jobs[2], None)
    with refusing(engine, CAPTURE):
        state.cycle()
    assert counts(engine) == {"all": 10, "completed": 2, "dead": 1, "running": 0, "waiting": 7}
    while counts(engine)["waiting"] or state.waiting:
        state.cycle()
        beat(state)
        finish_all(state)
    state.close()
    assert counts(engine) == {"all": 10, "completed": 9, "dead": 1, "running": 0, "waiting": 0}


def test_the_error_pause_is_limited(engine: Engine) -> None:
    put(engine, 1)
    state = state_of(engine)
    with refusing(engine, CAPTURE):
        for _ in range(8):
            state.cycle()
    assert state.pause() == 5


def test_close_takes_every_step_that_succeeds(engine: Engine) -> None:
    state, jobs = three_taken(engine)
    state.database.sleep = lambda _: None
    state.done(jobs[0], None)
    state.done(jobs[1], RuntimeError("wrong"))
    with refusing(engine, COMPLETE):
        state.close()
    # the completed job was not reported, the failed one was, and the running one was released
    assert counts(engine) == {"all": 10, "completed": 0, "dead": 1, "running": 1, "waiting": 8}


@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_a_server_restart_loses_no_job(name: str) -> None:
    server = real.start(name)
    assert isinstance(server, real.SQLServer)
    try:
        server.create_database("restarted")
        url = server.url(PLAIN[name], "restarted")
        install(url)
        done: list[int] = []
        halfway = threading.Event()

        def handler(job: Any) -> None:
            done.append(job.payload)
            if len(done) == 50:
                halfway.set()
            time.sleep(0.002)

        with connected(url) as engine, connected(url) as bind:
            put(engine, *range(150))
            with running(sl.Worker(queue, handler, bind=bind, heartbeat=0.5, stalled_after=2, poll=0.1, concurrency=2)):
                assert halfway.wait(PATIENCE)
                server.kill()
                server.restart()
                engine.dispose()
                until(lambda: counts(engine)["completed"] == 150)
            assert set(done) == set(range(150))
            assert counts(engine)["running"] == 0
    finally:
        server.close()


def test_a_worker_waits_while_its_database_is_read_only(servers: Servers) -> None:
    """As a standby is: its connections, made then, are replaced."""
    url = servers.fresh("postgresql15", "psycopg")
    install(url)
    with connected(url, isolation_level="AUTOCOMMIT") as admin, connected(url, pool_size=2, max_overflow=0) as engine:
        done: list[Any] = []

        def set_read_only(value: str) -> None:
            with admin.connect() as connection:
                database = admin.url.database
                connection.execute(text(f'ALTER DATABASE "{database}" SET default_transaction_read_only = {value}'))

        put(engine, 1)
        engine.dispose()
        set_read_only("on")
        with pytest.raises(sl.NotWritable):
            sl.Locks(engine).run(queue.put(2))
        worker = sl.Worker(queue, done.append, bind=engine, concurrency=1, poll=0.1, heartbeat=0.2)
        with seen(engine) as statements, running(worker):
            until(lambda: len([each for each in statements if "lock." in each]) > 3)
            set_read_only("off")
            until(lambda: done)

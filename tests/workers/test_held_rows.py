"""A finished job whose row somebody holds: the worker goes on, and tells of it later."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, select

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.workers.state import WorkerState
from tests.fixtures.queues import MakeEngine, silenced
from tests.queue.test_exchange import exchanged, shift_of, work
from tests.workers.test_workers import counts, put

#: who waits for a row nevertheless is told so, and hangs nobody; there is no other lock that it could wait for
BOUND: dict[str, Any] = {"connect_args": {"options": "-c lock_timeout=10s"}}
#: where rows can be held one by one
ENGINES = ["postgresql15", "postgresql18", "yugabytedb", "mysql", "mariadb"]
queue = sl.Queue()


def worker_engine(engine_to: MakeEngine, name: str) -> Engine:
    return engine_to(name, **({} if name in ("mysql", "mariadb") else BOUND))


@contextmanager
def holding(engine: Engine, *jobs: Any) -> Iterator[Connection]:
    """Somebody's open transaction, with these jobs' rows."""
    with engine.connect() as connection:
        job = build_context(connection.dialect, {}).tables.job
        for each in jobs:
            connection.execute(select(job.c.claim).where(job.c.internal_id == each.internal_id).with_for_update()).one()
        yield connection
        connection.rollback()


def later(shift: WorkerState) -> None:
    """A second after that."""
    shift._later_at = time.monotonic()
    shift.turn()


@pytest.mark.parametrize("name", ENGINES)
def test_a_finished_job_that_somebody_holds_stops_nothing(
    engine_to: MakeEngine, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = worker_engine(engine_to, name)
    put(engine, *range(6))
    shift = shift_of(engine, batch=2, concurrency=2)
    shift.turn()
    with holding(engine_to(name), shift.waiting[0]):
        assert work(shift) == [0, 1]
        shift.turn()
        assert counts(engine)["completed"] == 1
        assert work(shift) == [2, 3]  # which were captured nevertheless
        later(shift)
        assert counts(engine)["completed"] == 3
        assert shift.pause() <= 1
        assert [job.payload for job, _ in shift.later] == [0]
        assert "somebody holds their rows" in caplog.text
        assert "taken from it" not in caplog.text
    later(shift)
    assert (shift.later, counts(engine)["completed"]) == ([], 4)
    assert work(shift) == [4, 5]
    shift.close()
    assert counts(engine) == {"all": 6, "completed": 6, "dead": 0, "running": 0, "waiting": 0}


@pytest.mark.parametrize("name", ENGINES)
def test_so_does_one_that_has_failed(engine_to: MakeEngine, name: str) -> None:
    engine = worker_engine(engine_to, name)
    put(engine, *range(4), max_attempts=1)
    shift = shift_of(engine, batch=2, concurrency=2)
    shift.turn()
    with holding(engine_to(name), shift.waiting[0]):
        for _ in range(2):
            shift.done(shift.take(), ValueError("no"))
        shift.turn()
        later(shift)
        assert counts(engine)["dead"] == 1
        assert work(shift) == [2, 3]
    later(shift)
    assert (shift.later, counts(engine)["dead"]) == ([], 2)
    shift.close()
    assert counts(engine) == {"all": 4, "completed": 2, "dead": 2, "running": 0, "waiting": 0}


@pytest.mark.parametrize("name", ENGINES)
def test_what_was_ended_by_who_held_it_is_not_told_of_again(
    engine_to: MakeEngine, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = worker_engine(engine_to, name)
    put(engine, 0, 1)
    shift = shift_of(engine, batch=2, concurrency=2)
    shift.turn()
    mine = list(shift.waiting)
    with holding(engine_to(name), *mine) as connection:
        work(shift)
        shift.turn()
        assert len(shift.later) == 2
        connection.execute(queue.complete(mine[0]))
        connection.commit()
    with caplog.at_level(logging.WARNING, "sqlalchemy_locks.worker"):
        caplog.clear()
        later(shift)
    assert shift.later == []
    assert "1 jobs were ended already" in caplog.text
    assert counts(engine)["completed"] == 2


@pytest.mark.parametrize("name", ENGINES)
def test_what_was_taken_from_it_is_told_apart(engine_to: MakeEngine, name: str) -> None:
    """A job that somebody holds is another's already: the one who had it has no part in it any more."""
    engine = worker_engine(engine_to, name)
    put(engine, 0, 1)
    shift = shift_of(engine, batch=2, concurrency=2)
    shift.turn()
    with engine.begin() as connection:
        silenced(connection)
        assert connection.scalar(queue.requeue_stalled(3600)) == 2
    (other, _) = exchanged(engine, [], 2).jobs
    with holding(engine_to(name), other):
        work(shift)
        shift.turn()
        assert shift.later == []
    assert counts(engine)["running"] == 2


@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_a_heartbeat_is_of_those_too(engine_to: MakeEngine, name: str) -> None:
    engine = worker_engine(engine_to, name)
    put(engine, 0)
    shift = shift_of(engine, batch=1)
    shift.turn()
    with holding(engine_to(name), shift.waiting[0]):
        work(shift)
        shift.turn()
        assert len(shift._all()) == 1


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
def test_what_an_unanswered_capture_takes_late_is_found(engine_to: MakeEngine, name: str) -> None:
    """The server goes on with a statement that nobody waits for any more, and commits after it was asked."""
    engine = worker_engine(engine_to, name)
    shift = shift_of(engine, batch=2)
    shift._unsure = True
    shift.turn()
    assert not shift.waiting
    put(engine, 0, max_attempts=1)
    assert len(exchanged(engine, [], 1, host=shift.host).jobs) == 1
    shift.turn()
    assert not shift.waiting
    shift._look_again = time.monotonic()
    shift.turn()
    assert [job.payload for job in shift.waiting] == [0]
    shift.close()
    assert counts(engine)["waiting"] == 1


def test_and_given_back_where_it_is_stopped(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15")
    shift = shift_of(engine, batch=2)
    shift._unsure = True
    shift.turn()
    put(engine, 0, max_attempts=1)
    assert len(exchanged(engine, [], 1, host=shift.host).jobs) == 1
    shift.close()
    assert counts(engine) == {"all": 1, "completed": 0, "dead": 0, "running": 0, "waiting": 1}

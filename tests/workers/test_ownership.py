"""Which jobs a worker owns: heartbeats, stalled jobs, jobs that others have captured."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from sqlalchemy import Engine

import sqlalchemy_locks as sl
from tests.fixtures.queues import put, silenced
from tests.fixtures.worker_states import counts, queue, state_of, sweep


def test_stalled_jobs_of_other_queues_are_left(lite: Engine) -> None:
    put(lite, 1, queue="other")
    put(lite, 2)
    with lite.begin() as connection:
        assert len(connection.execute(queue.capture(5, queue="other")).all()) == 1
        assert len(connection.execute(queue.capture(5)).all()) == 1
        silenced(connection)
    state = state_of(lite, heartbeat=1, stalled_after=3600)
    sweep(state)
    assert (counts(lite)["running"], counts(lite)["waiting"]) == (1, 1)


def test_a_sweep_requeues_every_batch(lite: Engine) -> None:
    put(lite, *range(1005))
    with lite.begin() as connection:
        connection.execute(queue.capture(1005)).all()
        silenced(connection)
    state = state_of(lite, heartbeat=1, stalled_after=3600)
    sweep(state)
    assert counts(lite)["running"] == 0


@pytest.mark.parametrize("kind", ["completes", "releases"])
def test_jobs_lost_to_others_are_logged(lite: Engine, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """A handler that completes its job, in the transaction of its work, has lost nothing."""
    put(lite, 1)
    runs: list[Any] = []

    def handler(job: Any) -> None:
        runs.append(job.payload)
        with lite.begin() as connection:
            connection.execute(queue.release(job) if kind == "releases" and len(runs) == 1 else queue.complete(job))

    with caplog.at_level(logging.WARNING, "sqlalchemy_locks.worker"):
        sl.Worker(queue, handler, bind=lite, poll=0.05).run(until_empty=True)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == (kind == "releases"), logged
    assert all("before this worker finished them: 1" in each for each in logged)

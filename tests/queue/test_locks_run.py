"""``locks.run`` returns captured rows as a list, entities detached and readable."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, inspect, select
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.fixtures.parties import ENGINES, connected, installed, unused
from tests.fixtures.task_models import Animal, Base
from tests.fixtures.worker_states import queue


@pytest.mark.parametrize("name", ENGINES)
def test_captures_through_locks(servers: Any, name: str) -> None:
    queue, topic = sl.Queue(), unused("queue")
    with connected(installed(servers, name), poolclass=NullPool) as engine:
        Base.metadata.create_all(engine)
        locks = sl.Locks(engine)
        for payload in (1, 2, 3):
            locks.run(queue.put(payload, queue=topic))
        jobs = locks.run(queue.capture(2, queue=topic))
        assert [job.payload for job in jobs] == [1, 2]
        assert locks.run(queue.complete(jobs)) == 2
        with Session(engine) as session, session.begin():
            session.add_all([Animal(caged=False), Animal(caged=False)])
        taken = locks.run(
            sl.capture(Animal, where=Animal.caged.is_(False), values={"caged": True}, order_by=Animal.id, limit=5)
        )
        assert len(taken) == 2
        assert all(inspect(each).detached and each.caged is True for each in taken)
        with Session(engine) as session:
            assert session.scalars(select(Animal.caged).where(Animal.id.in_([each.id for each in taken]))).all() == [
                True,
                True,
            ]


def take(engine: Engine, limit: int = 1, name: str = "default") -> list[Any]:
    with engine.begin() as connection:
        return list(connection.execute(queue.capture(limit, queue=name, host="here")))


def test_locks_run_each_operation(engine: Engine) -> None:
    locks = sl.Locks(engine)
    mine = uuid.uuid4()
    assert locks.run(queue.put(1, external_id=mine)) == mine
    (job,) = take(engine)
    assert locks.run(queue.complete(job)) == 1
    assert locks.run(queue.delete_finished(0)) == 1
    assert locks.run(queue.requeue_stalled(0)) == 0

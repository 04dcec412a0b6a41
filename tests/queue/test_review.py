"""What a hostile reader found in the queue: each of these was wrong once."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, Engine, text

import sqlalchemy_locks as sl

from .conftest import MakeEngine
from .test_queue import job_table, put, queue, scalar, take


def soon(connection: Connection) -> None:
    """Let a wait for somebody's lock end as an error."""
    innodb = connection.dialect.name in ("mysql", "mariadb")
    connection.execute(text("SET innodb_lock_wait_timeout = 1" if innodb else "SET LOCAL lock_timeout = '1s'"))


def test_a_heartbeat_waits_for_no_handler(leveled: Engine) -> None:
    put(leveled, *range(3))
    mine = take(leveled, 3)
    with leveled.connect() as handler, leveled.connect() as worker:
        assert handler.execute(queue.complete(mine[1])).scalar() == 1  # in the transaction of its work
        soon(worker)
        assert worker.execute(queue.heartbeat(mine)).scalar() == 3
        worker.commit()
        handler.commit()
    assert scalar(leveled, queue.heartbeat(mine)) == 2
    assert scalar(leveled, queue.heartbeat([])) == 0
    assert scalar(leveled, queue.complete(mine)) == 2
    assert scalar(leveled, queue.heartbeat(mine)) == 0


def test_a_heartbeat_is_heard(engine: Engine) -> None:
    put(engine, 1, 2)
    mine = take(engine, 2)
    with engine.begin() as connection:
        table = job_table(connection)
        connection.execute(table.update().values(heartbeat_at=mine[0].created_at.replace(year=2020)))
    assert scalar(engine, queue.heartbeat(mine[0])) == 1
    assert scalar(engine, queue.requeue_stalled(300)) == 1
    assert scalar(engine, queue.heartbeat(mine)) == 1


def test_a_sweep_of_one_queue(engine: Engine) -> None:
    put(engine, 1, 2, queue="slow")
    put(engine, 3, queue="fast")
    take(engine, 2, "slow")
    take(engine, 1, "fast")
    assert scalar(engine, queue.requeue_stalled(0, queue="fast")) == 1
    assert scalar(engine, queue.requeue_stalled(0, queue="fast")) == 0
    assert scalar(engine, queue.requeue_stalled(0, queue="slow")) == 2
    with pytest.raises(ValueError, match="queue"):
        queue.requeue_stalled(0, queue="")

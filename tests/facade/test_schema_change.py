"""A schema that changes while the app runs: statements that a driver has prepared before are prepared again."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

import sqlalchemy_locks as sl
from tests.conftest import Servers, install
from tests.fixtures.parties import connected


def test_psycopg_connections_prepare_their_statements_again(servers: Servers) -> None:
    """In autocommit, psycopg would keep what it has prepared, and fail at each further execution."""
    url = servers.fresh("postgresql15", "psycopg")
    install(url)
    with connected(url, isolation_level="AUTOCOMMIT") as admin, connected(url, pool_size=2) as engine:
        locks, queue = sl.Locks(engine), sl.Queue(bind=engine)

        def work() -> None:
            assert locks.mutex.acquire_token("task")
            assert locks.mutex.release("task")
            locks.run(queue.put(1))
            done: list[Any] = []
            sl.Worker(queue, done.append, concurrency=1, batch=1).run(until_empty=True)
            assert len(done) == 1

        for _ in range(8):  # the sixth execution uses a prepared statement
            work()
        for kind in ("integer", "bigint"):
            with admin.connect() as connection:
                connection.execute(text(f"ALTER TABLE lock.task_state ALTER COLUMN fence TYPE {kind}"))
                connection.execute(text(f"ALTER TABLE lock.job ALTER COLUMN priority TYPE {kind}"))
            for _ in range(8):
                work()

"""Every capture uses an index, with many waiting jobs and many more completed ones."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.crowd import Filler
from tests.fixtures.parties import locked_rows
from tests.fixtures.queues import KINDS

#: set to 100,000 and 1,000,000 for a full test
WAITING = int(os.environ.get("LOCKS_TEST_WAITING", "5000"))
FINISHED = int(os.environ.get("LOCKS_TEST_FINISHED", "20000"))

queue, tasks = sl.Queue(), sl.StateTransition()


def family(engine: Engine) -> str:
    return engine.dialect.name.replace("mariadb", "mysql")


def fill(engine: Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        filler = Filler(connection)
        job = {"external_id": filler.uuid, "payload": "'{}'", "priority": "n % 3", "attempts": "0"}
        for number, ended in ((FINISHED, filler.ago("0")), (WAITING, "NULL")):
            filler.insert("job", number, **job, started_at=ended, completed_at=ended)
        for status, number in {"done": 6000, "failed": 3000, "in_progress": 300}.items():
            filler.insert("task", number, id=filler.text(status, "n"), status=f"'{status}'")
        filler.analyze("job", "task")


@pytest.fixture(params=KINDS)
def engine(servers: Servers, request: pytest.FixtureRequest) -> Iterator[Engine]:
    url = servers.fresh(request.param, PLAIN[request.param])
    install(url)
    engine = create_engine(url, poolclass=NullPool)
    fill(engine)
    if engine.dialect.name in ("mysql", "mariadb"):
        engine = engine.execution_options(isolation_level="READ COMMITTED")
    yield engine
    engine.dispose()


CAPTURES: dict[str, sl.Operation[Any]] = {
    "capture": queue.capture(10),
    "delete_finished": queue.delete_finished(86400),
    "delete_finished dead": queue.delete_finished(86400, dead=True),
    "tasks.expire": tasks.expire(),
    "tasks.capture": tasks.capture(10),
}


def test_captures_find_their_rows_by_an_index(engine: Engine) -> None:
    """All of it in one test for each engine, since it takes seconds to fill one."""
    for name, capture in CAPTURES.items():
        assert (name, slow_steps(engine, capture)) == (name, [])
    if engine.dialect.name in ("mysql", "mariadb"):  # only InnoDB locks what it passes
        for count in (1, 10):
            with engine.connect() as connection, engine.connect() as second:
                assert len(connection.execute(queue.capture(count)).all()) == count
                assert len(second.execute(queue.capture(count)).all()) == count
                for each in (connection, second):
                    assert locked_rows(engine, each) <= 4 * count + 4
                connection.rollback()
                second.rollback()


def slow_steps(engine: Engine, capture: sl.Operation[Any]) -> list[str]:
    """Return the steps of its plan that sort all candidates, or scan a table."""
    searches: list[tuple[str, Any]] = []
    with engine.connect() as connection:

        def note(conn: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            # not the SELECT that reads the rows by their keys, after they were captured
            if not searches and re.match("WITH|SELECT", statement) and re.search(r"lock[._](job|task)\b", statement):
                searches.append((statement, parameters))

        event.listen(connection, "before_cursor_execute", note)
        connection.execute(capture)
        event.remove(connection, "before_cursor_execute", note)
        connection.rollback()
        ((statement, parameters),) = searches
        explain = EXPLAIN.get(engine.dialect.name, "EXPLAIN")
        rows = connection.exec_driver_sql(f"{explain} {statement}", parameters).mappings().all()
    return [step for step in search_steps(engine, rows) if SLOW[family(engine)].search(step)]


EXPLAIN = {"mysql": "EXPLAIN FORMAT=TRADITIONAL", "sqlite": "EXPLAIN QUERY PLAN"}
#: a sort of all candidates, or a scan of the whole table
SLOW = {
    "postgresql": re.compile(r"\bSort\b|Seq Scan on (job|task)"),
    "mysql": re.compile(r"^lock_(job|task) ALL|^lock_(job|task) .*filesort"),
    "sqlite": re.compile(r"TEMP B-TREE FOR|^SCAN lock_(job|task)(?!.* USING)|^SCAN .*sqlite_autoindex"),
}


def search_steps(engine: Engine, rows: Any) -> list[str]:
    """Return the steps that search the candidates; what is captured is changed, and sorted, afterwards."""
    if family(engine) == "mysql":
        return [f"{row['table']} {row['type']} {row['Extra']}" for row in rows]
    steps = [str(value) for row in rows for value in list(row.values())[-1:]]
    if family(engine) == "sqlite":
        return steps
    begin = next(number for number, step in enumerate(steps) if step.strip() == "CTE locks_chosen")
    ends = (number for number, step in enumerate(steps) if number > begin and step.strip().startswith("CTE "))
    return steps[begin : next(ends)]

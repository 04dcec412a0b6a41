"""Every capture uses an index, with many waiting jobs and many more completed ones; explain() reports it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Boolean, Column, Engine, Index, MetaData, Table, Text, create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.capture_models import Base, Order
from tests.fixtures.parties import locked_rows
from tests.fixtures.queues import KINDS

#: set to 100,000 and 1,000,000 for a full test
WAITING = int(os.environ.get("LOCKS_TEST_WAITING", "20000"))
FINISHED = int(os.environ.get("LOCKS_TEST_FINISHED", "60000"))

queue, tasks = sl.Queue(), sl.StateTransition()

#: a number for each row, from 1; and a UUID of it
SERIES = {
    "postgresql": ("generate_series(1, {n}) AS s(n)", "gen_random_uuid()", "clock_timestamp()"),
    "mysql": (
        "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {n}) SELECT n FROM s) AS s",
        "replace(uuid(), '-', '')",
        "utc_timestamp(6)",
    ),
    "sqlite": (
        "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {n}) SELECT n FROM s) AS s",
        "lower(hex(randomblob(16)))",
        "strftime('%Y-%m-%d %H:%M:%f000', 'now')",
    ),
}


def family(engine: Engine) -> str:
    return engine.dialect.name.replace("mariadb", "mysql")


def fill(engine: Engine) -> None:
    series, uuid, now = SERIES[family(engine)]
    job, task = ("lock.job", "lock.task") if engine.dialect.name == "postgresql" else ("lock_job", "lock_task")
    columns = "external_id, payload, priority, attempts, started_at, completed_at"
    with engine.begin() as connection:
        if engine.dialect.name in ("mysql", "mariadb"):
            for setting in ("cte_max_recursion_depth", "max_recursive_iterations"):
                found = connection.execute(text("SHOW VARIABLES LIKE :name"), {"name": setting}).first()
                if found:
                    connection.execute(text(f"SET SESSION {setting} = 2000000"))
        for number, ended in ((FINISHED, now), (WAITING, "NULL")):
            many = series.format(n=number)
            connection.execute(
                text(f"INSERT INTO {job} ({columns}) SELECT {uuid}, '{{}}', n % 3, 0, {ended}, {ended} FROM {many}")
            )
        for status, number in {"done": 20000, "failed": 10000, "in_progress": 500}.items():
            many = series.format(n=number)
            id = f"concat('{status}', n)" if family(engine) != "sqlite" else f"'{status}' || n"
            connection.execute(text(f"INSERT INTO {task} (id, status) SELECT {id}, '{status}' FROM {many}"))
        for table in (job, task):
            analyze = "ANALYZE TABLE" if engine.dialect.name in ("mysql", "mariadb") else "ANALYZE"
            connection.execute(text(f"{analyze} {table}"))


@pytest.fixture(scope="module")
def filled() -> dict[str, str]:
    """The databases by engine, until the module's tests end, or go to another process: they are dropped then."""
    return {}


@pytest.fixture(params=KINDS)
def engine(servers: Servers, filled: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Engine]:
    name = request.param
    if name not in filled:
        url = servers.fresh(name, PLAIN[name])
        install(url)
        fill(create_engine(url, poolclass=NullPool))
        filled[name] = url
    engine = create_engine(filled[name], poolclass=NullPool)
    if engine.dialect.name in ("mysql", "mariadb"):
        engine = engine.execution_options(isolation_level="READ COMMITTED")
    yield engine
    engine.dispose()


CAPTURES: dict[str, sl.Operation[Any]] = {
    "capture": queue.capture(10),
    "requeue_stalled": queue.requeue_stalled(300),
    "delete_finished": queue.delete_finished(86400),
    "delete_finished dead": queue.delete_finished(86400, dead=True),
    "tasks.expire": tasks.expire(),
    "tasks.capture": tasks.capture(10),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_no_sort_and_no_full_scan(engine: Engine, name: str) -> None:
    with engine.connect() as connection:
        explained = sl.explain(CAPTURES[name], connection)
    assert explained.problems == (), str(explained)
    assert explained.missing is None
    assert "an index serves it" in str(explained)


@pytest.mark.parametrize("count", [1, 10])
def test_innodb_locks_few_rows_besides_the_captured(engine: Engine, count: int) -> None:
    if engine.dialect.name not in ("mysql", "mariadb"):
        pytest.skip("only InnoDB locks what it passes")
    with engine.connect() as connection, engine.connect() as second:
        assert len(connection.execute(queue.capture(count)).all()) == count
        assert len(second.execute(queue.capture(count)).all()) == count
        for each in (connection, second):
            assert locked_rows(engine, each) <= 4 * count + 4
        connection.rollback()
        second.rollback()


def test_explain_reports_a_missing_index(servers: Servers) -> None:
    for name in KINDS:
        engine = create_engine(servers.fresh(name, PLAIN[name]), poolclass=NullPool)
        Base.metadata.create_all(engine)
        with Session(engine) as session:
            session.add_all(Order(id=n, rank=n % 7) for n in range(1, 3000))
            session.commit()
            by_rank = sl.capture(
                Order, where=Order.status == "paid", values={"status": "x"}, order_by=Order.rank, limit=3
            )
            explained = sl.explain(by_rank, session)
            assert any("sorted" in problem for problem in explained.problems), str(explained)
            assert explained.missing is not None
            assert "rank" in explained.missing
            assert "status" in explained.missing
            assert "missing: an index on orders" in str(explained)
            for where, order, column in ((Order.rank > 3, Order.rank, "rank"), (Order.status == "paid", (), "status")):
                one = sl.capture(Order, where=where, values={"status": "x"}, order_by=order, limit=3)
                assert sl.explain(one, session).missing == f"an index on orders ({column})"
            # explain() has captured nothing
            assert len(session.scalars(by_rank).all()) == 3
            session.rollback()
        partial = name in ("postgresql15", "sqlite")
        assert (" WHERE " in explained.missing) is partial
        columns = [Order.__table__.c.rank] if partial else [Order.__table__.c.status, Order.__table__.c.rank]
        paid = Order.__table__.c.status == "paid"
        where = {"postgresql_where": paid, "sqlite_where": paid} if partial else {}
        index = Index("orders_paid", *columns, **where)
        index.create(engine)
        Order.__table__.indexes.discard(index)
        with engine.connect() as connection:
            assert sl.explain(by_rank, connection).problems == ()
        engine.dispose()


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "AUTOCOMMIT"])
def test_explain_of_a_small_table_reports_no_missing_index(servers: Servers, isolation: str) -> None:
    url = servers.fresh("postgresql15", PLAIN["postgresql15"])
    install(url)
    engine = create_engine(url, poolclass=NullPool, isolation_level=isolation)
    settings = text("SELECT current_setting('enable_seqscan') || current_setting('enable_sort')")
    with engine.connect() as connection:
        connection.execute(queue.put(1, 2, 3))
        connection.execute(text("ANALYZE lock.job"))
        explained = sl.explain(queue.capture(10), connection)
        assert connection.execute(settings).scalar_one() == "onon"
    assert explained.missing is None
    assert all("there is an index that serves" in problem for problem in explained.problems)
    assert explained.problems, str(explained)
    engine.dispose()


def test_explain_reports_a_scan_by_key_on_sqlite(servers: Servers) -> None:
    engine = create_engine(servers.fresh("sqlite", PLAIN["sqlite"]), poolclass=NullPool)
    named = Table("named", MetaData(), Column("name", Text, primary_key=True), Column("ready", Boolean))
    named.create(engine)
    capture = sl.capture(named, where=named.c.ready, values={"ready": False}, order_by=named.c.name, limit=3)
    with engine.connect() as connection:
        explained = sl.explain(capture, connection)
        assert explained.problems == ("the whole of named is scanned",), str(explained)
        assert explained.missing == "an index on named (name) WHERE the conditions on ready"
        Index("named_ready", named.c.name, sqlite_where=text("ready = 1")).create(connection)
        assert sl.explain(capture, connection).problems == ()
    engine.dispose()


def test_explain_takes_captures_only(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(TypeError, match="captures nothing|is none"):
        sl.explain(queue.stats(), connection)

"""A transaction that SQL in its block ends: nothing that follows is executed without the lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pymysql
import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import OperationalError

import sqlalchemy_locks as sl
from tests.conformance import faces
from tests.conformance.faces import opened
from tests.faults.drivers import free, losing
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ASYNC, ENGINES, installed, unused

SYNC = [*(f"{name}/{driver}" for name, driver in ENGINES.items()), "postgresql15/psycopg2", "yugabytedb/psycopg2"]
INNODB = [which for which in SYNC if which.startswith(("mysql", "mariadb"))]
#: what the end of a block reports about the work inside it
SAID = "has failed or ended"


@pytest.fixture
def noting(engine_to: MakeEngine) -> Iterator[Callable[..., Engine]]:
    """Engines with an empty table that records the writes."""
    made: list[Engine] = []

    def make(which: str) -> Engine:
        made.append(engine_to(*which.split("/")))
        with made[-1].begin() as connection:
            connection.execute(text("CREATE TABLE ended (id INTEGER)"))
        return made[-1]

    yield make
    for engine in made:
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE ended"))


def written(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return [row.id for row in connection.execute(text("SELECT id FROM ended ORDER BY id"))]


def write(number: int) -> Any:
    return text(f"INSERT INTO ended VALUES ({number})")


@pytest.mark.parametrize("which", SYNC)
@pytest.mark.parametrize(
    ("statement", "kept", "asked"),
    [("/* audit */ commit work", [1], asked) for asked in ("lost", "statement", "end")]
    + [("rollback;", [], asked) for asked in ("check", "end")],
)
def test_statement_that_ends_the_transaction(
    noting: Any, which: str, statement: str, kept: list[int], asked: str
) -> None:
    if "work" in statement and which.startswith("sqlite"):
        statement = statement.replace("work", "transaction")
    engine, key = noting(which), unused()
    locks = sl.Locks(engine)
    with losing(locks, SAID), locks.exclusive(key) as held:
        held.session.execute(write(1))
        held.session.execute(text(statement))
        assert free(engine, key)
        if asked == "lost":
            assert held.lost
        elif asked == "check":
            with pytest.raises(sl.LockLost, match=SAID):
                held.check()
        elif asked == "statement":
            # the driver begins another transaction by itself, whose COMMIT would succeed
            with pytest.raises(sl.LockLost, match=SAID):
                held.session.execute(write(2))
            assert held.lost
    assert written(engine) == kept


@pytest.mark.parametrize("which", INNODB)
@pytest.mark.parametrize(
    "statement", ["SET @x = 'a, b', autocommit=1", "CREATE TABLE IF NOT EXISTS ended (id INTEGER)", "FLUSH STATUS"]
)
def test_statement_with_an_implicit_commit(noting: Any, which: str, statement: str) -> None:
    engine, key = noting(which), unused()
    locks = sl.Locks(engine)
    with losing(locks, SAID), locks.exclusive(key) as held:
        held.session.execute(write(1))
        held.session.connection().exec_driver_sql(statement).close()
        assert held.lost
        assert free(engine, key)
        with pytest.raises(sl.LockLost, match=SAID):
            held.session.execute(write(2))
    assert written(engine) == [1]


@pytest.mark.parametrize("which", INNODB)
@pytest.mark.parametrize(
    "statement", ["BEGIN", "START TRANSACTION READ ONLY", "COMMIT AND CHAIN", "ANALYZE TABLE ended"]
)
@pytest.mark.parametrize("asked", [True, False], ids=["check", "end"])
def test_transaction_replaced_by_another(noting: Any, which: str, statement: str, asked: bool) -> None:
    """No driver reports it, nor a COMMIT after a result's rows; the marker left in the first transaction does."""
    engine, key = noting(which), unused()
    locks = sl.Locks(engine)
    with losing(locks, SAID), locks.exclusive(key) as held:
        held.session.execute(write(1))
        held.session.connection().exec_driver_sql(statement).close()
        assert free(engine, key)
        if "ONLY" not in statement:
            held.session.execute(write(2))
        if asked:
            with pytest.raises(sl.LockLost, match=SAID):
                held.check()
            assert held.lost
    assert written(engine) == [1]


@pytest.mark.parametrize("case", ASYNC)
def test_async_block_whose_transaction_ended(servers: Any, noting: Any, case: str) -> None:
    name, driver = ASYNC[case]
    engine, key = noting(f"{name}/{ENGINES[name]}"), unused()
    with opened(faces.ASYNC, installed(servers, name, driver)) as (locks, _):
        with losing(locks, SAID), locks.exclusive(key) as held:
            held.session.execute(write(1))
            held.session.execute(text("/* audit */ COMMIT"))
            with pytest.raises(sl.LockLost, match=SAID):
                held.check()
            assert held.lost
    assert written(engine) == [1]


@pytest.mark.parametrize("which", ["mysql/pymysql", "mariadb/mariadb+pymysql", "sqlite/pysqlite"])
def test_rollback_that_fails_hides_no_error_of_the_block(engine_to: MakeEngine, which: str) -> None:
    """A node of a cluster that has lost the others answers ROLLBACK TO SAVEPOINT with an error."""
    engine, key = engine_to(*which.split("/"), pool_size=1, max_overflow=0), unused()
    locks = sl.Locks(engine)

    def fail(*_: Any) -> None:
        raise OperationalError("ROLLBACK TO SAVEPOINT", None, Exception(1047, "WSREP has not yet prepared node"))

    event.listen(engine, "rollback_savepoint", fail)
    with pytest.raises(KeyError), locks.exclusive(key) as held:
        held.session.begin_nested()
        held.session.execute(text("SELECT 1"))
        raise KeyError
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert free(engine, key)


@pytest.mark.parametrize("which", INNODB)
def test_commit_of_a_read_on_a_node_without_a_majority(engine_to: MakeEngine, which: str) -> None:
    engine = engine_to(*which.split("/"))
    locks, key = sl.Locks(engine), unused()
    assert locks.run(sl.lock.holders(key)) == []

    def fail(*_: Any) -> None:
        raise OperationalError("COMMIT", None, pymysql.OperationalError(1047, "WSREP has not yet prepared node"))

    event.listen(engine, "commit", fail)
    with pytest.raises(sl.NotWritable):
        locks.run(sl.lock.holders(key))

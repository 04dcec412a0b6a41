"""A transaction that is ended inside its block, in SQL: nothing that follows is done without the lock."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlalchemy_locks as sl
from tests.operation.fixtures import MakeEngine
from tests.operation.parties import ASYNC, ENGINES, async_connected, installed, unused

SYNC = [*(f"{name}/{driver}" for name, driver in ENGINES.items()), "postgresql15/psycopg2", "yugabytedb/psycopg2"]
INNODB = [which for which in SYNC if which.startswith(("mysql", "mariadb"))]
#: the same to the server, and not seen in the text
HIDDEN = "/* so */ COMMIT"
#: these are told at once, wherever it was ended; the others when the block ends
TOLD = ("postgresql15", "yugabytedb", "sqlite")


@pytest.fixture
def noting(engine_to: MakeEngine) -> Iterator[Callable[..., Engine]]:
    """Engines with an empty table of what was written."""
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


def free(engine: Engine, key: str) -> bool:
    with engine.connect() as connection, connection.begin():
        return bool(connection.scalar(sl.lock.try_exclusive(key)))


def write(number: int) -> Any:
    return text(f"INSERT INTO ended VALUES ({number})")


@pytest.mark.parametrize("which", SYNC)
@pytest.mark.parametrize(
    "statement",
    ["COMMIT", "  commit work", "END", "ROLLBACK", "rollback;", "COMMIT AND CHAIN", "PREPARE TRANSACTION 'x'"],
)
def test_what_ends_it_is_refused(noting: Any, which: str, statement: str) -> None:
    engine, key = noting(which), unused()
    with sl.Locks(engine).exclusive(key) as held:
        held.session.execute(write(1))
        with pytest.raises(sl.Unsupported, match="as text would end the transaction that holds the lock: leave"):
            held.session.execute(text(statement))
        assert not free(engine, key)
        held.check()
        held.session.execute(write(2))
    assert written(engine) == [1, 2]


@pytest.mark.parametrize("which", INNODB)
@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("BEGIN", "BEGIN"),
        ("begin work", "BEGIN"),
        ("START  TRANSACTION READ ONLY", "START TRANSACTION"),
        ("SET autocommit=1", "SET AUTOCOMMIT"),
        ("set session autocommit = ON", "SET SESSION AUTOCOMMIT"),
        ("SET @@session.autocommit := 1", "SET @@SESSION.AUTOCOMMIT"),
        ("SET @x = 'a, b', autocommit=1", "SET @X = 'A, B', AUTOCOMMIT"),
        ("\nCREATE TABLE another (id INTEGER)", "CREATE"),
        ("CREATE INDEX another ON ended (id)", "CREATE"),
        ("ALTER TABLE ended ADD COLUMN another INTEGER", "ALTER"),
        ("DROP TABLE IF EXISTS another", "DROP"),
        ("RENAME TABLE ended TO another", "RENAME"),
        ("TRUNCATE ended", "TRUNCATE"),
        ("LOCK TABLES ended READ", "LOCK TABLES"),
        ("ANALYZE LOCAL TABLE ended", "ANALYZE LOCAL TABLE"),
        ("FLUSH STATUS", "FLUSH"),
    ],
)
def test_what_commits_without_saying_so_is_refused(noting: Any, which: str, statement: str, told: str) -> None:
    engine, key = noting(which), unused()
    with sl.Locks(engine).exclusive(key) as held:
        held.session.execute(write(1))
        with pytest.raises(sl.Unsupported, match=f"^{re.escape(told)} would commit on .*: execute it before the block"):
            held.session.connection().exec_driver_sql(statement)
        assert not free(engine, key)
        held.check()
        held.session.execute(write(2))
    assert written(engine) == [1, 2]


@pytest.mark.parametrize("which", INNODB)
def test_what_commits_nothing_is_executed(noting: Any, which: str) -> None:
    engine, key = noting(which), unused()
    with sl.Locks(engine).exclusive(key) as held:
        driver = held.session.connection().exec_driver_sql
        for statement in [
            "CREATE TEMPORARY TABLE passing (id INTEGER)",
            "DROP TEMPORARY TABLE passing",
            "PREPARE passing FROM 'SELECT 1'",
            "DROP PREPARE passing",
            "SET @autocommit = 1",
            "SET @said = 'a, autocommit=1'",
            "SET @said = @@session.autocommit",
            "SELECT 'BEGIN', @@autocommit",
            "(SELECT 1) UNION SELECT 2",
            "CHECKSUM TABLE ended",
            "SHOW CREATE TABLE ended",
            "REPLACE INTO ended VALUES (1)",
        ]:
            driver(statement).close()
            assert not free(engine, key), statement
        held.check()
    assert written(engine) == [1]


@pytest.mark.parametrize("which", [which for which in SYNC if which not in INNODB])
def test_a_table_is_created_where_that_commits_nothing(noting: Any, which: str) -> None:
    engine, key = noting(which), unused()
    with pytest.raises(ZeroDivisionError), sl.Locks(engine).exclusive(key) as held:
        held.session.execute(text("CREATE TEMPORARY TABLE passing (id INTEGER)"))
        held.session.execute(text("ALTER TABLE ended ADD COLUMN another INTEGER"))
        assert not free(engine, key)
        raise ZeroDivisionError
    assert written(engine) == []


@pytest.mark.parametrize("which", SYNC)
def test_a_savepoint_is_rolled_back_to(noting: Any, which: str) -> None:
    engine = noting(which)
    with sl.Locks(engine).exclusive(unused()) as held:
        held.session.execute(write(1))
        with held.session.begin_nested() as nested:
            held.session.execute(write(2))
            nested.rollback()
        held.session.execute(text("SAVEPOINT mine"))
        held.session.execute(write(3))
        held.session.execute(text("ROLLBACK TO SAVEPOINT mine"))
        held.session.execute(write(4))
    assert written(engine) == [1, 4]


@pytest.mark.parametrize("which", SYNC)
@pytest.mark.parametrize("asked", [True, False])
def test_what_follows_is_not_executed(noting: Any, which: str, asked: bool) -> None:
    """A driver begins another transaction by itself, and at its end all would seem well."""
    engine, key = noting(which), unused()
    with pytest.raises(sl.LockLost), sl.Locks(engine).exclusive(key) as held:
        held.session.execute(write(1))
        held.session.execute(text(HIDDEN))
        assert free(engine, key)
        if which.split("/")[0] in TOLD:
            with pytest.raises(sl.LockLost, match="was ended inside its block"):
                held.session.execute(write(2))
            assert held.lost
        else:
            held.session.execute(write(2))
        if asked:
            held.check()
    assert written(engine) == [1]


@pytest.mark.parametrize("which", SYNC)
def test_it_is_lost_when_nothing_follows(noting: Any, which: str) -> None:
    with pytest.raises(sl.LockLost), sl.Locks(noting(which)).exclusive(unused()) as held:
        held.session.execute(text(HIDDEN))
        assert held.lost is (which.split("/")[0] in TOLD)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_one_text_of_several_statements(noting: Any, driver: str) -> None:
    engine, key = noting(f"postgresql15/{driver}"), unused()
    with pytest.raises(sl.LockLost), sl.Locks(engine).exclusive(key) as held:
        held.session.execute(text("INSERT INTO ended VALUES (1); COMMIT; INSERT INTO ended VALUES (2)"))
        assert held.lost
        held.session.execute(write(3))
    assert written(engine) == [1, 2]


@pytest.mark.parametrize("case", ASYNC)
def test_the_same_awaited(servers: Any, noting: Any, case: str) -> None:
    name, driver = ASYNC[case]
    engine, key = noting(f"{name}/{ENGINES[name]}"), unused()

    async def main() -> None:
        async with async_connected(installed(servers, name, driver)) as bind:
            locks = sl.AsyncLocks(bind)
            async with locks.exclusive(key) as held:
                with pytest.raises(sl.Unsupported, match="COMMIT as text"):
                    await held.session.execute(text("COMMIT"))
                await held.session.execute(write(1))
            with pytest.raises(sl.LockLost):
                async with locks.exclusive(key) as held:
                    await held.session.execute(text(HIDDEN))
                    if name in TOLD:
                        with pytest.raises(sl.LockLost, match="was ended inside its block"):
                            await held.session.execute(write(2))
                        assert held.lost
                    else:
                        await held.session.execute(write(2))

    asyncio.run(main())
    assert written(engine) == [1]

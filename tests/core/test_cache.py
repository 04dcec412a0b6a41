"""SQLAlchemy's compiled cache: it is hit, and no two different operations share an entry."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, String, Table

import sqlalchemy_locks as sl
from tests.core.test_compile import MAKE
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import seen, unused

COMPILED = re.compile(r"^\[(generated in|cached since|no key|caching disabled|dialect)")


class Compiled(logging.Handler):
    """SQLAlchemy's report of whether each statement's compiled form came from the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = COMPILED.match(record.getMessage())
        if found:
            self.words.append(found[1])


@pytest.fixture
def compiled() -> Any:
    handler, logger = Compiled(), logging.getLogger("sqlalchemy.engine.Engine")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.words
    logger.setLevel(level)
    logger.removeHandler(handler)


def operations() -> list[Any]:
    waits = [make(unused()).execution_options(locks_wait=5) for make in (sl.lock.exclusive, sl.lock.shared)]
    return [*waits, *(make() for name, make in MAKE.items() if not name.startswith("lock.row"))]


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb", "sqlite"])
def test_nothing_is_compiled_twice(engine_to: MakeEngine, compiled: list[str], name: str) -> None:
    # (a try's second connection, above READ COMMITTED on MySQL, has a cache of its own)
    engine = engine_to(name, **({"isolation_level": "READ COMMITTED"} if name == "mysql" else {}))
    made = operations() if name != "sqlite" else operations()[:-2]
    with engine.connect() as connection:
        for n, operation in enumerate([*made, *(operations()[: len(made)])]):
            if n == len(made):
                assert "generated in" in compiled
                compiled.clear()
            connection.execute(operation)
        assert set(compiled) == {"cached since"}
        connection.rollback()


def test_different_functions_never_share_a_key(engine_to: MakeEngine) -> None:
    """Each has an entry of its own, and each entry's statement calls its own function."""
    engine = engine_to("postgresql15")
    engine.clear_compiled_cache()
    with engine.connect() as connection, seen(engine) as statements:
        for operation in operations():
            connection.execute(operation)
        connection.rollback()
    statements = [line for line in statements if not line.startswith("SELECT version()")]  # once per engine
    cached = [str(entry) for entry in cache_of(engine) if not str(entry).startswith("SELECT version()")]
    assert sorted(cached) == sorted(set(statements))
    assert len(cached) == 10  # a wait is an argument of the function, and no other statement


def test_cached_row_locks_differ_by_table(engine_to: MakeEngine, compiled: list[str]) -> None:
    metadata = MetaData()
    one = Table("cached_one", metadata, Column("id", Integer, primary_key=True), Column("name", String(9)))
    two = Table("cached_two", metadata, Column("id", Integer, primary_key=True), Column("name", String(9)))
    engine = engine_to("postgresql15")
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(one.insert(), [{"id": n, "name": f"one {n}"} for n in range(3)])
        connection.execute(two.insert(), [{"id": n, "name": f"two {n}"} for n in range(3)])
        assert connection.scalar(sl.lock.try_exclusive(unused()))  # the first operation asks the server
        compiled.clear()
        for n in range(3):
            assert connection.execute(sl.lock.row(one, n)).one() == (n, f"one {n}")
            assert connection.execute(sl.lock.row(two, n)).one() == (n, f"two {n}")
        assert compiled == ["generated in"] * 2 + ["cached since"] * 4


def cache_of(engine: Engine) -> list[Any]:
    cache: Any = engine._compiled_cache
    return list(cache.values())

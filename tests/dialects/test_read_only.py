"""A read-only transaction gets no lock, however it was begun, and whether the key is known or brand-new."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import INNODB, unused

ACQUIRE: list[Any] = [sl.lock.exclusive, sl.lock.shared, sl.lock.try_exclusive, sl.lock.try_shared]
LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
BEGINS = {
    "its own": "START TRANSACTION READ ONLY",
    "the next one": "SET TRANSACTION READ ONLY",
    "the session's": "SET SESSION TRANSACTION READ ONLY",
}


@pytest.mark.parametrize("name", ["postgresql15", "postgresql15-table", "postgresql18", "yugabytedb"])
@pytest.mark.parametrize("make", ACQUIRE, ids=lambda make: make.__name__)
def test_functions_refuse_a_read_only_transaction(engine_to: MakeEngine, name: str, make: Any) -> None:
    with engine_to(name).connect() as connection:
        connection.execute(sl.lock.create(known := unused()))
        connection.commit()
        for key in (known, unused()):
            connection.execute(text("SET TRANSACTION READ ONLY"))
            with pytest.raises(sl.NotWritable):
                connection.execute(make(key))
            connection.rollback()


@pytest.mark.parametrize("name", INNODB)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("begin", BEGINS.values(), ids=BEGINS)
@pytest.mark.parametrize("make", ACQUIRE, ids=lambda make: make.__name__)
def test_row_locks_refuse_a_read_only_transaction(
    engine_to: MakeEngine, name: str, level: str, begin: str, make: Any
) -> None:
    engine = engine_to(name, isolation_level=level)
    with engine.begin() as connection:
        connection.execute(sl.lock.create(known := unused()))
    with engine.connect() as holder, engine.connect() as connection:
        # also a key that this engine has acquired before, and one that another shares
        holder.execute(sl.lock.exclusive(again := unused()))
        holder.commit()
        holder.execute(sl.lock.shared(known))
        for key in (known, again, unused()):
            connection.execute(text(begin))
            with pytest.raises(sl.NotWritable):
                connection.execute(make(key))
            connection.rollback()
        connection.invalidate()

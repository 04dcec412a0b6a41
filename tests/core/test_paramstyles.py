"""Engines with another ``paramstyle`` than their driver's default."""

from __future__ import annotations

import pytest
from sqlalchemy import text

import sqlalchemy_locks as sl
from sqlalchemy_locks.health import examine
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import unused


@pytest.mark.parametrize("paramstyle", ["numeric", "numeric_dollar"])
def test_numbers_that_sqlite_takes_for_names_are_refused(engine_to: MakeEngine, paramstyle: str) -> None:
    engine = engine_to("sqlite", paramstyle=paramstyle)
    with engine.connect() as connection:
        with pytest.raises(sl.Unsupported, match=f'paramstyle="{paramstyle}"'):
            connection.execute(sl.Queue().capture())
        assert "paramstyle" in next(each.says for each in examine(connection) if each.level == "problem")


@pytest.mark.parametrize(
    ("name", "paramstyle"),
    [("postgresql15", "format"), ("mysql", "pyformat"), ("mariadb", "pyformat"), ("sqlite", "named")],
)
def test_every_paramstyle_works(engine_to: MakeEngine, name: str, paramstyle: str) -> None:
    locks, key, queue = sl.Locks(engine_to(name, paramstyle=paramstyle)), unused("50%s"), sl.Queue()
    with locks.exclusive(key, timeout=1) as held:
        held.session.execute(sl.Mutex().create(key))
        assert held.session.scalar(text("SELECT :one"), {"one": 1}) == 1
    assert locks.mutex.acquire(key)
    assert locks.once_per(key, every=60)
    with locks.lease(key, timeout=1) as lease:
        lease.check()
    locks.run(queue.put({"a%s": "50% :x"}, 2, queue=key))
    assert [job.payload for job in locks.run(queue.capture(2, queue=key))] == [{"a%s": "50% :x"}, 2]

"""The connections beside an engine's pool: one set for all copies of the engine, and none that outlives it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from sqlalchemy import create_engine

from sqlalchemy_locks.core.side_pool import pool_beside


def test_copies_of_an_engine_share_a_pool_that_ends_with_it(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/app.db")
    pool = pool_beside(engine.execution_options(locks_prefix="mine_"))
    assert pool_beside(engine) is pool
    with pool.connect() as connection:
        raw = connection.connection.driver_connection
    engine.dispose()
    with pool.connect() as connection:
        assert connection.connection.driver_connection is not raw
    engine.dispose()
    alive = weakref.ref(engine.dialect), weakref.ref(pool)
    del engine, pool, connection
    gc.collect()
    assert [each() for each in alive] == [None, None]

"""Processes that start at the same time, and each install what isn't there yet."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Engine, create_engine

from sqlalchemy_locks.alembic import ops as _registers  # noqa: F401
from sqlalchemy_locks.alembic.drift import check
from sqlalchemy_locks.alembic.options import Options
from sqlalchemy_locks.alembic.steps import STEPS, recorded
from tests.conftest import PLAIN, Servers
from tests.fixtures.parties import PATIENCE, all_of

_SO_MANY = 6


def install(engine: Engine, barrier: threading.Barrier) -> None:
    try:
        for before, step in zip(("base", *STEPS), STEPS, strict=False):
            barrier.wait(PATIENCE)
            with engine.begin() as connection:
                operations: Any = Operations(MigrationContext.configure(connection))
                operations.upgrade_locks(from_=before, to=step)
    except BaseException:
        barrier.abort()
        raise


@pytest.mark.parametrize("name", ["postgresql15", "postgresql18"])
def test_several_install_at_once(servers: Servers, name: str) -> None:
    engine = create_engine(servers.fresh(name, PLAIN[name]), pool_size=_SO_MANY)
    try:
        barrier = threading.Barrier(_SO_MANY)
        all_of(*[lambda: install(engine, barrier)] * _SO_MANY)
        with engine.connect() as connection:
            assert recorded(connection, Options()) == dict.fromkeys(STEPS, "directives")
            assert check(connection) == []
    finally:
        engine.dispose()

"""Processes that start at the same time, and each install the missing steps."""

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
from sqlalchemy_locks.alembic.steps import recorded
from tests.conftest import PLAIN, Servers
from tests.fixtures import second_step
from tests.fixtures.parties import PATIENCE, all_of

_PROCESSES = 6


def install(engine: Engine, barrier: threading.Barrier) -> None:
    try:
        for before, step in (("base", "0001"), ("0001", "0002")):
            barrier.wait(PATIENCE)
            with engine.begin() as connection:
                operations: Any = Operations(MigrationContext.configure(connection))
                operations.upgrade_locks(from_=before, to=step)
    except BaseException:
        barrier.abort()
        raise


@pytest.mark.parametrize("name", ["postgresql15", "postgresql18"])
def test_concurrent_installs_do_not_fail(servers: Servers, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    second_step.add(monkeypatch)
    engine = create_engine(servers.fresh(name, PLAIN[name]), pool_size=_PROCESSES)
    try:
        barrier = threading.Barrier(_PROCESSES)
        all_of(*[lambda: install(engine, barrier)] * _PROCESSES)
        with engine.connect() as connection:
            assert recorded(connection, Options()) == dict.fromkeys(("0001", "0002"), "directives")
            assert check(connection) == []
    finally:
        engine.dispose()

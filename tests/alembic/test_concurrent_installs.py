"""Processes that start at the same time, and each install the missing steps."""

from __future__ import annotations

import contextlib
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

_PROCESSES = 8


def install(engine: Engine, barrier: threading.Barrier, block: bool) -> None:
    try:
        for before, step in (("base", "0001"), ("0001", "0002")):
            barrier.wait(PATIENCE)
            with engine.connect() as connection:
                context = MigrationContext.configure(connection)
                operations: Any = Operations(context)
                begun = context.begin_transaction() if block else connection.begin()
                with begun, context.autocommit_block() if block else contextlib.nullcontext():
                    operations.upgrade_locks(from_=before, to=step)
    except BaseException:
        barrier.abort()
        raise


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("postgresql15", "transaction"),
        ("postgresql15", "autocommit"),
        ("postgresql18", "autocommit_block"),
        ("mysql", "transaction"),
        ("mariadb", "autocommit_block"),
    ],
)
def test_concurrent_installs_do_not_fail(servers: Servers, name: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    second_step.add(monkeypatch)
    options: Any = {"isolation_level": "AUTOCOMMIT"} if by == "autocommit" else {}
    engine = create_engine(servers.fresh(name, PLAIN[name]), pool_size=_PROCESSES, **options)
    try:
        barrier = threading.Barrier(_PROCESSES)
        all_of(*[lambda: install(engine, barrier, by == "autocommit_block")] * _PROCESSES)
        with engine.connect() as connection:
            assert recorded(connection, Options()) == dict.fromkeys(("0001", "0002"), "directives")
            assert check(connection) == []
    finally:
        engine.dispose()

"""The view of held keys on PostgreSQL, and the locks that psql acquires."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlalchemy_locks as sl
from tests.fixtures.parties import connected, unused

NAMES = ["postgresql15", "postgresql18"]
KEYS = [0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**32, -(2**32) - 1, 2**63 - 1, -(2**63)]
HELD = "SELECT key, mode, pid = pg_backend_pid(), ts IS NOT NULL FROM lock.locked_keys"


@pytest.mark.parametrize("name", NAMES)
def test_view_lists_each_held_key_with_its_mode(engine: Engine) -> None:
    with engine.connect() as connection, engine.connect() as other:
        for n, key in enumerate(KEYS):
            connection.execute(sl.lock.shared(key) if n % 2 else sl.lock.exclusive(key))
        wanted = {(key, "shared" if n % 2 else "exclusive") for n, key in enumerate(KEYS)}
        assert set(connection.execute(text(HELD))) == {(key, mode, True, True) for key, mode in wanted}
        assert set(other.execute(text(HELD))) == {(key, mode, False, True) for key, mode in wanted}
        connection.rollback()
        other.rollback()
        assert other.execute(text(HELD)).all() == []


@pytest.mark.parametrize("name", ["postgresql15", "postgresql15-table", "yugabytedb"])
def test_psql_and_the_library_use_the_same_lock(engine: Engine) -> None:
    key = unused()
    call = text("SELECT lock.exclusive(lock.key(:name))")
    with engine.connect() as psql, engine.connect() as library:
        psql.execute(call, {"name": key})
        assert library.scalar(sl.lock.try_shared(key)) is False
        psql.rollback()
        library.rollback()
        library.execute(sl.lock.shared(key))
        library.commit()
        library.execute(sl.lock.shared(key))
        assert psql.scalar(text("SELECT lock.try_exclusive(lock.key(:name))"), {"name": key}) is False
        assert psql.scalar(text("SELECT lock.try_shared(lock.key(:name))"), {"name": key}) is True


def test_database_without_the_functions(servers: Any) -> None:
    with connected(servers.fresh("postgresql15", "psycopg")) as engine, engine.connect() as connection:
        for operation in (sl.lock.exclusive("a"), sl.lock.try_shared("a"), sl.lock.vacuum(), sl.lock.create("a")):
            with pytest.raises(sl.NotInstalled, match="`sqlalchemy-locks check` tells what is missing"):
                connection.execute(operation)
            connection.rollback()
        assert (
            connection.scalar(sl.lock.session_exclusive("a")) is None
        )  # the server's own function, which needs no installation

"""The SQL functions, as psql and other languages call them: what tests of the library itself can't see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import URL

from tests.alembic.project import Fresh, Project, connected, run

LOCKING = ("exclusive", "shared", "try_exclusive", "try_shared")
VARIANTS = [("postgresql15", "native"), ("postgresql18", "table"), ("yugabytedb", "native")]


@pytest.fixture
def functions(request: pytest.FixtureRequest, fresh: Fresh, tmp_path: Path) -> URL:
    server, locking = getattr(request, "param", ("yugabytedb", "native"))
    url = fresh(server, "psycopg")
    Project(tmp_path, url, "directives", locking=locking).upgrade()
    return url


def sqlstate(connection: sa.Connection, sql: str) -> Any:
    with pytest.raises(sa.exc.DBAPIError) as raised:
        connection.exec_driver_sql(sql)
    connection.rollback()
    return getattr(raised.value.orig, "sqlstate", None)


@pytest.mark.parametrize("functions", VARIANTS, indirect=True)
def test_a_tried_lock_lasts_until_the_end_of_the_transaction(functions: URL) -> None:
    """The table variant locks inside an exception block: the lock must outlast the block."""
    engine = sa.create_engine(functions, poolclass=sa.NullPool)
    with engine.connect() as a, engine.connect() as b:
        for call in ("try_exclusive", "try_shared"):
            assert a.exec_driver_sql(f"SELECT lock.{call}(1)").scalar() is True
            assert b.exec_driver_sql("SELECT lock.try_exclusive(1)").scalar() is False
            b.rollback()
            a.commit()
            assert b.exec_driver_sql("SELECT lock.try_exclusive(1)").scalar() is True
            b.rollback()


@pytest.mark.parametrize("functions", VARIANTS[1:], indirect=True)
def test_vacuum_continues_until_no_free_key_is_left(functions: URL) -> None:
    run(functions, "INSERT INTO lock.locked_keys (key) SELECT generate_series(1, 25000)")
    with sa.create_engine(functions, poolclass=sa.NullPool).connect() as holder:
        holder.exec_driver_sql("SELECT lock.exclusive(12345)")
        assert run(functions, "SELECT lock.vacuum()") == [(24999,)]
    assert run(functions, "SELECT key FROM lock.locked_keys") == [(12345,)]


@pytest.mark.parametrize("function", [True, False])
def test_snapshot_isolation_reported_as_read_committed(functions: URL, function: bool) -> None:
    """A cluster without yb_enable_read_committed_isolation, as its function reports, or its setting."""
    name = "pg_catalog.yb_get_effective_transaction_isolation_level()"
    with sa.create_engine(functions, poolclass=sa.NullPool).connect() as connection:
        if function:
            replaced = f"CREATE OR REPLACE FUNCTION {name} RETURNS text LANGUAGE sql AS $$SELECT 'Repeatable Read'$$"
            connection.exec_driver_sql(replaced)
        else:
            connection.exec_driver_sql(f"DROP FUNCTION {name}")
            # a setting without a dot can't be defined: the function that reads settings is replaced
            connection.exec_driver_sql(
                "CREATE FUNCTION public.current_setting(text, boolean) RETURNS text LANGUAGE sql AS "
                "$$SELECT CASE $1 WHEN 'yb_effective_transaction_isolation_level' THEN 'repeatable read' END$$"
            )
            connection.exec_driver_sql("SET search_path = public, pg_catalog")
        connection.commit()
        assert connection.exec_driver_sql("SHOW transaction_isolation").scalar() == "read committed"
        connection.rollback()
        for call in LOCKING:
            assert sqlstate(connection, f"SELECT lock.{call}(1)") == "SL003"
        connection.exec_driver_sql("SELECT lock.exclusive(1, true)")


@pytest.mark.parametrize("before", ["on", "off"])
def test_the_setting_of_yugabytedb_is_restored(functions: URL, before: str) -> None:
    with connected(functions) as connection:
        connection.exec_driver_sql(f"SET yb_disable_transactional_writes = {before}")
        for number, call in enumerate(LOCKING):
            connection.exec_driver_sql(f"SELECT lock.{call}({number})")
            assert connection.exec_driver_sql("SHOW yb_disable_transactional_writes").scalar() == before


def test_keys_are_inserted_outside_the_transaction(functions: URL) -> None:
    """The setting is on while the row is inserted, by every function."""
    run(
        functions,
        "CREATE TABLE seen (setting text)",
        "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
        " INSERT INTO seen VALUES (current_setting('yb_disable_transactional_writes')); RETURN NEW; END$$",
        "CREATE TRIGGER see BEFORE INSERT ON lock.locked_keys FOR EACH ROW EXECUTE FUNCTION see()",
    )
    for number, call in enumerate(LOCKING):
        run(functions, f"SELECT lock.{call}({number})")
    assert run(functions, "SELECT setting FROM seen") == [("on",)] * 4


def test_an_invisible_key_ends_the_loop(functions: URL) -> None:
    """As with a snapshot that is too old; here a trigger drops the row."""
    run(
        functions,
        "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$",
        "CREATE TRIGGER swallow BEFORE INSERT ON lock.locked_keys FOR EACH ROW EXECUTE FUNCTION swallow()",
    )
    with connected(functions) as connection:
        for call in ("exclusive", "shared"):
            assert sqlstate(connection, f"SELECT lock.{call}(1)") == "40001"
        for call in ("try_exclusive", "try_shared"):
            assert connection.exec_driver_sql(f"SELECT lock.{call}(1)").scalar() is False

"""Schema, prefix, locking, and what is refused before any SQL is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy.engine import URL

from sqlalchemy_locks.alembic import Options, Refused, check, ops
from tests.alembic.project import Fresh, Project, catalog, connected, installed, run, statements, tables

BY_SCHEMA = ("postgresql", "yugabytedb")


@pytest.mark.parametrize("schema", ["locks_of_app", "Select", "order", "_x$1", "lock2"])
def test_objects_are_installed_in_another_schema(fresh: Fresh, schema: str, installed_by: str, tmp_path: Path) -> None:
    for number, engine in enumerate([("postgresql15", "psycopg"), ("yugabytedb", "yugabytedb")]):
        url = fresh(*engine)
        project = Project(tmp_path / str(number), url, installed_by, schema=schema)
        project.upgrade()
        assert catalog(url) == {}
        assert installed(url, schema)
        run(url, f'SELECT "{schema}".exclusive(1), "{schema}".try_shared(2), "{schema}".unlock(1)')
        run(url, f'SELECT "{schema}".vacuum()', f'SELECT * FROM "{schema}".locked_keys')
        with connected(url) as connection:
            assert check(connection, schema=schema) == []
        project.downgrade()
        assert catalog(url, schema) == {}


@pytest.mark.parametrize("prefix", ["Weird$_", "x" * 44], ids=["weird", "longest"])
def test_tables_are_installed_with_another_prefix(fresh: Fresh, prefix: str, installed_by: str, tmp_path: Path) -> None:
    for number, engine in enumerate([("mysql", "pymysql"), ("mariadb", "mariadb+pymysql"), ("sqlite", "pysqlite")]):
        url = fresh(*engine)
        project = Project(tmp_path / str(number), url, installed_by, prefix=prefix)
        project.upgrade()
        made = {name.lower() for name in catalog(url)}
        assert {f"{prefix}{name}".lower() for name in tables("sqlite")} <= made
        assert all(name.startswith(prefix.lower()) for name in made)
        assert installed(url, prefix=prefix)
        with connected(url) as connection:
            assert check(connection, prefix=prefix) == []
        project.downgrade()
        assert catalog(url) == {}


@pytest.mark.parametrize("engine_", ["postgresql15", "postgresql18"])
def test_table_locking_installs_a_table(fresh: Fresh, engine_: str, installed_by: str, tmp_path: Path) -> None:
    url = fresh(engine_, "psycopg")
    project = Project(tmp_path, url, installed_by, locking="table")
    project.upgrade()
    relations = {name: kind for name, kind, *_ in catalog(url)["relations"]}
    assert relations["locked_keys"] == "r"
    with connected(url) as connection:
        assert check(connection) == []
    project.downgrade()
    assert catalog(url) == {}


@pytest.mark.parametrize(("first", "second"), [("native", "table"), ("table", "native")])
def test_another_locking_option_is_refused_once_installed(
    postgresql: URL, first: str, second: str, tmp_path: Path
) -> None:
    Project(tmp_path / first, postgresql, "directives", locking=first).upgrade()
    made = catalog(postgresql)
    run(postgresql, "DROP TABLE alembic_version")
    with pytest.raises(sa.exc.DBAPIError, match="downgrade to base with the locking option"):
        Project(tmp_path / second, postgresql, "directives", locking=second).upgrade()
    assert catalog(postgresql) == made


@pytest.mark.parametrize("server", ["postgresql15", "postgresql18", "yugabytedb"])
def test_an_existing_schema_is_not_dropped(fresh: Fresh, server: str, tmp_path: Path) -> None:
    url = fresh(server, "psycopg2")
    run(url, "CREATE SCHEMA lock")
    project = Project(tmp_path, url, "revisions")
    project.upgrade()
    project.downgrade()
    assert set(catalog(url)) == {"schema"}


def test_a_schema_with_other_objects_is_not_dropped(fresh: Fresh, engine: tuple[str, str], tmp_path: Path) -> None:
    """Without schemas: a table whose name only has the prefix is not dropped."""
    url = fresh(*engine)
    project = Project(tmp_path, url, "revisions")
    project.upgrade()
    other = "lock.mine" if url.get_backend_name() in BY_SCHEMA else "lock_mine"
    run(url, f"CREATE TABLE {other} (id int)")
    project.downgrade()
    assert run(url, f"SELECT count(*) FROM {other}") == [(0,)]
    found = catalog(url)
    if "relations" in found:
        assert [name for name, *_ in found["relations"]] == ["mine"]
        assert "functions" not in found
    else:
        assert list(found) == ["lock_mine"]


@pytest.mark.parametrize("table", ["semaphore_history", "task", "locked_keys", "installed"])
def test_downgrade_does_not_cascade(postgresql: URL, table: str, tmp_path: Path) -> None:
    project = Project(tmp_path, postgresql, "revisions")
    project.upgrade()
    made, record = catalog(postgresql), installed(postgresql)
    run(postgresql, f"CREATE VIEW public.mine AS SELECT * FROM lock.{table}")
    with pytest.raises(sa.exc.DBAPIError, match="depend"):
        project.downgrade()
    assert (catalog(postgresql), installed(postgresql)) == (made, record)
    assert run(postgresql, "SELECT count(*) FROM public.mine")


def test_an_existing_schema_needs_no_right_to_create_one(fresh: Fresh, installed_by: str, tmp_path: Path) -> None:
    for number, engine in enumerate([("postgresql15", "psycopg"), ("yugabytedb", "yugabytedb")]):
        url = fresh(*engine)
        role = f"migrator_{installed_by}_{number}"
        run(url, f"CREATE ROLE {role} LOGIN", f"CREATE SCHEMA lock AUTHORIZATION {role}")
        run(url, f"GRANT CREATE ON SCHEMA public TO {role}")
        project = Project(tmp_path / str(number), url.set(username=role), installed_by)
        project.upgrade()
        project.downgrade()
        assert set(catalog(url)) == {"schema"}


def test_overloads_of_another_origin_are_refused(postgresql: URL, tmp_path: Path) -> None:
    run(
        postgresql,
        "CREATE SCHEMA lock",
        "CREATE FUNCTION lock.exclusive(key bigint) RETURNS void LANGUAGE sql AS 'SELECT'",
    )
    with pytest.raises(sa.exc.DBAPIError, match="calls would reach it"):
        Project(tmp_path, postgresql, "revisions").upgrade()


@pytest.mark.parametrize(
    "options",
    [
        {"schema": 'Weird "Name"'},
        {"schema": ""},
        {"schema": "a.b"},
        {"schema": "x" * 64},
        {"schema": "lock\n"},
        {"prefix": "a`b"},
        {"prefix": "1lock_"},
        {"prefix": "x" * 49},
        {"grant_to": "app; DROP TABLE x"},
        {"grant_to": ["app", 'a"b']},
        {"grant_to": "a@b@c"},
        {"locking": "optimistic"},
    ],
    ids=repr,
)
def test_names_that_would_need_escaping_are_refused(options: dict[str, Any]) -> None:
    for dialect in ("postgresql", "mysql", "sqlite"):
        with pytest.raises(ValueError, match=r"refused|locking is"):
            statements(dialect, "upgrade", **options)


@pytest.mark.parametrize("dialect", ["mysql", "mariadb", "sqlite"])
def test_table_locking_is_refused_except_on_postgresql(dialect: str) -> None:
    with pytest.raises(ValueError, match="for PostgreSQL"):
        statements(dialect, "upgrade", locking="table")


def test_grant_to_is_refused_on_sqlite() -> None:
    with pytest.raises(ValueError, match="SQLite, which has no roles"):
        statements("sqlite", "upgrade", grant_to="app")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="does not know the engine 'oracle'"):
        statements("oracle", "upgrade")


@pytest.mark.parametrize(
    ("name", "from_", "to", "sentence"),
    [
        ("upgrade_locks", "0001", "base", "not upwards"),
        ("upgrade_locks", "base", "base", "not upwards"),
        ("upgrade_locks", "base", "9999", "no step '9999'"),
        ("upgrade_locks", "1", "0001", "no step '1'"),
        ("downgrade_locks", "base", "0001", "from the higher to the lower"),
        ("downgrade_locks", "head", "base", "no step 'head'"),
    ],
)
def test_both_ends_are_validated(name: str, from_: str, to: str, sentence: str) -> None:
    context = MigrationContext.configure(dialect_name="sqlite", opts={"as_sql": True})
    operations = Operations(context)
    with pytest.raises(ValueError, match=sentence):
        getattr(operations, name)(from_=from_, to=to)
    with Operations.context(context), pytest.raises(ValueError, match=sentence):
        getattr(ops, name)(from_=from_, to=to)


def test_both_ends_are_required() -> None:
    operations = Operations(MigrationContext.configure(dialect_name="sqlite", opts={"as_sql": True}))
    with pytest.raises(TypeError):
        operations.upgrade_locks()  # type: ignore[attr-defined]


def test_a_directive_knows_its_reverse() -> None:
    upgrade = ops.UpgradeLocksOp("base", "0001", Options())
    downgrade = upgrade.reverse()
    assert (downgrade.from_, downgrade.to, downgrade.options) == ("0001", "base", Options())
    assert isinstance(downgrade.reverse(), ops.UpgradeLocksOp)


def test_a_refused_name_executes_nothing(postgresql: URL, tmp_path: Path) -> None:
    with pytest.raises(Refused):
        Project(tmp_path, postgresql, "revisions", schema='a"b').upgrade()
    assert catalog(postgresql, 'a""b') == {}

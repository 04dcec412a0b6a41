"""Schema, prefix, locking, and what is refused before any SQL is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy.engine import URL

from sqlalchemy_locks.alembic import check
from tests.alembic.project import Fresh, Project, catalog, connected, installed, run, statements, table, tables

PLACED = [
    ("postgresql15", "psycopg", "revisions", {"schema": "Select"}),
    ("postgresql18", "psycopg2", "directives", {"schema": "_x$1", "locking": "table"}),
    ("yugabytedb", "yugabytedb", "directives", {"schema": "locks_of_app"}),
    ("mysql", "pymysql", "revisions", {"prefix": "Weird$_"}),
    ("mariadb", "mariadb+pymysql", "directives", {"prefix": "Weird$_"}),
    ("sqlite", "pysqlite", "revisions", {"prefix": "Weird$_"}),
]


@pytest.mark.parametrize(("server", "driver", "door", "options"), PLACED, ids=lambda value: str(value))
def test_another_schema_or_prefix(
    fresh: Fresh, server: str, driver: str, door: str, options: dict[str, str], tmp_path: Path
) -> None:
    url = fresh(server, driver)
    project = Project(tmp_path, url, door, **options)
    project.upgrade()
    place = {name: value for name, value in options.items() if name != "locking"}
    assert installed(url, **place)
    if "schema" in place:
        schema = place["schema"]
        assert catalog(url) == {}
        run(url, f'SELECT "{schema}".exclusive(1), "{schema}".try_shared(2), "{schema}".unlock(1)')
        relations = {name: kind for name, kind, *_ in catalog(url, schema)["relations"]}
        assert relations["locked_keys"] == ("v" if "locking" not in options and server != "yugabytedb" else "r")
    else:
        created = {name.lower() for name in catalog(url)}
        assert {f"weird$_{name}" for name in tables("sqlite")} <= created
        assert all(name.startswith("weird$_") for name in created)
    with connected(url) as connection:
        assert check(connection, **place) == []
    project.downgrade()
    assert catalog(url, place.get("schema", "lock")) == {}


@pytest.mark.parametrize(("first", "second"), [("native", "table"), ("table", "native")])
def test_another_locking_option_is_refused_once_installed(
    postgresql: URL, first: str, second: str, tmp_path: Path
) -> None:
    Project(tmp_path / first, postgresql, "directives", locking=first).upgrade()
    created = catalog(postgresql)
    run(postgresql, "DROP TABLE alembic_version")
    with pytest.raises(sa.exc.DBAPIError, match="End every process that uses locks"):
        Project(tmp_path / second, postgresql, "directives", locking=second).upgrade()
    assert catalog(postgresql) == created


def test_objects_of_the_app_are_not_dropped(fresh: Fresh, engine: tuple[str, str], tmp_path: Path) -> None:
    """A schema that holds one stays; without schemas, a table whose name only has the prefix does."""
    url = fresh(*engine)
    project = Project(tmp_path, url, "revisions")
    project.upgrade()
    other = table(url, "mine")
    run(url, f"CREATE TABLE {other} (id int)")
    project.downgrade()
    assert run(url, f"SELECT count(*) FROM {other}") == [(0,)]
    left = catalog(url)
    if "relations" in left:
        assert [name for name, *_ in left["relations"]] == ["mine"]
        assert "functions" not in left
    else:
        assert list(left) == ["lock_mine"]


def test_downgrade_does_not_cascade(postgresql: URL, tmp_path: Path) -> None:
    project = Project(tmp_path, postgresql, "revisions")
    project.upgrade()
    created, record = catalog(postgresql), installed(postgresql)
    run(postgresql, "CREATE VIEW public.mine AS SELECT * FROM lock.task")
    with pytest.raises(sa.exc.DBAPIError, match="depend"):
        project.downgrade()
    assert (catalog(postgresql), installed(postgresql)) == (created, record)


@pytest.mark.parametrize(("server", "driver"), [("postgresql15", "psycopg"), ("yugabytedb", "yugabytedb")])
def test_an_existing_schema_needs_no_right_to_create_one(
    fresh: Fresh, server: str, driver: str, tmp_path: Path
) -> None:
    url = fresh(server, driver)
    role = f"migrator_{server}"
    run(url, f"CREATE ROLE {role} LOGIN", f"CREATE SCHEMA lock AUTHORIZATION {role}")
    run(url, f"GRANT CREATE ON SCHEMA public TO {role}")
    project = Project(tmp_path, url.set(username=role), "revisions")
    project.upgrade()
    project.downgrade()
    assert set(catalog(url)) == {"schema"}


def test_overloads_of_another_origin_are_refused(postgresql: URL, tmp_path: Path) -> None:
    overload = "CREATE FUNCTION lock.exclusive(key bigint) RETURNS void LANGUAGE sql AS 'SELECT'"
    run(postgresql, "CREATE SCHEMA lock", overload)
    with pytest.raises(sa.exc.DBAPIError, match="calls would reach it"):
        Project(tmp_path, postgresql, "revisions").upgrade()


@pytest.mark.parametrize(
    ("dialect", "options", "sentence"),
    [
        ("postgresql", {"schema": 'Weird "Name"'}, "refused"),
        ("postgresql", {"schema": ""}, "refused"),
        ("postgresql", {"schema": "x" * 64}, "refused"),
        ("postgresql", {"schema": "lock\n"}, "refused"),
        ("mysql", {"prefix": "a`b"}, "refused"),
        ("mysql", {"prefix": "x" * 49}, "refused"),
        ("postgresql", {"grant_to": "app; DROP TABLE x"}, "refused"),
        ("postgresql", {"grant_to": ["app", 'a"b']}, "refused"),
        ("mysql", {"grant_to": "a@b@c"}, "refused"),
        ("postgresql", {"locking": "optimistic"}, "locking is"),
        ("mysql", {"locking": "table"}, "for PostgreSQL"),
        ("sqlite", {"locking": "advisory"}, "for PostgreSQL"),
        ("sqlite", {"grant_to": "app"}, "SQLite, which has no roles"),
        ("oracle", {}, "does not know the engine 'oracle'"),
    ],
    ids=repr,
)
def test_refused_options(dialect: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        statements(dialect, "upgrade", **options)


@pytest.mark.parametrize(
    ("name", "from_", "to", "sentence"),
    [
        ("upgrade_locks", "0001", "base", "not upwards"),
        ("upgrade_locks", "base", "base", "not upwards"),
        ("upgrade_locks", "base", "9999", "no step '9999'"),
        ("downgrade_locks", "base", "0001", "from the higher to the lower"),
    ],
)
def test_both_ends_are_validated(name: str, from_: str, to: str, sentence: str) -> None:
    operations = Operations(MigrationContext.configure(dialect_name="sqlite", opts={"as_sql": True}))
    with pytest.raises(ValueError, match=sentence):
        getattr(operations, name)(from_=from_, to=to)

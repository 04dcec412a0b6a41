"""The drift check reports what was changed by hand, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.engine import URL

from sqlalchemy_locks.alembic import check
from sqlalchemy_locks.alembic.script import Family
from sqlalchemy_locks.alembic.steps import load
from sqlalchemy_locks.dialects import backend_for
from tests.alembic.project import Fresh, Project, catalog, connected, drifts, run, table, tables


def test_what_installed_records(url: URL, tmp_path: Path) -> None:
    """Nothing, all steps, one of a newer release, none; the check only reads."""
    (sentence,) = drifts(url)
    assert f"{table(url, 'installed')}" in sentence.replace("`", "").replace('"', "")
    assert "is missing" in sentence
    Project(tmp_path, url, "directives").upgrade()
    sqlite = url.get_backend_name() == "sqlite"
    with connected(url) as connection:
        connection.exec_driver_sql("PRAGMA query_only = ON" if sqlite else "START TRANSACTION READ ONLY")
        assert check(connection) == []
    run(url, f"INSERT INTO {table(url, 'installed')} VALUES ('9999', 'revisions', '')")
    (sentence,) = drifts(url)
    assert sentence.startswith("step 9999 was installed by a newer release")
    run(url, f"DELETE FROM {table(url, 'installed')}")
    (sentence,) = drifts(url)
    assert "no step was installed completely" in sentence


FUNCTION_DRIFTS = {
    "body": (
        "CREATE OR REPLACE FUNCTION lock.vacuum() RETURNS bigint LANGUAGE plpgsql AS $$BEGIN RETURN 0; END$$",
        "the body of lock.vacuum() is not the one that was installed",
    ),
    "missing": ("DROP FUNCTION lock.vacuum()", "lock.vacuum() is missing"),
    "overload": (
        "CREATE FUNCTION lock.exclusive(bigint) RETURNS void LANGUAGE sql AS 'SELECT'",
        "lock.exclusive(bigint) was not installed by a step, and calls may reach it instead",
    ),
}


@pytest.mark.parametrize("drift", FUNCTION_DRIFTS)
@pytest.mark.parametrize("server", ["postgresql15", "yugabytedb"])
def test_drift_of_functions(
    fresh: Fresh, server: str, drift: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Autogenerate and `alembic check`, which don't compare them, say so, too."""
    url = fresh(server, "psycopg2")
    Project(tmp_path, url, "directives").upgrade()
    command, sentence = FUNCTION_DRIFTS[drift]
    run(url, command)
    assert drifts(url) == [sentence]
    caplog.clear()
    with connected(url) as connection:
        compare_metadata(MigrationContext.configure(connection), sa.MetaData())
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [f"Drift: {sentence}"]


@pytest.mark.parametrize(("server", "driver"), [("mysql", "pymysql"), ("mariadb", "mariadb+pymysql")])
def test_changed_storage_types_and_keys(fresh: Fresh, server: str, driver: str, tmp_path: Path) -> None:
    url = fresh(server, driver)
    Project(tmp_path, url, "directives").upgrade()
    run(url, "ALTER TABLE lock_locked_keys ENGINE=MyISAM")
    assert drifts(url) == ["the engine of `lock_locked_keys` is MyISAM, not InnoDB"]
    run(url, "ALTER TABLE lock_locked_keys ENGINE=InnoDB, CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci")
    assert drifts(url) == ["the collate of `lock_locked_keys` is utf8mb4_general_ci, not utf8mb4_bin"]
    run(url, "ALTER TABLE lock_locked_keys COLLATE utf8mb4_bin, MODIFY ts DATETIME(3) NULL")
    assert drifts(url) == ["`lock_locked_keys`.ts is DATETIME(3), not DATETIME(6)", "`lock_locked_keys`.ts allows NULL"]
    run(url, "ALTER TABLE lock_locked_keys MODIFY ts DATETIME(6) NOT NULL, DROP PRIMARY KEY, ADD PRIMARY KEY (ts)")
    assert drifts(url) == ["the primary key of `lock_locked_keys` is (ts), not (key)"]
    run(url, "ALTER TABLE lock_task_state MODIFY owner VARCHAR(255) COLLATE utf8mb4_general_ci")
    assert drifts(url)[1:] == ["the collation of `lock_task_state`.owner is utf8mb4_general_ci"]


#: The engines that can alter tables, with the variant whose keys are a table.
ALTERED = [
    ("postgresql15", "psycopg", "table"),
    ("yugabytedb", "yugabytedb", "native"),
    ("mysql", "pymysql", "native"),
    ("mariadb", "mariadb+pymysql", "native"),
]


@pytest.fixture(params=ALTERED, ids=lambda param: param[0])
def altered(request: pytest.FixtureRequest, fresh: Fresh, tmp_path: Path) -> URL:
    server, driver, locking = request.param
    url = fresh(server, driver)
    Project(tmp_path, url, "directives", locking=locking).upgrade()
    return url


def family(url: URL) -> Family:
    return backend_for(url.get_dialect()()).family


def shown(url: URL, name: str) -> str:
    return f"`{table(url, name)}`" if family(url) == "mysql" else table(url, name)


def test_every_missing_table_is_reported(altered: URL) -> None:
    names = [name for name in tables(family(altered)) if name != "installed"]
    run(altered, *(f"DROP TABLE {table(altered, name)}" for name in reversed(names)))
    assert {f"{shown(altered, name)} is missing" for name in names} <= set(drifts(altered))


def test_changed_columns_are_reported(altered: URL) -> None:
    run(altered, f"ALTER TABLE {table(altered, 'locked_keys')} DROP COLUMN ts, ADD COLUMN who varchar(10)")
    change = "MODIFY error text NOT NULL" if family(altered) == "mysql" else "ALTER error SET NOT NULL"
    run(altered, f"ALTER TABLE {table(altered, 'job')} {change}")
    keys = shown(altered, "locked_keys")
    assert drifts(altered) == [
        f"{keys} has lost its column ts",
        f"{keys} has a column who that no step created",
        f"{shown(altered, 'job')}.error does not allow NULL",
    ]


def test_missing_indexes_are_reported(altered: URL) -> None:
    """An index, and a unique constraint."""
    before = "" if family(altered) == "postgresql" else "lock_"
    job, semaphore = (table(altered, name) for name in ("job", "semaphore"))
    if family(altered) == "postgresql":
        run(altered, "DROP INDEX lock.job_ready", f"ALTER TABLE {semaphore} DROP CONSTRAINT semaphore_by_name")
    else:
        run(altered, f"DROP INDEX lock_job_ready ON {job}", f"DROP INDEX lock_semaphore_by_name ON {semaphore}")
    assert drifts(altered) == [
        f"{shown(altered, name)} has lost its index {before}{index}"
        for name, index in (("job", "job_ready"), ("semaphore", "semaphore_by_name"))
    ]


def test_nulls_keys_and_unique_constraints_on_sqlite(
    fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite alters no columns: the table is replaced."""
    url = fresh("sqlite", "pysqlite")
    Project(tmp_path, url, "directives").upgrade()
    monkeypatch.setattr(load("0001"), "INDEXES", {**load("0001").INDEXES, "task_state": ("lone", "pair")})
    made = catalog(url)["lock_task_state"]
    for old, new in (
        ("acquired BOOLEAN NOT NULL", "acquired BOOLEAN"),
        ("owner VARCHAR(255)", "owner VARCHAR(255) NOT NULL"),
        ("PRIMARY KEY (queue_id, id)", "CONSTRAINT lock_pair UNIQUE (owner, id), PRIMARY KEY (id)"),
    ):
        assert old in made
        made = made.replace(old, new)
    run(url, "DROP TABLE lock_task_state", made)
    assert drifts(url) == [
        '"lock_task_state".acquired allows NULL',
        '"lock_task_state".owner does not allow NULL',
        'the primary key of "lock_task_state" is (id), not (queue_id, id)',
        '"lock_task_state" has lost its index lock_lone',
    ]


def test_a_missing_view_is_reported(postgresql: URL, tmp_path: Path) -> None:
    Project(tmp_path, postgresql, "directives").upgrade()
    run(postgresql, "DROP VIEW lock.locked_keys")
    assert drifts(postgresql) == ["lock.locked_keys is missing"]


def test_a_prefix_that_needs_escaping_is_refused(fresh: Fresh) -> None:
    with connected(fresh("sqlite", "pysqlite")) as connection, pytest.raises(ValueError, match="refused"):
        check(connection, prefix="lock; --")

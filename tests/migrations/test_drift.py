"""The drift check finds what was changed by hand, and says nothing of what was not."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from sqlalchemy_locks.alembic import check

from .project import Fresh, Project, connected, run


def drifts(url: URL, **place: str) -> list[str]:
    with connected(url) as connection:
        return check(connection, **place)


def test_no_drift(project: Project, url: URL) -> None:
    project.upgrade()
    assert drifts(url) == []


def test_nothing_installed(url: URL) -> None:
    (sentence,) = drifts(url)
    assert "installed" in sentence
    assert "is missing" in sentence


def test_a_step_that_was_not_finished(project: Project, url: URL) -> None:
    project.upgrade()
    run(url, f"DELETE FROM {table(url, 'installed')}")
    (sentence,) = drifts(url)
    assert "no step was installed to its end" in sentence


def test_a_newer_step(project: Project, url: URL) -> None:
    project.upgrade()
    run(url, f"INSERT INTO {table(url, 'installed')} VALUES ('9999', 'revisions')")
    (sentence,) = drifts(url)
    assert sentence.startswith("step 9999 was installed by a newer release")


def table(url: URL, name: str) -> str:
    return f"lock.{name}" if url.get_backend_name() in ("postgresql", "yugabytedb") else f"lock_{name}"


FUNCTION_DRIFTS = {
    "body": (
        "CREATE OR REPLACE FUNCTION lock.exclusive(key bigint, allow_stale boolean DEFAULT false) RETURNS void "
        "LANGUAGE plpgsql AS $$BEGIN END$$",
        "the body of lock.exclusive(bigint, boolean) is not the one that was installed",
    ),
    "missing": ("DROP FUNCTION lock.vacuum()", "lock.vacuum() is missing"),
    "security": (
        "ALTER FUNCTION lock.unlock(bigint) SECURITY DEFINER",
        "the security of lock.unlock(bigint): DEFINER, not INVOKER",
    ),
    "volatility": (
        "ALTER FUNCTION lock.key(text[]) STABLE",
        "the volatility of lock.key(text[]): s, not i",
    ),
    "settings": (
        "ALTER FUNCTION lock.try_shared(bigint, boolean) SET lock_timeout = '10s'",
        "the settings of lock.try_shared(bigint, boolean): ['lock_timeout=10s'], not [{}]",
    ),
    "overload": (
        "CREATE FUNCTION lock.exclusive(bigint) RETURNS void LANGUAGE sql AS 'SELECT'",
        "lock.exclusive(bigint) is not ours, and calls may reach it instead of ours",
    ),
    "column": (
        "ALTER TABLE lock.installed DROP COLUMN door CASCADE",
        "lock.installed has lost its column door",
    ),
}


@pytest.mark.parametrize("drift", FUNCTION_DRIFTS)
@pytest.mark.parametrize(
    ("server", "locking"),
    [("postgresql15", "native"), ("postgresql15", "table"), ("postgresql18", "native"), ("yugabytedb", "native")],
)
def test_drift_on_postgresql(fresh: Fresh, server: str, locking: str, drift: str, tmp_path: Path) -> None:
    url = fresh(server, "psycopg2")
    Project(tmp_path, url, "directives", locking=locking).upgrade()
    command, sentence = FUNCTION_DRIFTS[drift]
    run(url, command)
    wanted = {"yugabytedb": "'lock_timeout=100ms'", "table": "'lock_timeout=1ms'"}
    assert drifts(url) == [sentence.format(wanted.get(server) or wanted.get(locking, ""))]


@pytest.mark.parametrize(
    ("server", "driver"), [("postgresql18", "psycopg"), ("mysql", "pymysql"), ("mariadb", "mariadb+pymysql")]
)
def test_drift_of_a_table(fresh: Fresh, server: str, driver: str, tmp_path: Path) -> None:
    url = fresh(server, driver)
    project = Project(tmp_path, url, "directives", **({"locking": "table"} if server == "postgresql18" else {}))
    project.upgrade()
    keys = table(url, "locked_keys")
    quoted = keys if server == "postgresql18" else f"`{keys}`"
    run(url, f"ALTER TABLE {keys} DROP COLUMN ts, ADD COLUMN who varchar(10)")
    assert drifts(url) == [f"{quoted} has lost its column ts", f"{quoted} has a column who that no step made"]
    run(url, f"DROP TABLE {keys}")
    # on PostgreSQL nothing says any more that it was a table: the bodies then differ, too
    assert f"{quoted} is missing" in drifts(url)


@pytest.mark.parametrize(("server", "driver"), [("mysql", "pymysql"), ("mariadb", "mariadb+pymysql")])
def test_drift_of_storage_types_and_keys(fresh: Fresh, server: str, driver: str, tmp_path: Path) -> None:
    url = fresh(server, driver)
    Project(tmp_path, url, "directives").upgrade()
    run(url, "ALTER TABLE lock_locked_keys ENGINE=MyISAM")
    assert drifts(url) == ["the engine of `lock_locked_keys` is MyISAM, not InnoDB"]
    run(url, "ALTER TABLE lock_locked_keys ENGINE=InnoDB, CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci")
    assert drifts(url) == ["the collate of `lock_locked_keys` is utf8mb4_general_ci, not utf8mb4_bin"]
    run(url, "ALTER TABLE lock_locked_keys COLLATE utf8mb4_bin, MODIFY ts DATETIME(3) NULL")
    assert drifts(url) == [
        "`lock_locked_keys`.ts is DATETIME(3), not DATETIME(6)",
        "`lock_locked_keys`.ts allows NULL",
    ]
    run(url, "ALTER TABLE lock_locked_keys MODIFY ts DATETIME(6) NOT NULL, DROP PRIMARY KEY, ADD PRIMARY KEY (ts)")
    assert drifts(url) == ["the primary key of `lock_locked_keys` is ['ts'], and not its first column"]


def test_drift_on_sqlite(fresh: Fresh, tmp_path: Path) -> None:
    url = fresh("sqlite", "pysqlite")
    Project(tmp_path, url, "directives").upgrade()
    run(url, "ALTER TABLE lock_locked_keys DROP COLUMN ts")
    assert drifts(url) == ['"lock_locked_keys" has lost its column ts']


def test_drift_of_the_view(postgresql: URL, tmp_path: Path) -> None:
    Project(tmp_path, postgresql, "directives").upgrade()
    run(postgresql, "DROP VIEW lock.locked_keys", "CREATE VIEW lock.locked_keys AS SELECT 1 AS key")
    assert drifts(postgresql) == ["the view lock.locked_keys has the columns key, not key, ts, pid, mode"]
    run(postgresql, "DROP VIEW lock.locked_keys")
    assert drifts(postgresql) == ["lock.locked_keys is missing"]


def test_the_check_only_reads(project: Project, url: URL) -> None:
    project.upgrade()
    sqlite = url.get_backend_name() == "sqlite"
    with connected(url) as connection:
        connection.exec_driver_sql("PRAGMA query_only = ON" if sqlite else "START TRANSACTION READ ONLY")
        assert check(connection) == []


def test_a_table_name_that_is_none_is_refused(fresh: Fresh) -> None:
    with connected(fresh("sqlite", "pysqlite")) as connection, pytest.raises(ValueError, match="refused"):
        check(connection, prefix="lock; --")

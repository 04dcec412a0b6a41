"""The findings of ``check``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.pool import NullPool

from sqlalchemy_locks import health
from sqlalchemy_locks.dialects import findings
from tests.cli.conftest import Cli
from tests.conftest import PLAIN, Servers, install


def found(cli: Cli, subject: str, code: int = 0) -> list[tuple[str, str]]:
    told = cli.json("check", code=code)["findings"]
    return [(each["level"], each["says"]) for each in told if each["subject"] == subject]


def executed(url: str, *commands: str) -> None:
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        for command in commands:
            connection.exec_driver_sql(command)


@pytest.mark.parametrize("engine", ["postgresql18", "yugabytedb"])
def test_check_reports_all_is_well(engine: str, servers: Servers) -> None:
    url = servers.installed(engine, PLAIN[engine])
    ((level, says),) = found(Cli(url), "idle transactions")
    assert (level, "idle_in_transaction_session_timeout" in says) == ("warning", True)
    cli = Cli(option(url, "-c idle_in_transaction_session_timeout=1min"))
    assert cli.json("check")["warnings"] == 0
    done = cli("check")
    assert done.stdout.splitlines()[-1] == "All is well"
    assert done.stderr == ""
    if engine == "yugabytedb":
        assert "YugabyteDB 2.25.2.0" in done.stdout
        assert found(cli, "effective isolation") == [("ok", "READ COMMITTED is in force")]


def test_check_reports_drift_and_missing_index(servers: Servers) -> None:
    url = servers.fresh("postgresql15", "psycopg")
    install(url)
    cli = Cli(url)
    executed(
        url,
        "CREATE OR REPLACE FUNCTION lock.unlock(key bigint) RETURNS void LANGUAGE plpgsql AS $$BEGIN END$$",
        "DROP INDEX lock.permit_held",
        "ALTER TABLE lock.task DROP COLUMN claim",
    )
    done = cli("check", code=1)
    assert "locks don't work here as promised" in done.stdout
    assert ("problem", "lock.permit has lost its index permit_held") in found(cli, "index", 1)
    sentences = [says for _, says in found(cli, "drift", 1)]
    assert "lock.task has lost its column claim" in sentences
    assert "the body of lock.unlock(bigint) is not the one that was installed" in sentences


def test_check_reports_isolation_level(postgresql: Cli) -> None:
    assert found(postgresql, "isolation") == [("ok", "sessions begin at READ COMMITTED")]
    stale = Cli(option(postgresql.url, r"-c default_transaction_isolation=repeatable\ read"))
    ((level, says),) = found(stale, "isolation")
    assert level == "warning"
    assert "REPEATABLE READ" in says


def test_check_reports_effective_isolation(servers: Servers) -> None:
    url = servers.fresh("yugabytedb", "psycopg2")
    install(url)
    function = "pg_catalog.yb_get_effective_transaction_isolation_level()"
    told = "CREATE OR REPLACE FUNCTION {} RETURNS text LANGUAGE SQL STABLE AS '{}'"
    try:
        executed(url, told.format(function, "SELECT ''repeatable read''"))
        ((level, says),) = found(Cli(url), "effective isolation", 1)
    finally:
        executed(url, told.format(function, "SELECT current_setting(''transaction_isolation'')"))
    assert level == "problem"
    assert "effectively REPEATABLE READ" in says
    assert "yb_enable_read_committed_isolation" in says


def test_check_reports_read_only(postgresql: Cli) -> None:
    ((level, says),) = found(Cli(option(postgresql.url, "-c default_transaction_read_only=on")), "writable", 1)
    assert level == "problem"
    assert "read-only" in says


def test_check_reports_standby(servers: Servers) -> None:
    _, standby = servers.pair()
    ((level, says),) = found(Cli(standby.url("psycopg")), "writable", 1)
    assert level == "problem"
    assert "standby" in says


def option(url: str, options: str) -> str:
    return make_url(url).update_query_dict({"options": options}).render_as_string(hide_password=False)


def test_check_reports_unwritable_file(sqlite: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(sqlite, "writable") == [("ok", "the file is writable")]
    # root may write to everything
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    ((level, says),) = found(sqlite, "writable", 1)
    assert level == "problem"
    assert "can't be written to" in says


def test_check_warns_of_mysql_defaults(servers: Servers) -> None:
    for engine in ("mysql", "mariadb"):
        cli = Cli(servers.installed(engine, PLAIN[engine]))
        ((level, says),) = found(cli, "isolation")
        assert (level, "REPEATABLE READ" in says) == ("warning", True)
        assert [level for level, _ in found(cli, "settings")] == ["ok"]
        ((level, says),) = found(cli, "idle transactions")
        assert (level, "for 28800 seconds" in says) == ("warning", True)
        assert "Locks work here" in cli("check").stdout


@pytest.mark.parametrize("hours", [-1, 1])
def test_check_warns_of_clock_difference(hours: int, sqlite: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(sqlite, "clock")[0][0] == "ok"
    here = time.time
    monkeypatch.setattr(health.time, "time", lambda: here() + hours * 3600)
    ((level, says),) = found(sqlite, "clock")
    assert level == "warning"
    assert "Locks are not affected" in says


@pytest.mark.parametrize(
    ("name", "spelt", "level"),
    [
        ("PostgreSQL", "11.22", "problem"),
        ("PostgreSQL", "12.1", "problem"),
        ("PostgreSQL", "15.1", "ok"),
        ("MySQL", "8.0.12", "problem"),
        ("MySQL", "8.0.13", "ok"),
        ("MySQL", "9.7.4", "ok"),
        ("MariaDB", "10.5.20", "problem"),
        ("MariaDB", "10.11.19", "ok"),
        ("SQLite", "3.34.1", "problem"),
        ("SQLite", "3.35.0", "ok"),
        ("YugabyteDB", "2.20.1", "ok"),
    ],
)
def test_check_reports_old_versions(name: str, spelt: str, level: str) -> None:
    finding: Any = findings.version_finding(name, spelt)
    assert (finding.level, spelt in finding.says) == (level, True)


def test_examine_reports_a_missing_installation(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/a.db", poolclass=NullPool)
    with engine.connect() as connection:
        problems = [each for each in health.examine(connection) if each.level == "problem"]
    assert [each.subject for each in problems] == ["installed"]

"""Missing privileges are found, and the reported GRANTs fix them."""

from __future__ import annotations

import os
import re

import pytest
from sqlalchemy import make_url

import sqlalchemy_locks as sl
from sqlalchemy_locks.alembic.steps import STEPS, load
from tests.cli.conftest import Cli
from tests.cli.test_check import executed, found
from tests.conftest import PLAIN, Servers, install

POSTGRESQL = [("postgresql15", "native"), ("postgresql18", "table"), ("yugabytedb", "native")]
INNODB = ["mysql", "mariadb"]


def as_user(url: str, user: str, password: str | None = None) -> Cli:
    return Cli(make_url(url).set(username=user, password=password).render_as_string(hide_password=False))


def of_postgresql(servers: Servers, engine: str, locking: str = "native") -> tuple[str, str, Cli]:
    """A database that was installed for a role: its URL, the role, and the commands run as that role."""
    url = servers.fresh(engine, PLAIN[engine])
    role = f"App-{make_url(url).database}"
    executed(url, f'CREATE ROLE "{role}" LOGIN')
    install(url, grant_to=role, locking=locking)
    return url, f'"{role}"', as_user(url, role)


def of_innodb(servers: Servers, engine: str) -> tuple[str, str, Cli]:
    url = servers.fresh(engine, PLAIN[engine])
    user = f"app_{make_url(url).database}"
    executed(url, f"CREATE USER '{user}'@'%%' IDENTIFIED BY 'x'")
    install(url, grant_to=user)
    return url, f"'{user}'@'%%'", as_user(url, user, "x")


def grants(told: list[tuple[str, str]]) -> list[str]:
    return [re.search(r"GRANT .*", says)[0] for _, says in told]  # type: ignore[index]


def mend(url: str, told: list[tuple[str, str]]) -> None:
    executed(url, *(grant.replace("%", "%%") for grant in grants(told)))


@pytest.mark.parametrize(("engine", "locking"), POSTGRESQL)
def test_each_privilege_of_postgresql(engine: str, locking: str, servers: Servers) -> None:
    url, role, cli = of_postgresql(servers, engine, locking)
    assert [level for level, _ in found(cli, "privileges")] == ["ok"]
    keys = "lock.locked_keys"
    rows = locking == "table" or engine == "yugabytedb"
    for privilege, on, named in [
        ("USAGE", "SCHEMA lock", "the schema lock"),
        ("EXECUTE", "FUNCTION lock.semaphore_take_back(bigint)", "lock.semaphore_take_back(bigint)"),
        ("EXECUTE", "FUNCTION lock.key(text[])", "lock.key(text[])"),
        ("INSERT", "lock.job", "lock.job"),
        ("UPDATE", "lock.permit", "lock.permit"),
        ("DELETE", "lock.task_timeout", "lock.task_timeout"),
        ("SELECT", "lock.semaphore_history", "lock.semaphore_history"),
        *([("UPDATE", keys, keys)] if rows else []),
    ]:
        executed(url, f"REVOKE {privilege} ON {on} FROM {role}")
        told = found(cli, "privileges", 1)
        assert told == [("problem", f"{role} lacks {privilege} on {named}: GRANT {privilege} ON {on} TO {role}")]
        mend(url, told)
        assert [level for level, _ in found(cli, "privileges")] == ["ok"]


@pytest.mark.parametrize(("engine", "locking"), POSTGRESQL)
def test_row_level_security(engine: str, locking: str, servers: Servers) -> None:
    url, role, cli = of_postgresql(servers, engine, locking)
    for table in ("job", "installed"):
        executed(url, f"ALTER TABLE lock.{table} ENABLE ROW LEVEL SECURITY")
        ((level, says),) = found(cli, "privileges", 1)
        assert level == "problem"
        mending = f"ALTER TABLE lock.{table} DISABLE ROW LEVEL SECURITY"
        assert re.fullmatch(rf"row-level security may hide rows of lock\.{table} from {role}, .*: {mending}", says)
        # the tables' owner, to whom it doesn't apply
        assert [level for level, _ in found(Cli(url), "privileges")] == ["ok"]
        executed(url, mending)
        assert [level for level, _ in found(cli, "privileges")] == ["ok"]


def test_partitioned_table_counts_once(servers: Servers) -> None:
    url, role, cli = of_postgresql(servers, "postgresql15")
    executed(
        url,
        "ALTER TABLE lock.task_timeout RENAME TO before",
        "CREATE TABLE lock.task_timeout (LIKE lock.before INCLUDING DEFAULTS) PARTITION BY LIST (id)",
    )
    ((level, says),) = found(cli, "privileges", 1)
    assert (level, says.partition(": ")[0]) == (
        "problem",
        f"{role} lacks SELECT, INSERT, UPDATE, DELETE on lock.task_timeout",
    )


def test_privileges_only_check_needs(servers: Servers) -> None:
    url, role, cli = of_postgresql(servers, "postgresql15")
    executed(url, f"REVOKE SELECT ON lock.locked_keys FROM {role}")
    assert [level for level, _ in found(cli, "privileges")] == ["warning"]
    assert [level for level, _ in found(cli, "drift")] == ["ok"]
    executed(url, f"REVOKE SELECT ON lock.installed FROM {role}")
    told = found(cli, "privileges")
    assert grants(told) == [f"GRANT SELECT ON lock.installed, lock.locked_keys TO {role}"]
    ((level, says),) = found(cli, "installed")
    assert (level, "takes the SELECT" in says) == ("warning", True)
    mend(url, told)
    assert cli("check").stdout.splitlines()[-1] == "All is well"


@pytest.mark.parametrize(("engine", "locking"), POSTGRESQL)
def test_reported_grants_fix_a_role(engine: str, locking: str, servers: Servers) -> None:
    url, _, app = of_postgresql(servers, engine, locking)
    stranger = f"stranger_{make_url(url).database}"
    executed(url, f"CREATE ROLE {stranger} LOGIN")
    cli = as_user(url, stranger)
    told = found(cli, "privileges", 1)
    assert any("EXECUTE on 17 functions" in says for _, says in told)
    mend(url, told)
    assert cli.json("check")["findings"][1:] == app.json("check")["findings"][1:]
    with cli.locks.exclusive("a"):
        assert cli.locks.run(sl.semaphore.create("s", 1))


@pytest.mark.parametrize("engine", INNODB)
def test_each_privilege_of_mysql_and_mariadb(engine: str, servers: Servers) -> None:
    url, user, cli = of_innodb(servers, engine)
    quoted = user.replace("'", "`").replace("%%", "%")
    shown = user.replace("'", "").replace("%%", "%")
    # the privileges of grant_to suffice for locks, but not to compare the installed objects
    only_looks = f"{shown} lacks SELECT on `lock_installed`: GRANT SELECT ON `lock_installed` TO {quoted}"
    assert found(cli, "privileges") == [("warning", only_looks)]
    assert [level for level, _ in found(cli, "installed")] == ["warning"]
    mend(url, found(cli, "privileges"))
    assert [level for level, _ in found(cli, "privileges")] == ["ok"]
    assert [level for level, _ in found(cli, "drift")] == ["ok"]
    for privilege, table in [("SELECT", "job"), ("INSERT", "permit"), ("UPDATE", "locked_keys"), ("DELETE", "task")]:
        executed(url, f"REVOKE {privilege} ON lock_{table} FROM {user}")
        told = found(cli, "privileges", 1)
        grant = f"GRANT {privilege} ON `lock_{table}` TO {quoted}"
        assert told == [("problem", f"{shown} lacks {privilege} on `lock_{table}`: {grant}")]
        mend(url, told)
        assert [level for level, _ in found(cli, "privileges")] == ["ok"]


@pytest.mark.parametrize("engine", INNODB)
def test_privileges_by_role_or_database(engine: str, servers: Servers) -> None:
    url = servers.fresh(engine, PLAIN[engine])
    database = make_url(url).database
    user, role = f"app_{database}", f"role_{database}"
    tables = [f"lock_{table}" for step in STEPS for table in load(step).TABLES["mysql"]]
    install(url)
    executed(
        url,
        f"CREATE ROLE '{role}'",
        *(f"GRANT SELECT, INSERT ON {table} TO '{role}'" for table in tables),
        f"CREATE USER '{user}'@'%%' IDENTIFIED BY 'x'",
        f"GRANT '{role}' TO '{user}'@'%%'",
        f"SET DEFAULT ROLE '{role}' {'TO' if engine == 'mysql' else 'FOR'} '{user}'@'%%'",
        f"GRANT UPDATE ON `{str(database).replace('_', chr(92) + '_')}`.* TO '{user}'@'%%'",
    )
    told = found(as_user(url, user, "x"), "privileges", 1)
    assert {says.partition(" lacks ")[2].partition(" on ")[0] for _, says in told} == {"DELETE"}
    mend(url, told)
    assert [level for level, _ in found(as_user(url, user, "x"), "privileges")] == ["ok"]


def test_check_writes_nothing(servers: Servers) -> None:
    url, _, cli = of_innodb(servers, "mariadb")
    executed(url, "INSERT INTO lock_locked_keys (`key`) VALUES (1)", "INSERT INTO lock_task (id) VALUES ('a')")
    cli("check")
    locks = Cli(url).locks
    with locks._engine.connect() as connection:
        for table in ("locked_keys", "task"):
            assert connection.exec_driver_sql(f"SELECT COUNT(*) FROM lock_{table}").scalar() == 1


def test_unwritable_folder_is_reported(sqlite: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(make_url(sqlite.url).database)
    # root may write to everything
    monkeypatch.setattr(os, "access", lambda path, mode: path == file)
    ((level, says),) = found(sqlite, "writable", 1)
    assert (level, "journal: chmod u+w" in says) == ("problem", True)
    # existing tables can be written to
    executed(sqlite.url, "PRAGMA journal_mode = wal")
    try:
        monkeypatch.setattr(os, "access", lambda path, mode: path.startswith(file))
        assert [level for level, _ in found(sqlite, "writable")] == ["ok"]
    finally:
        monkeypatch.undo()
        executed(sqlite.url, "PRAGMA journal_mode = delete")

"""What the user of the connection may not do."""

from __future__ import annotations

import os

import pytest
from sqlalchemy import make_url

from tests.cli.conftest import Cli
from tests.cli.test_check import executed, found
from tests.conftest import PLAIN, Servers, install


@pytest.mark.parametrize("engine", ["postgresql15", "mysql", "mariadb"])
def test_a_user_without_the_privilege_to_read_the_installation(engine: str, servers: Servers) -> None:
    url = servers.fresh(engine, PLAIN[engine])
    app, stranger = f"app_{make_url(url).database}", f"stranger_{make_url(url).database}"
    for user in (app, stranger):
        create = f"CREATE ROLE {user} LOGIN" if engine == "postgresql15" else f"CREATE USER '{user}' IDENTIFIED BY 'x'"
        executed(url, create)
    install(url, grant_to=app)
    if engine != "postgresql15":
        executed(url, f"GRANT SELECT ON lock_job TO '{stranger}'")
    cli = {
        user: Cli(make_url(url).set(username=user, password="x").render_as_string(False)) for user in (app, stranger)
    }
    assert [level for level, _ in found(cli[app], "drift")] == ["ok"]
    ((level, says),) = found(cli[stranger], "installed", 1)
    assert (level, "install --grant-to" in says) == ("problem", True)


@pytest.mark.parametrize("engine", ["postgresql15", "yugabytedb", "mysql", "mariadb"])
def test_what_a_user_lacks_is_named(engine: str, servers: Servers) -> None:
    url = servers.fresh(engine, PLAIN[engine])
    app = f"app_{make_url(url).database}"
    innodb = engine in ("mysql", "mariadb")
    executed(url, f"CREATE USER '{app}' IDENTIFIED BY 'x'" if innodb else f"CREATE ROLE {app} LOGIN")
    install(url, grant_to=app)
    cli = Cli(make_url(url).set(username=app, password="x").render_as_string(False))
    assert found(cli, "privileges") == []
    job, worker = ("lock_job", "lock_worker") if innodb else ("lock.job", "lock.worker")
    lacks = {f"UPDATE on {job}", f"INSERT on {worker}", f"DELETE on {worker}"}
    of = f"'{app}'@'%%'" if innodb else app
    executed(url, *(f"REVOKE {privilege} FROM {of}" for privilege in lacks))
    if not innodb:
        executed(url, f"REVOKE EXECUTE ON FUNCTION lock.exclusive(bigint, boolean, integer) FROM {app}")
        lacks.add("EXECUTE on lock.exclusive")
    ((level, says),) = found(cli, "privileges", 1)
    lacking, _, hint = says.removeprefix("the user of this connection lacks ").partition(": ")
    assert (level, {*lacking.split(", ")}, "--grant-to" in hint) == ("problem", lacks, True)


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

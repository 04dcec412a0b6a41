"""grant_to: a role gets what the locks need, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import URL

import sqlalchemy_locks as sl
from sqlalchemy_locks.alembic import check
from sqlalchemy_locks.alembic.script import Family
from sqlalchemy_locks.alembic.steps import STEPS, load
from tests.alembic.project import Fresh, Project, connected, functions, run

CALLS = (
    "SELECT lock.exclusive(1)",
    "SELECT lock.shared(2)",
    "SELECT lock.try_exclusive(3)",
    "SELECT lock.try_shared(4)",
    "SELECT lock.unlock(1)",
    "SELECT lock.vacuum()",
    "SELECT lock.create('{1,2}')",
    "SELECT lock.key('a', 'b')",
    "SELECT lock.exclusive(lock.key('a'), true)",
    "SELECT key, ts FROM lock.locked_keys",
    "SELECT step, installed_by FROM lock.installed",
)

FORBIDDEN = (
    "INSERT INTO lock.installed VALUES ('9999', 'x', '')",
    "DELETE FROM lock.installed",
    "CREATE TABLE lock.mine (id int)",
    "DROP FUNCTION lock.vacuum()",
    "TRUNCATE lock.locked_keys",
    "ALTER TABLE lock.installed ADD x int",
)


def used(table: str, column: str) -> list[str]:
    """Commands that use the rows of a table."""
    return [
        f"SELECT * FROM {table} FOR UPDATE",
        f"INSERT INTO {table} SELECT * FROM {table} WHERE 1 = 0",
        f"UPDATE {table} SET {column} = {column}",
        f"DELETE FROM {table}",
    ]


def misused(table: str) -> list[str]:
    return [f"DROP TABLE {table}", f"ALTER TABLE {table} ADD x int"]


def allowed(url: URL, *commands: str) -> list[str]:
    """Return the commands that are not refused."""
    found = []
    with connected(url) as connection:
        for command in commands:
            try:
                connection.exec_driver_sql(command).close()
            except sa.exc.DBAPIError as error:
                if any(word in str(error) for word in ("permission denied", "must be owner", "is not a table")):
                    continue
            found.append(command)
    return found


def rows(family: Family) -> dict[str, str]:
    """The tables whose rows the app may write, except `locked_keys`, and a column of each."""
    every = {k: next(iter(v)) for step in STEPS for k, v in load(step).TABLES[family].items()}
    quote = "`" if family == "mysql" else '"'
    return {k: f"{quote}{v}{quote}" for k, v in every.items() if k not in ("installed", "locked_keys")}


def executable(url: URL) -> list[str]:
    """The shipped functions that the user may execute."""
    query = "SELECT oid FROM pg_proc WHERE proname = '{}' AND oidvectortypes(proargtypes) = '{}' AND {}"
    ours = "pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = 'lock')"
    may = "has_function_privilege(oid, 'EXECUTE')"
    with connected(url) as connection:
        return [
            name
            for name, takes in functions().items()
            if connection.exec_driver_sql(query.format(name, takes, f"{ours} AND {may}")).all()
        ]


@pytest.mark.parametrize(
    ("server", "driver", "locking", "door"),
    [
        ("postgresql15", "psycopg", "native", "directives"),
        ("postgresql18", "psycopg", "table", "revisions"),
        ("yugabytedb", "yugabytedb", "native", "directives"),
    ],
)
def test_privileges_of_a_postgresql_role_suffice(
    fresh: Fresh, server: str, driver: str, locking: str, door: str, tmp_path: Path
) -> None:
    url = fresh(server, driver)
    number = str(url.database)
    app, other, stranger = f"app-{number}@project.iam", f"Other_{number}", f"stranger_{number}"
    run(url, *(f'CREATE ROLE "{role}" LOGIN' for role in (app, other, stranger)))
    both = f"{app}, {other}" if door == "revisions" else [app, other]
    Project(tmp_path, url, door, grant_to=both, locking=locking).upgrade()
    names = {f"lock.{name}": column for name, column in rows("postgresql").items()}
    calls = [*CALLS, *(call for name, column in names.items() for call in used(name, column))]
    forbidden = [*FORBIDDEN, *(call for name in names for call in [*misused(name), f"TRUNCATE {name}"])]
    locks = sl.Locks(sa.create_engine(url.set(username=app), poolclass=sa.NullPool))
    with locks.lease("nightly-import", ttl=3600, timeout=0) as grant:
        grant.check()
    assert set(locks.maintain().done) >= {"orphans", "leases"}
    for role in (app, other):
        run(url.set(username=role), *calls)
        assert allowed(url.set(username=role), *forbidden) == []
        assert executable(url.set(username=role)) == [*functions()]
        with connected(url.set(username=role)) as connection:
            assert check(connection) == []
    # USAGE of the schema alone doesn't allow more
    for entered in (False, True):
        if entered:
            run(url, f'GRANT USAGE ON SCHEMA lock TO "{stranger}"')
        assert allowed(url.set(username=stranger), *calls) == []
        assert executable(url.set(username=stranger)) == []


@pytest.mark.parametrize(
    ("server", "driver", "door"), [("mysql", "pymysql", "revisions"), ("mariadb", "mariadb+pymysql", "directives")]
)
def test_privileges_of_a_mysql_user_suffice(fresh: Fresh, server: str, driver: str, door: str, tmp_path: Path) -> None:
    url = fresh(server, driver)
    app, role = f"app_{url.database}", f"r_{url.database}"
    run(
        url,
        f"CREATE USER '{app}'@'127.0.0.%%' IDENTIFIED BY 'x'",
        f"CREATE USER '{app}2'@'%%' IDENTIFIED BY 'x'",
        f"CREATE ROLE '{role}'",
        f"GRANT '{role}' TO '{app}2'@'%%'",
    )
    both = [f"{app}@127.0.0.%", role]
    Project(tmp_path, url, door, grant_to=", ".join(both) if door == "revisions" else both).upgrade()
    others = {f"`{url.database}`.lock_{name}": column for name, column in rows("mysql").items()}
    for name, first in ((app, "SELECT 1"), (f"{app}2", f"SET ROLE '{role}'")):
        user = URL.create(url.drivername, username=name, password="x", host=url.host, port=url.port)
        table = f"`{url.database}`.lock_locked_keys"
        run(
            user,
            first,
            f"INSERT INTO {table} (`key`) VALUES (1)",
            f"SELECT * FROM {table} WHERE `key` = 1 FOR UPDATE",
            f"UPDATE {table} SET `key` = `key`",
            f"DELETE FROM {table}",
            *(call for other, column in others.items() for call in used(other, column)),
        )
        for command in (
            *(call for other in others for call in misused(other)),
            f"DELETE FROM `{url.database}`.lock_installed",
            f"DROP TABLE {table}",
            f"ALTER TABLE {table} ADD x int",
            f"CREATE TABLE `{url.database}`.mine (id int)",
        ):
            with pytest.raises(sa.exc.DBAPIError, match="denied"):
                run(user, first, command)
    with connected(url.set(username=app, password="x")) as connection:
        assert check(connection) == []


def test_the_host_of_a_user_in_the_offline_script(fresh: Fresh, tmp_path: Path) -> None:
    """The percent sign of a host survives, once and not twice."""
    url = fresh("mysql", "pymysql")
    assert "TO `app`@`10.%`;" in Project(tmp_path, url, "revisions", grant_to="app@10.%").script()

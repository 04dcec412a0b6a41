"""The drift check reports what was changed by hand, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import URL

from sqlalchemy_locks.alembic import check
from sqlalchemy_locks.alembic.script import Family
from sqlalchemy_locks.alembic.steps import STEPS, load
from sqlalchemy_locks.dialects import backend_for
from tests.alembic.project import Fresh, Project, catalog, connected, functions, run, tables


def drifts(url: URL, **place: str) -> list[str]:
    with connected(url) as connection:
        return check(connection, **place)


def test_no_drift(project: Project, url: URL) -> None:
    project.upgrade()
    assert drifts(url) == []


def test_a_missing_installation_is_reported(url: URL) -> None:
    (sentence,) = drifts(url)
    assert "installed" in sentence
    assert "is missing" in sentence


def test_an_incomplete_step_is_reported(project: Project, url: URL) -> None:
    project.upgrade()
    run(url, f"DELETE FROM {table(url, 'installed')}")
    (sentence,) = drifts(url)
    assert "no step was installed completely" in sentence


def test_a_newer_step_is_reported(project: Project, url: URL) -> None:
    project.upgrade()
    run(url, f"INSERT INTO {table(url, 'installed')} VALUES ('9999', 'revisions')")
    (sentence,) = drifts(url)
    assert sentence.startswith("step 9999 was installed by a newer release")


def table(url: URL, name: str) -> str:
    return f"lock.{name}" if url.get_backend_name() in ("postgresql", "yugabytedb") else f"lock_{name}"


QUOTES = {"postgresql": "", "mysql": "`", "sqlite": '"'}

FUNCTION_DRIFTS = {
    "body": (
        "CREATE OR REPLACE FUNCTION lock.vacuum() RETURNS bigint LANGUAGE plpgsql AS $$BEGIN RETURN 0; END$$",
        "the body of lock.vacuum() is not the one that was installed",
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
        "ALTER FUNCTION lock.try_shared(bigint, boolean) RESET ALL;"
        "ALTER FUNCTION lock.try_shared(bigint, boolean) SET lock_timeout = '10s'",
        "the settings of lock.try_shared(bigint, boolean): ['lock_timeout=10s'], not [{}]",
    ),
    "overload": (
        "CREATE FUNCTION lock.exclusive(bigint) RETURNS void LANGUAGE sql AS 'SELECT'",
        "lock.exclusive(bigint) was not installed by a step, and calls may reach it instead",
    ),
    "column": (
        "ALTER TABLE lock.installed DROP COLUMN installed_by CASCADE",
        "lock.installed has lost its column installed_by",
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
    wanted = {"yugabytedb": "'lock_timeout=100ms'", "table": "'enable_seqscan=off', 'lock_timeout=1ms'"}
    assert drifts(url) == [sentence.format(wanted.get(server) or wanted.get(locking, ""))]


@pytest.mark.parametrize(
    ("server", "driver"), [("postgresql18", "psycopg"), ("mysql", "pymysql"), ("mariadb", "mariadb+pymysql")]
)
def test_changed_and_missing_tables(fresh: Fresh, server: str, driver: str, tmp_path: Path) -> None:
    url = fresh(server, driver)
    project = Project(tmp_path, url, "directives", **({"locking": "table"} if server == "postgresql18" else {}))
    project.upgrade()
    keys = table(url, "locked_keys")
    quoted = keys if server == "postgresql18" else f"`{keys}`"
    run(url, f"ALTER TABLE {keys} DROP COLUMN ts, ADD COLUMN who varchar(10)")
    assert drifts(url) == [f"{quoted} has lost its column ts", f"{quoted} has a column who that no step created"]
    run(url, f"DROP TABLE {keys}")
    # on PostgreSQL nothing shows that it was a table, so the bodies of the functions are reported as well
    assert f"{quoted} is missing" in drifts(url)


@pytest.mark.parametrize(("server", "driver"), [("mysql", "pymysql"), ("mariadb", "mariadb+pymysql")])
def test_changed_storage_types_and_keys(fresh: Fresh, server: str, driver: str, tmp_path: Path) -> None:
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
    assert drifts(url) == ["the primary key of `lock_locked_keys` is (ts), not (key)"]
    run(url, "ALTER TABLE lock_task_state MODIFY owner VARCHAR(255) COLLATE utf8mb4_general_ci")
    assert drifts(url)[1:] == ["the collation of `lock_task_state`.owner is utf8mb4_general_ci"]


#: The engines that can alter tables, with the variant whose keys are a table.
ALTERED = [
    ("postgresql15", "psycopg", "table"),
    ("postgresql18", "psycopg", "table"),
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


@pytest.mark.parametrize("server", ["postgresql15", "yugabytedb"])
def test_every_missing_function_is_reported(fresh: Fresh, server: str, tmp_path: Path) -> None:
    url = fresh(server, "psycopg2")
    Project(tmp_path, url, "directives").upgrade()
    every = [f"lock.{name}({takes})" for name, takes in functions().items()]
    run(url, *(f"DROP FUNCTION {function}" for function in every))
    assert drifts(url) == [f"{function} is missing" for function in every]


@pytest.mark.parametrize("step", STEPS)
def test_every_changed_nullability_is_reported(altered: URL, step: str) -> None:
    wanted = []
    for name, columns in load(step).TABLES[family(altered)].items():
        alter = []
        key = load(step).KEYS.get(name, (next(iter(columns)),))
        for column, type_ in columns.items():
            if column in key or name == "installed":
                continue
            bare = type_.removesuffix(" NULL")
            verb = "allows" if type_ == bare else "does not allow"
            wanted.append(f"{shown(altered, name)}.{column} {verb} NULL")
            if family(altered) == "mysql":
                alter.append(f"MODIFY `{column}` {bare} {'NULL' if type_ == bare else 'NOT NULL'}")
            else:
                alter.append(f'ALTER "{column}" {"DROP" if type_ == bare else "SET"} NOT NULL')
        if alter:
            run(altered, f"DELETE FROM {table(altered, name)}")  # a row that the step inserted may hold NULLs
            run(altered, f"ALTER TABLE {table(altered, name)} {', '.join(alter)}")
    assert wanted
    assert drifts(altered) == wanted


def test_the_column_order_of_primary_keys_is_compared(altered: URL) -> None:
    for name in load("0001").KEYS:
        command = f"ALTER TABLE {table(altered, name)} DROP {{}}, ADD PRIMARY KEY (id, queue_id)"
        run(altered, command.format("PRIMARY KEY" if family(altered) == "mysql" else f"CONSTRAINT {name}_pkey"))
    assert drifts(altered) == [
        f"the primary key of {shown(altered, name)} is (id, queue_id), not (queue_id, id)" for name in load("0001").KEYS
    ]
    for name in load("0001").KEYS:
        command = f"ALTER TABLE {table(altered, name)} DROP {{}}"
        run(altered, command.format("PRIMARY KEY" if family(altered) == "mysql" else f"CONSTRAINT {name}_pkey"))
    assert f"the primary key of {shown(altered, 'task_state')} is (), not (queue_id, id)" in drifts(altered)


def indexes(url: URL) -> set[tuple[str, str]]:
    """The indexes on the server other than primary keys: tables and names."""
    by_schema = family(url) == "postgresql"
    found = set()
    with connected(url) as connection:
        inspector = sa.inspect(connection)
        for name in tables(family(url)):
            place = (name, "lock") if by_schema else (f"lock_{name}", None)
            found |= {(name, str(index["name"])) for index in inspector.get_indexes(*place)}
            found |= {(name, str(unique["name"])) for unique in inspector.get_unique_constraints(*place)}
    return {(name, index.removeprefix("" if by_schema else "lock_")) for name, index in found}


def test_every_index_is_declared(project: Project, url: URL) -> None:
    """Only declared indexes are reported when they are missing."""
    project.upgrade()
    declared = [load(step).INDEXES.items() for step in STEPS]
    assert indexes(url) == {(name, index) for items in declared for name, names in items for index in names}


@pytest.mark.parametrize("kind", ["INDEX", "UNIQUE INDEX"])
def test_a_missing_index_is_reported(project: Project, url: URL, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    project.upgrade()
    declared = {**load("0001").INDEXES, "task_state": ("task_owner", "task_token")}
    monkeypatch.setattr(load("0001"), "INDEXES", declared)
    before = "" if family(url) == "postgresql" else "lock_"
    run(url, f"CREATE {kind} {before}task_owner ON {table(url, 'task_state')} (owner)")
    (sentence,) = drifts(url)
    assert sentence.endswith(f"task_state{QUOTES[family(url)]} has lost its index {before}task_token")
    run(url, f"CREATE {kind} {before}task_token ON {table(url, 'task_state')} (token)")
    assert drifts(url) == []


def test_a_missing_unique_constraint_is_reported(altered: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    before = "" if family(altered) == "postgresql" else "lock_"
    monkeypatch.setattr(load("0001"), "INDEXES", {**load("0001").INDEXES, "task_state": ("task_owner",)})
    assert drifts(altered) == [f"{shown(altered, 'task_state')} has lost its index {before}task_owner"]
    run(altered, f"ALTER TABLE {table(altered, 'task_state')} ADD CONSTRAINT {before}task_owner UNIQUE (owner)")
    assert drifts(altered) == []


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


def test_a_prefix_that_needs_escaping_is_refused(fresh: Fresh) -> None:
    with connected(fresh("sqlite", "pysqlite")) as connection, pytest.raises(ValueError, match="refused"):
        check(connection, prefix="lock; --")

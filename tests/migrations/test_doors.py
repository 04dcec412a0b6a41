"""Both doors, online and offline, up and down, on every engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.engine import URL

from sqlalchemy_locks.alembic import Refused
from sqlalchemy_locks.alembic.steps import STEPS

from .project import Fresh, Project, catalog, execute, installed, normal, run, statements


def test_up_down_up(project: Project, url: URL, door: str) -> None:
    project.upgrade()
    made = catalog(url)
    assert made
    assert installed(url) == [(step, door) for step in STEPS]
    project.downgrade()
    assert catalog(url) == {}
    project.upgrade()
    assert catalog(url) == made


def test_the_offline_script_makes_the_same(
    project: Project, url: URL, fresh: Fresh, engine: tuple[str, str], door: str
) -> None:
    project.upgrade()
    other = fresh(*engine)
    execute(other, project.script())
    assert catalog(other) == catalog(url)
    assert installed(other) == installed(url)
    execute(other, project.script("downgrade"))
    assert catalog(other) == {}


def test_both_doors_install_the_same(fresh: Fresh, engine: tuple[str, str], tmp_path: Path) -> None:
    made = []
    for door in ("revisions", "directives"):
        url = fresh(*engine)
        Project(tmp_path / door, url, door).upgrade()
        made.append(catalog(url))
    assert made[0] == made[1]


@pytest.mark.parametrize("second", ["revisions", "directives"])
def test_doors_are_not_mixed(url: URL, tmp_path: Path, second: str) -> None:
    first = {"revisions": "directives", "directives": "revisions"}[second]
    Project(tmp_path / first, url, first).upgrade()
    made = catalog(url)
    run(url, "DROP TABLE alembic_version")
    other = Project(tmp_path / second, url, second)
    with pytest.raises(Refused, match="stay with the one that was begun with"):
        other.upgrade()
    assert catalog(url) == made
    assert installed(url) == [(step, first) for step in STEPS]


def test_one_script_for_postgresql_and_yugabytedb(fresh: Fresh, tmp_path: Path) -> None:
    postgresql = fresh("postgresql15", "psycopg")
    yugabytedb = fresh("yugabytedb", "yugabytedb")
    scripts = [
        normal(Project(tmp_path / url.drivername, url, "revisions").script()) for url in (postgresql, yugabytedb)
    ]
    assert scripts[0] == scripts[1]
    for url in (postgresql, yugabytedb):
        execute(url, scripts[0])
    relations = [{name: kind for name, kind, *_ in catalog(url)["relations"]} for url in (postgresql, yugabytedb)]
    assert relations[0]["locked_keys"] == "v"
    assert relations[1]["locked_keys"] == "r"


def test_one_script_for_mysql_and_mariadb(fresh: Fresh, tmp_path: Path) -> None:
    for direction in ("upgrade", "downgrade"):
        assert statements("mysql", direction) == statements("mariadb", direction)
    mysql = fresh("mysql", "pymysql")
    # written for MySQL: for MariaDB, Alembic itself adds a RETURNING to its version rows, which MySQL has not
    script = Project(tmp_path, mysql, "revisions").script()
    for url in (mysql, fresh("mariadb", "mariadb+pymysql")):
        execute(url, script)
        assert set(catalog(url)) == {"lock_installed", "lock_locked_keys"}


def _dialect(engine: tuple[str, str]) -> str:
    return engine[0].rstrip("0123456789")


def test_a_step_that_died_in_the_middle_runs_again(
    fresh: Fresh, engine: tuple[str, str], door: str, tmp_path: Path
) -> None:
    """Where DDL commits as it goes: after every command, then the whole step again."""
    whole = fresh(*engine)
    Project(tmp_path / "whole", whole, door).upgrade()
    commands = statements(_dialect(engine), "upgrade")
    assert len(commands) >= 3
    for done in range(1, len(commands)):
        url = fresh(*engine)
        for command in commands[:done]:
            execute(url, command)
        Project(tmp_path / str(done), url, door).upgrade()
        assert catalog(url) == catalog(whole)


def test_a_downgrade_that_died_in_the_middle_runs_again(fresh: Fresh, engine: tuple[str, str], tmp_path: Path) -> None:
    for done in range(1, len(statements(_dialect(engine), "downgrade"))):
        url = fresh(*engine)
        project = Project(tmp_path / str(done), url, "directives")
        project.upgrade()
        for command in statements(_dialect(engine), "downgrade")[:done]:
            execute(url, command)
        project.downgrade()
        assert catalog(url) == {}


def test_a_whole_step_runs_again(project: Project, url: URL) -> None:
    project.upgrade()
    made, door = catalog(url), installed(url)
    run(url, "DELETE FROM alembic_version")
    project.upgrade()
    assert (catalog(url), installed(url)) == (made, door)


def test_one_labelled_head(tmp_path: Path) -> None:
    config = Project(tmp_path, sa.make_url("sqlite://"), "revisions").config
    (head,) = ScriptDirectory.from_config(config).get_revisions("heads")
    assert head is not None
    assert head.revision == f"sqlalchemy_locks_{STEPS[-1]}"
    assert head.branch_labels == {"sqlalchemy_locks"}


def test_every_step_has_its_revision(tmp_path: Path) -> None:
    scripts = ScriptDirectory.from_config(Project(tmp_path, sa.make_url("sqlite://"), "revisions").config)
    found = [script.revision for script in scripts.walk_revisions()]
    assert found[::-1] == [f"sqlalchemy_locks_{step}" for step in STEPS]


def test_without_our_import_alembic_does_not_know_yugabytedb(yugabytedb: URL) -> None:
    """Why env.py must import us first; should this fail, Alembic has learnt it and ours can go."""
    from alembic.ddl.impl import DefaultImpl, _impls

    from sqlalchemy_locks.alembic.yugabytedb import YugabyteDBImpl

    dialect = sa.create_engine(yugabytedb).dialect
    assert DefaultImpl.get_by_dialect(dialect) is YugabyteDBImpl
    ours = _impls.pop("yugabytedb")
    try:
        with pytest.raises(KeyError):
            DefaultImpl.get_by_dialect(dialect)
    finally:
        _impls["yugabytedb"] = ours


@pytest.mark.parametrize("driver", ["yugabytedb", "psycopg2"])
def test_a_failure_takes_back_no_version_rows_of_revisions_before_it(fresh: Fresh, driver: str, tmp_path: Path) -> None:
    """Where their DDL has stayed: by the dialect's name, or by env.py, which a postgresql:// URL leaves to know it."""
    url = fresh("yugabytedb", driver)
    project = Project(tmp_path, url, "revisions")
    if driver == "yugabytedb":
        env = tmp_path / "env.py"
        env.write_text(env.read_text().replace('"transaction_per_migration": True,', ""))
    (tmp_path / "versions" / "b1.py").write_text(
        "revision = 'b1'\ndown_revision = None\ndepends_on = 'sqlalchemy_locks_0001'\n"
        "def upgrade():\n    raise RuntimeError('as planned')\n"
    )
    with pytest.raises(RuntimeError, match="as planned"):
        project.upgrade()
    assert run(url, "SELECT version_num FROM alembic_version") == [("sqlalchemy_locks_0001",)]
    assert installed(url) == [("0001", "revisions")]


def test_refusals_are_for_the_command_line_too() -> None:
    assert issubclass(Refused, CommandError)
    assert issubclass(Refused, ValueError)

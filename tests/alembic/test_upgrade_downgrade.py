"""Upgrade and downgrade by revisions and by directives, online and offline, on every engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.engine import URL

from sqlalchemy_locks.alembic import Refused
from sqlalchemy_locks.alembic.steps import STEPS, InstalledBy
from tests.alembic.project import (
    Fresh,
    Project,
    catalog,
    execute,
    installed,
    normal,
    run,
    statements,
    tables,
)

HEAD = f"sqlalchemy_locks_{STEPS[-1]}"


def test_downgrade_removes_what_upgrade_created(project: Project, url: URL, installed_by: str) -> None:
    project.upgrade()
    made = catalog(url)
    assert made
    assert installed(url) == [(step, installed_by) for step in STEPS]
    project.downgrade()
    assert catalog(url) == {}
    project.upgrade()
    assert catalog(url) == made


def test_the_offline_script_makes_the_same(
    project: Project, url: URL, fresh: Fresh, engine: tuple[str, str], installed_by: str
) -> None:
    project.upgrade()
    other = fresh(*engine)
    execute(other, project.script())
    assert catalog(other) == catalog(url)
    assert installed(other) == installed(url)
    execute(other, project.script("downgrade"))
    assert catalog(other) == {}


def test_revisions_and_directives_install_the_same(fresh: Fresh, engine: tuple[str, str], tmp_path: Path) -> None:
    made = []
    for installed_by in ("revisions", "directives"):
        url = fresh(*engine)
        Project(tmp_path / installed_by, url, installed_by).upgrade()
        made.append(catalog(url))
    assert made[0] == made[1]


@pytest.mark.parametrize("second", ["revisions", "directives"])
def test_revisions_and_directives_are_not_mixed(url: URL, tmp_path: Path, second: str) -> None:
    first = {"revisions": "directives", "directives": "revisions"}[second]
    Project(tmp_path / first, url, first).upgrade()
    made = catalog(url)
    run(url, "DROP TABLE alembic_version")
    other = Project(tmp_path / second, url, second)
    with pytest.raises(Refused, match="stay with the one that was used first"):
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
    # written for MySQL: for MariaDB, Alembic adds a RETURNING to its version rows, which MySQL doesn't support
    script = Project(tmp_path, mysql, "revisions").script()
    for url in (mysql, fresh("mariadb", "mariadb+pymysql")):
        execute(url, script)
        assert set(catalog(url)) == {f"lock_{name}" for name in tables("mysql")}


def _dialect(engine: tuple[str, str]) -> str:
    return engine[0].rstrip("0123456789")


def interruptions(commands: list[str]) -> list[int]:
    """The numbers of commands to interrupt after: one, all, and before each change of the kind of command."""
    kinds = [" ".join(command.split()[:2]) for command in commands]
    return [
        number for number in range(1, len(kinds) + 1) if number in (1, len(kinds)) or kinds[number - 1] != kinds[number]
    ]


@pytest.mark.long
def test_an_interrupted_upgrade_runs_again(
    project: Project, url: URL, engine: tuple[str, str], installed_by: InstalledBy
) -> None:
    """Where each DDL command commits by itself, the whole step is run again."""
    project.upgrade()
    made = catalog(url)
    commands = statements(_dialect(engine), "upgrade", installed_by=installed_by)
    for done in interruptions(commands):
        project.downgrade()
        assert catalog(url) == {}
        execute(url, "\n".join(commands[:done]))
        project.upgrade()
        assert catalog(url) == made
        assert installed(url) == [(step, installed_by) for step in STEPS]


@pytest.mark.long
def test_an_interrupted_downgrade_runs_again(url: URL, engine: tuple[str, str], tmp_path: Path) -> None:
    """After the last command, only the version row is left."""
    project = Project(tmp_path, url, "directives")
    commands = statements(_dialect(engine), "downgrade")
    for done in interruptions(commands):
        project.upgrade()
        execute(url, "\n".join(commands[:done]))
        project.downgrade()
        assert catalog(url) == {}


def test_a_whole_step_runs_again(project: Project, url: URL) -> None:
    project.upgrade()
    made, record = catalog(url), installed(url)
    run(url, "DELETE FROM alembic_version")
    project.upgrade()
    assert (catalog(url), installed(url)) == (made, record)


def test_one_labelled_head(tmp_path: Path) -> None:
    config = Project(tmp_path, sa.make_url("sqlite://"), "revisions").config
    (head,) = ScriptDirectory.from_config(config).get_revisions("heads")
    assert head is not None
    assert head.revision == HEAD
    assert head.branch_labels == {"sqlalchemy_locks"}


def test_every_step_has_its_revision(tmp_path: Path) -> None:
    scripts = ScriptDirectory.from_config(Project(tmp_path, sa.make_url("sqlite://"), "revisions").config)
    found = [script.revision for script in scripts.walk_revisions()]
    assert found[::-1] == [f"sqlalchemy_locks_{step}" for step in STEPS]


def test_alembic_itself_does_not_know_yugabytedb(yugabytedb: URL) -> None:
    """Why env.py must import the package first; if this fails, Alembic supports it and `impl.py` can go."""
    from alembic.ddl.impl import DefaultImpl, _impls

    from sqlalchemy_locks.alembic.impl import YugabyteDBImpl

    dialect = sa.create_engine(yugabytedb).dialect
    assert DefaultImpl.get_by_dialect(dialect) is YugabyteDBImpl
    ours = _impls.pop("yugabytedb")
    try:
        with pytest.raises(KeyError):
            DefaultImpl.get_by_dialect(dialect)
    finally:
        _impls["yugabytedb"] = ours


@pytest.mark.parametrize("driver", ["yugabytedb", "psycopg2"])
def test_a_failure_rolls_back_no_earlier_version_rows(fresh: Fresh, driver: str, tmp_path: Path) -> None:
    """Where DDL commits by itself: recognized by the dialect's name or, behind a postgresql:// URL, set in env.py."""
    url = fresh("yugabytedb", driver)
    project = Project(tmp_path, url, "revisions")
    if driver == "yugabytedb":
        env = tmp_path / "env.py"
        env.write_text(env.read_text().replace('"transaction_per_migration": True,', ""))
    (tmp_path / "versions" / "b1.py").write_text(
        f"revision = 'b1'\ndown_revision = None\ndepends_on = '{HEAD}'\n"
        "def upgrade():\n    raise RuntimeError('as planned')\n"
    )
    with pytest.raises(RuntimeError, match="as planned"):
        project.upgrade()
    assert run(url, "SELECT version_num FROM alembic_version") == [(HEAD,)]
    assert installed(url) == [(step, "revisions") for step in STEPS]


def test_a_refusal_is_a_command_error() -> None:
    assert issubclass(Refused, CommandError)
    assert issubclass(Refused, ValueError)

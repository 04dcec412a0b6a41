"""Upgrade and downgrade by revisions and by directives, online and offline, on every engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory
from sqlalchemy.engine import URL

from sqlalchemy_locks.alembic import Refused
from sqlalchemy_locks.alembic.steps import STEPS
from tests.alembic.project import (
    Fresh,
    Project,
    catalog,
    execute,
    installed,
    run,
    statements,
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


def test_both_doors_and_their_offline_scripts_install_the_same(
    fresh: Fresh, engine: tuple[str, str], tmp_path: Path
) -> None:
    catalogs = []
    for door in ("revisions", "directives"):
        url, offline = fresh(*engine), fresh(*engine)
        project = Project(tmp_path / door, url, door)
        project.upgrade()
        execute(offline, project.script())
        catalogs += [catalog(url), catalog(offline)]
        assert installed(offline) == installed(url)
        execute(offline, project.script("downgrade"))
        assert catalog(offline) == {}
    assert all(each == catalogs[0] for each in catalogs)


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


@pytest.mark.parametrize(
    ("written", "also"),
    [
        (("postgresql15", "psycopg"), ("yugabytedb", "yugabytedb")),
        # for MariaDB, Alembic adds a RETURNING to its version rows, which MySQL doesn't support
        (("mysql", "pymysql"), ("mariadb", "mariadb+pymysql")),
    ],
)
def test_one_script_for_two_servers(
    fresh: Fresh, written: tuple[str, str], also: tuple[str, str], tmp_path: Path
) -> None:
    script = Project(tmp_path, fresh(*written), "revisions").script()
    for pair in (written, also):
        url = fresh(*pair)
        execute(url, script)
        assert installed(url) == [(step, "revisions") for step in STEPS]


def _dialect(engine: tuple[str, str]) -> str:
    return engine[0].rstrip("0123456789")


def interruptions(commands: list[str]) -> list[int]:
    """The numbers of commands to interrupt after: one, all, and before each change of the kind of command."""
    kinds = [" ".join(command.split()[:2]) for command in commands]
    return [
        number for number in range(1, len(kinds) + 1) if number in (1, len(kinds)) or kinds[number - 1] != kinds[number]
    ]


def test_an_interrupted_upgrade_or_downgrade_runs_again(url: URL, engine: tuple[str, str], tmp_path: Path) -> None:
    """Where each DDL command commits by itself, the whole step is run again."""
    project = Project(tmp_path, url, "directives")
    project.upgrade()
    complete = catalog(url)
    for direction, run_again in (("upgrade", project.upgrade), ("downgrade", project.downgrade)):
        commands = statements(_dialect(engine), direction)
        for number in interruptions(commands):
            project.downgrade() if direction == "upgrade" else project.upgrade()
            execute(url, "\n".join(commands[:number]))
            run_again()
            assert catalog(url) == (complete if direction == "upgrade" else {})
        project.upgrade()


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

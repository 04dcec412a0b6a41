"""Upgrade and downgrade by revisions and by directives, online and offline, on every engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic import command
from alembic.util import CommandError
from sqlalchemy.engine import URL

from sqlalchemy_locks.alembic import Refused
from sqlalchemy_locks.alembic.steps import STEPS
from tests.alembic.conftest import ENGINES
from tests.alembic.project import Fresh, Project, catalog, edit, execute, installed, run, statements

HEAD = f"sqlalchemy_locks_{STEPS[-1]}"


def test_one_door_of_the_two_again_and_back(project: Project, url: URL, installed_by: str, tmp_path: Path) -> None:
    project.upgrade()
    made, record = catalog(url), installed(url)
    assert made
    assert record == [(step, installed_by) for step in STEPS]
    run(url, "DROP TABLE alembic_version")
    other = "directives" if installed_by == "revisions" else "revisions"
    with pytest.raises(Refused, match="stay with the one that was used first"):
        Project(tmp_path / other, url, other).upgrade()
    assert (catalog(url), installed(url)) == (made, record)
    # the whole step runs again
    project.upgrade()
    assert (catalog(url), installed(url)) == (made, record)
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


@pytest.mark.parametrize("engine", ENGINES[1:], ids="-".join)
def test_an_interrupted_upgrade_or_downgrade_runs_again(url: URL, engine: tuple[str, str], tmp_path: Path) -> None:
    """Where each DDL command commits by itself, the whole step is run again; PostgreSQL rolls it back."""
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


def test_a_number_of_steps_drops_no_locks_beside_other_heads(postgresql: URL, tmp_path: Path) -> None:
    """Alembic takes the first of the rows of alembic_version, and PostgreSQL moves the one that was changed last."""
    project = Project(tmp_path, postgresql, "revisions")
    for name, down in (("a1", None), ("a2", "a1")):
        body = f"revision = {name!r}\ndown_revision = {down!r}\ndef upgrade(): pass\ndef downgrade(): pass\n"
        (tmp_path / "versions" / f"{name}.py").write_text(body)
        project.upgrade()
    made = catalog(postgresql)
    with pytest.warns(UserWarning, match="ambiguous"), pytest.raises(CommandError, match=r"BRANCH@-1 or REVISION for"):
        command.downgrade(project.config, "-1")
    assert catalog(postgresql) == made
    assert sorted(run(postgresql, "SELECT * FROM alembic_version")) == [("a2",), (HEAD,)]
    command.downgrade(project.config, "a2@-1")
    assert catalog(postgresql) == made
    command.downgrade(project.config, "sqlalchemy_locks@-1")
    assert catalog(postgresql) == {}


@pytest.mark.parametrize("driver", ["yugabytedb", "psycopg2"])
def test_a_failure_rolls_back_no_earlier_version_rows(fresh: Fresh, driver: str, tmp_path: Path) -> None:
    """Where DDL commits by itself: recognized by the dialect's name or, behind a postgresql:// URL, set in env.py."""
    url = fresh("yugabytedb", driver)
    project = Project(tmp_path, url, "revisions")
    if driver == "yugabytedb":
        edit(tmp_path / "env.py", '"transaction_per_migration": True,', "")
    (tmp_path / "versions" / "b1.py").write_text(
        f"revision = 'b1'\ndown_revision = None\ndepends_on = '{HEAD}'\n"
        "def upgrade():\n    raise RuntimeError('as planned')\n"
    )
    with pytest.raises(RuntimeError, match="as planned"):
        project.upgrade()
    assert run(url, "SELECT version_num FROM alembic_version") == [(HEAD,)]
    assert installed(url) == [(step, "revisions") for step in STEPS]

"""Both doors, online and offline, up and down, on every engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.engine import URL

from sqlalchemy_locks.alembic import Refused, check
from sqlalchemy_locks.alembic.steps import STEPS, Door
from tests.alembic.project import (
    Fresh,
    Project,
    catalog,
    connected,
    execute,
    installed,
    normal,
    run,
    statements,
    tables,
)

HEAD = f"sqlalchemy_locks_{STEPS[-1]}"


def test_up_down_up(project: Project, url: URL, door: str) -> None:
    project.upgrade()
    made = catalog(url)
    assert made
    assert installed(url) == [(step, door) for step in STEPS]
    project.downgrade()
    assert catalog(url) == {}
    project.upgrade()
    assert catalog(url) == made


def test_step_by_step(url: URL, door: str, tmp_path: Path) -> None:
    project = Project(tmp_path, url, door, stepwise=True)
    made = [catalog(url)]
    for number, step in enumerate(STEPS, 1):
        project.upgrade(step)
        made.append(catalog(url))
        assert made[-1] != made[-2]
        assert installed(url) == [(step, door) for step in STEPS[:number]]
        assert drifts(url) == []
    for number, step in reversed([*enumerate(("base", *STEPS[:-1]))]):
        project.downgrade(step)
        assert catalog(url) == made[number]
        if number:
            assert installed(url) == [(step, door) for step in STEPS[:number]]
            assert drifts(url) == []


def drifts(url: URL) -> list[str]:
    with connected(url) as connection:
        return check(connection)


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
        assert set(catalog(url)) == {f"lock_{name}" for name in tables("mysql")}


def _dialect(engine: tuple[str, str]) -> str:
    return engine[0].rstrip("0123456789")


@pytest.mark.long
def test_steps_that_died_in_the_middle_run_again(
    project: Project, url: URL, engine: tuple[str, str], door: Door
) -> None:
    """Where DDL commits as it goes: after every command, then all of it again."""
    project.upgrade()
    made = catalog(url)
    commands = statements(_dialect(engine), "upgrade", door=door)
    assert len(commands) >= 2 * len(STEPS)
    for done in range(1, len(commands) + 1):
        project.downgrade()
        assert catalog(url) == {}
        execute(url, "\n".join(commands[:done]))
        project.upgrade()
        assert catalog(url) == made
        assert installed(url) == [(step, door) for step in STEPS]


@pytest.mark.long
def test_steps_whose_downgrade_died_in_the_middle_run_again(url: URL, engine: tuple[str, str], tmp_path: Path) -> None:
    """All of them as one revision of the app; the last time, nothing but the version row was left."""
    project = Project(tmp_path, url, "directives")
    commands = statements(_dialect(engine), "downgrade")
    for done in range(1, len(commands) + 1):
        project.upgrade()
        execute(url, "\n".join(commands[:done]))
        project.downgrade()
        assert catalog(url) == {}


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
def test_one_step_whose_downgrade_died_in_the_middle_runs_again(
    url: URL, engine: tuple[str, str], step: str, door: Door, tmp_path: Path
) -> None:
    commands = statements(_dialect(engine), "downgrade", (step,), door)
    below = ("base", *STEPS)[STEPS.index(step)]
    project = Project(tmp_path, url, door, stepwise=True)
    made = []
    for done in range(len(commands) + 1):
        project.upgrade(step)
        if done:
            execute(url, "\n".join(commands[:done]))
        project.downgrade(below)
        made.append(catalog(url))
        assert made[-1] == made[0]


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
    assert head.revision == HEAD
    assert head.branch_labels == {"sqlalchemy_locks"}


def test_every_step_has_its_revision(tmp_path: Path) -> None:
    scripts = ScriptDirectory.from_config(Project(tmp_path, sa.make_url("sqlite://"), "revisions").config)
    found = [script.revision for script in scripts.walk_revisions()]
    assert found[::-1] == [f"sqlalchemy_locks_{step}" for step in STEPS]


def test_without_our_import_alembic_does_not_know_yugabytedb(yugabytedb: URL) -> None:
    """Why env.py must import us first; should this fail, Alembic has learnt it and ours can go."""
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
def test_a_failure_takes_back_no_version_rows_of_revisions_before_it(fresh: Fresh, driver: str, tmp_path: Path) -> None:
    """Where their DDL has stayed: by the dialect's name, or by env.py, which a postgresql:// URL leaves to know it."""
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


def test_refusals_are_for_the_command_line_too() -> None:
    assert issubclass(Refused, CommandError)
    assert issubclass(Refused, ValueError)

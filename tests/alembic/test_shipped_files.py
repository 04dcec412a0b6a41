"""The shipped files: runnable in psql, listed in the manifest, unchanged once released."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import sqlalchemy_locks.alembic_templates
from sqlalchemy.engine import URL

from sqlalchemy_locks.alembic import template
from sqlalchemy_locks.alembic.script import Family
from sqlalchemy_locks.alembic.steps import STEPS, load
from tests.alembic.project import run, statements

(FOLDER,) = map(Path, sqlalchemy_locks.alembic_templates.__path__)
SQL = FOLDER / "sql"
BODIES = sorted(path.relative_to(SQL) for path in SQL.glob("*/*.sql"))
RELEASED = Path(__file__).parent / "released"

#: The frozen scripts of each step: without options, and with all of them.
SCRIPTS = {
    f"{step}/{dialect}.{choice}.{direction}.sql": (dialect, direction, (step,), options)
    for step in STEPS
    for dialect, everything in {
        "postgresql": {"schema": "elsewhere", "grant_to": ["app", "other"], "locking": "table"},
        "mysql": {"prefix": "my_", "grant_to": ["app@10.%", "role"]},
        "sqlite": {"prefix": "my_"},
    }.items()
    for choice, options in {"plain": {}, "options": everything}.items()
    for direction in ("upgrade", "downgrade")
}


def test_the_manifest_is_up_to_date() -> None:
    """To update it before a release, in alembic_templates/sql: sha256sum */*.sql > MANIFEST."""
    written = [tuple(line.split("  ")) for line in (SQL / "MANIFEST").read_text().splitlines()]
    actual = [(hashlib.sha256((SQL / path).read_bytes()).hexdigest(), path.as_posix()) for path in BODIES]
    assert written == actual


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_step_writes_its_released_script(name: str) -> None:
    """Written by `python -m tests.alembic.test_shipped_files`, which must never change a released step's files."""
    assert script(name) == (RELEASED / name).read_text()


def script(name: str) -> str:
    dialect, direction, steps, options = SCRIPTS[name]
    return "\n\n".join(statements(dialect, direction, steps, **options)) + "\n"


@pytest.mark.parametrize("path", BODIES, ids=str)
def test_a_body_survives_every_driver(path: Path) -> None:
    text = (SQL / path).read_text("utf-8")
    # a percent sign is a driver's placeholder, Alembic's offline mode turns tabs into spaces
    assert not set("%\t\r") & set(text)
    assert text.isascii()
    assert text.count("-- sqlalchemy_locks 0") == 1
    assert all(len(line) <= 120 for line in text.splitlines())
    (kind, name), *others = re.findall(r"CREATE OR REPLACE (FUNCTION|VIEW) lock\.(\w+)", text)
    assert not others
    assert name == path.stem
    assert text.endswith(";\n")
    if kind == "FUNCTION":
        assert text.endswith("$body$;\n")


def test_every_body_is_installed_by_a_step() -> None:
    named = {path for step in STEPS for bodies in load(step).BODIES.values() for path in bodies.values()}
    assert named | {"advisory/locked_keys.sql"} == {path.as_posix() for path in BODIES}


@pytest.mark.parametrize("family", ["postgresql", "mysql", "sqlite"])
@pytest.mark.parametrize("step", STEPS)
def test_names_fit_behind_the_longest_prefix(step: str, family: Family) -> None:
    names = [*load(step).TABLES[family], *(name for names in load(step).INDEXES.values() for name in names)]
    assert [name for name in names if len(name) > 64 - 44] == []


@pytest.mark.parametrize("step", STEPS)
def test_a_step_has_a_body_for_each_of_its_functions(step: str) -> None:
    assert set(load(step).BODIES) == {"advisory", "table", "yugabytedb"}
    for bodies in load(step).BODIES.values():
        assert set(bodies) == set(load(step).FUNCTIONS)


@pytest.mark.parametrize("folder", ["advisory", "table", "yugabytedb"])
def test_psql_runs_the_files_as_they_stand(postgresql: URL, folder: str) -> None:
    psql = shutil.which("psql")
    if psql is None:
        pytest.skip("psql is not installed")
    files = [*(SQL / "common").glob("*.sql"), *(SQL / folder).glob("*.sql")]
    command = [psql, "-qX", "-v", "ON_ERROR_STOP=1", "-c", "CREATE SCHEMA lock"]
    for path in files:
        command += ["-f", str(path)]
    url = postgresql.set(drivername="postgresql").render_as_string(hide_password=False)
    subprocess.run([*command, url], check=True)
    assert run(postgresql, "SELECT count(*) > 4 FROM pg_proc WHERE pronamespace = 'lock'::regnamespace") == [(True,)]


@pytest.mark.parametrize("name", ["generic", "async"])
def test_files_of_the_templates(name: str) -> None:
    found = {path.name for path in Path(template(name)).iterdir()} - {"__pycache__"}
    # `alembic init` copies every file into the app's project
    assert found == {"README", "alembic.ini.mako", "env.py", "script.py.mako"}


def test_an_unknown_template_is_refused() -> None:
    with pytest.raises(ValueError, match="no template 'multidb'"):
        template("multidb")


def write() -> None:
    """Write the frozen scripts of a step before its release."""
    for name in SCRIPTS:
        (RELEASED / name).parent.mkdir(exist_ok=True)
        (RELEASED / name).write_text(script(name))


if __name__ == "__main__":
    write()

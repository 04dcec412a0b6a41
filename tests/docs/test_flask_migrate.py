"""docs/flask-migrate.md as a user follows it, from an app with a history."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import make_url

from sqlalchemy_locks.alembic.steps import STEPS
from tests.alembic.project import installed
from tests.docs.pages import ROOT, Block, blocks

PAGE = ROOT / "docs" / "flask-migrate.md"


def part(heading: str) -> list[Block]:
    """Return the blocks between a heading and the next one; of the page's beginning without a heading."""
    lines = PAGE.read_text().splitlines()
    begin = lines.index(f"## {heading}") if heading else 0
    end = next((i for i, line in enumerate(lines) if i > begin and line.startswith("## ")), len(lines))
    return [block for block in blocks(PAGE) if begin < block.line <= end]


#: runs lines of a shell, without a process for each: `flask ...`, and `python` with a file
SHELL = """
import runpy, shlex, sys
from flask.cli import cli
for line in sys.argv[1].splitlines():
    name, *words = shlex.split(line)
    sys.modules.pop("app", None)
    if name == "flask":
        cli.main(words, standalone_mode=False)
    else:
        runpy.run_path(words[0])
"""


def sh(commands: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SHELL, commands],
        cwd=folder,
        env=os.environ | {"FLASK_APP": "app", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the app with its history."""
    folder = tmp_path_factory.mktemp("migrated") / "app"
    folder.mkdir()
    shown, commands = part("")
    (folder / "app.py").write_text(shown.text)
    sh(commands.text, folder)
    return folder


@pytest.fixture
def app(migrated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(migrated, tmp_path / "app"))


def change_app(block: Block, app: Path) -> None:
    path, old = app / "app.py", "    migrate.init_app(app, db)\n"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, re.sub("^(?=.)", "    ", block.text, flags=re.M)))


def revisions(app: Path) -> list[str]:
    return sorted(re.sub("^[0-9a-f]+_", "", path.stem) for path in (app / "migrations/versions").glob("*.py"))


def record(app: Path) -> list[tuple[str, str]]:
    return installed(make_url(f"sqlite:///{app}/instance/app.db"))


def test_a_revision_of_the_app(app: Path) -> None:
    make, functions, filter_, upgrade = part("A revision of your own")
    assert f'to="{STEPS[-1]}"' in functions.text
    sh(make.text, app)
    (file,) = (app / "migrations/versions").glob("*_install_the_locks.py")
    header = file.read_text().partition("def upgrade")[0].replace("from alembic import op\n", "")
    file.write_text(header + functions.text)
    change_app(filter_, app)
    sh(f'{upgrade.text}flask db migrate -m "nothing"', app)
    assert record(app) == [(step, "directives") for step in STEPS]
    assert revisions(app) == ["install_the_locks", "invoices"]


def test_the_shipped_revisions(app: Path) -> None:
    ini, directives, commands = part("The shipped revisions")
    path = app / "migrations/alembic.ini"
    path.write_text(path.read_text().replace("[alembic]\n", f"[alembic]\n{ini.text}"))
    change_app(directives, app)
    in_python = 'flask_migrate.upgrade(revision="heads")'
    assert in_python in PAGE.read_text()
    (app / "upgraded.py").write_text(f"import app, flask_migrate\nwith app.create_app().app_context(): {in_python}")
    said = sh(f'{commands.text}flask db revision -m "mine"\npython upgraded.py\nflask db current', app)
    assert record(app) == [(step, "revisions") for step in STEPS]
    # "what has changed" was empty, and the other revision isn't in the library's folder
    assert revisions(app) == ["invoices", "mine"]
    assert said.count("(head)") == 2

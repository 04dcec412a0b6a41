"""docs/alembic.md as a user follows it: its commands, its revision, its program, its SQL."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from alembic.config import Config
from sqlalchemy import make_url

from sqlalchemy_locks.alembic import Options, template
from sqlalchemy_locks.alembic.steps import STEPS, load
from tests.alembic.project import edit, installed
from tests.docs.pages import ROOT, Block, blocks
from tests.fixtures.forks import main

PAGE = ROOT / "docs" / "alembic.md"
BLOCKS = blocks(PAGE)
RECORD = [(step, "revisions") for step in STEPS]


def section(title: str, language: str) -> list[Block]:
    """The blocks under one heading."""
    before, _, after = PAGE.read_text().partition(f"## {title}\n")
    begin = before.count("\n")
    end = begin + after.partition("\n## ")[0].count("\n")
    return [block for block in BLOCKS if begin < block.line <= end + 1 and block.language == language]


def sh(commands: str, folder: Path) -> None:
    """Execute commands of the page, ``alembic`` in a process that has imported it already."""
    program = """"$(python -c 'from sqlalchemy_locks.alembic import template; print(template("generic"))')\""""
    for line in commands.replace(program, template("generic")).splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "alembic":
            status, out, err = main("alembic.config", folder, *words[1:])
            assert status == 0, out + err
        else:
            subprocess.run(words, cwd=folder, check=True)


def connect(folder: Path) -> None:
    edit(folder / "alembic.ini", "driver://user:pass@localhost/dbname", "sqlite:///app.db")


def test_a_new_project_has_no_drift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (commands,) = section("A new project", "sh")
    sh(commands.text, tmp_path)
    assert installed(make_url(f"sqlite:///{tmp_path}/app.db")) == RECORD
    assert len(list((tmp_path / "migrations/versions").glob("*_my_first_revision.py"))) == 1
    (program,) = (block for block in BLOCKS if block.mark == "drift")
    monkeypatch.chdir(tmp_path)
    page: dict[str, Any] = {}
    exec(program.compiled(), page)
    page["engine"].dispose()
    assert capsys.readouterr().out == ""


def test_shipped_revisions_in_a_project_of_alembics(tmp_path: Path) -> None:
    """Insert the page's settings and its lines of env.py where they belong."""
    (ini,) = section("Shipped revisions", "ini")
    (env,) = section("Shipped revisions", "python")
    heads, flags = section("Shipped revisions", "sh")
    sh("alembic init migrations", tmp_path)
    connect(tmp_path)
    edit(tmp_path / "alembic.ini", "path_separator = os\n", f"{ini.text}revision_environment = true\n")
    lines = tmp_path / "migrations" / "env.py"
    imports, _, call = env.text.partition("\n\n")
    old = "context.configure(\n            connection=connection, target_metadata=target_metadata\n        )"
    edit(lines, old, call.strip().replace("\n", "\n        "))
    lines.write_text(imports + "\n" + lines.read_text())
    sh("alembic revision -m mine", tmp_path)
    sh(heads.text.splitlines()[0], tmp_path)
    assert installed(make_url(f"sqlite:///{tmp_path}/app.db")) == RECORD
    sh(heads.text, tmp_path)
    for made in (tmp_path / "migrations/versions").glob("*.py"):
        made.unlink()
    (tmp_path / "app.db").unlink()
    sh(flags.text, tmp_path)
    assert len(list((tmp_path / "migrations/versions").glob("*.py"))) == 2


def test_shipped_revisions_in_pyproject_toml(tmp_path: Path) -> None:
    (toml,) = section("Shipped revisions", "toml")
    sh("alembic init -t pyproject migrations", tmp_path)
    connect(tmp_path)
    options = f'{toml.text}sqlalchemy_locks_prefix = "my_"\n'
    edit(tmp_path / "pyproject.toml", "[tool.alembic]\n", f"[tool.alembic]\n{options}")
    sh("alembic upgrade heads", tmp_path)
    assert installed(make_url(f"sqlite:///{tmp_path}/app.db"), prefix="my_") == RECORD


@pytest.mark.parametrize("value", ["'app, other'", '["app", "other"]'])
def test_roles_in_pyproject_toml(tmp_path: Path, value: str) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(f"[tool.alembic]\nsqlalchemy_locks_grant_to = {value}\n")
    assert Options.from_config(Config(toml_file=path)).grantees == ("app", "other")


def test_directives_in_a_project_of_alembics(tmp_path: Path) -> None:
    (revision,) = (block for block in BLOCKS if block.mark == "revision")
    assert f'to="{STEPS[-1]}"' in revision.text
    sh("alembic init migrations", tmp_path)
    connect(tmp_path)
    (tmp_path / "migrations/versions/locks.py").write_text(revision.text)
    sh("alembic upgrade head", tmp_path)
    assert installed(make_url(f"sqlite:///{tmp_path}/app.db")) == [(step, "directives") for step in STEPS]
    sh("alembic downgrade base", tmp_path)


@pytest.mark.parametrize("step", STEPS)
def test_the_page_names_each_step(step: str) -> None:
    rows = re.findall(rf"^\| `{step}` \|.*$", PAGE.read_text(), flags=re.MULTILINE)
    for table in load(step).TABLES["postgresql"]:
        assert any(f"`{table}`" in row for row in rows)


def test_the_filter_of_the_page_excludes_the_tables() -> None:
    (block,) = section("Autogenerate", "python")
    page: dict[str, Any] = {}
    exec(block.compiled(), page)
    answers = {
        name: page["mine"](name, "table", {"schema_name": schema})
        for name, schema in [("installed", "lock"), ("lock_installed", None), ("spatial_ref_sys", None), ("a", None)]
    }
    assert answers == {"installed": False, "lock_installed": False, "spatial_ref_sys": False, "a": True}

"""The wheel, which is built from the sdist, in a virtual environment of its own.

It is used outside the checkout, so that files that only a checkout has on ``sys.path`` aren't found. The editable install
is what all other tests use; tests/examples runs its shipped revisions outside the checkout.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.alembic.project import tables
from tests.packaging.conftest import Built
from tests.packaging.environment import ROOT, Environment, run

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("wheel") / "venv")
    environment.install(built.wheel, "aiosqlite", "greenlet")
    return environment


def alembic(installed: Environment, folder: Path, *commands: str) -> str:
    """Run commands in one process, since its start takes longer than each of them."""
    code = "import sys; from alembic.config import main; [main(command.split()) for command in sys.argv[1:]]"
    return installed("-c", code, *commands, cwd=folder)


def found(folder: Path) -> set[str]:
    with contextlib.closing(sqlite3.connect(folder / "x.db")) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {name for name in names if not name.startswith(("alembic", "sqlite"))}


OURS = {f"lock_{name}" for name in tables("sqlite")}


def test_shipped_revisions(installed: Environment, tmp_path: Path) -> None:
    code = "from sqlalchemy_locks.alembic import template; print(template('async'))"
    template = installed("-c", code, cwd=tmp_path).strip()
    alembic(installed, tmp_path, f"init -t {template} migrations")
    ini = tmp_path / "alembic.ini"
    ini.write_text(ini.read_text().replace("driver://user:pass@localhost/dbname", "sqlite+aiosqlite:///x.db"))
    said = alembic(installed, tmp_path, "revision -m first", "heads", "upgrade sqlalchemy_locks@head", "upgrade heads")
    assert said.count("(head)") == 2
    assert found(tmp_path) == OURS
    alembic(installed, tmp_path, "downgrade sqlalchemy_locks@base")
    assert found(tmp_path) == set()


def test_import_loads_no_alembic_and_no_dialect_and_no_other_module_is_importable(
    installed: Environment, tmp_path: Path
) -> None:
    code = (
        "import sys, sqlalchemy_locks, importlib.util as u\n"
        "unwanted = ('alembic', 'sqlalchemy_locks.alembic', 'sqlalchemy.dialects.')\n"
        "print([name for name in sys.modules if name.startswith(unwanted)])\n"
        "import sqlalchemy_locks.alembic_templates.steps\n"
        "print([name for name in ('alembic_templates', 'tests', 'steps', 'versions') if u.find_spec(name)])\n"
    )
    assert installed("-c", code, cwd=tmp_path).split() == ["[]", "[]"]


def test_the_command_line(installed: Environment, tmp_path: Path) -> None:
    """It names its missing dependency, which is an extra."""
    script = installed.folder / "bin" / "sqlalchemy-locks"
    bare = subprocess.run([script, "check"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert bare.returncode == 2
    assert "pip install 'sqlalchemy-locks[cli]'" in bare.stderr
    installed.install("click>=8.1", "rich>=13.9")
    run(script, "install", "--url", "sqlite:///x.db", cwd=tmp_path)
    assert found(tmp_path) == OURS
    assert "All is well" in run(script, "check", "--url", "sqlite+aiosqlite:///x.db", cwd=tmp_path)
    assert "None: semaphores, " in installed(
        "-m", "sqlalchemy_locks", "status", "--url", "sqlite:///x.db", cwd=tmp_path
    )


def test_sdist_has_tests_docs_and_changelog(built: Built) -> None:
    listed = run("git", "ls-files", cwd=ROOT).splitlines() if (ROOT / ".git").exists() else ["CHANGELOG.md"]
    wanted = {name for name in listed if not name.startswith(".") and (ROOT / name).exists()}
    with tarfile.open(built.sdist) as archive:
        packed = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert wanted - packed == set()


def test_wheel_has_every_file_of_the_package(built: Built) -> None:
    wanted = {
        path.relative_to(ROOT).as_posix()
        for part in ("sqlalchemy_locks", "alembic_templates")
        for path in (ROOT / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    shipped = {
        name.replace("alembic_templates/", "sqlalchemy_locks/alembic_templates/", 1)
        if name.startswith("alembic_templates/")
        else name
        for name in wanted
    }
    assert names == shipped


def test_build_has_no_warning(built: Built) -> None:
    assert [line for line in built.output.splitlines() if re.search(r"\bwarning\b|Warning:", line, re.I)] == []


def test_index_pages_accept_the_readme(built: Built, tmp_path: Path) -> None:
    checker = Environment(tmp_path / "checker")
    checker.install("twine>=6.1", "packaging>=24.2")
    checker("-m", "twine", "check", "--strict", built.sdist, built.wheel, cwd=tmp_path)


def test_the_oldest_versions_are_tested() -> None:
    """tools/test installs the least versions that the metadata allows, for the tests of SQLAlchemy 2.0."""
    metadata = (ROOT / "pyproject.toml").read_text()  # Python 3.10 reads no TOML
    pins = re.search(r"^oldest=\((.*)\)$", (ROOT / "tools" / "test").read_text(), re.MULTILINE)
    assert pins is not None
    for pin in pins[1].split():
        name, _, version = pin.partition("==")
        least = re.findall(rf'"{name}>=([0-9.]+)[,"]', metadata)
        assert least, pin
        assert all(f"{version}.".startswith(f"{each}.") for each in least), pin

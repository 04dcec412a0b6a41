"""The commands and programs of the README and the quick start work in an environment with only the wheel.

A second run of a page uses the database of the first one.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.packaging.conftest import Built
from tests.packaging.environment import Environment, variables

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

README = ROOT / "README.md"
REPOSITORY = re.search(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)


def entered(line: str, environment: Environment, wheel: Path, folder: Path) -> None:
    command = shlex.split(line, comments=True)
    if command[:2] == ["pip", "install"]:
        ours = re.compile(r"^(sqlalchemy-locks(?:\[.*\])?)$")
        environment.install(*(ours.sub(rf"\1 @ {wheel.as_uri()}", word) for word in command[2:]))
        return
    path = f"{environment.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-ec", line], cwd=folder, env=variables() | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Of both pages: the second one installs more."""
    return Environment(tmp_path_factory.mktemp("readme") / "venv")


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_typed_twice_into_a_fresh_environment(
    name: str, built: Built, environment: Environment, tmp_path: Path
) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    for _ in range(2):
        program = ""
        for block in blocks(ROOT / name):
            if block.language == "sh":
                for line in block.text.splitlines():
                    entered(line, environment, built.wheel, folder)
            elif block.language == "python" and block.info != "noexec" and not block.mark:
                program += block.text + "\n"
        environment("-W", "error", "-c", program, cwd=folder)


def test_readme_links_work_on_a_package_index() -> None:
    """Relative links and pictures would be broken there."""
    assert REPOSITORY
    raw = REPOSITORY[1].replace("https://github.com/", "https://raw.githubusercontent.com/") + "/main/"
    targets = re.findall(r"\]\(([^)\s]+)\)", README.read_text())
    assert any(target.startswith(raw) for target in targets), "no picture"
    for target in targets:
        assert target.startswith("https://"), target
        for base in (f"{REPOSITORY[1]}/blob/main/", raw):
            if target.startswith(base):
                assert (ROOT / target.removeprefix(base)).is_file(), target


def test_first_lock_takes_two_commands_and_five_lines() -> None:
    commands, program = (block for block in blocks(README) if not block.mark)
    assert len(commands.text.splitlines()) == 2
    assert len([line for line in program.text.splitlines() if line]) == 5

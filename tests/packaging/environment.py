"""Virtual environments of the packaging tests, and the files that a build reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: entries of a checkout that aren't files of the project
_LEFTOVERS = shutil.ignore_patterns(
    ".*", "__pycache__", "*.pyc", "*.egg-info", "*.db", "*.db-*", "build", "dist", "site", "node_modules"
)
#: variables of the tests' own environment
_INHERITED = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _INHERITED}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside of the environment of the tests, and return its output."""
    done = subprocess.run(command, cwd=cwd, env=variables(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def checkout(folder: Path) -> Path:
    """Copy the project, so that a build leaves no files in the checkout."""
    return Path(shutil.copytree(ROOT, folder, ignore=_LEFTOVERS))


class Environment:
    """A virtual environment, filled by uv if it is installed, otherwise by pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._uv = shutil.which("uv", path=f"{os.environ['PATH']}{os.pathsep}{ROOT / '.venv/uv/bin'}")
        if self._uv:
            run(self._uv, "venv", "-q", "--python", sys.executable, folder, cwd=folder.parent)
        else:
            venv.create(folder, with_pip=True)

    def install(self, *what: str | Path) -> None:
        """Install packages; retried, since a network can be interrupted."""
        uv = (self._uv, "pip", "install", "-q", "--python", self.python)
        command = uv if self._uv else (self.python, "-m", "pip", "install", "-q")
        for pause in (5, 30):
            try:
                return self._install(*command, *what)
            except AssertionError:
                time.sleep(pause)
        return self._install(*command, *what)

    def _install(self, *command: str | Path | None) -> None:
        run(*filter(None, command), cwd=self.folder)

    def __call__(self, *arguments: str | Path, cwd: Path) -> str:
        return run(self.python, *arguments, cwd=cwd)

"""Run an example as its README says: in a copy of its folder, by the shell, with its own tests."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT, blocks
from tests.fixtures.parties import PATIENCE, until

EXAMPLES = ROOT / "examples"
_PORT = re.compile(r"(?:running on|listening at:) (http://127\.0\.0\.1:\d+)", re.I)


def copied(name: str, folder: Path) -> Path:
    """Copy an example to a folder where it may write files."""
    copy = folder / name
    shutil.copytree(EXAMPLES / name, copy, ignore=shutil.ignore_patterns("*.db", "__pycache__", ".*"))
    return copy


def commands(folder: Path) -> list[str]:
    """Return the commands of the first shell block in its README."""
    block = next(block for block in blocks(folder / "README.md") if block.language == "sh")
    return block.text.splitlines()


def environment(**changes: str) -> dict[str, str]:
    """Return the environment, with the commands of this virtual environment first on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = ("PYTEST", "COV", "DATABASE_URL", "FLASK_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {**kept, "PATH": path, "PYTHONUNBUFFERED": "1", **changes}


def done(command: str, folder: Path, **changes: str) -> str:
    """Run a command to its end, and return its output."""
    ran = subprocess.run(
        ["sh", "-ec", command],
        cwd=folder,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


class Server:
    """A server that a shell command starts, in a process group of its own."""

    def __init__(self, command: str, folder: Path, **changes: str) -> None:
        self._said: list[str] = []
        self.process = subprocess.Popen(
            ["sh", "-ec", f"exec {command}"],
            cwd=folder,
            env=environment(**changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.append(line)

    @property
    def said(self) -> str:
        """Its output so far."""
        return "".join(self._said)

    def address(self) -> str:
        """Wait until it listens, and return its address."""
        until(lambda: _PORT.search(self.said) or self.process.poll() is not None)
        found = _PORT.search(self.said)
        assert found, self.said
        return found[1]

    def end(self, *, kill: bool = False) -> None:
        """Stop it, and wait until all its processes are gone."""
        self.process.kill() if kill else self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        finally:
            # children, too: one that is left would keep the pipe open, and the reader waiting
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._reader.join(PATIENCE)
            assert self.process.stdout is not None
            self.process.stdout.close()


@contextlib.contextmanager
def running(command: str, folder: Path, **changes: str) -> Iterator[Server]:
    """Run a server while the block runs."""
    server = Server(command, folder, **changes)
    try:
        yield server
    finally:
        if server.process.returncode is None:
            server.end(kill=True)

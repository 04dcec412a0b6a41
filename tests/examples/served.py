"""An example, as its README has it run: in a copy of its folder, by the shell, with its own tests."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
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
    """The example, where it may leave what it likes."""
    copy = folder / name
    shutil.copytree(EXAMPLES / name, copy, ignore=shutil.ignore_patterns("*.db", "__pycache__", ".*"))
    return copy


def commands(folder: Path) -> list[str]:
    """The two of its README: the first block of them."""
    block = next(block for block in blocks(folder / "README.md") if block.language == "sh")
    return block.text.splitlines()


def environment(**changes: str) -> dict[str, str]:
    """Where the commands are found that this run has."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    return {**kept, "PATH": path, "PYTHONUNBUFFERED": "1", **changes}


def done(command: str, folder: Path, **changes: str) -> str:
    """Run a command to its end; what it said."""
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
    """A server that a command has started: its address, and its end."""

    def __init__(self, command: str, folder: Path, **changes: str) -> None:
        self._said: list[str] = []
        self.process = subprocess.Popen(
            ["sh", "-ec", f"exec {command}"],
            cwd=folder,
            env=environment(**changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.append(line)

    @property
    def said(self) -> str:
        """Its log."""
        return "".join(self._said)

    def address(self) -> str:
        """Where it listens, when it does."""
        until(lambda: _PORT.search(self.said) or self.process.poll() is not None)
        found = _PORT.search(self.said)
        assert found, self.said
        return found[1]

    def end(self, *, kill: bool = False) -> None:
        """Stop it, and wait until it is gone."""
        self.process.kill() if kill else self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(PATIENCE)
            assert self.process.stdout is not None
            self.process.stdout.close()


@contextlib.contextmanager
def running(command: str, folder: Path, **changes: str) -> Iterator[Server]:
    """A server, while the block runs."""
    server = Server(command, folder, **changes)
    try:
        yield server
    finally:
        if server.process.returncode is None:
            server.end(kill=True)

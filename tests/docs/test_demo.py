"""The demo passes its own checks, and would not if the locks didn't hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import Servers
from .pages import ROOT

#: Has every process of the demo, as it starts, replace the locks by something that locks nothing.
BROKEN = """\
from sqlalchemy_locks import lock
lock.exclusive = lock.shared = lambda name: lock.unlock(name)
"""


def demo(url: str | None, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "demo", "--seconds", "3", *([url] if url else [])]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def url_of(engine: str, servers: Servers) -> str | None:
    return None if engine == "sqlite" else servers.server(engine).url("psycopg")


@pytest.mark.parametrize("engine", ["sqlite", "postgresql15"])
def test_passes(engine: str, servers: Servers, tmp_path: Path) -> None:
    done = demo(url_of(engine, servers), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✘" not in done.stdout
    assert "0 overlaps" in done.stdout
    assert "Worker 8 was killed" in done.stdout


@pytest.mark.parametrize("engine", ["sqlite", "postgresql15"])
def test_fails_if_the_locks_do_not_hold(engine: str, servers: Servers, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    done = demo(url_of(engine, servers), tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("✘")]
    assert any("Nobody was let into a key" in line for line in failed), done.stdout
    assert any("The written history" in line for line in failed), done.stdout

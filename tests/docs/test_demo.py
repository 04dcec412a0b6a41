"""The demo passes its own checks, and fails with broken locks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.cli.terminal import terminal
from tests.conftest import Servers
from tests.docs.pages import ROOT
from tests.fixtures.parties import PATIENCE

#: Has every process of the demo, as it starts, replace the locks by something that locks nothing.
BROKEN = """\
from sqlalchemy_locks import lock
from sqlalchemy_locks.dialects.sqlite import SQLite
from sqlalchemy_locks.facade import exclusive
exclusive.acquire = lambda key, **how: lock.unlock(key)
begin = SQLite.begin
SQLite.begin = lambda *given, writes: begin(*given, writes=False)
"""


def demo(url: str | None, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "demo", "--seconds", "3", *([url] if url else [])]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_demo_passes_its_checks(servers: Servers, tmp_path: Path) -> None:
    done = demo(servers.server("postgresql15").url("psycopg"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✘" not in done.stdout
    assert "0 overlaps" in done.stdout
    assert "Worker 8 was killed" in done.stdout
    # it ends by itself where nobody could end it, and says how the page is served
    assert "sqlalchemy-locks page --url" in done.stdout


def test_demo_ends_with_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with terminal("--seconds", "1", module="demo", columns=200, CI="") as demo_:
        demo_.until("Ctrl-C ends it")
        found = re.search(r"http://127\.0\.0\.1:\d+/", demo_.text)
        assert found is not None
        for path in ("", "live"):
            answer = httpx.get(f"{found[0]}{path}", timeout=PATIENCE)
            assert answer.status_code == 200
            assert "backup-slots" in answer.text
        demo_.type("\x03")
        assert demo_.ended() == 0, demo_.text
    assert "Traceback" not in demo_.text
    assert "✘" not in demo_.text


def test_demo_fails_with_broken_locks(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    done = demo(None, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("✘")]
    assert any("No exclusive holder" in line for line in failed), done.stdout
    assert any("The recorded history" in line for line in failed), done.stdout

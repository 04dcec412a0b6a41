"""The commands as processes: streams, exit codes, missing dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sqlalchemy_locks.cli import MISSING
from tests.cli.conftest import Cli
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.parties import connected
from tests.fixtures.queues import put

#: Makes imports of Click and Rich fail.
BARE = """\
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("click", "rich"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
import importlib.util as util
found = util.find_spec
util.find_spec = lambda name, package=None: None if name in ("click", "rich") else found(name, package)
"""


def process(*arguments: str, folder: Path, customize: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(customize)
    return subprocess.run(
        [sys.executable, "-m", "sqlalchemy_locks", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONUTF8": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_missing_click_or_rich_is_reported(tmp_path: Path) -> None:
    done = process("check", folder=tmp_path, customize=BARE)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{MISSING}\n")


INTEGRATIONS = {
    "flask": "flask",
    "fastapi": "fastapi",
    "otel": "opentelemetry",
    "prometheus": "prometheus_client",
    "dashboard": "jinja2",
}
WITHOUT = """
import importlib, sys
for module, library in {integrations}.items():
    sys.modules[library] = None
    try:
        importlib.import_module("sqlalchemy_locks.integrations." + module)
    except ImportError as error:
        print(error)
"""


def test_an_integration_names_the_extra_that_it_needs() -> None:
    script = WITHOUT.format(integrations=INTEGRATIONS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for module, line in zip(INTEGRATIONS, done.stdout.splitlines(), strict=True):
        assert f"pip install 'sqlalchemy-locks[{module}]'" in line


FAILING = """
import logging
import sqlalchemy_locks as sl
from sqlalchemy import create_engine

def handler(job):
    raise ValueError("boom")

worker = sl.Worker(sl.Queue(), handler, bind=create_engine({url!r}))
{more}
"""


@pytest.mark.parametrize("configured", [False, True])
def test_a_worker_writes_errors_to_stderr(servers: Servers, tmp_path: Path, configured: bool) -> None:
    url = servers.fresh("sqlite", PLAIN["sqlite"])
    install(url)
    more = "logging.getLogger().addHandler(logging.NullHandler())" if configured else ""
    (tmp_path / "failing.py").write_text(FAILING.format(url=url, more=more))
    with connected(url) as engine:
        put(engine, 1, max_attempts=1)
    done = process("worker", "failing:worker", "--until-empty", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert ("ValueError: boom" in done.stderr) is not configured


def test_closed_pipe_ends_quietly(sqlite: Cli, tmp_path: Path) -> None:
    command = f"{sys.executable} -m sqlalchemy_locks status --url {sqlite.url} | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stderr == ""


def test_unencodable_characters_are_escaped(sqlite: Cli, tmp_path: Path) -> None:
    sqlite("semaphore", "create", "vœu \u202e", "1")
    done = process("semaphore", "list", "--url", sqlite.url, folder=tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    sqlite("semaphore", "delete", "vœu \u202e", "--yes")
    assert "v\\u0153u \\u202e" in done.stdout


def test_closed_streams(sqlite: Cli, tmp_path: Path) -> None:
    line = f"{sys.executable} -m sqlalchemy_locks check --url {sqlite.url} >&- 2>&-"
    assert subprocess.run(["sh", "-c", line], cwd=tmp_path, check=False).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_is_reported(sqlite: Cli, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "sqlalchemy_locks", "check", "--url", sqlite.url]
        done = subprocess.run(line, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr

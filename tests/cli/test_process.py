"""The commands as processes; the demo and the bench, which have a life of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sqlalchemy_locks.cli import MISSING

from .conftest import Cli

#: Has every process of the demo, as it starts, grant whatever is asked for.
BROKEN = """\
import contextlib
from sqlalchemy_locks.leases import Leases
from sqlalchemy_locks.locks import Locks
from sqlalchemy_locks.values import Grant
Leases.acquire = lambda self, permits, **others: Grant("x", True, "ACQUIRED", permits)
Locks.exclusive = lambda self, *names, **others: contextlib.nullcontext()
"""
#: Has Python find neither Click nor Rich.
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


def test_without_what_it_is_made_with(tmp_path: Path) -> None:
    done = process("check", folder=tmp_path, customize=BARE)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{MISSING}\n")


def test_nobody_reads_on(sqlite: Cli, tmp_path: Path) -> None:
    command = f"{sys.executable} -m sqlalchemy_locks status --url {sqlite.url} | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stderr == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_a_terminal_has_not(sqlite: Cli, tmp_path: Path, encoding: str) -> None:
    sqlite("semaphore", "create", "vœu \u202e", "1")
    done = process("semaphore", "list", "--url", sqlite.url, folder=tmp_path, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    sqlite("semaphore", "delete", "vœu \u202e", "--yes")
    assert "v\\u0153u \\u202e" in done.stdout


@pytest.mark.parametrize("shut", [">&-", "2>&-", ">&- 2>&-"])
def test_streams_that_are_closed(sqlite: Cli, tmp_path: Path, shut: str) -> None:
    for command in ("check", "check --json", "sweep"):
        line = f"{sys.executable} -m sqlalchemy_locks {command} --url {sqlite.url} {shut}"
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("option", ["--json", "--prefix=lock_"])
def test_a_disk_that_is_full(sqlite: Cli, tmp_path: Path, option: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sqlalchemy_locks", "check", "--url", sqlite.url, option],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_library_loads_none_of_it(tmp_path: Path) -> None:
    code = "import sys, sqlalchemy_locks; print([name for name in ('click', 'rich', 'alembic') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "[]\n", done.stderr


def checks(done: subprocess.CompletedProcess[str]) -> list[tuple[bool, str]]:
    assert done.stdout, done.stderr
    return [(each["ok"], each["says"]) for each in json.loads(done.stdout)["checks"]]


#: Has a permit last for longer than a busy machine may leave a process standing still.
UNHURRIED = """\
from sqlalchemy_locks.cli import crowd
crowd.TTL = 15.0
"""
DEMO = ("demo", "--json", "--workers", "3", "--slots", "1", "--seconds", "1")


def test_the_demo(tmp_path: Path) -> None:
    done = process(*DEMO, folder=tmp_path, customize=UNHURRIED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(checks(done)) == 5
    assert all(ok for ok, _ in checks(done))


def test_the_demo_fails_if_nothing_is_locked(tmp_path: Path) -> None:
    done = process(*DEMO, folder=tmp_path, customize=BROKEN)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [says for ok, says in checks(done) if not ok]
    assert any("times more than 1" in says for says in failed), failed


def test_the_demo_wants_somebody_to_compete(sqlite: Cli) -> None:
    assert "nothing to compete for" in sqlite("demo", "--workers", "3", "--slots", "2", code=2).stderr


@pytest.mark.parametrize(
    ("engine", "raw", "trips"),
    [
        ("sqlite", [True, True, False], [None, None, None]),
        ("postgresql15", [True, True, True], [2, 3, 2]),
        ("mysql", [True, False, False], None),
    ],
)
def test_the_bench(engine: str, raw: list[bool], trips: list[Any] | None, made: Any) -> None:
    cli = Cli(made(engine))
    told = cli.json("bench", "--rounds", "3", "--pairs", "2")
    assert set(told) == {"database", "rounds", "pairs", "results"}
    for row in told["results"]:
        assert set(row) == {"pair", "microseconds", "raw_microseconds", "ratio", "round_trips"}
        assert row["microseconds"] > 0
    assert [row["raw_microseconds"] is not None for row in told["results"]] == raw
    # each pair of the raw driver's was one of permits, too, and all came back
    requests = "lock_permit_request" if engine in ("sqlite", "mysql") else "lock.permit_request"
    with cli.locks._engine.connect() as connection:
        states = connection.exec_driver_sql(f"SELECT state FROM {requests}").scalars().all()
    assert set(states) == {"RELEASED"}
    # 3 rounds of 2, and 1 before them, by each; through the wire 2 more
    assert len(states) == 7 * (1 + raw[2]) + (2 if trips is None or trips[2] else 0)
    if trips is not None:
        assert [row["round_trips"] for row in told["results"]] == trips
    assert [row["name"] for row in cli.json("semaphore", "list")["semaphores"]] == []
    assert "Round trips" in cli("bench", "--rounds", "3", "--pairs", "1").stdout

"""Of 64 processes exactly one acquires a mutex, an elapsed timeout, each window, each retry."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PLAIN, Servers
from tests.fixtures.parties import unused
from tests.fixtures.task_race import PROCESSES, RETRIES, ROUNDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("engine", ["postgresql15", "yugabytedb", "mysql", "mariadb", "sqlite"])
def test_exactly_one_of_64_processes(servers: Servers, engine: str) -> None:
    url = servers.installed(engine, PLAIN[engine])
    run = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.task_race", url, unused()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    got = json.loads(run.stdout)
    left, retries = got.pop("left"), got.pop("retries")
    assert got == {f"{what} {turn}": 1 for what in ("mutex", "elapsed", "window") for turn in range(ROUNDS)}
    assert retries + left == RETRIES
    assert retries > 0, f"none of {PROCESSES} got a retry"

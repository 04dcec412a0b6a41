"""Of many processes exactly one acquires a mutex, an elapsed timeout, each window, each retry."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PLAIN, Servers
from tests.fixtures.parties import unused
from tests.fixtures.task_race import RETRIES, ROUNDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("engine", "processes"), [("postgresql15", 32), ("yugabytedb", 16), ("mysql", 16), ("mariadb", 16), ("sqlite", 16)]
)
def test_exactly_one_of_many_processes(servers: Servers, engine: str, processes: int) -> None:
    url = servers.installed(engine, PLAIN[engine])
    run = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.task_race", url, unused(), str(processes)],
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
    assert retries > 0, f"none of {processes} got a retry"

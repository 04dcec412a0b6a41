"""Of many processes exactly one acquires a mutex, an elapsed timeout, each window, each retry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import PLAIN, Servers
from tests.fixtures.forks import main
from tests.fixtures.parties import ENGINES, unused
from tests.fixtures.task_race import RETRIES, ROUNDS


@pytest.mark.parametrize("engine", [*ENGINES, "yugabytedb"])
def test_exactly_one_of_many_processes(servers: Servers, engine: str, tmp_path: Path) -> None:
    url = servers.installed(engine, PLAIN[engine])
    status, out, err = main("tests.fixtures.task_race", tmp_path, url, unused())
    assert status == 0, err
    got = json.loads(out)
    left, retries = got.pop("left"), got.pop("retries")
    assert got == {f"{what} {turn}": 1 for what in ("mutex", "elapsed", "window") for turn in range(ROUNDS)}
    assert retries + left == RETRIES
    assert retries > 0

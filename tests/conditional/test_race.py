"""Of many processes exactly one acquires a mutex, an elapsed timeout, each window, each retry."""

from __future__ import annotations

from collections import Counter

import pytest
from sqlalchemy import Engine

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers
from tests.fixtures.forks import FORKS
from tests.fixtures.parties import ENGINES, PATIENCE
from tests.fixtures.task_race import PROCESSES, RETRIES, ROUNDS, mutex, take_part


@pytest.mark.parametrize("name", [*ENGINES, "yugabytedb"])
def test_exactly_one_of_many_processes(servers: Servers, engine: Engine, id: str, name: str) -> None:
    locks = sl.Locks(engine)
    locks.run(mutex.create(*(f"{id} {turn}" for turn in range(ROUNDS))))
    locks.run(mutex.create(f"{id} retries", retries=RETRIES))
    locks.run(sl.Timeout(every=1).create(f"{id} elapsed", f"{id} window"))
    url, barrier, results = (
        servers.installed(name, PLAIN[name]),
        FORKS.Barrier(PROCESSES, timeout=PATIENCE),
        FORKS.Queue(),
    )
    processes = [FORKS.Process(target=take_part, args=(url, id, each, barrier, results)) for each in range(PROCESSES)]
    for process in processes:
        process.start()
    got: Counter[str] = Counter()
    for _ in processes:
        got.update(results.get(timeout=PATIENCE))
    for process in processes:
        process.join(PATIENCE)
    retries = got.pop("retries")
    assert got == {f"{what} {turn}": 1 for what in ("mutex", "elapsed", "window") for turn in range(ROUNDS)}
    # every acquisition there was took one retry: those that are left add up with those that were had
    left = 0
    while locks.run(mutex.acquire(f"{id} retries")):
        locks.run(mutex.release(f"{id} retries"))
        left += 1
    assert retries + left == RETRIES
    assert retries > 0

"""Of many processes exactly one acquires a mutex, an elapsed timeout, each window, each retry.

They want the same thing at the same instant: half of them ask ``Locks``, half a session of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers
from tests.fixtures.forks import FORKS
from tests.fixtures.parties import ENGINES, PATIENCE

PROCESSES = 8
ROUNDS = 2
RETRIES = 5
NOW = 1_700_000_000 - 1_700_000_000 % 3600

mutex = sl.Mutex()
Run = Callable[[Any], Any]


def take_part(url: str, name: str, number: int, barrier: Any, results: Any) -> None:
    engine = create_engine(url, pool_size=1)
    locks = sl.Locks(engine)

    def in_a_session(operation: Any) -> Any:
        with Session(engine) as session, session.begin():
            return session.scalar(operation)

    run: Run = locks.run if number % 2 else in_a_session
    clock = [NOW]
    elapsed = sl.Timeout(every=10, clock=lambda: clock[0])
    windowed = sl.Timeout(every=3600, windowed=True, clock=lambda: clock[0])
    #: how often it got each thing
    got: dict[str, int] = {}
    for turn in range(ROUNDS):
        barrier.wait()
        got[f"mutex {turn}"] = run(mutex.acquire(f"{name} {turn}"))
        clock[0] = NOW + 11 * turn
        barrier.wait()
        got[f"elapsed {turn}"] = run(elapsed.acquire(f"{name} elapsed"))
        clock[0] = NOW + 3600 * (turn + 1) + number
        barrier.wait()
        got[f"window {turn}"] = run(windowed.acquire(f"{name} window"))
    barrier.wait()
    got["retries"] = 0
    for _ in range(4):
        if run(mutex.acquire(f"{name} retries")):
            got["retries"] += 1
            assert run(mutex.release(f"{name} retries")) is True
    engine.dispose()
    results.put(got)


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

"""Sixty-four processes that want the same thing at the same instant: ``python -m tests.tasks.race URL NAME``.

Half of them ask ``Locks``, half a session of their own. Prints how many got each thing, as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

from sqlalchemy import NullPool, create_engine
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl

PROCESSES = 64
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


def main(url: str, name: str) -> None:
    engine = create_engine(url, poolclass=NullPool)
    locks = sl.Locks(engine)
    locks.run(mutex.create(*(f"{name} {turn}" for turn in range(ROUNDS))))
    locks.run(mutex.create(f"{name} retries", retries=RETRIES))
    locks.run(sl.Timeout(every=1).create(f"{name} elapsed", f"{name} window"))
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(PROCESSES, timeout=250), context.Queue()
    processes = [
        context.Process(target=take_part, args=(url, name, number, barrier, results)) for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    total: dict[str, int] = {}
    for _ in processes:
        for what, many in results.get(timeout=400).items():
            total[what] = total.get(what, 0) + many
    for process in processes:
        process.join()
    # every acquisition there was took one retry: those that are left add up with those that were had
    left = 0
    while locks.run(mutex.acquire(f"{name} retries")):
        locks.run(mutex.release(f"{name} retries"))
        left += 1
    print(json.dumps(total | {"left": left}))


if __name__ == "__main__":
    main(*sys.argv[1:])

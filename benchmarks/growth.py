"""The time of each operation in tables of 1,000 to 1,000,000 rows, on each engine.

    make bench ONLY='growth[:engine]'

The engines are those of tests/servers (postgresql15, mysql, mariadb), and sqlite; without one, all of them. For each
number of rows there is a database of its own, and the rounds alternate between them. Jobs wait, mutexes are free,
permits are released, or, up to 10,000, held.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, text

import sqlalchemy_locks as sl
from tests import servers
from tests.conftest import PLAIN, install
from tests.fixtures.crowd import Filler

from .report import durable, judge

ENGINES = ["postgresql15", "mysql", "mariadb", "sqlite"]
ROWS = (1_000, 10_000, 100_000, 1_000_000)
HELD = (10, 100, 1_000, 10_000)
#: so few that 1,000 jobs suffice for all captures
ROUNDS, TIMES = 11, 8
NAME = "growing"
#: what is counted, the table's rows, the largest allowed growth (must), and the desired one (aim)
CAPTURE = "capture of 10, waiting jobs", ROWS, 1.5, 1.15
MUTEX = "mutex pair, mutexes", ROWS, 1.5, 1.15
RELEASED = "semaphore pair, released permits", ROWS, 1.2, 1.05
HELD_PERMITS = "semaphore pair, held permits", HELD, 1.5, 1.1

Operation = Callable[[sl.Locks], object]


def jobs(filler: Filler, rows: int) -> None:
    filler.insert("job", rows, external_id=filler.uuid, payload="'{}'")


def mutexes(filler: Filler, rows: int) -> None:
    filler.insert("task_state", rows, id=filler.text("task-", "n"))


def permits(filler: Filler, rows: int, state: str) -> None:
    filler.insert("permit_request", rows, external_id=filler.text("request-", "n"), state=f"'{state}'")
    # the first row, with an empty name, isn't a semaphore
    filler.insert("permit", rows, semaphore_id="2", permit_request_id="n", count="1", fence="n", state=f"'{state}'")


def capture(locks: sl.Locks) -> None:
    assert len(locks.run(sl.Queue().capture(10))) == 10


def mutex_pair(locks: sl.Locks) -> None:
    assert locks.mutex.acquire("task-500")
    assert locks.mutex.release("task-500")


def semaphore_pair(locks: sl.Locks) -> None:
    locks.release(locks.acquire({NAME: 1}))


def filled(engine: Engine, what: str, rows: int) -> None:
    """Insert the rows into a new database."""
    sl.Locks(engine).run(sl.semaphore.create(NAME, 2_000_000))
    with engine.begin() as connection:
        filler = Filler(connection)
        if what == CAPTURE[0]:
            jobs(filler, rows)
        elif what == MUTEX[0]:
            mutexes(filler, rows)
        else:
            permits(filler, rows, "RELEASED" if what == RELEASED[0] else "ACQUIRED")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        Filler(connection).analyze("job", "task_state", "permit_request", "permit", "semaphore")
        if engine.dialect.name == "postgresql":
            connection.execute(text("VACUUM"))


@contextlib.contextmanager
def server_of(name: str) -> Iterator[Callable[[str], str]]:
    """Start a server, and yield what creates a database and returns its URL."""
    if name == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield lambda database: f"sqlite:///{Path(folder) / database}.db"
        return
    with durable(name) as server:
        assert isinstance(server, servers.SQLServer)

        def made(database: str) -> str:
            server.create_database(database)
            return server.url(PLAIN[name], database)

        yield made


def report(name: str) -> None:
    """Print the growth of each operation on one engine."""
    print(f"\n{name}", flush=True)
    operations: list[tuple[tuple[str, tuple[int, ...], float, float], Operation]] = [
        (CAPTURE, capture),
        (MUTEX, mutex_pair),
        (RELEASED, semaphore_pair),
        (HELD_PERMITS, semaphore_pair),
    ]
    for number, ((what, sizes, must, aim), operation) in enumerate(operations):
        with server_of(name) as database:
            engines: dict[int, Engine] = {}
            for rows in sizes:
                url = database(f"growth_{number}_{rows}")
                install(url)
                # none of them waits for a disk
                options: Any = {"connect_args": {"options": "-c synchronous_commit=off"}} if "postgresql" in url else {}
                engines[rows] = create_engine(url, **options)
                filled(engines[rows], what, rows)
            locks = {rows: sl.Locks(engine) for rows, engine in engines.items()}
            took: dict[int, list[float]] = {rows: [] for rows in sizes}
            for turn in range(ROUNDS + 1):
                for rows in sizes:
                    began = time.perf_counter()
                    for _ in range(TIMES):
                        operation(locks[rows])
                    if turn:  # the first one connects
                        took[rows].append((time.perf_counter() - began) / TIMES * 1e6)
            for engine in engines.values():
                engine.dispose()
        shown = ", ".join(f"{rows:,}: {statistics.median(each):.0f} µs" for rows, each in took.items())
        print(f"  {shown}")
        ratios = [most / least for least, most in zip(took[sizes[0]], took[sizes[-1]], strict=True)]
        judge(f"{what}, {sizes[-1]:,} / {sizes[0]:,}, {name}", ratios, must, aim)


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    parser.add_argument("engine", nargs="*", choices=[*ENGINES, []], help=f"{', '.join(ENGINES)}; without any, all")
    asked: list[str] = parser.parse_args().engine
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for name in asked or ENGINES:
        report(name)


if __name__ == "__main__":
    main()

"""Wait times for a lock and for a semaphore with one permit, and fairness among the waiters.

    make bench ONLY='waiting[:engine,...]'

The engines are those of tests/servers (postgresql15, yugabytedb, mysql, mariadb), and sqlite; without one, all of them.
``pgbouncer-2`` is postgresql15 behind a PgBouncer in transaction mode with two server connections.
Eight processes acquire, hold for 2 ms, release, and start again immediately, in rounds of three seconds. Fairness is
the fewest turns of a process over the most. "Plain" is the usual loop around the same operation: try, sleep for 1 ms
to 64 ms with jitter, try again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

import sqlalchemy_locks as sl
from tests import servers
from tests.conftest import PLAIN, install

from .report import durable, judge

PROCESSES, TENURE, SECONDS, ROUNDS = 8, 0.002, 3.0, 3
#: must and aim: the longest wait in milliseconds, the least fairness, and the turns beside those of the plain loop
WORST, FAIRNESS, THROUGHPUT = (300.0, 60.0), (0.5, 0.95), (0.75, 0.9)
NAME = "hot"
ENGINES = ["postgresql15", "yugabytedb", "mysql", "mariadb", "sqlite"]
T = TypeVar("T")


@contextlib.contextmanager
def database(name: str) -> Iterator[str]:
    """Return the URL of a database with a semaphore of one permit."""
    with contextlib.ExitStack() as opened:
        if name == "sqlite":
            folder = opened.enter_context(tempfile.TemporaryDirectory())
            url = f"sqlite:///{Path(folder) / 'waiting.db'}"
        else:
            pooler, _, size = name.partition("-")
            pooled = pooler == "pgbouncer"
            server = opened.enter_context(durable("postgresql15" if pooled else name, pinned=False))
            server.create_database("waiting")
            if pooled:
                assert isinstance(server, servers.PostgreSQL)
                server = opened.enter_context(servers.PgBouncer(server, default_pool_size=size))
            # psycopg2 prepares no statements, as an older PgBouncer requires
            url = server.url("psycopg2" if pooled else PLAIN[name], "waiting")
        install(url)
        engine = create_engine(url)
        sl.Locks(engine).run(sl.semaphore.create(NAME, 1))
        engine.dispose()
        yield url


def tried(attempt: Callable[[], T | None]) -> T:
    """A loop without a queue."""
    delay = 0.001
    while True:
        with contextlib.suppress(DBAPIError, sl.LockTimeout):
            got = attempt()
            if got is not None:
                return got
        time.sleep(random.uniform(delay / 2, delay))
        delay = min(2 * delay, 0.064)


@contextlib.contextmanager
def plain_semaphore(locks: sl.Locks) -> Iterator[None]:
    grant = tried(lambda: locks.run(sl.semaphore.acquire({NAME: 1}, ttl=60)) or None)
    yield
    locks.release(grant)


@contextlib.contextmanager
def acquire(locks: sl.Locks) -> Iterator[None]:
    grant = locks.acquire({NAME: 1}, ttl=60)
    yield
    locks.release(grant)


@contextlib.contextmanager
def plain_lock(locks: sl.Locks) -> Iterator[None]:
    def attempt() -> contextlib.ExitStack:
        with contextlib.ExitStack() as entered:
            entered.enter_context(locks.exclusive(NAME, timeout=0))
            return entered.pop_all()

    with tried(attempt):
        yield


@contextlib.contextmanager
def exclusive(locks: sl.Locks) -> Iterator[None]:
    with locks.exclusive(NAME):
        yield


#: by name in the report
WAYS: dict[str, Callable[[sl.Locks], contextlib.AbstractContextManager[None]]] = {
    "plain semaphore": plain_semaphore,
    "locks.acquire": acquire,
    "plain lock": plain_lock,
    "locks.exclusive": exclusive,
}


def turns(url: str, way: str, start: float) -> list[float]:
    """Return the waits of one process."""
    engine = create_engine(url)
    locks = sl.Locks(engine)
    with WAYS[way](locks):
        pass  # connects, and fills SQLAlchemy's cache of compiled statements
    waits = []
    time.sleep(max(0.0, start - time.monotonic()))
    while time.monotonic() < start + SECONDS:
        began = time.monotonic()
        with WAYS[way](locks):
            waits.append(time.monotonic() - began)
            time.sleep(TENURE)
    engine.dispose()
    return waits


def crowd(url: str, way: str) -> list[list[float]]:
    """Return the waits of each process."""
    start, readers = time.monotonic() + 2, []
    for _ in range(PROCESSES):
        reader, writer = os.pipe()
        if not os.fork():
            with os.fdopen(writer, "w") as told:
                json.dump(turns(url, way, start), told)
            os._exit(0)
        os.close(writer)
        readers.append(os.fdopen(reader))
    found = []
    for waited in readers:
        with waited:
            found.append(json.load(waited))
        os.wait()
    return found


def report(name: str) -> None:
    """Run the benchmark on one engine."""
    worst: dict[str, list[float]] = {way: [] for way in WAYS}
    fairness: dict[str, list[float]] = {way: [] for way in WAYS}
    rate: dict[str, list[float]] = {way: [] for way in WAYS}
    with database(name) as url:
        for _ in range(ROUNDS):
            for way in WAYS:
                waits = crowd(url, way)
                served = [len(each) for each in waits]
                worst[way].append(max(max(each) for each in waits) * 1000)
                fairness[way].append(min(served) / max(served))
                rate[way].append(sum(served) / SECONDS)
    print(f"\n{name}: {PROCESSES} processes, {TENURE * 1000:g} ms each, {ROUNDS} rounds of {SECONDS:g} s")
    for plain, way in (("plain semaphore", "locks.acquire"), ("plain lock", "locks.exclusive")):
        for each in (plain, way):
            # SQLite's write lock promises no order
            ordered = each is way and name != "sqlite"
            judge(f"{each}, worst wait in ms, {name}", worst[each], *(WORST if ordered else ()))
            judge(f"{each}, fairness, {name}", fairness[each], *(FAIRNESS if ordered else ()), least=True)
            judge(f"{each}, turns a second, {name}", rate[each])
        ratios = [ours / theirs for ours, theirs in zip(rate[way], rate[plain], strict=True)]
        targets = THROUGHPUT if way == "locks.acquire" else ()
        judge(f"{way}, turns / plain, {name}", ratios, *targets, least=True)


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting", description=__doc__.splitlines()[0])
    parser.add_argument("engine", nargs="*", help=f"{', '.join(ENGINES)}, pgbouncer-N; without any, the first five")
    for name in parser.parse_args().engine or ENGINES:
        report(name)


if __name__ == "__main__":
    main()

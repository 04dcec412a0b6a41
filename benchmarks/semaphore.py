"""The cost of a semaphore, compared with the same pattern in plain SQLAlchemy Core, on PostgreSQL.

    make bench ONLY='semaphore[:postgresql+psycopg://user:password@host/database]'

Without a URL durable servers are started (see tests/servers): one for the eight processes, then one that is pinned,
with this process, to one processor: on two, the speed of the same operation varies. With a URL, a database is made
there and dropped.

A pair is an acquire and a release of one permit. Plain is the pattern written by hand, ten round trips: begin, lock the
row, sum, insert, insert, commit; begin, update, update, commit. Every figure is a ratio within one run, the median of
alternating rounds; only such ratios are comparable.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from sqlalchemy import URL, Engine, create_engine, func, insert, make_url, select, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.sql.clock import Now
from sqlalchemy_locks.sql.tables import tables

from .lock import Pair, a_server, database, engine_at
from .report import durable, judge
from .wire import Wire

ROUNDS, PAIRS = 15, 100
PROCESSES, SECONDS, CROWDS = 8, 2.0, 5
SEMAPHORE = "hot"

NAMES = {"ours": "locks.run", "locks.acquire": "locks.acquire"}
#: the speed-up: the least allowed one (must), and the desired one (aim)
FASTER = {"off": (2.5, 4.0), "on": (2.3, 3.5)}
CROWDED = {"off": (2.8, 5.0), "on": (2.8, 4.0)}

_ids = itertools.count()
_here = tables("lock", "")


def fresh() -> str:
    """Return a new id."""
    return f"{os.getpid()}-{next(_ids)}"


def plain(engine: Engine, ident: str) -> bool:
    """The pattern, with statements built at each use."""
    sem, request, permit = _here.semaphore, _here.permit_request, _here.permit
    with engine.begin() as connection:
        row = connection.execute(
            select(sem.c.id, sem.c.capacity).where(sem.c.name == SEMAPHORE).with_for_update()
        ).one()
        held = select(func.coalesce(func.sum(permit.c.count), 0))
        used = connection.scalar(held.where(permit.c.semaphore_id == row.id, permit.c.state == "ACQUIRED"))
        assert used is not None
        if used + 1 > row.capacity:
            return False
        made = connection.execute(insert(request).values(external_id=ident, state="ACQUIRED").returning(request.c.id))
        found = made.scalar_one()
        values = {"semaphore_id": row.id, "permit_request_id": found, "count": 1, "fence": 0}
        connection.execute(insert(permit).values(**values, state="ACQUIRED"))
    with engine.begin() as connection:
        freed = update(permit).where(permit.c.permit_request_id == found, permit.c.state != "RELEASED")
        connection.execute(freed.values(state="RELEASED"))
        ended = update(request).where(request.c.id == found)
        connection.execute(ended.values(state="RELEASED", updated_at=Now()))
    return True


def ours(locks: sl.Locks, ident: str) -> bool:
    """The same with ``Locks``."""
    grant = locks.run(sl.semaphore.acquire({SEMAPHORE: 1}, external_id=ident))
    if not grant:
        return False
    locks.release(ident)
    return True


def waiting(locks: sl.Locks, ident: str) -> bool:
    """The same with ``locks.acquire``."""
    locks.release(locks.acquire({SEMAPHORE: 1}, external_id=ident, ttl=60))
    return True


def variants(engine: Engine) -> dict[str, Pair]:
    """Return each variant, warmed up."""
    locks = sl.Locks(engine)
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: plain(engine, fresh()),
        "ours": lambda: ours(locks, fresh()),
        "locks.acquire": lambda: waiting(locks, fresh()),
    }
    for way in ways.values():
        for _ in range(20):
            way()
    return ways


def microseconds(pair: Pair, pairs: int = PAIRS) -> float:
    """Return the mean time of a pair in one round."""
    began = time.perf_counter()
    for _ in range(pairs):
        pair()
    return (time.perf_counter() - began) / pairs * 1e6


def report_pairs(url: URL, synchronous_commit: str) -> None:
    """One client."""
    engine = engine_at(url, synchronous_commit)
    ways = variants(engine)
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            rounds[name].append(microseconds(way))
    print(f"\nAcquire and release, synchronous_commit {synchronous_commit}")
    for name, times in rounds.items():
        print(f"  {name:14} {statistics.median(times):7.0f} µs")
    for name in NAMES:
        ratios = [a / b for a, b in zip(rounds["plain"], rounds[name], strict=True)]
        judge(f"plain Core / {NAMES[name]}, {synchronous_commit}", ratios, *FASTER[synchronous_commit], least=True)
    engine.dispose()


def turns(url: URL, synchronous_commit: str, kind: str, warm: threading.Barrier) -> int:
    """Count the pairs of one of several processes, from when all of them have connected and compiled statements."""
    engine = engine_at(url, synchronous_commit)
    locks = sl.Locks(engine)
    ways = {"plain": partial(plain, engine), "ours": partial(ours, locks), "locks.acquire": partial(waiting, locks)}
    way, done = ways[kind], 0
    for _ in range(10):
        way(fresh())
    warm.wait()
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done += way(fresh())
    return done


def report_crowd(url: URL, synchronous_commit: str) -> None:
    """Run eight processes on one semaphore with permits for all of them."""
    done: dict[str, list[int]] = {"plain": [], "ours": [], "locks.acquire": []}
    for _ in range(CROWDS):
        for kind, found in done.items():
            found.append(sum(crowd(url, synchronous_commit, kind)))
    for kind in ("ours", "locks.acquire"):
        ratios = [a / b for a, b in zip(done[kind], done["plain"], strict=True)]
        what = f"{PROCESSES} processes, one semaphore: plain / {NAMES[kind]}, {synchronous_commit}"
        judge(what, ratios, *CROWDED[synchronous_commit], least=True)


def crowd(url: URL, synchronous_commit: str, kind: str) -> Iterator[int]:
    """Return the pairs of each process."""
    readers, warm = [], multiprocessing.get_context("fork").Barrier(PROCESSES)
    for _ in range(PROCESSES):
        reader, writer = os.pipe()
        if not os.fork():
            os.write(writer, str(turns(url, synchronous_commit, kind, warm)).encode())
            os._exit(0)
        os.close(writer)
        readers.append(reader)
    for reader in readers:
        yield int(os.read(reader, 64))
        os.close(reader)
        os.wait()


def report_round_trips(url: URL) -> None:
    """Print the round trips of each variant."""
    assert url.host is not None
    wire = Wire(url.host, url.port or 5432)
    engine = engine_at(url.set(host="127.0.0.1", port=wire.port), "off")
    locks = sl.Locks(engine)
    print("\nRound trips, counted on the wire")
    for name, way in variants(engine).items():
        judge(f"{name}: acquire and release", counted(wire, way))
    locks.run(sl.semaphore.acquire({SEMAPHORE: 1}, external_id="kept"))
    judge("a request that is denied", counted(wire, lambda: locks.run(sl.semaphore.acquire({"closed": 1}))))
    judge("renew", counted(wire, lambda: locks.renew("kept")))
    locks.release("kept")
    engine.dispose()
    wire.close()


def counted(wire: Wire, pair: Pair) -> float:
    for _ in range(10):
        pair()
    before = wire.round_trips
    for _ in range(10):
        pair()
    return (wire.round_trips - before) / 10


@contextlib.contextmanager
def unpinned_server() -> Iterator[URL]:
    """Start a PostgreSQL server on all processors, for eight processes."""
    with durable("postgresql15", pinned=False) as server:
        yield make_url(server.url("psycopg"))


@contextlib.contextmanager
def place(given: URL | None, start: Callable[[], contextlib.AbstractContextManager[URL]]) -> Iterator[URL]:
    """Create a database, and install the semaphores."""
    with contextlib.nullcontext(given) if given is not None else start() as server, database(server) as url:
        engine = create_engine(url)
        for name, capacity in ((SEMAPHORE, 1000), ("closed", 0)):
            sl.Locks(engine).run(sl.semaphore.create(name, capacity))
        engine.dispose()
        yield url


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.semaphore", description=__doc__.splitlines()[0])
    parser.add_argument(
        "url", nargs="?", type=make_url, help="postgresql+psycopg://...; without it, a server is started"
    )
    given: URL | None = parser.parse_args().url
    with place(given, unpinned_server) as url:
        for synchronous_commit in ("off", "on"):
            report_crowd(url, synchronous_commit)
    with place(given, a_server) as url:
        report_round_trips(url)
        for synchronous_commit in ("off", "on"):
            report_pairs(url, synchronous_commit)


if __name__ == "__main__":
    main()

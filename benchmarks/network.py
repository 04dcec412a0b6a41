"""The time of each pattern with half a millisecond between the app and PostgreSQL: round trips are what counts there.

    make bench ONLY=network

Each packet of either side is kept back for a quarter of a millisecond by a proxy. Every figure is a ratio within one
run, the median of alternating rounds.
"""

from __future__ import annotations

import statistics
import time

from sqlalchemy import create_engine, make_url

import sqlalchemy_locks as sl

from . import lock, semaphore
from .mutex import pairs_of
from .report import durable, judge
from .wire import Wire

ROUNDS, PAIRS = 9, 30
DELAY = 0.0005
TARGETS = (
    lock.Target("with locks.exclusive() / the block in plain Core", "locks.exclusive", "core lock", 1.15, 0.8),
    lock.Target("with locks.exclusive() / sqlalchemy-dlock", "locks.exclusive", "dlock", None, None),
    lock.Target("locks.mutex pair / plain Core, begin()", "locks.mutex", "core mutex", 0.5, 0.4),
    lock.Target("locks.acquire and release / plain Core", "locks.acquire", "core semaphore", 0.3, 0.25),
)


def main() -> None:
    """Run the benchmark."""
    with durable("postgresql15") as server, lock.database(make_url(server.url("psycopg"))) as url:
        engine = create_engine(url)
        sl.Locks(engine).run(sl.semaphore.create(semaphore.SEMAPHORE, 1000))
        engine.dispose()
        assert url.host is not None
        wire = Wire(url.host, url.port or 5432, DELAY)
        far = url.set(host="127.0.0.1", port=wire.port)
        engine = lock.engine_at(far, "on")
        with lock.variants(far, "on") as locks:
            mutexes = pairs_of(engine)
            semaphores = semaphore.variants(engine)
            ways = {
                "core mutex": mutexes["core, begin()"],
                "locks.mutex": mutexes["locks"],
                "core lock": locks["core"],
                "locks.exclusive": locks["locks"],
                "dlock": locks["dlock"],
                "core semaphore": semaphores["plain"],
                "locks.acquire": semaphores["locks.acquire"],
            }
            rounds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS):
                for name, way in ways.items():
                    began = time.perf_counter()
                    for _ in range(PAIRS):
                        way()
                    rounds[name].append((time.perf_counter() - began) / PAIRS * 1e3)
        engine.dispose()
        wire.close()
    print(f"\nAcquire and release, {DELAY * 1000:g} ms for a round trip")
    for name, times in rounds.items():
        print(f"  {name:16} {statistics.median(times):6.2f} ms")
    for target in TARGETS:
        ratios = [a / b for a, b in zip(rounds[target.of], rounds[target.against], strict=True)]
        judge(f"{target.what}, {DELAY * 1000:g} ms", ratios, target.must, target.aim)


if __name__ == "__main__":
    main()

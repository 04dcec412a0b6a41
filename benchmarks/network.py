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
from .mutex import pairs_of, raw
from .report import durable, judge
from .wire import Wire

ROUNDS, PAIRS = 9, 30
DELAY = 0.0005
#: what is compared, and with what
RATIOS = (
    ("locks.mutex / raw psycopg", "locks.mutex", "raw mutex"),
    ("with locks.exclusive() / raw psycopg", "locks.exclusive", "raw lock"),
    ("with locks.exclusive() / sqlalchemy-dlock", "locks.exclusive", "dlock"),
    ("locks.acquire and release / plain Core", "locks.acquire", "plain semaphore"),
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
        options = {"options": "-c synchronous_commit=on"}
        with (
            lock.variants(far, "on") as locks,
            raw(far, options) as (_, execute),
            engine.connect().execution_options(isolation_level="AUTOCOMMIT") as held,
        ):
            mutexes = pairs_of(engine, held, execute)
            semaphores = semaphore.variants(engine)
            ways = {
                "raw mutex": mutexes["raw"],
                "locks.mutex": mutexes["locks"],
                "raw lock": locks["raw"],
                "locks.exclusive": locks["locks"],
                "dlock": locks["dlock"],
                "plain semaphore": semaphores["plain"],
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
    for what, of, against in RATIOS:
        judge(f"{what}, {DELAY * 1000:g} ms", [a / b for a, b in zip(rounds[of], rounds[against], strict=True)])


if __name__ == "__main__":
    main()

"""The cost of a mutex on Redis, compared with redis-py's ZADD, which is the pattern without its checks.

    make bench ONLY='redis[:redis://host:6379/0]'

Without a URL a server is started (see tests/servers) and pinned, with this process, to one processor. With a URL the
keys ``{locks_benchmark:...}`` and ``locks_benchmark`` are made there, and deleted.

Every figure is a ratio within one run, the median of alternating rounds; only such ratios are comparable.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from urllib.parse import urlsplit

import redis
import redis.asyncio

from sqlalchemy_locks.redis import Mutex

from .report import judge
from .wire import Wire

KEY = "locks_benchmark"
ROUNDS = 21
PAIRS = 500
MUST, AIM = 1.6, 1.3


def report(title: str, rounds: dict[str, list[float]]) -> None:
    """Print each variant's time and the ratio."""
    print(f"\n{title}")
    for name, times in rounds.items():
        print(f"  {name:6} {statistics.median(times):7.0f} µs")
    ratios = [a / b for a, b in zip(rounds["mutex"], rounds["zadd"], strict=True)]
    judge(f"acquire and release / ZADD twice, {title}", ratios, MUST, AIM)


def synchronous(url: str) -> None:
    """Acquire and release with redis.Redis."""
    client = redis.Redis.from_url(url)
    client.zadd(KEY, {"task": 0})
    mutex = Mutex(client, prefix=KEY)
    mutex.create("task")

    def zadd() -> None:
        client.zadd(KEY, {"task": 1}, xx=True, ch=True)
        client.zadd(KEY, {"task": 0}, xx=True, ch=True)

    def pair() -> None:
        mutex.acquire("task")
        mutex.release("task")

    def timed(pair: Callable[[], None]) -> float:
        started = time.perf_counter()
        for _ in range(PAIRS):
            pair()
        return (time.perf_counter() - started) / PAIRS * 1e6

    timed(pair)
    rounds: dict[str, list[float]] = {"zadd": [], "mutex": []}
    for _ in range(ROUNDS):
        rounds["zadd"].append(timed(zadd))
        rounds["mutex"].append(timed(pair))
    report("redis.Redis", rounds)
    client.close()


async def asynchronous(url: str) -> None:
    """Acquire and release with redis.asyncio.Redis."""
    client = redis.asyncio.Redis.from_url(url)
    mutex = Mutex(client, prefix=KEY)

    async def zadd() -> None:
        await client.zadd(KEY, {"task": 1}, xx=True, ch=True)
        await client.zadd(KEY, {"task": 0}, xx=True, ch=True)

    async def pair() -> None:
        await mutex.acquire("task")
        await mutex.release("task")

    async def timed(pair: Callable[[], Awaitable[None]]) -> float:
        started = time.perf_counter()
        for _ in range(PAIRS):
            await pair()
        return (time.perf_counter() - started) / PAIRS * 1e6

    await timed(pair)
    rounds: dict[str, list[float]] = {"zadd": [], "mutex": []}
    for _ in range(ROUNDS):
        rounds["zadd"].append(await timed(zadd))
        rounds["mutex"].append(await timed(pair))
    report("redis.asyncio.Redis", rounds)
    await client.aclose()


def report_round_trips(url: str) -> None:
    """Print the round trips of each operation."""
    place = urlsplit(url)
    wire = Wire(place.hostname or "localhost", place.port or 6379)
    client = redis.Redis.from_url(place._replace(netloc=f"127.0.0.1:{wire.port}").geturl())
    mutex = Mutex(client, prefix=KEY)
    mutex.create("task")
    print("\nRound trips, counted on the wire")
    for name, call in (("acquire", mutex.acquire), ("release", mutex.release)):
        call("task")
        before = wire.round_trips
        for _ in range(10):
            call("task")
        judge(f"{name}, round trips", (wire.round_trips - before) / 10)
    client.close()
    wire.close()


@contextlib.contextmanager
def a_server() -> Iterator[str]:
    """Start a Redis server on the same processor as this process."""
    from tests import servers

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # inherited by the server
    with servers.start("redis") as server:
        yield server.url("redis")


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.redis", description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", help="redis://...; without it, a server is started")
    given: str | None = parser.parse_args().url
    with contextlib.nullcontext(given) if given is not None else a_server() as url:
        report_round_trips(url)
        synchronous(url)
        asyncio.run(asynchronous(url))
        with contextlib.closing(redis.Redis.from_url(url)) as client:
            client.delete(KEY, *client.scan_iter(f"{{{KEY}:*"))


if __name__ == "__main__":
    main()

"""Concurrent callers: one acquires, captures are disjoint, each window and each retry is spent once."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import redis
import redis.asyncio

from sqlalchemy_locks.redis import Mutex, StateTransition, Timeout
from tests import servers as real
from tests.fixtures.parties import PATIENCE
from tests.redis.test_timeout import Clock

ALL = 64
ROUNDS = 20


def at_once(server: real.Redis, round_: Callable[[redis.Redis, int], list[Any]], parties: int) -> list[list[Any]]:
    """Return the results of ``round_(client, number)`` for all clients; they start each round together."""
    barrier = threading.Barrier(parties, timeout=PATIENCE)

    def party(_: int) -> list[list[Any]]:
        with redis.Redis(host=server.host, port=server.port) as client:
            told = []
            for number in range(ROUNDS):
                barrier.wait()
                told.append(round_(client, number))
            client.connection_pool.disconnect()  # which redis-py 5 leaves open
            return told

    with ThreadPoolExecutor(parties) as threads:
        each = list(threads.map(party, range(parties)))
    return [list(itertools.chain(*together)) for together in zip(*each, strict=True)]


def test_one_of_64_connections_acquires(server: real.Redis, plain: redis.Redis, queue: str) -> None:
    ids = [f"task {number}" for number in range(ROUNDS)]
    Mutex(plain).create(*ids, queue=queue)
    answers = at_once(server, lambda client, number: [Mutex(client).acquire(ids[number], queue=queue)], ALL)
    assert [Counter(together) for together in answers] == [{True: 1, False: ALL - 1}] * ROUNDS


def test_one_of_16_releases_and_one_acquires(server: real.Redis, plain: redis.Redis, queue: str) -> None:
    mutex = Mutex(plain)
    mutex.create("a", queue=queue)
    taken = [mutex.acquire("a", queue=queue)]

    def turn(client: redis.Redis, number: int) -> list[int]:
        own = Mutex(client)
        if number % 2:
            return [int(own.acquire("a", queue=queue))]
        return [-int(own.release("a", queue=queue))]

    sums = [sum(together) for together in at_once(server, turn, 16)]
    assert taken == [True]
    assert sums == [-1, 1] * (ROUNDS // 2)


def test_each_window_once(server: real.Redis, plain: redis.Redis, queue: str) -> None:
    Timeout(plain, every=60).create("windowed", "elapsed", queue=queue)

    def turn(client: redis.Redis, number: int) -> list[tuple[str, bool]]:
        clock = Clock(1_700_000_000 + 61 * number)
        windowed = Timeout(client, every=60, windowed=True, clock=clock)
        elapsed = Timeout(client, every=60, clock=clock)
        return [
            ("windowed", windowed.acquire("windowed", queue=queue)),
            ("elapsed", elapsed.acquire("elapsed", queue=queue)),
        ]

    for together in at_once(server, turn, 16):
        assert Counter(together) == {(kind, answer): 1 if answer else 15 for kind, answer in {*together}}
        assert len({*together}) == 4


def test_retries_are_spent_once_and_never_below_zero(server: real.Redis, plain: redis.Redis, queue: str) -> None:
    retries = 37
    Mutex(plain).create("a", queue=queue, retries=retries)

    def turn(client: redis.Redis, _: int) -> list[bool]:
        mutex, told = Mutex(client), []
        for _ in range(5):
            told.append(mutex.acquire("a", queue=queue))
            if told[-1]:
                mutex.release("a", queue=queue)
        return told

    answers = list(itertools.chain(*at_once(server, turn, 8)))
    assert Counter(answers)[True] == retries
    assert plain.hget(f"{{sqlalchemy_locks:{queue}}}:mutex:facts", "retries:a") == b"0"


def test_concurrent_captures_are_disjoint(server: real.Redis, plain: redis.Redis, queue: str) -> None:
    ids = [f"task {number:04}" for number in range(7 * 8 * ROUNDS)]
    StateTransition(plain).create(*ids, queue=queue)
    Mutex(plain).create(*ids, queue=queue)

    def turn(client: redis.Redis, _: int) -> list[tuple[str, str]]:
        tasks, mutexes = StateTransition(client).capture(7, queue=queue), Mutex(client).capture(7, queue=queue)
        assert (len(tasks), len(mutexes)) == (7, 7)
        return [("task", task.id) for task in tasks] + [("mutex", id) for id in mutexes]

    captured = list(itertools.chain(*at_once(server, turn, 8)))
    assert sorted(captured) == sorted((kind, id) for kind in ("task", "mutex") for id in ids)

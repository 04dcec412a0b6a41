"""The demo's processes, and the witness that watches them and knows nothing of locks.

What the witness compares is written while a process holds what it asked for: an overlap that it counts was one.
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from typing import Any

from sqlalchemy import URL, create_engine

from ..errors import LockTimeout
from ..locks import Locks

#: how long a permit is held without being renewed, in seconds
TTL = 2.0
AWAY, WAITS, HOLDS = range(3)


@dataclass(frozen=True)
class Names:
    """What the demo calls its semaphore and its key: its own, wherever it runs."""

    semaphore: str
    key: str


class Witness:
    """Memory that all the processes share."""

    def __init__(self, workers: int, slots: int, context: SpawnContext) -> None:
        self.workers, self.slots = workers, slots
        self._gate = context.Lock()
        self._states = context.RawArray("b", workers)
        self._turns = context.RawArray("i", workers)
        self._overlaps = context.RawValue("i", 0)
        self._most = context.RawValue("i", 0)
        #: counted up under the key by reading, thinking and writing: what is lost was read by two
        self._counter = context.RawValue("i", 0)
        self.ready = context.Barrier(workers + 1)
        self.stop, self.victim_may, self.victim_holds = context.Event(), context.Event(), context.Event()

    def set(self, worker: int, state: int) -> None:
        with self._gate:
            self._states[worker] = state
            inside = self.inside()
            if state == HOLDS:
                self._turns[worker] += 1
                self._most.value = max(self._most.value, inside)
                self._overlaps.value += inside > self.slots

    def inside(self) -> int:
        return list(self._states).count(HOLDS)

    def count_up(self) -> None:
        seen = self._counter.value
        think(0.001, 0.004)
        self._counter.value = seen + 1

    @property
    def states(self) -> list[int]:
        return list(self._states)

    @property
    def turns(self) -> list[int]:
        return list(self._turns)

    @property
    def overlaps(self) -> int:
        return int(self._overlaps.value)

    @property
    def most(self) -> int:
        """The most that were inside at once, since that was last forgotten."""
        return int(self._most.value)

    def forget_most(self) -> int:
        """What it was until now."""
        with self._gate:
            most, self._most.value = self.most, 0
        return most

    @property
    def counted(self) -> int:
        return int(self._counter.value)


def think(least: float, most: float) -> None:
    time.sleep(random.uniform(least, most))


def work(number: int, url: URL, options: dict[str, Any], names: Names, witness: Witness, victim: bool) -> None:
    """The whole life of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's Ctrl-C: it ends its workers itself
    engine = create_engine(url, execution_options=options)
    locks = Locks(engine)
    witness.ready.wait()
    while not witness.stop.is_set():
        witness.set(number, WAITS)
        try:
            grant = locks.acquire({names.semaphore: 1}, ttl=TTL, timeout=1)
        except LockTimeout:
            continue
        witness.set(number, HOLDS)
        if victim and witness.victim_may.is_set():
            witness.victim_holds.set()
            time.sleep(3600)
        think(0.05, 0.25)
        with locks.exclusive(names.key):
            witness.count_up()
        witness.set(number, AWAY)
        locks.release(grant)
        think(0.0, 0.1)
    witness.set(number, AWAY)
    engine.dispose()

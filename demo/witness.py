"""The witness: which worker is in which key, recorded without using the locks.

It keeps two records, independent of each other and of the database:

- *counters* in memory shared by all processes, compared when a worker enters;
- a *history*, one file for each process, appended during the run and read afterwards.

Both are written only while the lock is held, so an overlap in them is an overlap of holders.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType

KEYS = ("invoice:1", "invoice:2", "stock")


class State(IntEnum):
    """The state of a worker at a key."""

    AWAY = 0
    WAITS_TO_SHARE = 1
    WAITS_ALONE = 2
    SHARES = 3
    ALONE = 4


class Witness:
    """The state shared by all processes."""

    def __init__(self, workers: int, folder: Path, context: ForkServerContext) -> None:
        self.workers = workers
        self.folder = folder
        self._guard = context.Lock()
        self._states = context.RawArray("b", len(KEYS) * workers)
        self._overlaps = context.RawValue("i", 0)
        self._most_sharers = context.RawValue("i", 0)

    def visit(self, worker: int, *keys: str, shared: bool = False) -> Visit:
        """Record that a worker requests keys; ``with visit:`` records that it holds them."""
        return Visit(self, worker, keys, shared)

    def states(self, key: str) -> list[State]:
        """Return the state of each worker at a key."""
        begin = KEYS.index(key) * self.workers
        return [State(state) for state in self._states[begin : begin + self.workers]]

    @property
    def overlaps(self) -> int:
        """How often a worker entered a key in spite of another holder that excludes it."""
        return int(self._overlaps.value)

    @property
    def most_sharers(self) -> int:
        """The largest number of sharers in one key at the same time."""
        return int(self._most_sharers.value)

    def set(self, worker: int, keys: tuple[str, ...], state: State) -> None:
        """Set the state of a worker at keys; compare it with the holders when it enters."""
        with self._guard:
            for key in keys:
                if state in (State.SHARES, State.ALONE):
                    self._compare(key, state)
                self._states[KEYS.index(key) * self.workers + worker] = state

    def _compare(self, key: str, entering: State) -> None:
        others = self.states(key)
        sharers, alone = others.count(State.SHARES), others.count(State.ALONE)
        if alone or (sharers and entering is State.ALONE):
            self._overlaps.value += 1
        elif entering is State.SHARES:
            self._most_sharers.value = max(self._most_sharers.value, sharers + 1)

    def write(self, worker: int, event: str, keys: tuple[str, ...], shared: bool) -> None:
        """Append to the history in one short write, so that a killed process leaves no partial line."""
        line = f"{time.monotonic_ns()} {event} {'shared' if shared else 'alone'} {' '.join(keys)}\n"
        with (self.folder / f"{worker}.history").open("a") as history:
            history.write(line)


class Visit:
    """A worker's turn: it asks, enters, leaves, and has committed."""

    def __init__(self, witness: Witness, worker: int, keys: tuple[str, ...], shared: bool) -> None:
        self._witness, self._worker, self._keys, self._shared = witness, worker, keys, shared
        self._write("asks")
        self._set(State.WAITS_TO_SHARE if shared else State.WAITS_ALONE)

    def __enter__(self) -> None:
        self._set(State.SHARES if self._shared else State.ALONE)
        self._write("enters")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write("leaves")
        self._set(State.AWAY)

    def committed(self) -> None:
        """Record that its changes are committed."""
        self._write("committed")

    def _write(self, event: str) -> None:
        self._witness.write(self._worker, event, self._keys, self._shared)

    def _set(self, state: State) -> None:
        self._witness.set(self._worker, self._keys, state)


@dataclass(frozen=True)
class Stay:
    """A worker's stay in keys, from the history. Times are in seconds."""

    worker: int
    keys: tuple[str, ...]
    shared: bool
    asked: float
    entered: float
    left: float
    committed: bool

    @property
    def waited(self) -> float:
        return self.entered - self.asked


def read_history(folder: Path) -> list[Stay]:
    """Return all stays in the history, in the order of their beginning."""
    stays = [stay for path in folder.glob("*.history") for stay in _stays(path)]
    return sorted(stays, key=lambda stay: stay.entered)


def _stays(path: Path) -> Iterator[Stay]:
    lines = [line.split() for line in path.read_text().splitlines()]
    times = {"asks": 0.0, "enters": 0.0}
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=["", "", "", ""]):
        nanoseconds, event, mode, *keys = line
        if event == "leaves":
            left, committed = int(nanoseconds) / 1e9, following[1] == "committed"
            yield Stay(int(path.stem), tuple(keys), mode == "shared", times["asks"], times["enters"], left, committed)
        times[event] = int(nanoseconds) / 1e9


def overlaps(stays: list[Stay]) -> list[tuple[Stay, Stay]]:
    """Return pairs of stays that overlapped in a key, except pairs of sharers."""
    found = []
    for key in KEYS:
        inside: list[Stay] = []
        for stay in (stay for stay in stays if key in stay.keys):
            inside = [other for other in inside if other.left > stay.entered]
            found += [(other, stay) for other in inside if not (other.shared and stay.shared)]
            inside.append(stay)
    return found

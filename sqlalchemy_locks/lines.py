"""Lines in memory: of one process, those who wait for one semaphore are served in the order in which they came.

Only who is in front waits on a connection, and only as long as the pool keeps enough of them for everybody else: a
holder that finds no connection can neither renew nor release, and so nobody's wait would end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from sqlalchemy.pool import QueuePool
from sqlalchemy.util import await_only

_LINES = "_sqlalchemy_locks_lines"


class Lines:
    """Lines of threads. They are made when somebody comes, and gone when nobody is there."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._guard = threading.Lock()
        self._lines: dict[Any, deque[Any]] = {}
        #: those who wait on a connection
        self._connected = 0

    def anybody(self, names: Iterable[str]) -> str | None:
        """The first of the names in whose line somebody stands."""
        world = self._world()
        with self._guard:
            return next((name for name in names if (world, name) in self._lines), None)

    @contextlib.contextmanager
    def stood(self, name: str, patience: float | None) -> Iterator[bool]:
        """Stand in a line until one is in front; ``False`` when that took longer than ``patience``, in seconds."""
        key, ticket = (self._world(), name), self._make()
        with self._guard:
            line = self._lines.setdefault(key, deque())
            line.append(ticket)
        try:
            yield line[0] is ticket or self._wait(ticket, patience) or line[0] is ticket
        finally:
            with self._guard:
                line.remove(ticket)
                if not line:
                    del self._lines[key]
                else:
                    line[0].set()

    @contextlib.contextmanager
    def connected(self, pool: Any) -> Iterator[bool]:
        """Whether there is a connection to wait on: half of what a pool has is for those who don't wait."""
        with self._guard:
            room = self._connected < _half(pool)
            self._connected += room
        try:
            yield room
        finally:
            with self._guard:
                self._connected -= room

    def _world(self) -> Any:
        return None

    def _make(self) -> Any:
        return threading.Event()

    def _wait(self, ticket: Any, patience: float | None) -> bool:
        came: bool = ticket.wait(None if patience is None else min(patience, threading.TIMEOUT_MAX))
        return came


class AsyncLines(Lines):
    """Lines of tasks, stood in SQLAlchemy's greenlet."""

    def _world(self) -> Any:
        return asyncio.get_running_loop()

    def _make(self) -> Any:
        return asyncio.Event()

    def _wait(self, ticket: Any, patience: float | None) -> bool:
        try:
            return bool(await_only(asyncio.wait_for(ticket.wait(), patience)))
        except asyncio.TimeoutError:
            return False


def _half(pool: Any) -> float:
    if not isinstance(pool, QueuePool) or pool._max_overflow < 0:
        return float("inf")
    return (pool.size() + pool._max_overflow) // 2


def lines_of(engine: Any) -> Lines:
    """The lines of an engine, shared by every ``Locks`` on it and by its options' copies; a fork begins anew."""
    dialect: Any = engine.dialect
    lines: Lines | None = dialect.__dict__.get(_LINES)
    if lines is not None and lines.process == os.getpid():
        return lines
    made = AsyncLines() if dialect.is_async else Lines()
    if lines is not None:
        dialect.__dict__[_LINES] = made
    kept: Lines = dialect.__dict__.setdefault(_LINES, made)
    return kept


class Pace:
    """How often who waits looks: a tenth of what it has waited for already, so that looking adds no more than that."""

    SHORTEST, LONGEST = 0.001, 0.25

    def __init__(self) -> None:
        self._began = time.monotonic()

    def pause(self) -> float:
        """Seconds until the next look."""
        return min(self.LONGEST, max(self.SHORTEST, (time.monotonic() - self._began) / 10))

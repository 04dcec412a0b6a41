"""Lines in memory: of one process, those who want one thing wait for it here, first come first served.

Correctness comes from the database alone. Without these, the threads or tasks that want one key, or one semaphore,
would keep all the connections of the pool waiting for it, and whoever holds it could not get one to give it back.
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

from sqlalchemy.util import await_only

from sqlalchemy_locks.dialects.connections import most

_LINES = "_sqlalchemy_locks_lines"
#: what "for ever" is to a lock of Python's
_YEARS = 86400.0 * 3650


class LocalQueues:
    """The lines of one engine: made when somebody comes, and gone when nobody is there."""

    def __init__(self, asynchronous: bool) -> None:
        self.process = os.getpid()
        self.guard = threading.Lock()
        self.asynchronous = asynchronous
        #: whose turn it is, while it is somebody's
        self.now: dict[Any, Ticket] = {}
        #: those who wait on a connection
        self._connected = 0
        #: until when nobody waits on a connection, since a pooler has too few: by the monotonic clock
        self.aside_until = 0.0

    def turn(self, key: Any) -> Ticket:
        """A turn at this, to be come for."""
        return Ticket(self, (key, self._world()))

    def anybody(self, keys: Iterable[Any]) -> Any:
        """The first of the keys in whose line somebody stands, or is in front."""
        world = self._world()
        return next((key for key in keys if (key, world) in self.now), None)

    @contextlib.contextmanager
    def alone(self, keys: Iterable[Any], patience: float) -> Iterator[bool]:
        """Have one's turn at all of these; ``False`` when that took longer than ``patience``, in seconds.

        :param keys: in one order for everybody.
        """
        deadline = time.monotonic() + patience
        with contextlib.ExitStack() as had:
            for key in keys:
                turn = self.turn(key)
                had.callback(turn.give)
                if not turn.come(max(0.0, deadline - time.monotonic())):
                    yield False
                    return
            yield True

    @contextlib.contextmanager
    def connected(self, pool: Any) -> Iterator[bool]:
        """Whether there is a connection to wait on: half of what a pool has is for those who don't wait."""
        with self.guard:
            room = 2 * (self._connected + 1) <= most(pool)
            self._connected += room
        try:
            yield room
        finally:
            with self.guard:
                self._connected -= room

    def _world(self) -> Any:
        return asyncio.get_running_loop() if self.asynchronous else None


class Ticket:
    """One's turn: to be come for, and given back whatever became of it."""

    __slots__ = ("bell", "key", "line", "lines")

    def __init__(self, lines: LocalQueues, key: Any) -> None:
        self.lines, self.key = lines, key
        #: rings when it is one's turn
        self.bell: Any = None
        #: who comes after whose turn it is
        self.line: deque[Ticket] | None = None

    def come(self, patience: float | None) -> bool:
        """Wait for it, ``patience`` seconds at most; whether one has it. Who hasn't may wait on, in the same place."""
        lines = self.lines
        if self.bell is None:
            with lines.guard:
                now = lines.now.setdefault(self.key, self)
                if now is self:
                    return True
                if lines.asynchronous:
                    self.bell = asyncio.get_running_loop().create_future()
                else:
                    self.bell = threading.Lock()
                    self.bell.acquire()
                if now.line is None:
                    now.line = deque()
                now.line.append(self)
        if lines.asynchronous:
            return bool(await_only(rung(self.bell, patience)))
        came: bool = self.bell.acquire(timeout=_YEARS if patience is None else min(_YEARS, max(0.0, patience)))
        return came

    def give(self) -> None:
        """Pass it on to who comes next, or leave the line; again, nothing."""
        lines, key = self.lines, self.key
        if self.bell is None and lines.now.get(key) is not self:
            return  # it never waited, and has passed it on
        with lines.guard:
            now = lines.now.get(key)
            if now is self:
                if self.line:
                    after = self.line.popleft()
                    after.line = self.line
                    lines.now[key] = after
                    # who was cancelled, or whose time is up, and has not run since, passes it on when it does
                    if lines.asynchronous:
                        after.bell.set_result(None)
                    else:
                        after.bell.release()
                else:
                    del lines.now[key]
            elif now is not None and now.line and self in now.line:
                now.line.remove(self)


async def rung(bell: asyncio.Future[Any], patience: float | None) -> bool:
    """Wait for a future that is somebody else's to set; whether it was within ``patience``, in seconds.

    Not ``asyncio.wait_for``, which before Python 3.12 loses a cancellation that comes together with the result.
    """
    await asyncio.wait({bell}, timeout=None if patience is None else min(_YEARS, patience))
    return bell.done()


def local_queues(dialect: Any) -> LocalQueues:
    """The lines of an engine, by its dialect: shared by every ``Locks`` on it and by its options' copies.

    A fork begins anew.
    """
    known: dict[str, Any] = dialect.__dict__
    lines: LocalQueues | None = known.get(_LINES)
    if lines is not None and lines.process == os.getpid():
        return lines
    made = LocalQueues(bool(dialect.is_async))
    if lines is not None:
        known[_LINES] = made
    # in one step, for threads that come at the same time
    kept: LocalQueues = known.setdefault(_LINES, made)
    return kept


class Backoff:
    """How often who waits looks: a tenth of what it has waited for already, so that looking adds no more than that.

    :param part: which part of it instead of the tenth: for the fiftieth, 50.
    """

    SHORTEST, LONGEST = 0.001, 0.25

    def __init__(self, part: int = 10) -> None:
        self._began, self._part = time.monotonic(), part

    def pause(self) -> float:
        """Seconds until the next look."""
        return min(self.LONGEST, max(self.SHORTEST, (time.monotonic() - self._began) / self._part))

"""Turns: of one process, one waits for a key on a connection, and the others wait here, first come first served.

Correctness comes from the database alone. Without this, the threads or tasks that want one key would keep all the
connections of the pool waiting for it, and whoever holds it could not get one for its own work.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from typing import Any

from sqlalchemy.util import await_only

#: what "for ever" is to a lock of Python's
_YEARS = 86400.0 * 3650


class Turns:
    """The lines before the keys of one engine. A line is there while somebody has the turn."""

    def __init__(self, asynchronous: bool) -> None:
        self._guard = threading.Lock()
        self._asynchronous = asynchronous
        #: who has the turn, and who waits for it
        self.lines: dict[Any, tuple[Turn, deque[Turn]]] = {}

    def turn(self, key: Any) -> Turn:
        """A turn before this key, to be taken."""
        world = asyncio.get_running_loop() if self._asynchronous else None
        return Turn(self, (key, os.getpid(), world))


class Turn:
    """One's turn: to be taken once, and given back whatever became of it."""

    def __init__(self, turns: Turns, key: Any) -> None:
        self._turns, self._key = turns, key
        self._bell: Any = None

    def take(self, patience: float | None) -> bool:
        """Wait for it, ``patience`` seconds at most; whether one has it."""
        turns, key = self._turns, self._key
        with turns._guard:
            line = turns.lines.get(key)
            if line is None:
                turns.lines[key] = self, deque()
                return True
            if turns._asynchronous:
                self._bell = asyncio.get_running_loop().create_future()
            else:
                self._bell = threading.Lock()
                self._bell.acquire()
            line[1].append(self)
        if turns._asynchronous:
            return self._awaited(patience)
        got: bool = self._bell.acquire(timeout=_YEARS if patience is None else max(0.0, patience))
        return got

    def _awaited(self, patience: float | None) -> bool:
        # not asyncio.wait_for, which loses a cancellation that comes with the bell (Python before 3.12)
        bell = self._bell
        alarm = None
        if patience is not None:
            alarm = bell.get_loop().call_later(patience, lambda: bell.done() or bell.set_result(False))
        try:
            return bool(await_only(bell))
        finally:
            if alarm is not None:
                alarm.cancel()

    def give(self) -> None:
        """Pass it on to who comes next, or leave the line; again, nothing."""
        turns, key = self._turns, self._key
        with turns._guard:
            line = turns.lines.get(key)
            if line is None:
                return
            has, waiting = line
            if has is not self:
                if self in waiting:
                    waiting.remove(self)
                return
            while waiting:
                after = waiting.popleft()
                if not turns._asynchronous:
                    turns.lines[key] = after, waiting
                    after._bell.release()
                    return
                if not after._bell.done():  # else it was cancelled or its time is up, and it hasn't run since
                    turns.lines[key] = after, waiting
                    after._bell.set_result(True)
                    return
            del turns.lines[key]


def turns_of(engine: Any) -> Turns:
    """The lines of an engine, shared by every ``Locks`` on it and by its options' copies."""
    dialect: Any = engine.dialect
    made: Turns = dialect.__dict__.setdefault("_sqlalchemy_locks_turns", Turns(bool(dialect.is_async)))
    return made

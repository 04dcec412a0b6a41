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
    """The lines before the keys of one engine."""

    def __init__(self, asynchronous: bool) -> None:
        self.guard = threading.Lock()
        self.asynchronous = asynchronous
        #: whose turn it is, while it is somebody's
        self.now: dict[Any, Turn] = {}

    def turn(self, key: Any) -> Turn:
        """A turn before this key, to be taken."""
        world = asyncio.get_running_loop() if self.asynchronous else None
        return Turn(self, (key, os.getpid(), world))


class Turn:
    """One's turn: to be taken once, and given back whatever became of it."""

    __slots__ = ("bell", "key", "line", "turns")

    def __init__(self, turns: Turns, key: Any) -> None:
        self.turns, self.key = turns, key
        #: rings when it is one's turn
        self.bell: Any = None
        #: who comes after whose turn it is
        self.line: deque[Turn] | None = None

    def take(self, patience: float | None) -> bool:
        """Wait for it, ``patience`` seconds at most; whether one has it."""
        turns = self.turns
        with turns.guard:
            now = turns.now.setdefault(self.key, self)
            if now is self:
                return True
            if turns.asynchronous:
                self.bell = asyncio.get_running_loop().create_future()
            else:
                self.bell = threading.Lock()
                self.bell.acquire()
            if now.line is None:
                now.line = deque()
            now.line.append(self)
        if turns.asynchronous:
            return self._awaited(patience)
        got: bool = self.bell.acquire(timeout=_YEARS if patience is None else max(0.0, patience))
        return got

    def _awaited(self, patience: float | None) -> bool:
        # not asyncio.wait_for, which loses a cancellation that comes with the bell (Python before 3.12)
        bell = self.bell
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
        turns, key = self.turns, self.key
        if self.bell is None and turns.now.get(key) is not self:
            return  # it never waited, and has passed it on
        with turns.guard:
            now = turns.now.get(key)
            if now is self:
                after = self._after()
                if after is None:
                    del turns.now[key]
                else:
                    turns.now[key] = after
            elif now is not None and now.line and self in now.line:
                now.line.remove(self)

    def _after(self) -> Turn | None:
        """Who comes next, with the line behind him, and told so."""
        while self.line:
            after = self.line.popleft()
            if not self.turns.asynchronous:
                after.line = self.line
                after.bell.release()
                return after
            if not after.bell.done():  # else it was cancelled or its time is up, and it hasn't run since
                after.line = self.line
                after.bell.set_result(True)
                return after
        return None


def turns_of(dialect: Any) -> Turns:
    """The lines of an engine, by its dialect: shared by every ``Locks`` on it and by its options' copies."""
    known: dict[str, Any] = dialect.__dict__
    if "_sqlalchemy_locks_turns" not in known:
        # in one step, for threads that come at the same time
        known.setdefault("_sqlalchemy_locks_turns", Turns(bool(dialect.is_async)))
    made: Turns = known["_sqlalchemy_locks_turns"]
    return made

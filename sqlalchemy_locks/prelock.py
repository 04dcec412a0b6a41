"""In-memory gates, one a semaphore: of one process, one waits for it on a connection, and the others wait here.

Correctness comes from the database alone. Without this, ten threads that want one semaphore would keep ten
connections of the pool waiting for one row.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from sqlalchemy.util import await_only

from .errors import LockTimeout


class Gates:
    """Gates for threads. They are made when somebody comes, and gone when nobody is there."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._gates: dict[Any, tuple[Any, int]] = {}

    @contextlib.contextmanager
    def passed(self, names: Iterable[str], patience: float) -> Iterator[None]:
        """Be alone inside, among those of this process that want one of these.

        :param names: in one order for everybody.
        :raises LockTimeout: when that took longer than ``patience``, in seconds.
        """
        deadline = time.monotonic() + patience
        with contextlib.ExitStack() as held:
            for name in names:
                key = (os.getpid(), self._world(), name)
                gate = self._come(key)
                held.callback(self._go, key)
                if not self._take(gate, max(0.0, deadline - time.monotonic())):
                    raise LockTimeout(f"others of this process were busy with {name!r} for {patience:g} s")
                held.callback(gate.release)
            yield

    def _come(self, key: Any) -> Any:
        with self._guard:
            gate, visitors = self._gates.get(key) or (self._make(), 0)
            self._gates[key] = gate, visitors + 1
            return gate

    def _go(self, key: Any) -> None:
        with self._guard:
            gate, visitors = self._gates[key]
            if visitors == 1:
                del self._gates[key]
            else:
                self._gates[key] = gate, visitors - 1

    def _world(self) -> Any:
        return None

    def _make(self) -> Any:
        return threading.Lock()

    def _take(self, gate: Any, patience: float) -> bool:
        got: bool = gate.acquire(timeout=patience)
        return got


class AsyncGates(Gates):
    """Gates for tasks, passed in SQLAlchemy's greenlet."""

    def _world(self) -> Any:
        return asyncio.get_running_loop()

    def _make(self) -> Any:
        return asyncio.Lock()

    def _take(self, gate: Any, patience: float) -> bool:
        if not gate.locked():
            return bool(await_only(gate.acquire()))
        try:
            return bool(await_only(asyncio.wait_for(gate.acquire(), patience)))
        except asyncio.TimeoutError:
            return False


def gates_of(engine: Any) -> Gates:
    """The gates of an engine, shared by every ``Locks`` on it and by its options' copies."""
    dialect: Any = engine.dialect
    made: Gates = dialect.__dict__.setdefault("_sqlalchemy_locks_gates", AsyncGates() if dialect.is_async else Gates())
    return made

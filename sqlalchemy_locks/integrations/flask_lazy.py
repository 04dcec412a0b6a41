"""Blocks that are made before anybody knows whose: as decorators of views are, before there is an app.

What is promised: a block is of the ``Locks`` that are current when it is entered, and ends there, whatever is current
then; what can be wrong with its arguments is said where it is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

from sqlalchemy_locks.errors import ReentryError
from sqlalchemy_locks.facade.exclusive import ExclusiveBlock, Held, Name
from sqlalchemy_locks.facade.lease import Lease, LeaseContext
from sqlalchemy_locks.facade.locks import Locks


class _Nobody:
    """What a block is made with before its app is known."""

    owner = "nobody"


_NOBODY: Any = _Nobody()


class _Later:
    """A block that is made when it is entered, of the app that is current then."""

    _use: threading.Lock
    _now: Callable[[], Any]
    _block: Any = None

    def _enter_now(self) -> Any:
        # this one stays as it is: it may be the same for several apps
        if not self._use.acquire(blocking=False):
            raise ReentryError("this block is entered already: make one for each use")
        try:
            self._block = block = self._now()
            return block.__enter__()
        except BaseException:
            self._use.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block, self._block = self._block, None
        if block is None:
            raise ReentryError("this block is not entered")
        try:
            block.__exit__(kind, error, trace)
        finally:
            self._use.release()


class LaterHold(_Later, ExclusiveBlock):
    """``exclusive`` and ``shared``; ``now`` gives the ``Locks`` when it is entered."""

    def __init__(
        self, now: Callable[[], Locks], names: tuple[Name, ...], shared: bool, timeout: float | timedelta | None
    ) -> None:
        super().__init__(_NOBODY, names, shared, timeout)  # what is wrong with them is said here
        self._now = lambda: ExclusiveBlock(now(), names, shared, timeout)

    def __enter__(self) -> Held:
        held: Held = self._enter_now()
        return held


class LaterLeasing(_Later, LeaseContext):
    """``semaphore`` and ``lease``; ``now`` gives the ``Locks`` when it is entered."""

    def __init__(self, now: Callable[[], Locks], *given: Any, **named: Any) -> None:
        super().__init__(_NOBODY, *given, **named)
        self._now = lambda: LeaseContext(now()._semaphores, *given, **named)

    def __enter__(self) -> Lease:
        lease: Lease = self._enter_now()
        return lease

"""Who holds what, in blocks: what tells a thread, task or greenlet that it would wait for itself.

It is in the context, and so in those of the tasks that begin inside a block: there it is another's, and is over when
the block is, whatever becomes of the copies. A block that nobody can leave any more (an exception that came from
outside just before its first line) is over, too. A fork has none of its parent's.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any


class _Me:
    """A thread: its number may be another's when it has ended."""

    __slots__ = ("__weakref__",)


class _Mine(threading.local):
    def __init__(self) -> None:
        self.me = _Me()


class HeldEntry:
    """What one block holds; it is kept by the block alone."""

    __slots__ = ("__weakref__", "held", "kind", "me", "over")

    def __init__(self, kind: str, current_owner: tuple[Any, ...], held: Mapping[Any, int]) -> None:
        self.kind, self.me, self.held = kind, current_owner, held
        self.over = False


_mine = _Mine()
_inside: contextvars.ContextVar[tuple[weakref.ref[HeldEntry], ...]] = contextvars.ContextVar(
    "sqlalchemy_locks_inside", default=()
)


def current_owner() -> tuple[Any, ...]:
    """This process, this thread, and the task or the greenlet that it runs."""
    running: Any = None
    try:
        # a task's greenlets are SQLAlchemy's, and others each time
        running = asyncio.current_task() or _greenlet()
    except RuntimeError:
        running = _greenlet()
    # no id(), which is another's when this one is gone; and no task is kept by what it has held
    return os.getpid(), _mine.me, None if running is None else weakref.ref(running)


def _greenlet() -> Any:
    """The greenlet that runs, but for the one that a thread begins with; one of gevent's has a thread of others."""
    greenlet = sys.modules.get("greenlet")
    running: Any = None if greenlet is None else greenlet.getcurrent()
    return None if running is None or running.parent is None else running


def held_by(kind: str, mine: tuple[Any, ...]) -> list[HeldEntry]:
    """What this thread or task holds in blocks of a kind."""
    return [one for one in _going_on() if one.kind == kind and one.me == mine] if _inside.get() else []


def enter(kind: str, mine: tuple[Any, ...], held: Mapping[Any, int]) -> HeldEntry:
    """It holds this from now on: how often, by key."""
    entered = HeldEntry(kind, mine, held)
    _inside.set(tuple(weakref.ref(one) for one in (*_going_on(), entered)))
    return entered


def leave(entered: HeldEntry) -> None:
    """It does so no longer."""
    entered.over = True
    _inside.set(tuple(weakref.ref(one) for one in _going_on()))


def _going_on() -> list[HeldEntry]:
    return [one for one in (kept() for kept in _inside.get()) if one is not None and not one.over]

"""What each thread, task or greenlet holds in blocks: acquiring it again inside them would deadlock.

The entries are in a context variable, so a task that is created inside a block sees them, but isn't their owner. When
the block is left, its entry is closed, in every copy of the context. An entry whose block can't be left any more (an
exception from outside hit its first line) is garbage-collected. A forked process has no entry of its parent.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Engine

from sqlalchemy_locks._forks import in_forked_child
from sqlalchemy_locks.core.operation import build_context, translated_schema
from sqlalchemy_locks.errors import ReentryError


class _ThreadLocal(threading.local):
    def __init__(self) -> None:
        #: the thread's identity; its number may be reused when it has ended
        self.token = object()


class HeldEntry:
    """What one block holds: how often, by key. Only the block keeps a reference to it, and closes it at its end."""

    __slots__ = ("__weakref__", "closed", "held", "kind", "owner")

    def __init__(self, kind: str, owner: tuple[Any, ...], held: Mapping[Any, int]) -> None:
        self.kind, self.owner, self.held = kind, owner, held
        self.closed = False


_local = _ThreadLocal()
_entries: contextvars.ContextVar[tuple[weakref.ref[HeldEntry], ...]] = contextvars.ContextVar(
    "sqlalchemy_locks_held", default=()
)


def current_owner() -> tuple[Any, ...]:
    """Return the identity of this thread, and of the task or greenlet that it runs."""
    try:
        running: Any = asyncio.current_task()
    except RuntimeError:
        running = None  # no event loop runs
    if running is None:  # a task's calls have greenlets of their own
        greenlet = sys.modules.get("greenlet")
        current = None if greenlet is None else greenlet.getcurrent()
        # the greenlet that a thread begins with has no parent, and stands for the thread; gevent's greenlets have one
        running = None if current is None or current.parent is None else current
    # not id(), which is reused after the task has ended; and a weak reference, which doesn't keep the task alive
    return _local.token, None if running is None else weakref.ref(running)


@in_forked_child
def _forget_parent() -> None:
    _local.token = object()


def scope_of(engine: Engine) -> str:
    """Return a text that distinguishes the tables of an engine from those of its copies with other options.

    Where they can't be told apart for certain, the result is the same: a needless error is better than a deadlock.
    """
    options = engine.get_execution_options()
    table = build_context(engine.dialect, options).tables.semaphore
    if table.schema is None:
        # not the schema: a copy may name a database, and this may be the database of the connection
        return table.name.lower()
    return str(translated_schema(options, table.schema) or table.schema)


def held_by(kind: str, owner: tuple[Any, ...]) -> list[HeldEntry]:
    """Return the open entries of an owner for blocks of a kind."""
    entries = []
    for ref in _entries.get():
        entry = ref()
        if entry is not None and not entry.closed and entry.kind == kind and entry.owner == owner:
            entries.append(entry)
    return entries


def refuse_write(engine: Engine) -> None:
    """Refuse a write that would wait for the write lock of its own caller; called only for a ``single_writer``.

    :raises ReentryError: when this thread or task is in a block of this engine that holds the lock.
    """
    if not _entries.get():
        return
    for entry in held_by("key", current_owner()):
        if any(dialect is engine.dialect for (dialect, _), _ in entry.held):
            raise ReentryError(
                "this thread or task is in an exclusive() or shared() block, which holds SQLite's one write lock, and "
                "this write would wait for it forever: execute it in the block's held.session, or before the block"
            )


def enter(kind: str, owner: tuple[Any, ...], held: Mapping[Any, int]) -> HeldEntry:
    """Record the keys or semaphores that an owner holds from now on. :param held: how often, by key."""
    open_refs = []
    for ref in _entries.get():
        other = ref()
        if other is not None and not other.closed:
            open_refs.append(ref)
    entry = HeldEntry(kind, owner, held)
    _entries.set((*open_refs, weakref.ref(entry)))
    return entry

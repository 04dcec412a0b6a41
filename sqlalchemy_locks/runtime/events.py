"""Events of locks, for listeners and for the log ``sqlalchemy_locks``.

Listeners are SQLAlchemy's: ``event.listen(locks, "acquired", on_event)``. What a listener raises is logged, and breaks
no lock.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

from sqlalchemy import event
from sqlalchemy.event.registry import EventTarget

from sqlalchemy_locks._validation import is_coroutine_function
from sqlalchemy_locks.values import LockEvent

log = logging.getLogger("sqlalchemy_locks")

_LEVELS = {"lost": logging.WARNING, "retried": logging.WARNING, "swept": logging.INFO}


class Observed(EventTarget):
    """The target of listeners: ``Locks``, and ``AsyncLocks`` through it."""

    #: the owner that is stored with permits and mutexes
    owner: str
    #: whether every event is logged; frequent events are emitted only then, or if they have listeners
    _is_logged = staticmethod(partial(log.isEnabledFor, logging.DEBUG))

    @property
    def engine_name(self) -> str:
        """The engine's name in error messages and events."""
        raise NotImplementedError

    def _emit(
        self, what: str, kind: str, names: Iterable[str | int], *, owner: str | None = None, **details: Any
    ) -> None:
        """Emit an event.

        :param what: its name: one of the methods of ``LockEvents``. :param details: the attributes of ``LockEvent``.
        """
        listeners = getattr(self.dispatch, what)
        level = _LEVELS.get(what, logging.DEBUG)
        logged = log.isEnabledFor(level)
        if not listeners and not logged:
            return
        lock_event = LockEvent(
            event=what,
            kind=kind,
            names=tuple(names),
            engine=self.engine_name,
            owner=self.owner if owner is None else owner,
            **details,
        )
        if logged:
            with contextlib.suppress(Exception):  # a log handler that raises breaks no lock, either
                log.log(level, "%s", lock_event)
        for listener in listeners:
            try:
                listener(lock_event)
            except Exception:
                with contextlib.suppress(Exception):
                    log.exception("a listener failed at the event: %s", lock_event)


def add_listener(event_key: Any, **kw: Any) -> None:
    """Add a listener to its target.

    :param event_key: SQLAlchemy's description of both. :raises TypeError: for a coroutine, which nothing would await.
    """
    if is_coroutine_function(event_key.fn):
        raise TypeError(
            f"a listener is a plain function, and {event_key.fn!r} is async: start a task in a plain function"
        )
    event_key.base_listen(**kw)


class LockEvents(event.Events[Observed]):
    """The events, for SQLAlchemy's own ``event.listen`` and ``event.listens_for``.

    Listeners are plain functions of one :class:`~sqlalchemy_locks.LockEvent`, called where it occurs: in the thread
    that holds the lock, or in the event loop. They must not block, and can't be coroutines.

    >>> from sqlalchemy import event
    >>> @event.listens_for(locks, "lost")
    ... def on_lost(event: sl.LockEvent) -> None:
    ...     alarm(event.names)
    """

    _target_class_doc = "locks"
    _dispatch_target = Observed

    @classmethod
    def _listen(cls, event_key: Any, **kw: Any) -> None:
        add_listener(event_key, **kw)

    def waited(self, event: LockEvent) -> None:
        """A wait has ended. With the lock, ``acquired`` follows; without it, the event has an ``error``."""

    def acquired(self, event: LockEvent) -> None:
        """A lock, a mutex, permits or a period were acquired."""

    def released(self, event: LockEvent) -> None:
        """It was released; every block that was ``acquired`` ends with this event, and its ``error`` if it raised."""

    def lost(self, event: LockEvent) -> None:
        """It was lost before its holder released it."""

    def retried(self, event: LockEvent) -> None:
        """A transient error is followed by a retry; ``count`` is its number."""

    def swept(self, event: LockEvent) -> None:
        """A sweep has released ``count`` requests that their holders will not release."""

    def acted(self, event: LockEvent) -> None:
        """A visitor of the dashboard, the ``owner``, has executed the action ``kind``, e.g. ``dashboard.resize``."""

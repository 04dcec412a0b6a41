"""What happens to locks, told to who listens and to the log ``sqlalchemy_locks``; costs next to nothing unheard.

Listeners are SQLAlchemy's: ``event.listen(locks, "acquired", told)``. What one of them raises is logged, and breaks no
lock. Each emission is one line where it happens, and nothing is put together for it while nobody listens.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sqlalchemy import event
from sqlalchemy.event.registry import EventTarget

from sqlalchemy_locks.values import LockEvent

log = logging.getLogger("sqlalchemy_locks")
log.addHandler(logging.NullHandler())

_LEVELS = {"lost": logging.WARNING, "retried": logging.WARNING, "swept": logging.INFO}
_DEBUG = logging.DEBUG


class Observed(EventTarget):
    """What can be listened to: ``Locks``, and ``AsyncLocks`` by way of it."""

    #: somebody listens, or has listened
    _listened = False

    @property
    def _heard(self) -> bool:
        """Whether telling may be worth its while: to be asked before what happens all the time."""
        return self._listened or log.isEnabledFor(_DEBUG)

    @property
    def owner(self) -> str:
        """Who acquires."""
        raise NotImplementedError

    @property
    def engine_name(self) -> str:
        """The engine, as this library's sentences call it."""
        raise NotImplementedError

    def _tell(
        self,
        what: str,
        kind: str,
        names: Iterable[str | int],
        *,
        waited: float | None = None,
        held: float | None = None,
        shared: bool = False,
        owner: str | None = None,
        fence: int | Mapping[str, int] | None = None,
        external_id: str | None = None,
        count: int | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Tell that something happened: one of the methods of ``LockEvents``."""
        listeners = getattr(self.dispatch, what)
        level = _LEVELS.get(what, _DEBUG)
        logged = log.isEnabledFor(level)
        if not listeners and not logged:
            return
        told = LockEvent(
            event=what,
            kind=kind,
            names=tuple(names),
            engine=self.engine_name,
            owner=self.owner if owner is None else owner,
            shared=shared,
            waited=waited,
            held=held,
            fence=fence,
            external_id=external_id,
            count=count,
            error=error,
        )
        if logged:
            with contextlib.suppress(Exception):  # a handler of logs that raises is not the lock's trouble, either
                log.log(level, "%s", told)
        for listener in listeners:
            _hear(listener, told)


def _hear(listener: Callable[[LockEvent], object], told: LockEvent) -> None:
    try:
        listener(told)
    except Exception:
        with contextlib.suppress(Exception):
            log.exception("a listener failed that was told: %s", told)


class LockEvents(event.Events[Observed]):
    """What can be listened to, by SQLAlchemy's own ``event.listen`` and ``event.listens_for``.

    Listeners are plain functions of one :class:`~sqlalchemy_locks.LockEvent`, called where it happens: in the thread
    that holds the lock, or in the event loop. They must not block, and can't be coroutines.

    >>> from sqlalchemy import event
    >>> @event.listens_for(locks, "lost")
    ... def told(event: sl.LockEvent) -> None:
    ...     alarm(event.names)
    """

    _target_class_doc = "locks"
    _dispatch_target = Observed

    @classmethod
    def _listen(cls, event_key: Any, **kw: Any) -> None:
        event_key.dispatch_target._listened = True
        event_key.base_listen(**kw)

    def waited(self, event: LockEvent) -> None:
        """A wait is over: with the lock, and then ``acquired`` follows, or in vain, with the ``error``."""

    def acquired(self, event: LockEvent) -> None:
        """Something is held now."""

    def released(self, event: LockEvent) -> None:
        """Something is held no longer; each block that was ``acquired`` ends so, with its ``error`` if it had one."""

    def lost(self, event: LockEvent) -> None:
        """Something was held and is gone, before who held it had finished."""

    def retried(self, event: LockEvent) -> None:
        """A transient error: it is run again, for the ``count``-th time."""

    def swept(self, event: LockEvent) -> None:
        """A sweep has released what nobody would give back: ``count`` requests."""

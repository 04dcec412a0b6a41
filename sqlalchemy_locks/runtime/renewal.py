"""Renewal: what keeps a lease, and how its holder knows, without a round trip, that it may no longer rely on it.

A lease is proven until an instant of this machine's own clock: when the request was sent by which the server granted or
renewed it, plus its time to live, less a margin. That instant passes by itself: a holder that was stopped for longer
finds its lease lost at the next look.

Leases are renewed in batches, in which a row that others have locked is passed over: that is neither a renewal nor a
loss. It is tried again, and so is a renewal that fails, for as long as the lease is proven.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from weakref import WeakSet

from sqlalchemy_locks._validation import timeout_seconds
from sqlalchemy_locks.values import Grant

_log = logging.getLogger("sqlalchemy_locks")

#: part of the time to live: how far clocks may drift apart in it, and what a holder needs to act on what it has read
MARGIN = 0.05
#: renewals in one time to live
_RENEWALS = 3
#: the first pause after a renewal that failed, and the longest, as parts of the time to live
_FIRST_RETRY, _LONGEST_RETRY = 1 / 60, 1 / 12
#: the pause after a batch has passed over a lease, as a part of the time to live, and at least in seconds: its row may
#: be locked most of the time
_LOCKED_RETRY, _SHORTEST_RETRY = 1 / 200, 0.02
#: how much earlier than due a lease is renewed at most, so that it is renewed with others, in seconds
_LONGEST_EARLY = 1.0
#: leases that one batch renews at most
BATCH = 500

#: why a lease is lost that the server doesn't renew
NOT_HELD = "its time had run out, or it was released or swept"


def clock() -> float:
    """Return the seconds of a clock that also runs while the machine sleeps, and that can't be set."""
    if sys.platform == "win32":
        return time.monotonic()
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LostEvent:
    """Whether a lease is lost: true in a condition, and something to wait for. Once set, it stays set.

    >>> with locks.lease("nightly-import", ttl=60) as grant:
    ...     if not grant.lost:
    ...         run_the_import()
    """

    def __init__(self, ttl: float, asked_at: float) -> None:
        self.ttl = ttl
        #: the process that holds the lease
        self.process = os.getpid()
        self._event = threading.Event()
        self._once = threading.Lock()
        #: why it is set, as the end of a sentence
        self.why = ""
        #: called when it is set
        self.on_set: list[Callable[[], object]] = []
        #: called when the lease is lost, and not when its block ends
        self.on_lost: list[Callable[[LostEvent], object]] = []
        #: until when the lease is confirmed, by :func:`clock`
        self.deadline = asked_at + ttl * (1 - MARGIN)

    def confirm(self, asked_at: float) -> None:
        """Extend the lease: the server has confirmed what was sent after ``asked_at``."""
        self.deadline = asked_at + self.ttl * (1 - MARGIN)

    def set(self, why: str) -> None:
        """Mark the lease as lost."""
        if self._set(why) and os.getpid() == self.process:
            for notify in self.on_lost:
                notify(self)

    def close(self) -> None:
        """Set it since the block has ended, which is no loss."""
        self._set("its block has ended")

    def _set(self, why: str) -> bool:
        with self._once:
            if self._event.is_set():
                return False
            self.why = why
            self._event.set()
        for notify in self.on_set:
            notify()
        return True

    def is_set(self) -> bool:
        """Return whether the lease is lost, as far as this process knows; without a round trip.

        >>> with locks.lease("nightly-import", ttl=60) as grant:
        ...     grant.lost.is_set()
        False
        """
        if not self._event.is_set():
            if os.getpid() != self.process:
                self.set("it is held by the process that forked this one")
            elif clock() >= self.deadline:
                self.set("it could not be renewed in time")
        return self._event.is_set()

    __bool__ = is_set

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait until the lease is lost.

        :param timeout: the longest wait, in seconds or as a ``timedelta``; ``None`` for no limit.
        :return: whether it is lost.

        >>> with locks.lease("nightly-import", ttl=60) as grant:
        ...     grant.lost.wait(0.01)
        False
        """
        for left in self._waits(timeout):
            self._event.wait(left)
        return self.is_set()

    def _waits(self, timeout: float | timedelta | None) -> Iterator[float]:
        """Yield how long to wait for the next change, in seconds, until the lease is lost or ``timeout`` is over."""
        limit = timeout_seconds(timeout)
        until = math.inf if limit is None else time.monotonic() + limit
        while not self.is_set() and (rest := until - time.monotonic()) > 0:
            yield min(rest, max(0.0, self.deadline - clock()), threading.TIMEOUT_MAX)

    def __repr__(self) -> str:
        return f"<lost: {self.why}>" if self.is_set() else "<not lost>"


class RenewableLease:
    """One lease while it is held: when its renewal is due, and what came of it."""

    def __init__(self, grant: Grant, lost: LostEvent, asked_at: float) -> None:
        self.grant, self.lost = grant, lost
        self.due = asked_at + lost.ttl / _RENEWALS
        #: how much earlier than due it may be renewed, with others, in seconds
        self.early = min(_LONGEST_EARLY, lost.ttl / 12)
        #: its block has ended
        self.closed = False
        self._failures = 0

    def confirm(self, asked_at: float) -> None:
        """Note that the server has renewed it when it was asked, after ``asked_at``."""
        if not (self.closed or self.lost):
            self.lost.confirm(asked_at)
            self._failures = 0
            self.due = asked_at + self.lost.ttl / _RENEWALS

    def refuse(self) -> None:
        """Note that the server has not renewed it, as it isn't held."""
        if not self.closed:
            self.lost.set(NOT_HELD)

    def pass_over(self) -> None:
        """Note that others have locked its row."""
        self._retry_after(max(_SHORTEST_RETRY, self.lost.ttl * _LOCKED_RETRY))

    def postpone(self) -> None:
        """Note that it isn't known whether it was renewed."""
        self._retry_after(self.lost.ttl * min(_LONGEST_RETRY, _FIRST_RETRY * 2**self._failures))
        self._failures += 1

    def _retry_after(self, pause: float) -> None:
        self.due = min(clock() + pause, max(clock(), self.lost.deadline))


class RenewalSchedule:
    """The leases that one timer renews, of one ``Locks``. The timers wait, and this knows when and what.

    It has weak references: a lease whose block was garbage-collected ends with its time to live.

    :param renew: renews those of some grants that are held. It returns, for the tokens of those, whether they were
        renewed; others have locked the rest.
    """

    def __init__(self, renew: Callable[[list[Grant]], Mapping[str, bool]]) -> None:
        self._renew = renew
        self.leases: WeakSet[RenewableLease] = WeakSet()
        #: of the set: the block's thread and the timer's change it
        self._guard = threading.Lock()

    def add(self, lease: RenewableLease) -> None:
        """Renew a lease from now on."""
        with self._guard:
            self.leases.add(lease)

    def remove(self, lease: RenewableLease) -> None:
        """Stop renewing a lease. A renewal under way is not waited for."""
        lease.closed = True
        with self._guard:
            self.leases.discard(lease)

    def pause(self) -> float | None:
        """Return the seconds until the next renewal is due; ``None`` when there is nothing to renew."""
        with self._guard:
            due = min((lease.due for lease in self.leases), default=None)
        return None if due is None else max(0.0, due - clock())

    def renew_due(self) -> None:
        """Renew the leases that are due, in batches."""
        now = clock()
        with self._guard:
            due = [lease for lease in self.leases if lease.due - lease.early <= now]
        for start in range(0, len(due), BATCH):
            self._renew_batch([lease for lease in due[start : start + BATCH] if self._is_held(lease)])

    def _renew_batch(self, leases: list[RenewableLease]) -> None:
        if not leases:
            return
        asked_at = clock()
        try:
            held = self._renew([lease.grant for lease in leases])
        except Exception as error:
            first = leases[0].grant.external_id
            _log.warning("%d lease(s), the first of them %r, could not be renewed: %s", len(leases), first, error)
            for lease in leases:
                lease.postpone()
        else:
            for lease in leases:
                token = str(lease.grant.token)
                if token not in held:
                    lease.refuse()
                elif held[token]:
                    lease.confirm(asked_at)
                else:
                    lease.pass_over()
        for lease in leases:
            self._is_held(lease)

    def _is_held(self, lease: RenewableLease) -> bool:
        """Return whether to renew a lease; stop renewing it when its time has run out."""
        if lease.closed or lease.lost:
            self.remove(lease)
            return False
        return True

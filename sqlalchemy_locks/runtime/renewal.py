"""Renewal: what keeps a lease, and how its holder knows, without a round trip, that it may no longer rely on it.

A lease is proven until an instant of this machine's own clock: when the request was sent by which the server granted or
renewed it, plus its time to live, less a margin. That instant passes by itself: a holder that was stopped for longer
finds its lease lost at the next look.

Renewing is an UPDATE of what is held, and of nothing else. A refused renewal loses the lease; one that fails is tried
again for as long as the lease is proven.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

from sqlalchemy_locks._validation import timeout_seconds

_log = logging.getLogger("sqlalchemy_locks")

#: part of the time to live: how far clocks may drift apart in it, and what a holder needs to act on what it has read
MARGIN = 0.05
#: renewals in one time to live
_RENEWALS = 3
#: the first pause after a renewal that failed, and the longest, as parts of the time to live
_FIRST_RETRY, _LONGEST_RETRY = 1 / 60, 1 / 12
#: threads of one ``Locks`` that renew, and so connections of its pool
MAX_THREADS = 4

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
    """One lease while it is held: when its renewal is due, and what came of it.

    :param description: of the lease, for the log.
    :param renew: asks the server; ``False`` when the lease is no longer held.
    """

    def __init__(self, description: str, lost: LostEvent, asked_at: float, renew: Callable[[], bool]) -> None:
        self.description = description
        self.lost = lost
        self._renew = renew
        self._failures = 0
        self.due = asked_at + lost.ttl / _RENEWALS
        #: a thread is renewing it
        self.busy = False
        #: its block has ended
        self.closed = False

    def renew(self) -> bool:
        """Renew it now; return whether to keep renewing it."""
        if self.closed:
            return False
        asked_at, failure = clock(), None
        if not self.lost:
            try:
                if not self._renew() and not self.closed:
                    self.lost.set(NOT_HELD)
            except Exception as error:
                failure = error
        if self.closed:
            return False
        if failure is not None:
            _log.warning("%s could not be renewed: %s", self.description, failure)
        if self.lost:
            return False
        if failure is None:
            self.lost.confirm(asked_at)
            self._failures = 0
            self.due = asked_at + self.lost.ttl / _RENEWALS
        else:
            self.due = clock() + self.lost.ttl * min(_LONGEST_RETRY, _FIRST_RETRY * 2**self._failures)
            self._failures += 1
        return True


class RenewalThread:
    """The threads that renew the leases of one ``Locks``: one, and more while several renewals are due.

    None runs when nothing is held. A forked process has none of its parent's leases, and has threads of its own.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self._changed = threading.Condition()
        # weak references: a lease whose block was garbage collected is to end with its time to live
        self._leases: weakref.WeakSet[RenewableLease] = weakref.WeakSet()
        self._watched: set[weakref.ref[RenewableLease]] = set()
        self._threads = 0
        #: a thread waits for the next renewal that is due
        self._idle = False

    def add(self, lease: RenewableLease) -> None:
        """Renew a lease from now on."""
        with self._changed:
            if self._idle:
                self._changed.notify()  # it may be due before the one that is waited for
            elif self._threads < MAX_THREADS:
                self._start()
            self._leases.add(lease)
            self._watched.add(weakref.ref(lease, self._collected))

    def remove(self, lease: RenewableLease) -> None:
        """Stop renewing a lease; a renewal under way is not waited for."""
        with self._changed:
            lease.closed = True
            self._leases.discard(lease)
            self._watched.discard(weakref.ref(lease))
            self._changed.notify()

    def _collected(self, reference: weakref.ref[RenewableLease]) -> None:
        if os.getpid() != self.process:
            return  # in a forked process the lock may be held forever, by a thread that doesn't exist there
        # it may be collected inside one of these methods: the lock is a reentrant one
        with self._changed:
            self._watched.discard(reference)
            self._changed.notify()

    def _start(self) -> None:
        threading.Thread(target=self._work, name="sqlalchemy_locks.renewal", daemon=True).start()
        self._threads += 1

    def _work(self) -> None:
        try:
            while self._renew_next():
                pass
        except BaseException:
            with self._changed:
                self._threads -= 1
            raise

    def _renew_next(self) -> bool:
        lease = self._wait_for_next()
        if lease is None:
            return False
        renewed = False
        try:
            renewed = lease.renew()
        finally:
            with self._changed:
                lease.busy = False
                if not renewed:
                    self._leases.discard(lease)
                # the idle thread doesn't know yet when this lease is due again
                self._changed.notify()
        return True

    def _wait_for_next(self) -> RenewableLease | None:
        """Wait for the lease that is due first; ``None`` when this thread isn't needed any more."""
        with self._changed:
            while True:
                free = [lease for lease in self._leases if not lease.busy]
                if not free or self._idle:
                    # one idle thread is enough; a thread that is renewing returns here
                    self._threads -= 1
                    return None
                first = min(free, key=lambda lease: lease.due)
                pause = first.due - clock()
                if pause <= 0:
                    first.busy = True
                    if len(free) > 1 and self._threads < MAX_THREADS:
                        with contextlib.suppress(RuntimeError):  # the system may refuse more threads
                            self._start()  # the other leases must not wait for this one
                    return first
                known = len(self._leases)
                del first, free
                if len(self._leases) < known:
                    continue  # these were the last references, and no thread was idle to be notified
                self._idle = True
                self._changed.wait(min(pause, threading.TIMEOUT_MAX))
                self._idle = False

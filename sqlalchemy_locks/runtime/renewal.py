"""Renewal: what keeps a lease, and how its holder knows, without asking anybody, that it may no longer count on it.

A lease is proven until an instant of this machine's own clock: that of before the request was sent which the server
granted or renewed it by, and its time to live, less a margin. Nobody has to tell a holder that the instant has passed:
who was stopped for longer than that finds it lost the moment it looks.

Renewing is an UPDATE of what is held, and of nothing else. What is refused is lost; what fails is tried again for as
long as the lease is proven.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

_log = logging.getLogger("sqlalchemy_locks")

#: of a time to live: what clocks may run apart in it, and what a holder needs to act on what it has just read
MARGIN = 0.05
#: so often in a time to live it is renewed
_TIMES = 3
#: the first pause after a renewal that failed, and the longest, as parts of the time to live
_AGAIN, _LATEST = 1 / 60, 1 / 12
#: threads of one ``Locks`` that renew, and so connections of its pool
MOST = 4


def clock() -> float:
    """Seconds that go on while the machine sleeps, and that nobody sets."""
    if sys.platform == "win32":
        return time.monotonic()
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LostEvent:
    """Whether a lease is lost: true in a condition, and something to wait for. Once true, it stays so.

    >>> with locks.lease("nightly-import", ttl=60) as grant:
    ...     if not grant.lost:
    ...         run_the_import()
    """

    def __init__(self, ttl: float, asked_at: float) -> None:
        self.ttl = ttl
        #: the one that holds it
        self.process = os.getpid()
        self._gone = threading.Event()
        self._once = threading.Lock()
        #: a sentence's part, once it is
        self.why = ""
        #: called when it is
        self.told: list[Callable[[], object]] = []
        #: called, too, unless it was given back
        self.mourned: list[Callable[[], object]] = []
        #: until when it is proven
        self.deadline = 0.0
        self.proven(asked_at)

    def proven(self, asked_at: float) -> None:
        """The server has said yes to what was sent after ``asked_at``."""
        self.deadline = asked_at + self.ttl * (1 - MARGIN)

    def set(self, why: str) -> None:
        """It is lost."""
        if self._set(why) and os.getpid() == self.process:
            for tell in self.mourned:
                tell()

    def over(self) -> None:
        """It was given back, and is nobody's loss."""
        self._set("its block is over")

    def _set(self, why: str) -> bool:
        with self._once:
            if self._gone.is_set():
                return False
            self.why = why
            self._gone.set()
        for tell in self.told:
            tell()
        return True

    def is_set(self) -> bool:
        """Whether it is lost, as far as that is known here: nothing is asked.

        >>> with locks.lease("nightly-import", ttl=60) as grant:
        ...     grant.lost.is_set()
        False
        """
        if not self._gone.is_set():
            if os.getpid() != self.process:
                self.set("it is the process's that forked this one")
            elif clock() >= self.deadline:
                self.set("it could not be renewed in time")
        return self._gone.is_set()

    __bool__ = is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is lost, or for so many seconds; whether it is.

        >>> with locks.lease("nightly-import", ttl=60) as grant:
        ...     grant.lost.wait(0.01)
        False
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left = max(0.0, self.deadline - clock())
            if until is not None:
                rest = until - time.monotonic()
                if rest <= 0:
                    return False
                left = min(left, rest)
            self._gone.wait(min(left, threading.TIMEOUT_MAX))
        return True

    def __repr__(self) -> str:
        return f"<lost: {self.why}>" if self.is_set() else "<not lost>"


class RenewableLease:
    """One lease while it is held: when it is due, and what came of renewing it.

    :param renew: asks the server; ``False`` when it is no longer held.
    """

    def __init__(self, what: str, lost: LostEvent, asked_at: float, renew: Callable[[], bool]) -> None:
        self.what = what
        self.lost = lost
        self._renew = renew
        self._failures = 0
        self.due = asked_at + lost.ttl / _TIMES
        #: somebody is renewing it
        self.busy = False
        #: it was given back
        self.over = False

    def renew(self) -> bool:
        """Renew it now; whether to go on with it."""
        if self.over:
            return False
        asked_at, failure = clock(), None
        if not self.lost:
            try:
                if not self._renew() and not self.over:
                    self.lost.set("its time had run out, or it was released or swept")
            except Exception as error:
                failure = error
        if self.over:
            return False
        if failure is not None:
            _log.info("%s could not be renewed: %s", self.what, failure)
        if self.lost:
            return False
        if failure is None:
            self.lost.proven(asked_at)
            self._failures = 0
            self.due = asked_at + self.lost.ttl / _TIMES
        else:
            self.due = clock() + self.lost.ttl * min(_LATEST, _AGAIN * 2**self._failures)
            self._failures += 1
        return True


class RenewalThread:
    """The threads that renew what one ``Locks`` holds: one, and some more while there is more to do than that.

    There are none when nothing is held. A fork has none of its parent's leases: it begins with new ones of its own.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self._changed = threading.Condition()
        #: weakly: one that nobody can give back any more is to end with its time
        self._kept: weakref.WeakSet[RenewableLease] = weakref.WeakSet()
        self._watched: set[weakref.ref[RenewableLease]] = set()
        self._threads = 0
        #: whether a thread waits for what is due
        self._idle = False

    def add(self, lease: RenewableLease) -> None:
        """Renew it from now on."""
        with self._changed:
            if self._idle:
                self._changed.notify()  # it may be due before what is waited for
            elif self._threads < MOST:
                self._start()
            self._kept.add(lease)
            self._watched.add(weakref.ref(lease, self._dropped))

    def remove(self, lease: RenewableLease) -> None:
        """Renew it no more; one that is under way at this moment is not waited for."""
        with self._changed:
            lease.over = True
            self._kept.discard(lease)
            self._watched.discard(weakref.ref(lease))
            self._changed.notify()

    def _dropped(self, gone: weakref.ref[RenewableLease]) -> None:
        if os.getpid() != self.process:
            return  # a fork, where the lock may be had for ever by a thread that isn't there
        # wherever it was collected, perhaps in the midst of one of these methods: the lock may be had twice by a thread
        with self._changed:
            self._watched.discard(gone)
            self._changed.notify()

    def _start(self) -> None:
        threading.Thread(target=self._work, name="sqlalchemy_locks.renewal", daemon=True).start()
        self._threads += 1

    def _work(self) -> None:
        try:
            while self._worked():
                pass
        except BaseException:
            with self._changed:
                self._threads -= 1
            raise

    def _worked(self) -> bool:
        lease = self._next()
        if lease is None:
            return False
        kept = False
        try:
            kept = lease.renew()
        finally:
            with self._changed:
                lease.busy = False
                if not kept:
                    self._kept.discard(lease)
                # who waits doesn't know yet when this one is due again
                self._changed.notify()
        return True

    def _next(self) -> RenewableLease | None:
        """Wait for the lease that is due first; ``None`` when this thread is needed no more."""
        with self._changed:
            while True:
                free = [lease for lease in self._kept if not lease.busy]
                if not free or self._idle:
                    # one that waits is enough; whoever is renewing comes back here
                    self._threads -= 1
                    return None
                first = min(free, key=lambda lease: lease.due)
                pause = first.due - clock()
                if pause <= 0:
                    first.busy = True
                    if len(free) > 1 and self._threads < MOST:
                        with contextlib.suppress(RuntimeError):  # no more threads are to be had
                            self._start()  # the others must not wait for this one
                    return first
                known = len(self._kept)
                del first, free
                if len(self._kept) < known:
                    continue  # these were the last to know it, and nobody was there yet to be woken
                self._idle = True
                self._changed.wait(min(pause, threading.TIMEOUT_MAX))
                self._idle = False

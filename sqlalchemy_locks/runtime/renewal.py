"""The renewal of leases, and how a holder notices, without a round trip, that its lease may be lost.

A lease is confirmed until a deadline by this machine's clock. The deadline is the instant at which the request was sent
that granted or renewed the lease, plus its time to live, minus a margin. A holder that was stopped for longer sees the
loss at its next look: the deadline has passed by itself.

The timer is a thread, or a task of an event loop; there is none when nothing is held. It renews leases in batches. A
batch skips a row that others have locked, which is neither a renewal nor a loss. A skipped lease is renewed alone, in a
second thread or task, and only there a refusal is a loss. A renewal that fails is tried again until the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from functools import partial
from typing import Protocol
from weakref import WeakSet

from sqlalchemy.util import greenlet_spawn

from sqlalchemy_locks._validation import timeout_seconds
from sqlalchemy_locks.core.asyncio_waits import wait_for_event
from sqlalchemy_locks.core.side_pool import SidePool
from sqlalchemy_locks.values import Grant

_log = logging.getLogger("sqlalchemy_locks")

#: the margin, as a part of the time to live: for the drift of the clocks in it, and for a holder's reaction to a look
MARGIN = 0.05
#: renewals in one time to live
_RENEWALS = 3
#: the first pause after a renewal that failed, and the longest, as parts of the time to live
_FIRST_RETRY, _LONGEST_RETRY = 1 / 60, 1 / 12
#: how much earlier than due a lease is renewed at most, so that it is renewed with others, in seconds
_LONGEST_EARLY = 1.0
#: leases that one transaction renews at most
MAX_RENEWED = 500

THREAD_NAME = "sqlalchemy_locks.renewal"
#: how long the end of the last block waits for a renewal under way, in seconds: to cancel it would cost a connection
_RENEWAL_END = 1.0

#: why a lease is lost if the server doesn't renew it
NOT_HELD = "its time had run out, or it was released or swept"


#: returns the seconds of a clock that also runs while the machine sleeps, and that can't be set
clock: Callable[[], float] = time.monotonic
if sys.platform != "win32":
    clock = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


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
        self.on_set: Callable[[], object] = lambda: None
        #: called when the lease is lost, and not when its block ends
        self.on_lost: Callable[[LostEvent], object] = lambda _: None
        #: until when the lease is confirmed, by :func:`clock`
        self.deadline = asked_at + ttl * (1 - MARGIN)

    def confirm(self, asked_at: float) -> None:
        """Extend the lease: the server has confirmed it by a request that was sent after ``asked_at``."""
        self.deadline = asked_at + self.ttl * (1 - MARGIN)

    def set(self, why: str) -> None:
        """Mark the lease as lost."""
        if self._set(why) and os.getpid() == self.process:
            self.on_lost(self)

    def close(self) -> None:
        """Set the event because the block has ended; that is no loss."""
        self._set("its block has ended")

    def _set(self, why: str) -> bool:
        with self._once:
            if self._event.is_set():
                return False
            self.why = why
            self._event.set()
        self.on_set()
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
        for seconds in self._waits(timeout):
            self._event.wait(seconds)
        return self.is_set()

    def _waits(self, timeout: float | timedelta | None) -> Iterator[float]:
        """Yield how long to wait for the next change, in seconds, until the lease is lost or ``timeout`` is over."""
        limit = timeout_seconds(timeout)
        end = math.inf if limit is None else time.monotonic() + limit
        while not self.is_set() and (wait := end - time.monotonic()) > 0:
            yield min(wait, max(0.0, self.deadline - clock()), threading.TIMEOUT_MAX)

    def __repr__(self) -> str:
        return f"<lost: {self.why}>" if self.is_set() else "<not lost>"


class RenewableLease:
    """One lease while it is held: when its renewal is due, and whether the last one succeeded."""

    def __init__(self, grant: Grant, lost: LostEvent, asked_at: float) -> None:
        self.grant, self.lost = grant, lost
        self.due = asked_at + lost.ttl / _RENEWALS
        #: how much earlier than due it may be renewed, with others, in seconds
        self.early = min(_LONGEST_EARLY, lost.ttl / 12)
        #: its block has ended
        self.closed = False
        #: a batch has skipped it: it is renewed alone
        self.skipped = False
        self._failures = 0

    def confirm(self, asked_at: float) -> None:
        """Note that the server has renewed the lease; the request was sent after ``asked_at``."""
        if not (self.closed or self.lost):
            self.lost.confirm(asked_at)
            self._failures = 0
            self.due = asked_at + self.lost.ttl / _RENEWALS

    def refuse(self) -> None:
        """Note that the server has not renewed it, as it isn't held."""
        if not self.closed:
            self.lost.set(NOT_HELD)

    def postpone(self) -> None:
        """Note that it is unknown whether the lease was renewed: try again after a pause."""
        pause = self.lost.ttl * min(_LONGEST_RETRY, _FIRST_RETRY * 2**self._failures)
        self.due = min(clock() + pause, max(clock(), self.lost.deadline))
        self._failures += 1


class Renewer(Protocol):
    """Renews leases in the database; each method is called by one thread or task at a time."""

    def renew_batch(self, grants: list[Grant]) -> Collection[str]:
        """Return the tokens of the grants that were renewed; the others are locked, or not held."""
        ...

    def renew_alone(self, grant: Grant, ttl: float) -> bool:
        """Return whether a grant is held, and so was renewed; wait for its row, but not for long."""
        ...

    def take_pool(self) -> SidePool | None:
        """Return the pool of its connections, to be disposed of: the next renewal makes another one."""
        ...


class RenewalSchedule:
    """The leases of one ``Locks`` that one timer renews. The timer waits; the schedule decides when to renew which.

    It has weak references: a lease whose block was garbage-collected ends with its time to live.
    """

    def __init__(self, renewer: Renewer) -> None:
        self.renewer = renewer
        self.leases: WeakSet[RenewableLease] = WeakSet()
        #: protects ``leases``: the blocks' threads, the timer's thread and the thread for skipped leases change them
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
            if not self.leases:
                return None
            due = min((lease.due for lease in self.leases if not lease.skipped), default=math.inf)
        return max(0.0, due - clock())

    def renew_due(self) -> None:
        """Renew the leases that are due, in batches."""
        now = clock()
        due = [lease for lease in self._all() if not lease.skipped and lease.due - lease.early <= now]
        for start in range(0, len(due), MAX_RENEWED):
            self._renew_batch([lease for lease in due[start : start + MAX_RENEWED] if self._is_held(lease)])

    def has_skipped(self) -> bool:
        """Return whether there are leases that a batch has skipped."""
        return any(lease.skipped for lease in self._all())

    def renew_skipped(self) -> bool:
        """Renew one of the skipped leases; return whether there was one."""
        skipped = [lease for lease in self._all() if lease.skipped]
        if not skipped:
            return False
        # a lease whose row stayed locked is due later than leases that were not tried yet
        lease = min(skipped, key=lambda lease: lease.due)
        try:
            self._renew_alone(lease)
        finally:
            lease.skipped = False
        return True

    def return_skipped(self) -> None:
        """Let the batches renew the skipped leases again, after a pause."""
        for lease in self._all():
            if lease.skipped:
                lease.postpone()
                lease.skipped = False

    def _renew_batch(self, leases: list[RenewableLease]) -> None:
        if not leases:
            return
        asked_at = clock()
        try:
            renewed = self.renewer.renew_batch([lease.grant for lease in leases])
        except Exception as error:
            first = leases[0].grant.external_id
            _log.warning("%d lease(s), the first of them %r, could not be renewed: %s", len(leases), first, error)
            for lease in leases:
                lease.postpone()
        else:
            for lease in leases:
                if lease.grant.token in renewed:
                    lease.confirm(asked_at)
                else:
                    lease.skipped = True
        for lease in leases:
            self._is_held(lease)

    def _renew_alone(self, lease: RenewableLease) -> None:
        if not self._is_held(lease):
            return
        asked_at = clock()
        try:
            renewed = self.renewer.renew_alone(lease.grant, lease.lost.ttl)
        except Exception as error:
            _log.warning("the lease %r could not be renewed: %s", lease.grant.external_id, error)
            lease.postpone()
        else:
            if renewed:
                lease.confirm(asked_at)
            else:
                lease.refuse()
        self._is_held(lease)

    def _is_held(self, lease: RenewableLease) -> bool:
        """Return whether to renew a lease; stop renewing it when its time has run out."""
        if lease.closed or lease.lost:
            self.remove(lease)
            return False
        return True

    def _all(self) -> list[RenewableLease]:
        with self._guard:
            return list(self.leases)


class RenewalThread:
    """The thread that renews the leases of one ``Locks``, in one process."""

    def __init__(self, renewer: Renewer) -> None:
        self.process = os.getpid()
        self.schedule = RenewalSchedule(renewer)
        self._changed = threading.Condition()
        self._runs = self._renews_skipped = False
        #: when the thread looks again, by :func:`clock`
        self._wakes_at = math.inf

    def add(self, lease: RenewableLease) -> None:
        """Renew a lease from now on."""
        with self._changed:
            self.schedule.add(lease)
            if not self._runs:
                threading.Thread(target=self._work, name=THREAD_NAME, daemon=True).start()
                self._runs = True
            elif lease.due < self._wakes_at:
                self._changed.notify()

    def remove(self, lease: RenewableLease) -> None:
        """Stop renewing a lease; a renewal under way is not waited for."""
        with self._changed:
            self.schedule.remove(lease)
            if not self.schedule.leases:
                self._changed.notify()

    def wake(self) -> None:
        """Have the thread look again when the next renewal is due."""
        with self._changed:
            self._changed.notify()

    def _work(self) -> None:
        try:
            while self._wait():
                self.schedule.renew_due()
                self._begin_skipped()
        except BaseException:
            with self._changed:
                self._runs = False
            raise
        finally:
            self._release_pool()

    def _wait(self) -> bool:
        """Wait for the next renewal; ``False`` when there is nothing to renew."""
        with self._changed:
            while pause := self.schedule.pause():
                self._wakes_at = clock() + pause
                self._changed.wait(min(pause, threading.TIMEOUT_MAX))
            self._wakes_at = -math.inf
            self._runs = pause is not None
            return self._runs

    def _begin_skipped(self) -> None:
        with self._changed:
            if self._renews_skipped or not self.schedule.has_skipped():
                return
            self._renews_skipped = True
        try:
            threading.Thread(target=self._work_on_skipped, name=THREAD_NAME, daemon=True).start()
        except RuntimeError:  # the system refuses more threads
            self._renews_skipped = False
            self.schedule.return_skipped()

    def _work_on_skipped(self) -> None:
        try:
            while self._is_wanted_for_skipped():
                self.schedule.renew_skipped()
                self.wake()
        except BaseException:
            self._renews_skipped = False
            raise
        finally:
            self._release_pool()

    def _is_wanted_for_skipped(self) -> bool:
        with self._changed:  # a batch that passes over another lease afterwards starts another thread
            self._renews_skipped = self.schedule.has_skipped()
            return self._renews_skipped

    def _release_pool(self) -> None:
        """Dispose of the pool when no thread uses it."""
        with self._changed:
            in_use = self._runs or self._renews_skipped
            pool = None if in_use else self.schedule.renewer.take_pool()
        if pool is not None:
            pool.dispose()


class RenewalTask:
    """The task that renews the leases of one ``AsyncLocks``, in one event loop.

    :param on_end: called when it has ended: it is not used again.
    """

    def __init__(self, renewer: Renewer, on_end: Callable[[], object]) -> None:
        self.schedule = RenewalSchedule(renewer)
        self._on_end = on_end
        self._changed = asyncio.Event()
        #: the task has ended, or has leases to renew again
        self._settled = asyncio.Event()
        self._wakes_at = math.inf
        self._skipped_task: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._work())

    def add(self, lease: RenewableLease) -> None:
        """Renew a lease from now on."""
        self.schedule.add(lease)
        self._settled.set()
        if lease.due < self._wakes_at:
            self._changed.set()

    async def remove(self, lease: RenewableLease) -> None:
        """Stop renewing a lease; after the last one, wait until the task has ended."""
        self.schedule.remove(lease)
        if self.schedule.leases:
            return
        self._changed.set()
        self._settled.clear()
        if self._task.done():
            return
        await wait_for_event(self._settled, _RENEWAL_END)
        if not (self.schedule.leases or self._task.done()):
            await self._cancel()

    async def _work(self) -> None:
        try:
            while True:
                pause = self.schedule.pause()
                if pause is None and self._skipped_task is None:
                    await self._release_pool()
                    if self.schedule.leases:
                        continue
                    return
                if pause != 0:
                    await self._wait(pause)
                    continue
                await greenlet_spawn(self.schedule.renew_due)
                if self._skipped_task is None and self.schedule.has_skipped():
                    self._skipped_task = asyncio.create_task(self._work_on_skipped())
        finally:
            self._on_end()
            self._settled.set()

    async def _wait(self, pause: float | None) -> None:
        """Wait for the next renewal, or until something has changed."""
        self._wakes_at = math.inf if pause is None else clock() + pause
        self._changed.clear()
        await wait_for_event(self._changed, None if pause == math.inf else pause)
        self._wakes_at = -math.inf

    async def _work_on_skipped(self) -> None:
        try:
            while await greenlet_spawn(self.schedule.renew_skipped):
                self._changed.set()
        finally:
            self._skipped_task = None
            self._changed.set()

    async def _release_pool(self) -> None:
        pool = self.schedule.renewer.take_pool()
        if pool is not None:
            await greenlet_spawn(pool.dispose)

    async def _cancel(self) -> None:
        self._on_end()  # a block that is entered meanwhile gets another task, since this one ends
        for task in (self._skipped_task, self._task):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        await self._release_pool()


class LeaseTimers:
    """The timers of one ``Locks``: a thread in each process, a task in each event loop.

    :param renewer: makes the :class:`Renewer` of one timer.
    """

    def __init__(self, renewer: Callable[[], Renewer]) -> None:
        self._renewer = renewer
        self._thread = RenewalThread(renewer())
        self._tasks: dict[asyncio.AbstractEventLoop, RenewalTask] = {}

    @property
    def thread(self) -> RenewalThread:
        """The thread of this process; a forked process doesn't renew the leases of its parent."""
        if self._thread.process != os.getpid():
            self._thread = RenewalThread(self._renewer())
        return self._thread

    def task(self) -> RenewalTask:
        """Return the task of the running event loop."""
        loop = asyncio.get_running_loop()
        task = self._tasks.get(loop)
        if task is None:
            task = self._tasks[loop] = RenewalTask(self._renewer(), lambda: self._forget(loop, task))
        return task

    def _forget(self, loop: asyncio.AbstractEventLoop, task: RenewalTask | None) -> None:
        if self._tasks.get(loop) is task:
            del self._tasks[loop]

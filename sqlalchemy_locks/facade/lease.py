"""Leases: permits of semaphores, held while a block runs, and renewed in the background.

As long as ``grant.lost`` is not set, their time has not run out by the server's clock, unless that clock and this
machine's drifted apart by more than a twentieth of the time to live. A release or a sweep by their id or owner is
noticed at the next renewal. ``lost`` is for stopping early. A write that must not come too late belongs under
``guarded`` or ``fenced``, where the database refuses it.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from sqlalchemy_locks import semaphore
from sqlalchemy_locks._validation import timeout_seconds, valid_int
from sqlalchemy_locks.core.operation import Operation
from sqlalchemy_locks.core.side_pool import SidePool
from sqlalchemy_locks.core.transaction import ROW_TIMEOUT, OperationRunner
from sqlalchemy_locks.errors import LockLost, ReentryError, UnknownSemaphore, Unsupported
from sqlalchemy_locks.facade.host import LockHost
from sqlalchemy_locks.facade.semaphore_wait import SemaphoreWaiter
from sqlalchemy_locks.runtime import reentry
from sqlalchemy_locks.runtime.decorators import in_block, refuse_truth
from sqlalchemy_locks.runtime.renewal import NOT_HELD, LeaseTimers, LostEvent, RenewableLease, clock
from sqlalchemy_locks.semaphore.acquire import for_block
from sqlalchemy_locks.semaphore.admin import create_for_lease
from sqlalchemy_locks.semaphore.availability import availability, is_held
from sqlalchemy_locks.semaphore.release import abandon
from sqlalchemy_locks.semaphore.renew import renew_batch
from sqlalchemy_locks.values import Grant, Released

T = TypeVar("T")
P = ParamSpec("P")

_log = logging.getLogger("sqlalchemy_locks")
#: the longest wait for the row of one lease, as a part of its time to live
_ROW_WAIT = 1 / 24
#: attempts to create the semaphore of a lease and to use it: a clean-up may remove it in between
_ROUNDS = 100


class GrantView(Grant):
    """A grant with more attributes; ``expires_at`` is the value at grant time, renewals do not update it."""

    def __init__(self, grant: Grant) -> None:
        self.__dict__.update(vars(grant))

    def __reduce__(self) -> Any:
        # a copy, also one that is sent to another process, is the grant alone
        return Grant, tuple(getattr(self, field.name) for field in fields(Grant))


class Lease(GrantView):
    """What a block holds: a :class:`~sqlalchemy_locks.Grant`, and whether it is still held.

    >>> with locks.lease("nightly-import", ttl=60) as grant:
    ...     token = grant.fence["nightly-import"]
    """

    def __init__(self, grant: Grant, lost: LostEvent, check: Callable[[], None]) -> None:
        super().__init__(grant)
        #: set when it is lost: true in a condition, and to be waited for. It costs no round trip
        self.lost = lost
        self._check = check

    def check(self) -> None:
        """Ask the database.

        :raises LockLost: when the permits are no longer held.

        >>> with locks.lease("nightly-import", ttl=60) as grant:
        ...     grant.check()
        """
        self._check()


class LeaseContext:
    """The context manager of ``Locks.semaphore`` and ``Locks.lease``, for one thread at a time; a decorator, too.

    :param single: the semaphore has one permit, and is made when it doesn't exist.

    >>> @locks.lease("nightly-import")
    ... def nightly_import() -> None: ...
    """

    def __init__(
        self,
        locks: LockHost,
        timers: LeaseTimers,
        permits: str | Mapping[str, int],
        *,
        ttl: float | timedelta,
        timeout: float | timedelta | None,
        count: int | None = None,
        external_id: str | None = None,
        owner: str | None = None,
        single: bool = False,
    ) -> None:
        if isinstance(permits, str):
            permits = {permits: 1 if count is None else valid_int(count, "a count of permits")}
        elif count is not None:
            raise TypeError("count is for one semaphore that is given by its name: a mapping has its counts in it")
        if ttl is None:
            raise TypeError(
                "a block needs a ttl, after which the permits of a process that died are released: use locks.acquire "
                "for what is held until it is released"
            )
        self._locks, self.timers = locks, timers
        self._timeout = timeout_seconds(timeout)
        self._external_id, self._owner = external_id, owner
        self._single = single
        self._request = semaphore.acquire(permits, external_id=external_id, owner=owner, ttl=ttl)
        self._ttl: float = self._request._values["ttl_seconds"]
        if self._ttl < 1:
            raise ValueError(f"ttl is at least 1 second in a block that renews it three times in one, not {ttl!r}")
        self._permits: dict[str, int] = self._request._values["permits"]
        self._kind = "lease" if single else "semaphore"
        self._entered: tuple[Grant, RenewableLease, reentry.HeldEntry, float] | None = None
        #: held from before the permits are acquired until they are released
        self._use = threading.Lock()

    @property
    def display_name(self) -> str:
        """What error messages call it."""
        return f"{self._kind}()"

    def copy(self) -> LeaseContext:
        """Return a block with the same arguments, for another use at the same time."""
        if self._external_id is not None:
            raise TypeError(
                f"{self.display_name} with an external_id can't decorate: the id stands for one request, and each call "
                "is one"
            )
        other = copy.copy(self)
        other._entered, other._use = None, threading.Lock()
        return other

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        decorated = in_block(function, self.display_name, self.copy)
        self.copy()  # refuses a block that can't be used again
        return decorated

    __bool__ = refuse_truth

    def __enter__(self) -> Lease:
        grant, renewable = self.enter()
        try:
            self.timers.thread.add(renewable)
        except BaseException as error:
            self.leave(error)
            raise
        return Lease(grant, renewable.lost, self.check)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered is None:
            raise ReentryError("this block is not entered")
        try:
            self.timers.thread.remove(self._entered[1])
        finally:
            self.leave(error)

    def enter(self) -> tuple[Grant, RenewableLease]:
        """Acquire the permits; return the grant, and the lease that has to be renewed."""
        # held during the wait, too: if two callers entered, the first to leave would release the other's permits
        if not self._use.acquire(blocking=False):
            raise ReentryError("this block is entered already: make one for each use")
        grant, began = None, 0.0
        try:
            caller = reentry.current_owner()
            where = self._locks._engine.dialect, self._locks._reentry_scope
            held: dict[str, int] = {}
            for entry in reentry.held_by("permits", caller):
                for (there, name), count in entry.held.items():
                    if there == where and name in self._permits:
                        held[name] = held.get(name, 0) + count
            if self._single and held:
                raise ReentryError(
                    f"this thread or task holds {next(iter(held))!r} already, and acquiring it again would deadlock: "
                    "work in the block that holds it"
                )
            grant, asked_at = self._acquire(held)
            began = time.monotonic()
            # an acquisition that was repeated after a lost reply doesn't tell the capacity
            if self._single and grant.capacities != (1,):
                self._refuse_several(grant)
            if clock() >= asked_at + self._ttl / 3:
                # the reply took so long that the renewal is due already, or the time to live has ended
                asked_at = clock()
                if not self._locks._run_on_request(semaphore.renew(grant)):
                    raise LockLost(f"the request {grant.external_id!r} was granted, and its time ran out meanwhile")
            lost = LostEvent(self._ttl, asked_at)
            renewable = RenewableLease(grant, lost, asked_at)
            emit = self._emitter(grant)
            # not a method of this block: that would keep the block alive, and with it the renewal
            lost.on_lost = lambda lost: emit("lost", error=_lost_error(grant, lost))
            if lost:
                raise _lost_error(grant, lost)
        except BaseException as error:
            try:
                if grant is not None:
                    self._release(grant, error)
                    self._emitter(grant)("released", held=time.monotonic() - began, error=error)
            finally:
                self._use.release()
            raise
        entry = reentry.enter("permits", caller, {(where, name): count for name, count in self._permits.items()})
        self._entered = grant, renewable, entry, began
        return grant, renewable

    def check(self) -> None:
        """Ask the database whether the permits are held. :raises LockLost: when they are not."""
        if self._entered is None:
            raise LockLost("the block has ended, and its permits are released")
        grant, renewable, _, _ = self._entered
        if not renewable.lost and not self._locks._run(is_held(grant)):
            renewable.lost.set(NOT_HELD)
        if renewable.lost:
            raise _lost_error(grant, renewable.lost)

    def leave(self, error: BaseException | None) -> None:
        """Release the permits. :raises LockLost: when they were lost before, unless the block ends with an error."""
        assert self._entered is not None
        (grant, renewable, entry, began), self._entered = self._entered, None
        self._use.release()
        entry.closed = True
        renewable.closed = True
        lost = renewable.lost
        if lost.process != os.getpid():
            # a forked process doesn't hold them
            if lost and error is None:
                raise _lost_error(grant, lost)
            return
        held, outcome = not lost, error
        # a block whose permits were lost has not ended well: its id can be granted again
        ended_by = error if held or error is not None else _lost_error(grant, lost)
        try:
            if self._release(grant, ended_by) is not Released.RELEASED:
                lost.set("it had been released or swept when its block ended")
                held = False
            if not held:
                loss = _lost_error(grant, lost)
                if error is None:
                    raise loss
                if hasattr(error, "add_note"):
                    error.add_note(str(loss))
        except BaseException as raised:
            outcome = raised
            raise
        finally:
            lost.close()
            if self._locks.dispatch.released or self._locks._is_logged():
                self._emitter(grant)("released", held=time.monotonic() - began, error=outcome)

    def _acquire(self, held: Mapping[str, int]) -> tuple[Grant, float]:
        """Return the grant, and the instant from which its time to live counts."""
        own_id = self._external_id is not None
        owner = self._locks.owner if self._owner is None else self._owner
        request = for_block(self._request, owner, new_id=not own_id)
        rounds = 0
        while True:
            waiter = SemaphoreWaiter(self._locks, request, self._timeout, kind=self._kind, own_id=own_id, held=held)
            try:
                return waiter.wait(), waiter.asked_at
            except UnknownSemaphore:
                rounds += 1
                if not self._single or rounds > _ROUNDS:
                    raise
            # repeated, because a clean-up may remove the semaphore before it is used
            self._locks._run(create_for_lease(*self._permits))

    def _refuse_several(self, grant: Grant) -> None:
        """Refuse a lease on a semaphore of more than one permit.

        Capacity and permits are read while the permit of this lease is held. The acquisition itself has also counted
        the permits that were acquired before the semaphore was resized.
        """
        for row in self._locks._run(availability(grant)):
            if row.capacity != 1 or row.used > 1:
                raise Unsupported(
                    f"{row.name!r} is a semaphore of {row.capacity}, of which {row.used} are held, and a lease is one "
                    "of 1: use locks.semaphore, or another name, and never resize one that is used for leases"
                )

    def _release(self, grant: Grant, error: BaseException | None) -> Released:
        # after an error the work isn't done: the id can be granted again
        abandons = self._external_id is not None and error is not None
        release = abandon(grant) if abandons else semaphore.release(grant)
        lost_replies: list[bool] = []
        try:
            released: Released = self._locks._run_on_request(release, on_reply_lost=lambda: lost_replies.append(True))
        except Exception as failed:
            # the block's work is done, and its result must not be lost: the permits expire, since they aren't renewed
            self._log_unreleased(grant, failed)
            return Released.RELEASED
        except BaseException:
            # cancelled or interrupted
            try:
                self._locks._shield(self._locks._run_on_request, release)
            except BaseException as failed:
                self._log_unreleased(grant, failed)
            raise
        # an attempt without a reply may have released it
        return Released.RELEASED if lost_replies else released

    def _log_unreleased(self, grant: Grant, error: BaseException) -> None:
        _log.warning("the grant of %s could not be released, and ends with its time: %r", list(grant.permits), error)

    def _emitter(self, grant: Grant) -> Callable[..., None]:
        """Return the function that emits the events of a grant, without a reference to this block."""
        labels: dict[str, Any] = {"owner": self._owner, "external_id": grant.external_id, "fence": grant.fence}
        return partial(self._locks._emit, kind=self._kind, names=grant.permits, **labels)


def _lost_error(grant: Grant, lost: LostEvent) -> LockLost:
    names = ", ".join(map(repr, grant.permits))
    return LockLost(f"the permits of {names} (request {grant.external_id!r}) are held no longer: {lost.why}")


class LeaseRenewer:
    """Renews the leases of one timer, on connections beside the app's pool: its handlers may use all of that."""

    def __init__(self, locks: LockHost) -> None:
        self._locks = locks
        self._pool: SidePool | None = None
        self._runner: OperationRunner | None = None

    def renew_batch(self, grants: list[Grant]) -> Collection[str]:
        """Return the tokens of the grants that were renewed; the others are locked, or not held."""
        renewed: Collection[str] = self._run(renew_batch(grants), None)
        return renewed

    def renew_alone(self, grant: Grant, ttl: float) -> bool:
        """Return whether a grant is held, and so was renewed; wait for its row, but not for long."""
        wait = ROW_TIMEOUT if self._locks._backend.single_writer else min(ROW_TIMEOUT, ttl * _ROW_WAIT)
        return bool(self._run(semaphore.renew(grant), wait))

    def take_pool(self) -> SidePool | None:
        """Return the pool of its connections, to be disposed of: the next renewal makes another one."""
        pool, self._pool, self._runner = self._pool, None, None
        return pool

    def _run(self, operation: Operation[Any], wait: float | None) -> Any:
        if self._pool is None or self._runner is None:
            self._pool = SidePool(self._locks._engine)
            self._runner = self._locks._runner(self._pool.connect)
        return self._runner.run(operation, short=True, wait=wait)

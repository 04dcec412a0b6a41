"""What the blocks of ``Locks.semaphore`` and ``Locks.lease`` do in both worlds: all of it but the renewing.

What they promise is told in ``lease.py``.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from sqlalchemy_locks import semaphore
from sqlalchemy_locks._validation import bounded_seconds, timeout_seconds
from sqlalchemy_locks.core.operation import Operation
from sqlalchemy_locks.dialects.connections import unattended
from sqlalchemy_locks.errors import (
    IdempotencyConflict,
    LockLost,
    OutcomeUnknown,
    ReentryError,
    RequestHeld,
    RequestOver,
    UnknownSemaphore,
    Unsupported,
)
from sqlalchemy_locks.facade.semaphore_wait import PATIENCE, SemaphoreWaiter
from sqlalchemy_locks.runtime import reentry
from sqlalchemy_locks.runtime.renewal import LostEvent, RenewableLease, RenewalThread, clock
from sqlalchemy_locks.semaphore.admin import on_first_use
from sqlalchemy_locks.semaphore.availability import holding, room, time_to_live
from sqlalchemy_locks.semaphore.base import whole
from sqlalchemy_locks.semaphore.release import release_once
from sqlalchemy_locks.values import Grant, Released

B = TypeVar("B", bound="LeaseBlock")

_log = logging.getLogger("sqlalchemy_locks")
_IDS = "_sqlalchemy_locks_ids"
_ROUNDS = 100
_guard = threading.Lock()


class LeaseHost(Protocol):
    """What a block needs of ``Locks``."""

    _engine: Any

    @property
    def owner(self) -> str: ...
    def _waiting(
        self,
        request: Operation[Any],
        patience: float | None,
        known: bool,
        own: Mapping[str, int],
        reclaims: bool = False,
    ) -> SemaphoreWaiter: ...
    def _granted(self, waiting: SemaphoreWaiter, known: bool, block: str) -> Grant: ...
    def _of_request(self, operation: Operation[Any]) -> Any: ...
    def _settled(self, operation: Operation[Any]) -> Any: ...
    def _renewals(self) -> RenewalThread: ...
    def _undisturbed(self, work: Callable[[], Any]) -> Any: ...
    @property
    def _tell(self) -> Callable[..., None]: ...


class LeaseBlock:
    """Both worlds' block: all of it but the renewing.

    :param alone: the semaphore is one of one permit, made when it isn't there.
    :param resume: hold what is held already under this external id, too.
    :param reclaim: have an external id whose time ran out for a new request.
    """

    def __init__(
        self,
        leases: LeaseHost,
        permits: str | Mapping[str, int],
        count: int | None,
        ttl: float | timedelta,
        timeout: float | timedelta | None,
        external_id: str | None,
        owner: str | None,
        alone: bool = False,
        resume: bool = True,
        reclaim: bool = False,
    ) -> None:
        if isinstance(permits, str):
            permits = {permits: 1 if count is None else whole(count, "a count of permits", 1)}
        elif count is not None:
            raise TypeError("count is for one semaphore that is given by its name: a mapping has its counts in it")
        if ttl is None:
            raise TypeError(
                "a block needs a ttl, after which a process that died gives its permits back: use locks.acquire for "
                "what is held until it is released"
            )
        if reclaim and resume:
            raise TypeError(
                "reclaim=True is for blocks with resume=False: else of those who come with one external_id at once all "
                "would be let in"
            )
        self._leases = leases
        self._ttl = bounded_seconds(ttl, "ttl")
        if self._ttl < 1:
            raise ValueError(f"ttl is at least 1 second in a block that renews it three times in one, not {ttl!r}")
        self._patience = timeout_seconds(timeout)
        self._given = {"external_id": external_id, "owner": owner}
        self._alone, self._resume, self._reclaim = alone, resume, reclaim
        self._permits: dict[str, int] = self._request(permits)._values["permits"]
        self._entered: tuple[Grant, RenewableLease, reentry.HeldEntry, float] | None = None
        #: whoever is inside, or about to be
        self._use = threading.Lock()

    @property
    def shown(self) -> str:
        """What sentences call it."""
        return f"{self._kind}()"

    @property
    def _kind(self) -> str:
        return "lease" if self._alone else "semaphore"

    def again(self: B) -> B:
        """The same, for one more use at the same time."""
        if self._given["external_id"] is not None:
            raise TypeError(
                f"{self.shown} with an external_id can't decorate: that stands for one request, and each call is one"
            )
        twin = copy.copy(self)
        twin._entered, twin._use = None, threading.Lock()
        return twin

    def enter(self) -> tuple[Grant, RenewableLease]:
        """Acquire."""
        # while it is waited for, too: of two who are let in, the first to leave would end what the other has
        if not self._use.acquire(blocking=False):
            raise ReentryError("this block is entered already: make one for each use")
        try:
            return self._enter()
        except BaseException:
            self._use.release()
            raise

    def _enter(self) -> tuple[Grant, RenewableLease]:
        me, dialect = reentry.current_owner(), self._leases._engine.dialect
        own: dict[str, int] = {}
        for inside in reentry.held_by("permits", me):
            for (where, name), count in inside.held.items():
                if where is dialect and name in self._permits:
                    own[name] = own.get(name, 0) + count
        if self._alone and own:
            raise ReentryError(
                f"this thread or task holds {next(iter(own))!r} already: taking it again would wait for itself"
            )
        self._claim()
        try:
            grant, asked_at, ttl = self._acquire(own)
            began = time.monotonic()
            try:
                if self._alone:
                    self._verify()
                if clock() >= asked_at + ttl / 3:
                    # the answer took so long that it is due already, or over
                    asked_at = clock()
                    if not self._leases._of_request(semaphore.renew(grant)):
                        raise LockLost(f"the request {grant.external_id!r} was granted, and its time ran out meanwhile")
                lost = LostEvent(ttl, asked_at)
                what = f"the lease {grant.external_id!r}"
                renewed = RenewableLease(what, lost, asked_at, _renewing(self._leases, grant))
                # weakly: a block that nobody can leave any more is to go, and with it the renewing
                mourning, why = weakref.WeakMethod(self._mourn), weakref.ref(lost)
                lost.mourned.append(lambda: _call(mourning, grant, why()))
                if lost:
                    raise self._lost(grant, lost)
            except BaseException as error:
                self._release(grant)
                self._tell("released", grant, held=time.monotonic() - began, error=error)
                raise
        except BaseException:
            self._unclaim()
            raise
        mine = reentry.enter("permits", me, {(dialect, name): count for name, count in self._permits.items()})
        self._entered = grant, renewed, mine, began
        return grant, renewed

    def check(self) -> None:
        """Ask the database about what is held."""
        if self._entered is None:
            raise LockLost("the block is over, and what it held is given back")
        grant, renewed, _, _ = self._entered
        if not renewed.lost and not self._leases._settled(holding(grant)):
            renewed.lost.set("its time had run out, or it was released or swept")
        if renewed.lost:
            raise self._lost(grant, renewed.lost)

    def leave(self, error: BaseException | None) -> None:
        """Give it back, and tell whether it was held to the end."""
        assert self._entered is not None
        (grant, renewed, mine, began), self._entered = self._entered, None
        self._use.release()
        reentry.leave(mine)
        renewed.over = True
        lost = renewed.lost
        if lost.process != os.getpid():
            return  # this is a fork, and not the holder
        kept, failed = not lost, error
        try:
            if self._release(grant) is not Released.RELEASED:
                lost.set("it had been released or swept when its block ended")
                kept = False
            if not kept:
                gone = self._lost(grant, lost)
                if error is None:
                    raise gone
                if hasattr(error, "add_note"):
                    error.add_note(str(gone))
        except BaseException as raised:
            failed = raised
            raise
        finally:
            lost.over()
            self._unclaim()
            self._tell("released", grant, held=time.monotonic() - began, error=failed)

    def _claim(self) -> None:
        """Refuse an id that a block of this process has: the first of the two to end would release both."""
        ident = self._given["external_id"]
        if ident is None:
            return
        with _guard:
            claimed = self._claimed().setdefault(self._place(ident), self)
        if claimed is not self and not self._resume:
            raise RequestHeld(f"the request {ident!r} is held by another block of this process")
        if claimed is not self:
            raise ReentryError(
                f"the request {ident!r} is held by another block of this process, and ends for both when one ends: "
                "use another external_id"
            )

    def _unclaim(self) -> None:
        ident = self._given["external_id"]
        if ident is not None:
            with _guard:
                if self._claimed().get(self._place(ident)) is self:
                    del self._claimed()[self._place(ident)]

    def _claimed(self) -> weakref.WeakValueDictionary[Any, LeaseBlock]:
        claimed: weakref.WeakValueDictionary[Any, LeaseBlock] = self._leases._engine.dialect.__dict__.setdefault(
            _IDS, weakref.WeakValueDictionary()
        )
        return claimed

    def _place(self, ident: str) -> Any:
        options = self._leases._engine.get_execution_options()
        return os.getpid(), options.get("locks_prefix"), str(options.get("schema_translate_map")), ident

    def _tell(self, what: str, grant: Grant, **told: Any) -> None:
        owner, ident = self._given["owner"], grant.external_id
        self._leases._tell(what, self._kind, grant.permits, owner=owner, external_id=ident, fence=grant.fence, **told)

    def _request(self, permits: Mapping[str, int]) -> Operation[Any]:
        owner = self._given["owner"]
        return semaphore.acquire(
            permits,
            external_id=self._given["external_id"],
            owner=self._leases.owner if owner is None else owner,
            ttl=self._ttl,
        )

    def _acquire(self, own: Mapping[str, int]) -> tuple[Grant, float, float]:
        """The grant, from when its time counts, and how long that is."""
        known = self._given["external_id"] is not None
        request = self._request(self._permits)

        def ask() -> tuple[SemaphoreWaiter, Grant]:
            waiting = self._leases._waiting(request, self._patience, known, own, self._reclaim)
            return waiting, self._leases._granted(waiting, known, self._kind)

        for _ in range(_ROUNDS):
            try:
                waiting, grant = ask()
                break
            except UnknownSemaphore:
                if not self._alone:
                    raise
                # and once more where a clean-up has removed it before it was used
                make = on_first_use(*self._permits)
                self._leases._settled(make.execution_options(locks_checkout=self._patience))
        else:
            waiting, grant = ask()
        if not grant.replayed:
            return grant, waiting.asked_at, self._ttl
        if not self._resume:
            # not released: it is held by who asked first, as far as anybody can tell
            raise RequestHeld(f"the request {grant.external_id!r} was granted before, and is held")
        try:
            return (grant, *self._resumed(grant))
        except BaseException as error:
            if not known:
                self._release(grant)
            self._tell("released", grant, held=0.0, error=error)
            raise

    def _resumed(self, grant: Grant) -> tuple[float, float]:
        """Of a request that was granted, and stamped, by an earlier try: it keeps the time to live that it has."""
        asked_at = clock()
        if not self._leases._of_request(semaphore.renew(grant)):
            message = f"the request {grant.external_id!r} was granted before, and its time ran out"
            raise RequestOver(message, "EXPIRED")
        ttl = self._leases._settled(time_to_live(grant))
        if ttl is None:
            raise IdempotencyConflict(
                f"the request {grant.external_id!r} was granted without a ttl, to be held until it is released, and a "
                "block has one: use locks.acquire, or another external_id"
            )
        return asked_at, float(ttl)

    def _verify(self) -> None:
        """Refuse a lease on a semaphore that somebody has made of more than one permit.

        Asked each time, when the permit is had: whoever had one before it was resized is seen, and counts.
        """
        for row in self._leases._settled(room(self._request(self._permits))):
            if row.capacity != 1 or row.used > 1:
                raise Unsupported(
                    f"{row.name!r} is a semaphore of {row.capacity}, of which {row.used} are held, and a lease is one "
                    "of 1: use locks.semaphore, or another name, and never resize one that is used for leases"
                )

    def _release(self, grant: Grant) -> Released:
        try:
            try:
                released: Released = self._leases._of_request(release_once(grant))
            except OutcomeUnknown:
                # it may have been the first one that did it
                self._leases._of_request(semaphore.release(grant))
                released = Released.RELEASED
        except Exception as error:
            # what the block has done is done; nobody renews it, and so its time runs out
            self._unreleased(grant, error)
            return Released.RELEASED
        except BaseException:
            # cancelled or interrupted: nobody else will do it
            try:
                self._leases._undisturbed(lambda: self._leases._of_request(semaphore.release(grant)))
            except BaseException as error:
                self._unreleased(grant, error)
            raise
        return released

    def _unreleased(self, grant: Grant, error: BaseException) -> None:
        _log.warning("the lease %r could not be released, and ends with its time: %r", grant.external_id, error)

    def _mourn(self, grant: Grant, lost: LostEvent) -> None:
        self._tell("lost", grant, error=self._lost(grant, lost))

    def _lost(self, grant: Grant, lost: LostEvent) -> LockLost:
        names = ", ".join(map(repr, grant.permits))
        return LockLost(f"the permits of {names} (request {grant.external_id!r}) are held no longer: {lost.why}")


def _call(method: weakref.WeakMethod[Any], *told: Any) -> None:
    known = method()
    if known is not None:
        known(*told)


def _renewing(leases: LeaseHost, grant: Grant) -> Callable[[], bool]:
    # a write under guarded that is not committed holds up whoever renews, and so the leases of others, no longer
    operation = semaphore.renew(grant).execution_options(locks_wait=PATIENCE)

    def renew() -> bool:
        with unattended(leases._engine):
            return bool(leases._settled(operation))

    return renew

"""Leases: permits of semaphores, held while a block runs, and renewed behind its back.

What is promised: while ``grant.lost`` is not set, nobody else has been given these permits by the server's clock,
unless that clock and this machine's ran apart by more than a twentieth of the time to live. That is for stopping early.
What must not be written by a holder that came too late is written under ``guarded`` or ``fenced``, and the database
refuses it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

from . import semaphore
from .durations import seconds, span
from .errors import LockLost, OutcomeUnknown, ReentryError, UnknownSemaphore, Unsupported
from .operation import Operation
from .renewal import Lost, Renewals, Renewed, clock
from .semaphore.base import whole
from .semaphore.release import release_once
from .semaphore.room import holding, room
from .values import Grant, Released
from .waiting import Waiting

_log = logging.getLogger("sqlalchemy_locks")
#: how many permits of each semaphore are held in blocks, and by whom
_inside: contextvars.ContextVar[Mapping[Any, int]] = contextvars.ContextVar("sqlalchemy_locks_inside")


class Holder(Protocol):
    """What a block needs of ``Locks``."""

    _engine: Any

    @property
    def owner(self) -> str: ...
    def renew(self, external_id: str | Grant) -> bool: ...
    def release(self, external_id: str | Grant) -> Released: ...
    def _waiting(
        self, request: Operation[Any], patience: float | None, known: bool, own: Mapping[str, int]
    ) -> Waiting: ...
    def _granted(self, waiting: Waiting, known: bool) -> Grant: ...
    def _of_request(self, operation: Operation[Any]) -> Any: ...
    def _settled(self, operation: Operation[Any]) -> Any: ...
    def _renewals(self) -> Renewals: ...


class Given(Grant):
    """A grant, with what it is asked for; ``expires_at`` is as it was granted, and later by now."""

    def __init__(self, grant: Grant) -> None:
        self.__dict__.update(vars(grant))


class Lease(Given):
    """What a block holds: a :class:`~sqlalchemy_locks.Grant`, and whether it still does."""

    def __init__(self, grant: Grant, lost: Lost, check: Callable[[], None]) -> None:
        super().__init__(grant)
        #: set when it is lost: true in a condition, and to be waited for. It asks nobody
        self.lost = lost
        self._check = check

    def check(self) -> None:
        """Ask the database.

        :raises LockLost: when the permits are no longer held.
        """
        self._check()


class Block:
    """Both worlds' block: all of it but the renewing.

    :param alone: the semaphore is one of one permit, made when it isn't there.
    """

    def __init__(
        self,
        leases: Holder,
        permits: str | Mapping[str, int],
        count: int | None,
        ttl: float | timedelta,
        timeout: float | timedelta | None,
        external_id: str | None,
        owner: str | None,
        alone: bool = False,
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
        self._leases = leases
        self._ttl = span(ttl, "ttl")
        if self._ttl < 1:
            raise ValueError(f"ttl is at least 1 second in a block that renews it three times in one, not {ttl!r}")
        self._patience = None if timeout is None else seconds(timeout, "timeout")
        self._given = {"external_id": external_id, "owner": owner}
        self._alone = alone
        self._permits: dict[str, int] = self._request(permits)._values["permits"]
        self._entered: tuple[Grant, Renewed, tuple[Any, ...]] | None = None

    def enter(self) -> tuple[Grant, Renewed]:
        """Acquire."""
        if self._entered is not None:
            raise ReentryError("this block is entered already: make one for each use")
        me = _me(self._leases._engine)
        inside = _inside.get({})
        own = {name: inside[me, name] for name in self._permits if (me, name) in inside}
        if self._alone and own:
            raise ReentryError(
                f"this thread or task holds {next(iter(own))!r} already: taking it again would wait for itself"
            )
        grant, asked_at = self._acquire(own)
        try:
            lost = Lost(self._ttl, asked_at)
            renewed = Renewed(f"the lease {grant.external_id!r}", lost, asked_at, lambda: self._leases.renew(grant))
            if self._alone:
                self._verify(grant)
        except BaseException:
            self._release(grant)
            raise
        _inside.set({**inside, **{(me, name): own.get(name, 0) + count for name, count in self._permits.items()}})
        self._entered = grant, renewed, me
        return grant, renewed

    def check(self) -> None:
        """Ask the database about what is held."""
        if self._entered is None:
            raise LockLost("the block is over, and what it held is given back")
        grant, renewed, _ = self._entered
        if not renewed.lost and not self._leases._settled(holding(grant)):
            renewed.lost.set("its time had run out, or it was released or swept")
        if renewed.lost:
            raise self._lost(grant, renewed)

    def leave(self, error: BaseException | None) -> None:
        """Give it back, and tell whether it was held to the end."""
        assert self._entered is not None
        (grant, renewed, me), self._entered = self._entered, None
        inside = dict(_inside.get({}))
        for name, count in self._permits.items():
            inside[me, name] = inside.get((me, name), 0) - count
        _inside.set({key: count for key, count in inside.items() if count > 0})
        lost = renewed.lost
        if lost.process != os.getpid():
            return  # this is a fork, and not the holder
        kept = not lost
        if self._release(grant) is not Released.RELEASED:
            lost.set("it had been released or swept when its block ended")
            kept = False
        if not kept:
            gone = self._lost(grant, renewed)
            if error is None:
                raise gone
            if hasattr(error, "add_note"):
                error.add_note(str(gone))
        lost.set("its block is over")

    def _request(self, permits: Mapping[str, int]) -> Operation[Any]:
        owner = self._given["owner"]
        return semaphore.acquire(
            permits,
            external_id=self._given["external_id"],
            owner=self._leases.owner if owner is None else owner,
            ttl=self._ttl,
        )

    def _acquire(self, own: Mapping[str, int]) -> tuple[Grant, float]:
        known = self._given["external_id"] is not None
        request = self._request(self._permits)
        waiting = self._leases._waiting(request, self._patience, known, own)
        try:
            grant = self._leases._granted(waiting, known)
        except UnknownSemaphore:
            if not self._alone:
                raise
            (name,) = self._permits
            self._leases._settled(semaphore.create(name, 1))
            waiting = self._leases._waiting(request, self._patience, known, own)
            grant = self._leases._granted(waiting, known)
        asked_at = waiting.asked_at
        if grant.replayed:
            # granted, and stamped, by an earlier try than the one that told of it
            asked_at = clock()
            if not self._leases.renew(grant):
                raise LockLost(f"the request {grant.external_id!r} was granted before, and its time ran out")
        return grant, asked_at

    def _verify(self, grant: Grant) -> None:
        """Refuse a lease on a semaphore that somebody has made of more than one permit."""
        (name,) = self._permits
        known: set[str] = self._leases.__dict__.setdefault("_of_one", set())
        if name in known:
            return
        for row in self._leases._settled(room(self._request(self._permits))):
            if row.capacity != 1:
                raise Unsupported(
                    f"{name!r} is a semaphore of {row.capacity}, which so many may hold at once, and a lease is one of "
                    "1: use locks.semaphore, or another name"
                )
        known.add(name)

    def _release(self, grant: Grant) -> Released:
        try:
            try:
                released: Released = self._leases._of_request(release_once(grant))
            except OutcomeUnknown:
                # it may have been the first one that did it
                self._leases.release(grant)
                released = Released.RELEASED
        except Exception as error:
            # what the block has done is done; nobody renews it, and so its time runs out
            _log.warning("the lease %r could not be released, and ends with its time: %s", grant.external_id, error)
            return Released.RELEASED
        return released

    def _lost(self, grant: Grant, renewed: Renewed) -> LockLost:
        names = ", ".join(map(repr, grant.permits))
        return LockLost(
            f"the permits of {names} (request {grant.external_id!r}) are held no longer: {renewed.lost.why}"
        )


class Leasing(Block):
    """The context manager of ``Locks.semaphore`` and ``Locks.lease``, for one thread at a time."""

    def __enter__(self) -> Lease:
        grant, renewed = self.enter()
        try:
            self._leases._renewals().add(renewed)
        except BaseException as error:
            self.leave(error)
            raise
        return Lease(grant, renewed.lost, self.check)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._entered is not None
        self._leases._renewals().remove(self._entered[1])
        self.leave(error)


def _me(engine: Any) -> tuple[Any, ...]:
    """Who would wait for itself: this thread or task, on this engine."""
    try:
        task = id(asyncio.current_task())
    except RuntimeError:
        task = 0
    return threading.get_ident(), task, id(engine.pool)

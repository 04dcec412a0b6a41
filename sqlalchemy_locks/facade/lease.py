"""Leases: permits of semaphores, held while a block runs, and renewed behind its back.

What is promised: while ``grant.lost`` is not set, their time has not run out by the server's clock, unless that clock
and this machine's ran apart by more than a twentieth of the time to live. Who releases or sweeps them meanwhile, by
their id or their owner, is noticed at the next renewal. That is for stopping early. What must not be written by a
holder that came too late is written under ``guarded`` or ``fenced``, and the database refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from sqlalchemy_locks.errors import ReentryError
from sqlalchemy_locks.facade.lease_block import LeaseBlock
from sqlalchemy_locks.runtime.decorators import in_block
from sqlalchemy_locks.runtime.renewal import LostEvent
from sqlalchemy_locks.values import Grant

T = TypeVar("T")
P = ParamSpec("P")


class GrantView(Grant):
    """A grant, with what it is asked for; ``expires_at`` is as it was granted, and later by now."""

    def __init__(self, grant: Grant) -> None:
        self.__dict__.update(vars(grant))

    def __reduce__(self) -> Any:
        # a copy, or what another process is sent, is the grant alone
        return Grant, tuple(getattr(self, one.name) for one in fields(Grant))


class Lease(GrantView):
    """What a block holds: a :class:`~sqlalchemy_locks.Grant`, and whether it still does.

    >>> with locks.lease("nightly-import", ttl=60) as grant:
    ...     token = grant.fence["nightly-import"]
    """

    def __init__(self, grant: Grant, lost: LostEvent, check: Callable[[], None]) -> None:
        super().__init__(grant)
        #: set when it is lost: true in a condition, and to be waited for. It asks nobody
        self.lost = lost
        self._check = check

    def check(self) -> None:
        """Ask the database.

        :raises LockLost: when the permits are no longer held.

        >>> with locks.lease("nightly-import", ttl=60) as grant:
        ...     grant.check()
        """
        self._check()


class LeaseContext(LeaseBlock):
    """The context manager of ``Locks.semaphore`` and ``Locks.lease``, for one thread at a time; a decorator, too.

    >>> @locks.lease("nightly-import")
    ... def nightly_import() -> None: ...
    """

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        decorated = in_block(function, self.shown, self.again)
        self.again()  # which refuses what can't be used again
        return decorated

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
        if self._entered is None:
            raise ReentryError("this block is not entered")
        try:
            self._leases._renewals().remove(self._entered[1])
        finally:
            self.leave(error)

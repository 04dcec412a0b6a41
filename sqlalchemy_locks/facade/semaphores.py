"""The semaphores of ``Locks``: acquiring with a wait, releasing, renewing and sweeping. It knows no SQL.

The pattern: "Distributed Counting Semaphore with MySQL", the complete acquire: an id that makes it repeatable,
sorted names, a gate in memory, a bounded wait for the rows, up to three retries, and nothing left on the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy_locks import semaphore
from sqlalchemy_locks._validation import timeout_seconds
from sqlalchemy_locks.facade.host import LockHost
from sqlalchemy_locks.facade.lease_renewal import LeaseTimers
from sqlalchemy_locks.facade.semaphore_wait import SemaphoreWaiter
from sqlalchemy_locks.semaphore.statements import BATCH
from sqlalchemy_locks.semaphore.sweep import owned_requests, release_unchanged
from sqlalchemy_locks.values import Grant, Released

Alive = Callable[[list[str]], Iterable[str]]

DAY = 86400.0


def check_alive(alive: Any) -> None:
    """:raises TypeError: for what can't tell which owners are alive."""
    if alive is not None and not callable(alive):
        raise TypeError(f"alive is a function of a list of owners, not {alive!r}")


class Semaphores:
    """What ``Locks`` does with semaphores; the methods of ``Locks`` with the same names document it."""

    def __init__(self, locks: LockHost) -> None:
        self.locks = locks
        #: what renews the leases of blocks
        self.timers = LeaseTimers(locks)

    def acquire(
        self,
        permits: Mapping[str, int],
        external_id: str | None,
        owner: str | None,
        ttl: float | timedelta | None,
        timeout: float | timedelta | None,
    ) -> Grant:
        owner = self.locks.owner if owner is None else owner
        request = semaphore.acquire(permits, external_id=external_id, owner=owner, ttl=ttl)
        return SemaphoreWaiter(self.locks, request, timeout_seconds(timeout), known=external_id is not None).wait()

    def release(self, external_id: str | Grant) -> Released:
        released: Released = self.locks._run_on_request(semaphore.release(external_id))
        if released is Released.RELEASED and self.locks._has_listeners:
            self._emit("released", external_id)
        return released

    def renew(self, external_id: str | Grant) -> bool:
        renewed = bool(self.locks._run_on_request(semaphore.renew(external_id)))
        if not renewed:
            self._emit("lost", external_id)
        return renewed

    def sweep(self, stale_after: float | timedelta | None, alive: Alive | None) -> int:
        check_alive(alive)
        overdue, run = semaphore.sweep(stale_after=stale_after), self.locks._run
        dead = [] if alive is None else self._requests_of_dead_owners(alive)
        swept: int = 0
        while released := run(overdue):
            swept += released
        for start in range(0, len(dead), BATCH):
            swept += run(release_unchanged(dead[start : start + BATCH]))
        if swept:
            self.locks._emit("swept", "semaphore", (), count=swept)
        return swept

    def _requests_of_dead_owners(self, alive: Alive) -> list[tuple[Any, ...]]:
        verdicts: dict[str, bool] = {}
        dead: list[tuple[Any, ...]] = []
        after = 0
        while requests := self.locks._run(owned_requests(after)):
            unknown = sorted({owner for _, _, owner in requests} - verdicts.keys())
            if unknown:
                answer: Any = alive(unknown)
                if isinstance(answer, (str, bytes)) or not isinstance(answer, Iterable):
                    raise TypeError(
                        f"alive returns those of the given owners that are alive, as a list or set, not {answer!r}"
                    )
                living = frozenset(answer)
                if not all(isinstance(each, str) for each in living):
                    raise TypeError(f"alive returns those of the given owners that are alive, not {answer!r}")
                verdicts |= {owner: owner in living for owner in unknown}
            dead += [(request, renewed_at) for request, renewed_at, owner in requests if not verdicts[owner]]
            after = requests[-1][0]
        return dead

    def _emit(self, what: str, request: str | Grant) -> None:
        if isinstance(request, Grant):
            names, ident, fence = request.permits, request.external_id, request.fence
            self.locks._emit(what, "semaphore", names, external_id=ident, fence=fence)
        else:  # of a bare id the semaphores aren't known
            self.locks._emit(what, "semaphore", (), external_id=request)

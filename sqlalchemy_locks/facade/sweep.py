"""``locks.sweep``: release requests that their holders will not release, among them those of dead owners."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from sqlalchemy_locks import semaphore
from sqlalchemy_locks.facade.host import LockHost
from sqlalchemy_locks.semaphore.statements import MAX_SWEPT
from sqlalchemy_locks.semaphore.sweep import owned_requests, release_unchanged

Alive = Callable[[list[str]], Iterable[str]]

DAY = 86400.0


def check_alive(alive: Any) -> None:
    """:raises TypeError: for anything but ``None`` or a function, which tells which owners are alive."""
    if alive is not None and not callable(alive):
        raise TypeError(f"alive is a function of a list of owners, not {alive!r}")


def sweep(locks: LockHost, stale_after: float | timedelta | None, alive: Alive | None) -> int:
    """Release expired and stale requests, and those of dead owners; ``Locks.sweep`` documents it."""
    check_alive(alive)
    overdue, run = semaphore.sweep(stale_after=stale_after), locks._run
    dead = [] if alive is None else _requests_of_dead_owners(locks, alive)
    swept: int = 0
    while released := run(overdue):
        swept += released
    for start in range(0, len(dead), MAX_SWEPT):
        swept += run(release_unchanged(dead[start : start + MAX_SWEPT]))
    if swept:
        locks._emit("swept", "semaphore", (), count=swept)
    return swept


def _requests_of_dead_owners(locks: LockHost, alive: Alive) -> list[tuple[Any, ...]]:
    verdicts: dict[str, bool] = {}
    dead: list[tuple[Any, ...]] = []
    after = 0
    while requests := locks._run(owned_requests(after)):
        owners = sorted({owner for _, _, owner in requests} - verdicts.keys())
        if owners:
            answer: Any = alive(owners)
            if isinstance(answer, (str, bytes)) or not isinstance(answer, Iterable):
                raise TypeError(
                    f"alive returns those of the given owners that are alive, as a list or set, not {answer!r}"
                )
            living = frozenset(answer)
            if not all(isinstance(each, str) for each in living):
                raise TypeError(f"alive returns those of the given owners that are alive, not {answer!r}")
            verdicts |= {owner: owner in living for owner in owners}
        dead += [(request, renewed_at) for request, renewed_at, owner in requests if not verdicts[owner]]
        after = requests[-1][0]
    return dead

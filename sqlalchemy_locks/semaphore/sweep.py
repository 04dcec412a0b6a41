"""sweep and clean: what nobody gave back is released, what was released long ago is deleted.

A sweep looks without a lock, judges, and then releases only what is still as it was judged: a lease that was renewed
between the two stays, and what somebody is working on is passed over. A request is locked before its permits
are touched, as everywhere.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy import literal, select

from sqlalchemy_locks._validation import bounded_seconds
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, shaped
from sqlalchemy_locks.semaphore.base import SemaphoreBody, may_be_old, take
from sqlalchemy_locks.semaphore.statements import BATCH

#: before any clock was set
_NEVER = datetime(1970, 1, 1, tzinfo=timezone.utc)
_DAY = 86400


class _Batches(SemaphoreBody):
    def because(self, context: BuildContext) -> str:
        return "since it looks, judges, and writes what is still as it was judged"


class Overdue(_Batches):
    """The requests that have expired, are stale, or have no permit left: one batch, with what they were judged by."""

    writes = False

    def by_statements(self, execution: Execution, made: Any) -> list[tuple[Any, ...]]:
        values = {
            "after": execution.values["after"],
            "cutoff": before(execution, made, execution.values["stale_after"]),
        }
        return [tuple(row) for row in execution.execute(made.overdue, values)]


class Owned(_Batches):
    """The requests that have an owner: one batch, with what they will be judged by."""

    writes = False

    def by_statements(self, execution: Execution, made: Any) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in execution.execute(made.owned, {"after": execution.values["after"]})]


class TakePermits(_Batches):
    """Release those that are still as they were judged."""

    def by_statements(self, execution: Execution, made: Any) -> int:
        return len(take(execution, made, execution.values["judged"]))


class Strays(_Batches):
    """End the permits that are held under a request that was released, or that isn't there: rows written by hand."""

    def by_statements(self, execution: Execution, made: Any) -> int:
        after, ended = 0, 0
        while found := execution.execute(made.strays, {"after": after}).all():
            for row in found:
                # neither can ever be held again, so there is nothing to judge once more; clean() would never find
                # the one without a request
                execution.execute(made.drop_permit if row.request_id is None else made.free_one, {"which": row.id})
            after, ended = found[-1].id, ended + len(found)
        return ended


class Sweep(Strays):
    def by_statements(self, execution: Execution, made: Any) -> int:
        cutoff, after, swept = before(execution, made, execution.values["stale_after"]), 0, 0
        while judged := [tuple(row) for row in execution.execute(made.overdue, {"after": after, "cutoff": cutoff})]:
            swept += len(take(execution, made, judged))
            after = judged[-1][0]
        return swept + super().by_statements(execution, made)


class Clean(_Batches):
    def by_statements(self, execution: Execution, made: Any) -> int:
        cutoff = before(execution, made, execution.values["older_than"])
        chosen = execution.execute(made.old, {"cutoff": cutoff}).scalars().all()
        ids = execution.execute(made.old_locked, {"ids": chosen}).scalars().all() if chosen else ()
        if ids:
            each = [{"which": request} for request in ids]
            execution.execute(made.drop_permits, each)
            execution.execute(made.forget, each)
        return len(ids)


class CleanLeases(_Batches):
    def __init__(self) -> None:
        super().__init__()
        self.name = "semaphore.clean_leases"

    def by_statements(self, execution: Execution, made: Any) -> int:
        values = {"cutoff": before(execution, made, execution.values["older_than"]), "after": 0}
        while found := execution.execute(made.unused, values).all():
            # a released permit, too, as long as its request is remembered: what asks again is told of its semaphores
            used = set(execution.execute(made.used_by, {"ids": [row.id for row in found]}).scalars())
            judged = {row.id: row.fence for row in found if row.id not in used}
            if judged and (removed := self._remove(execution, made, judged)):
                return removed
            values["after"] = found[-1].id
        return 0

    def _remove(self, execution: Execution, made: Any, judged: dict[int, int]) -> int:
        # each grant raises the fence before it writes a permit: where that is as it was, there is none since
        # several at once may become a scan, which above READ COMMITTED keeps the locks of all that it passes (InnoDB)
        batches = [[semaphore] for semaphore in judged] if may_be_old(execution) else [list(judged)]
        rows = [row for batch in batches for row in execution.execute(made.unused_locked, {"ids": batch})]
        ids = [row.id for row in rows if row.on_demand and row.fence == judged[row.id]]
        # without the row that keeps it nothing is removed; where somebody is making a semaphore, next time
        floor = execution.execute(made.floor_locked, {}).first() if ids else None
        if floor is None:
            return 0
        least = max(floor.fence, *(judged[semaphore] for semaphore in ids))
        execution.execute(made.raise_floor, {"which": floor.id, "least": least})
        # one by one: of several, InnoDB may make a scan, and wait for those that others hold
        execution.execute(made.remove, [{"which": semaphore} for semaphore in ids])
        return len(ids)


class CleanHistory(_Batches):
    def __init__(self) -> None:
        super().__init__()
        self.name = "semaphore.clean_history"

    def by_statements(self, execution: Execution, made: Any) -> int:
        return int(
            execution.execute(
                made.drop_history, {"cutoff": before(execution, made, execution.values["older_than"])}
            ).rowcount
        )


def before(execution: Execution, made: Any, age: float | None) -> Any:
    """The instant, by the server's clock, before which things are that old."""
    return _NEVER if age is None else execution.execute(made.ago, {"seconds": -age}).scalar()


_OVERDUE, _OWNED, _TAKE, _STRAYS, _SWEEP = Overdue(), Owned(), TakePermits(), Strays(), Sweep()
_CLEAN, _CLEAN_LEASES, _CLEAN_HISTORY = Clean(), CleanLeases(), CleanHistory()


def overdue(stale_after: float | None, after: int) -> Operation[Any]:
    """One look of a sweep that takes its batches in transactions of their own."""
    return Operation(_OVERDUE, {"stale_after": stale_after, "after": after})


def owned(after: int) -> Operation[Any]:
    """One look of a sweep by owner."""
    return Operation(_OWNED, {"after": after})


def taken(judged: list[tuple[Any, ...]]) -> Operation[Any]:
    """What follows the look."""
    return Operation(_TAKE, {"judged": judged})


def strays() -> Operation[Any]:
    """End the permits that belong to no request that is held; how many they were."""
    return Operation(_STRAYS, {})


@shaped(select(literal(1)))
def sweep(*, stale_after: float | timedelta | None = None) -> Operation[Any]:
    """Release what has expired, what is stale, and what a crash left half released.

    :param stale_after: what was acquired without a time to live, and neither renewed nor released for that long, in
        seconds or as a ``timedelta``, is released; ``None``: only what has expired. What has a time to live is
        judged by that alone, however long it is.
    :return: how many requests were released, with the permits, if there are any, that belong to no request.

    ``locks.sweep()`` does it in transactions of its own, batch by batch, and can ask whether owners are alive.

    >>> session.scalar(sl.semaphore.sweep())
    0
    """
    return Operation(_SWEEP, {"stale_after": stale(stale_after)})


def stale(after: float | timedelta | None) -> float | None:
    return None if after is None else bounded_seconds(after, "stale_after", zero=False)


@shaped(select(literal(1)))
def clean(*, older_than: float | timedelta = 7 * _DAY) -> Operation[Any]:
    """Delete requests that were released long ago, and their permits: one batch of about 800.

    :param older_than: how long ago, in seconds or as a ``timedelta``.
    :return: how many were deleted. Run it again, each time in a transaction of its own, until that is 0.

    An id whose request is deleted is forgotten: asked for again, it is granted anew.

    >>> session.scalar(sl.semaphore.clean())
    0
    """
    return Operation(_CLEAN, {"older_than": bounded_seconds(older_than, "older_than")})


@shaped(select(literal(1)))
def clean_leases(*, older_than: float | timedelta = 7 * _DAY) -> Operation[Any]:
    """Delete semaphores that a lease made on its first use, and that are no longer used: one batch of about 800.

    :param older_than: since when nobody has acquired one of them, in seconds or as a ``timedelta``. Besides, its
        requests must be cleaned up: :func:`clean` deletes them seven days after they were released.
    :return: how many were deleted. Run it again, each time in a transaction of its own, until that is 0.

    Never one that :func:`create` or :func:`resize` was called for, nor one that is held. A lease makes it again when it
    needs it, and its fencing tokens go on: the greatest of all that were deleted is kept, and a new semaphore, of
    whatever name, begins above it.

    >>> session.scalar(sl.semaphore.clean_leases())
    0
    """
    return Operation(_CLEAN_LEASES, {"older_than": bounded_seconds(older_than, "older_than")})


@shaped(select(literal(1)))
def clean_history(*, older_than: float | timedelta = 30 * _DAY) -> Operation[Any]:
    """Delete records of changes of capacity.

    :param older_than: how long ago they were made, in seconds or as a ``timedelta``.
    :return: how many were deleted.

    >>> session.scalar(sl.semaphore.clean_history())
    0
    """
    return Operation(_CLEAN_HISTORY, {"older_than": bounded_seconds(older_than, "older_than")})


__all__ = ["BATCH", "clean", "clean_history", "clean_leases", "sweep"]

"""sweep and clean: what nobody gave back is released, what was released long ago is deleted.

A sweep looks without a lock, judges, and then releases only what is still as it was judged: a lease that was renewed
between the two stays, and what somebody is working on is passed over. A request is locked before its permits
are touched, as everywhere.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy import literal, select

from ..durations import span
from ..operation import Operation, Place, Run, shaped
from .base import SemaphoreBody, take
from .statements import BATCH

#: before any clock was set
_NEVER = datetime(1970, 1, 1, tzinfo=timezone.utc)
_DAY = 86400


class _Batches(SemaphoreBody):
    def because(self, place: Place) -> str:
        return "since it looks, judges, and writes what is still as it was judged"


class Overdue(_Batches):
    """The requests that have expired, are stale, or have no permit left: one batch, with what they were judged by."""

    writes = False

    def by_statements(self, run: Run, made: Any) -> list[tuple[Any, ...]]:
        values = {"after": run.values["after"], "cutoff": before(run, made, run.values["stale_after"])}
        return [tuple(row) for row in run.execute(made.overdue, values)]


class Owned(_Batches):
    """The requests that have an owner: one batch, with what they will be judged by."""

    writes = False

    def by_statements(self, run: Run, made: Any) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in run.execute(made.owned, {"after": run.values["after"]})]


class Take(_Batches):
    """Release those that are still as they were judged."""

    def by_statements(self, run: Run, made: Any) -> int:
        return len(take(run, made, run.values["judged"]))


class Sweep(_Batches):
    def by_statements(self, run: Run, made: Any) -> int:
        cutoff, after, swept = before(run, made, run.values["stale_after"]), 0, 0
        while judged := [tuple(row) for row in run.execute(made.overdue, {"after": after, "cutoff": cutoff})]:
            swept += len(take(run, made, judged))
            after = judged[-1][0]
        return swept


class Clean(_Batches):
    def by_statements(self, run: Run, made: Any) -> int:
        cutoff = before(run, made, run.values["older_than"])
        chosen = run.execute(made.old, {"cutoff": cutoff}).scalars().all()
        ids = run.execute(made.old_locked, {"ids": chosen}).scalars().all() if chosen else ()
        if ids:
            each = [{"which": request} for request in ids]
            run.execute(made.drop_permits, each)
            run.execute(made.forget, each)
        return len(ids)


class CleanHistory(_Batches):
    def __init__(self) -> None:
        super().__init__()
        self.name = "semaphore.clean_history"

    def by_statements(self, run: Run, made: Any) -> int:
        return int(run.execute(made.drop_history, {"cutoff": before(run, made, run.values["older_than"])}).rowcount)


def before(run: Run, made: Any, age: float | None) -> Any:
    """The instant, by the server's clock, before which things are that old."""
    return _NEVER if age is None else run.execute(made.ago, {"seconds": -age}).scalar()


_OVERDUE, _OWNED, _TAKE, _SWEEP = Overdue(), Owned(), Take(), Sweep()
_CLEAN, _CLEAN_HISTORY = Clean(), CleanHistory()


def overdue(stale_after: float | None, after: int) -> Operation[Any]:
    """One look of a sweep that takes its batches in transactions of their own."""
    return Operation(_OVERDUE, {"stale_after": stale_after, "after": after})


def owned(after: int) -> Operation[Any]:
    """One look of a sweep by owner."""
    return Operation(_OWNED, {"after": after})


def taken(judged: list[tuple[Any, ...]]) -> Operation[Any]:
    """What follows the look."""
    return Operation(_TAKE, {"judged": judged})


@shaped(select(literal(1)))
def sweep(*, stale_after: float | timedelta | None = None) -> Operation[Any]:
    """Release what has expired, what is stale, and what a crash left half released.

    :param stale_after: what was neither renewed nor released for that long, in seconds or as a ``timedelta``, is
        released though it has no time to live, or a longer one; ``None``: only what has expired.
    :return: how many requests were released.

    ``locks.sweep()`` does it in transactions of its own, batch by batch, and can ask whether owners are alive.

    >>> session.scalar(sl.semaphore.sweep())
    0
    """
    return Operation(_SWEEP, {"stale_after": stale(stale_after)})


def stale(after: float | timedelta | None) -> float | None:
    return None if after is None else span(after, "stale_after", zero=False)


@shaped(select(literal(1)))
def clean(*, older_than: float | timedelta = 7 * _DAY) -> Operation[Any]:
    """Delete requests that were released long ago, and their permits: one batch of about 800.

    :param older_than: how long ago, in seconds or as a ``timedelta``.
    :return: how many were deleted. Run it again, each time in a transaction of its own, until that is 0.

    An id whose request is deleted is forgotten: asked for again, it is granted anew.

    >>> session.scalar(sl.semaphore.clean())
    0
    """
    return Operation(_CLEAN, {"older_than": span(older_than, "older_than")})


@shaped(select(literal(1)))
def clean_history(*, older_than: float | timedelta = 30 * _DAY) -> Operation[Any]:
    """Delete records of changes of capacity.

    :param older_than: how long ago they were made, in seconds or as a ``timedelta``.
    :return: how many were deleted.

    >>> session.scalar(sl.semaphore.clean_history())
    0
    """
    return Operation(_CLEAN_HISTORY, {"older_than": span(older_than, "older_than")})


__all__ = ["BATCH", "clean", "clean_history", "sweep"]

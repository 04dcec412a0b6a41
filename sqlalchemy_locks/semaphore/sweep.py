"""sweep and clean: release abandoned requests, and delete requests that were released long ago.

A sweep reads requests without locks. Then it locks them, and releases those that are expired or unchanged: it keeps a
lease that was renewed in between, and skips a request that others have locked. As everywhere, a request is locked
before its permits.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy_locks._validation import bounded_seconds
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation
from sqlalchemy_locks.core.typing import INT_ROW, shaped
from sqlalchemy_locks.semaphore.base import SemaphoreImpl, reads_snapshot, release_unchanged_requests
from sqlalchemy_locks.semaphore.statements import Statements

#: before any timestamp
_NEVER = datetime(1970, 1, 1, tzinfo=timezone.utc)
_DAY = 86400


class BatchImpl(SemaphoreImpl):
    def multi_statement_reason(self, context: BuildContext) -> str:
        return "since it reads, decides, and then writes what is still unchanged"


class OwnedRequests(BatchImpl):
    """Reads a batch of the requests that have an owner, each with its last renewal."""

    name = "semaphore.owned_requests"
    writes = False

    def run_statements(self, execution: Execution, sql: Statements) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in execution.execute(sql.read_owned, {"after": execution.values["after"]})]


class ReleaseUnchanged(BatchImpl):
    """Releases the requests that are unchanged since they were read."""

    name = "semaphore.release_unchanged"

    def run_statements(self, execution: Execution, sql: Statements) -> int:
        return release_unchanged_requests(execution, sql, execution.values["requests"])


class Sweep(BatchImpl):
    """Releases a batch of requests that have expired, are stale, or have no permit left."""

    name = "semaphore.sweep"

    def run_statements(self, execution: Execution, sql: Statements) -> int:
        values = {"cutoff": _cutoff(execution, sql, "stale_after"), "after": 0}
        while overdue := execution.execute(sql.read_overdue, values).all():
            if swept := release_unchanged_requests(execution, sql, overdue):
                return swept
            values["after"] = overdue[-1].id  # all of these are locked by others, or were renewed meanwhile
        return 0


class Clean(BatchImpl):
    name = "semaphore.clean"

    def run_statements(self, execution: Execution, sql: Statements) -> int:
        ids = execution.execute(sql.read_released, {"cutoff": _cutoff(execution, sql, "older_than")}).scalars().all()
        ids = execution.execute(sql.lock_released, {"row_ids": ids}).scalars().all() if ids else ()
        if ids:
            requests = [{"row_id": request} for request in ids]
            execution.execute(sql.delete_permits, requests)
            execution.execute(sql.delete_request, requests)
        return len(ids)


class CleanLeases(BatchImpl):
    name = "semaphore.clean_leases"

    def run_statements(self, execution: Execution, sql: Statements) -> int:
        values = {"cutoff": _cutoff(execution, sql, "older_than"), "after": 0}
        while leases := execution.execute(sql.read_unused_leases, values).all():
            # released permits count as well while their request exists: a replay reads the names of its semaphores
            ids = {"row_ids": [lease.id for lease in leases]}
            used_ids = set(execution.execute(sql.read_semaphores_of_permits, ids).scalars())
            fences = {lease.id: lease.fence for lease in leases if lease.id not in used_ids}
            if fences and (removed := self._remove(execution, sql, fences)):
                return removed
            values["after"] = leases[-1].id
        return 0

    def _remove(self, execution: Execution, sql: Statements, fences: dict[int, int]) -> int:
        # A grant raises the fence before it inserts a permit, so an unchanged fence means that there is no new permit.
        # Each row is locked by itself above READ COMMITTED: for several ids InnoDB may scan the table, and a scan keeps
        # the locks of all rows that it passes.
        batches = [[semaphore] for semaphore in fences] if reads_snapshot(execution) else [list(fences)]
        rows = [row for batch in batches for row in execution.execute(sql.lock_leases, {"row_ids": batch})]
        ids = [row.id for row in rows if row.on_demand and row.fence == fences[row.id]]
        # Nothing is removed without the floor, which keeps the greatest fence. While a create has locked the floor, the
        # removal is left to the next run.
        floor = execution.execute(sql.lock_floor, {}).first() if ids else None
        if floor is None:
            return 0
        greatest = max(floor.fence, *(fences[semaphore] for semaphore in ids))
        execution.execute(sql.raise_floor, {"row_id": floor.id, "floor": greatest})
        # one by one: for several ids InnoDB may scan the table, and wait for rows that others have locked
        execution.execute(sql.delete_semaphore, [{"row_id": semaphore} for semaphore in ids])
        return len(ids)


class CleanHistory(BatchImpl):
    name = "semaphore.clean_history"

    def run_statements(self, execution: Execution, sql: Statements) -> int:
        return execution.execute(sql.delete_history, {"cutoff": _cutoff(execution, sql, "older_than")}).rowcount


def _cutoff(execution: Execution, sql: Statements, age: str) -> Any:
    """Return the instant that is ``age`` ago by the server's clock; for ``None``, one before every timestamp."""
    seconds = execution.values[age]
    return _NEVER if seconds is None else execution.execute(sql.read_instant, {"seconds": -seconds}).scalar()


_OWNED, _RELEASE, _SWEEP = OwnedRequests(), ReleaseUnchanged(), Sweep()
_CLEAN, _CLEAN_LEASES, _CLEAN_HISTORY = Clean(), CleanLeases(), CleanHistory()


def owned_requests(after: int) -> Operation[Any]:
    """Read one batch, for a sweep by owner. :param after: the last row id."""
    return Operation(_OWNED, {"after": after})


def release_unchanged(requests: list[tuple[Any, ...]]) -> Operation[Any]:
    """Release the requests that are unchanged since they were read; the value is their number."""
    return Operation(_RELEASE, {"requests": requests})


@shaped(INT_ROW)
def sweep(*, stale_after: float | timedelta | None = None) -> Operation[Any]:
    """Release expired and stale requests: one batch of at most 800.

    :param stale_after: in seconds or as a ``timedelta``: a request without a time to live is stale when it was not
        renewed for that long; ``None``: none is stale. A request with a time to live is never stale, it expires.
    :return: how many requests were released. Run it again, each time in a transaction of its own, until that is 0;
        ``locks.sweep()`` does so, and can ask whether owners are alive.

    >>> session.scalar(sl.semaphore.sweep())
    0
    """
    age = None if stale_after is None else bounded_seconds(stale_after, "stale_after", zero=False)
    return Operation(_SWEEP, {"stale_after": age})


@shaped(INT_ROW)
def clean(*, older_than: float | timedelta = 7 * _DAY) -> Operation[Any]:
    """Delete requests that were released long ago, and their permits: one batch of about 800.

    :param older_than: how long ago, in seconds or as a ``timedelta``.
    :return: how many were deleted. Run it again, each time in a transaction of its own, until that is 0.

    An id whose request is deleted is forgotten, and can be granted again as a new request.

    >>> session.scalar(sl.semaphore.clean())
    0
    """
    return Operation(_CLEAN, {"older_than": bounded_seconds(older_than, "older_than")})


@shaped(INT_ROW)
def clean_leases(*, older_than: float | timedelta = 7 * _DAY) -> Operation[Any]:
    """Delete semaphores that a lease created on its first use, and that are no longer used: one batch of about 800.

    :param older_than: for how long none of their permits was acquired, in seconds or as a ``timedelta``. Besides, their
        requests must be cleaned up: :func:`clean` deletes them seven days after they were released.
    :return: how many were deleted. Run it again, each time in a transaction of its own, until that is 0.

    It keeps semaphores for which :func:`create` or :func:`resize` was called, and those that are held. A lease creates
    its semaphore again when it needs it, and the fencing tokens continue: the greatest token of all deleted semaphores
    is kept, and a new semaphore, of any name, begins above it.

    >>> session.scalar(sl.semaphore.clean_leases())
    0
    """
    return Operation(_CLEAN_LEASES, {"older_than": bounded_seconds(older_than, "older_than")})


@shaped(INT_ROW)
def clean_history(*, older_than: float | timedelta = 30 * _DAY) -> Operation[Any]:
    """Delete records of changes of capacity.

    :param older_than: how long ago they were made, in seconds or as a ``timedelta``.
    :return: how many were deleted.

    >>> session.scalar(sl.semaphore.clean_history())
    0
    """
    return Operation(_CLEAN_HISTORY, {"older_than": bounded_seconds(older_than, "older_than")})

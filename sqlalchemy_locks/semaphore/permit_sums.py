"""Sum the held permits of locked semaphores, and release expired ones, on MySQL, MariaDB and SQLite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import Row

from sqlalchemy_locks.core.operation import Execution
from sqlalchemy_locks.semaphore import base
from sqlalchemy_locks.semaphore.statements import Statements

#: the semaphores whose rows a transaction of InnoDB has changed: its snapshot shows its own version of these rows
_changed_semaphores: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


def mark_changed(execution: Execution, semaphore: int) -> None:
    """Remember that this transaction has changed the semaphore's row itself."""
    if base.reads_snapshot(execution):
        _changed_semaphores.setdefault(execution.connection.get_transaction(), set()).add(semaphore)


class Usage(NamedTuple):
    """The use of locked semaphores, read after they were locked."""

    #: an upper bound of the held permits, by semaphore
    sums: dict[int, float]
    #: the instant of the read
    now: Any
    #: when the request was inserted, before the waits for locks
    began: Any


def read_usage(execution: Execution, sql: Statements, rows: Sequence[Row[Any]], request: int | None = None) -> Usage:
    """Return an upper bound of the held permits of each locked semaphore, and the instant of the read.

    A plain read of InnoDB may be as old as its transaction's snapshot. If the snapshot hides a grant, the fence in the
    locked row differs from the one in the snapshot, and the sum is infinite. The sum is also infinite if this
    transaction has changed the row: then both fences are its own, and prove nothing. Permits that were released since
    the snapshot count as held. If such a sum leaves no room, :func:`sum_again` decides.
    """
    usage_rows = execution.execute(sql.sum_held, {"row_ids": [row.id for row in rows], "row_id": request})
    usage_by_id = {row.id: row for row in usage_rows}
    changed_ids = _changed_semaphores.get(execution.connection.get_transaction(), ())
    sums: dict[int, float] = {}
    now = began = None
    for row in rows:
        usage = usage_by_id.get(row.id)
        # READ UNCOMMITTED shows releases that may be rolled back
        dirty = row.dirty and not execution.begun_by_locks
        # a snapshot older than the semaphore has no row for it; the sum of a killed statement is NULL, without an error
        if dirty or usage is None or usage.used is None or row.fence != usage.fence or row.id in changed_ids:
            sums[row.id] = math.inf
        else:
            sums[row.id] = int(usage.used)
            now, began = now or usage.now, usage.began
    return Usage(sums, now, began)


def sum_again(execution: Execution, sql: Statements, row: Row[Any], most: int) -> tuple[int, Any] | None:
    """Release expired requests of a locked semaphore, and sum its held permits again.

    :param most: the greatest sum that leaves room.
    :return: the sum and the instant of the read; ``None`` if there is certainly no room. On InnoDB the sum may lock the
        permits, since a read without locks may be as old as the snapshot. Their holders then can't release them before
        this transaction ends.
    """
    if not base.reads_snapshot(execution):
        requests = execution.execute(sql.read_expired, {"row_id": row.id}).all()
        if not base.release_unchanged_requests(execution, sql, requests):
            return None
        usage = read_usage(execution, sql, [row])
        return int(usage.sums[row.id]), usage.now
    # Committed rows suffice to deny a request, unless this transaction has released permits: there they still count as
    # held. They never suffice to grant one.
    committed = base.read_committed_rows(execution, [sql.read_expired, sql.sum_held_of_one], {"row_id": row.id})
    requests = execution.execute(sql.read_expired, {"row_id": row.id}).all() if committed is None else committed[0]
    base.release_unchanged_requests(execution, sql, requests)
    has_released = execution.connection.get_transaction() in base.releasing_transactions
    if committed is not None and not has_released and committed[1][0][0] > most:
        return None
    total: Any = execution.execute(sql.share_held_of_one, {"row_id": row.id}).scalar_one()
    # the clock is read in a later statement, since the sum may have waited for a release
    return int(total), execution.execute(sql.read_clock, {}).scalar_one()

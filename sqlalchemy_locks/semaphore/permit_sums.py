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

#: the semaphores whose rows a transaction of InnoDB has changed itself: there it sees its own version of the row
_changed_semaphores: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


def mark_changed(execution: Execution, semaphore: int) -> None:
    """Remember that this transaction has changed the semaphore's row itself."""
    if base.reads_snapshot(execution):
        _changed_semaphores.setdefault(execution.connection.get_transaction(), set()).add(semaphore)


class Usage(NamedTuple):
    """What was read of locked semaphores, after the locks."""

    #: how many permits of each are held, at most
    sums: dict[int, float]
    #: the instant of the read
    now: Any
    #: when the request was inserted, before the waits
    began: Any


def read_usage(execution: Execution, sql: Statements, rows: Sequence[Row[Any]], request: int | None = None) -> Usage:
    """Return how many permits of locked semaphores are held, at most, and the instant: read after the locks.

    A plain read of InnoDB may be as old as its transaction's snapshot. A grant that the snapshot hides shows as another
    fence in the locked row: the sum is then infinite. So it is where this transaction has changed the row itself, whose
    fence then proves nothing. What was released since the snapshot is counted as held. :func:`sum_again` decides then.
    """
    read = execution.execute(sql.sum_held, {"row_ids": [row.id for row in rows], "row_id": request})
    read_by_id = {row.id: row for row in read}
    changed = _changed_semaphores.get(execution.connection.get_transaction(), ())
    sums: dict[int, float] = {}
    now = began = None
    for row in rows:
        usage = read_by_id.get(row.id)
        # READ UNCOMMITTED shows a release that may be rolled back; a snapshot from before a semaphore doesn't show it
        dirty = row.dirty and not execution.begun_by_locks
        # the sum of a statement that was killed is NULL, without an error
        if dirty or usage is None or usage.used is None or row.fence != usage.fence or row.id in changed:
            sums[row.id] = math.inf
        else:
            sums[row.id] = int(usage.used)
            now, began = now or usage.now, usage.began
    return Usage(sums, now, began)


def sum_again(execution: Execution, sql: Statements, row: Row[Any], most: int) -> tuple[int, Any] | None:
    """Release what has expired, and sum again what is held of a locked semaphore: the sum, and the instant.

    :param most: how many permits may be held so that there is room.
    :return: ``None`` where there is no room for certain. A sum may lock the permits in InnoDB, where any other may be
        as old as the snapshot, and their holders then can't release before this transaction ends.
    """
    if not base.reads_snapshot(execution):
        expired = execution.execute(sql.read_expired, {"row_id": row.id}).all()
        if not base.release_unchanged_requests(execution, sql, expired):
            return None
        usage = read_usage(execution, sql, [row])
        return int(usage.sums[row.id]), usage.now
    # A denial is based on what is committed. A grant never is, nor where this transaction has released permits itself.
    committed = base.read_committed_rows(execution, [sql.read_expired, sql.sum_held_of_one], {"row_id": row.id})
    expired = execution.execute(sql.read_expired, {"row_id": row.id}).all() if committed is None else committed[0]
    base.release_unchanged_requests(execution, sql, expired)
    hides_own = execution.connection.get_transaction() in base.releasing_transactions
    if committed is not None and not hides_own and committed[1][0][0] > most:
        return None
    total: Any = execution.execute(sql.share_held_of_one, {"row_id": row.id}).scalar_one()
    # in a later statement, since the first one may have waited for a release
    return int(total), execution.execute(sql.read_clock, {}).scalar_one()

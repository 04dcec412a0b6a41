"""Sum the held permits of locked semaphores, and release expired ones, on MySQL, MariaDB and SQLite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Row
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import Execution
from sqlalchemy_locks.core.side_pool import side_connection
from sqlalchemy_locks.errors import LockTimeout, MustRollback
from sqlalchemy_locks.semaphore.statements import Statements

#: the semaphores whose rows a transaction of InnoDB has changed itself: there it sees its own version of the row
_changed_semaphores: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
#: transactions of InnoDB that have released something themselves
_releasing_transactions: WeakSet[Any] = WeakSet()


def read_committed_rows(
    execution: Execution, selects: Iterable[Executable], values: Mapping[str, Any]
) -> list[Sequence[Row[Any]]] | None:
    """Return the rows of each SELECT as they are committed now, read without locks by another connection.

    ``None`` where there is no connection for it: then only a locking read can tell.
    """
    try:
        with side_connection(execution, row_wait=1) as connection:
            return [connection.execute(each, values).all() for each in selects]
    except (DBAPIError, LockTimeout, MustRollback):
        return None


def reads_snapshot(execution: Execution) -> bool:
    """Return whether a plain read may show rows as they were when the transaction began."""
    return execution.backend.stale_reads and not execution.begun_by_locks


def mark_changed(execution: Execution, semaphore: int) -> None:
    """Remember that this transaction has changed the semaphore's row itself."""
    transaction = execution.connection.get_transaction()
    if reads_snapshot(execution) and transaction is not None:
        _changed_semaphores.setdefault(transaction, set()).add(semaphore)


class Usage(NamedTuple):
    """What was read of locked semaphores, after the locks."""

    #: how many permits of each are held, at most
    sums: dict[int, float]
    #: the instant of the read
    now: Any
    #: when the request was inserted, before the waits
    began: Any


def read_usage(execution: Execution, sql: Statements, rows: Iterable[Row[Any]], request: int | None = None) -> Usage:
    """Return how many permits of locked semaphores are held, at most, and the instant: read after the locks.

    A plain read of InnoDB may be as old as its transaction's snapshot. A grant that the snapshot hides shows as another
    fence in the locked row: the sum is then infinite. So it is where this transaction has changed the row itself, whose
    fence then proves nothing. What was released since the snapshot is counted as held. :func:`sum_again` decides then.
    """
    rows = list(rows)
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
    if not reads_snapshot(execution):
        if not _release_expired(execution, sql, execution.execute(sql.read_expired, {"row_id": row.id}).all()):
            return None
        usage = read_usage(execution, sql, [row])
        return int(usage.sums[row.id]), usage.now
    # A denial is based on what is committed. A grant never is, nor where this transaction has released permits itself.
    committed = read_committed_rows(execution, [sql.read_expired, sql.sum_held_of_one], {"row_id": row.id})
    expired = execution.execute(sql.read_expired, {"row_id": row.id}).all() if committed is None else committed[0]
    released = _release_expired(execution, sql, expired)
    hides_own = released or execution.connection.get_transaction() in _releasing_transactions
    if committed is not None and not hides_own and committed[1][0][0] > most:
        return None
    total: Any = execution.execute(sql.share_held_of_one, {"row_id": row.id}).scalar_one()
    # in a later statement, since the first one may have waited for a release
    return int(total), execution.execute(sql.read_clock, {}).scalar_one()


def _release_expired(execution: Execution, sql: Statements, expired: Iterable[Row[Any]]) -> bool:
    return bool(release_unchanged_requests(execution, sql, [(row.id, row.renewed_at) for row in expired]))


def release_unchanged_requests(execution: Execution, sql: Statements, requests: list[tuple[int, datetime]]) -> int:
    """Release the requests that have expired or are unchanged since they were read, except locked ones.

    :return: how many they were.
    """
    if not requests:
        return 0
    renewed_at = dict(requests)
    batches = execution.batches(list(renewed_at))
    rows = [row for ids in batches for row in execution.execute(sql.lock_unreleased, {"row_ids": ids})]
    unchanged = [row.id for row in rows if row.expired or row.renewed_at == renewed_at[row.id]]
    for request in unchanged:
        end_request(execution, sql, request)
    return len(unchanged)


def end_request(execution: Execution, sql: Statements, request: int) -> None:
    """Release a locked request: its permits first, so that a wait for them that times out can be repeated."""
    transaction = execution.connection.get_transaction()
    if reads_snapshot(execution) and transaction is not None:
        _releasing_transactions.add(transaction)
    # by their own ids, which locks no gap; only a snapshot from before them doesn't show them
    permits = execution.execute(sql.read_permit_ids, {"row_id": request}).scalars().all()
    if permits:
        execution.execute(sql.release_permit, [{"row_id": permit} for permit in permits])
    else:
        execution.execute(sql.release_permits, {"row_id": request})
    execution.execute(sql.end_request, {"row_id": request})

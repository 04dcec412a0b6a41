"""What the operations of a semaphore share: one call of a function where there are functions, else some statements.

Rows are locked in one order everywhere: a request before its permits, a request before semaphores, and semaphores
by name. A release locks no semaphore, so it never waits for an acquire.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Integer, Row, bindparam, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl
from sqlalchemy_locks.core.side_pool import side_connection
from sqlalchemy_locks.dialects.postgresql import milliseconds
from sqlalchemy_locks.errors import LockTimeout, MustRollback, Unsupported
from sqlalchemy_locks.semaphore.statements import Statements, statements
from sqlalchemy_locks.sql.elements import LockFunction, ReadCommitted
from sqlalchemy_locks.values import Grant

#: what error messages call an id
EXTERNAL_ID = "the external_id of a request"
#: of the functions: how long to wait for a lock, in milliseconds
WAIT = bindparam("wait_ms", None, Integer())
#: the semaphores whose rows a transaction of InnoDB has changed itself: there it sees its own version of the row
_changed_semaphores: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
#: transactions of InnoDB that have released something themselves
_releasing_transactions: WeakSet[Any] = WeakSet()
_read_committed = select(ReadCommitted())


class SemaphoreImpl(OperationImpl):
    """An operation that is one function call on PostgreSQL and YugabyteDB, and several statements elsewhere."""

    sends_wait = True
    uses_nonce = False

    def call(self) -> LockFunction | None:
        """Return the function's call; ``None`` where there is none on any engine."""
        return None

    def build(self, context: BuildContext) -> Executable | None:
        call = self.call() if context.backend.schemas else None
        return None if call is None else self.select_call(call)

    def select_call(self, call: LockFunction) -> Executable:
        return select(call)

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "where its rows are locked, read and written one after another"

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True  # run again, it finds what it did

    def _refuse_autocommit(self, execution: Execution) -> Unsupported:
        return Unsupported(
            f"{self.name} is several statements on {execution.backend.name}, which must be one transaction, and this "
            "connection is in autocommit: execute it inside a transaction, or use Locks"
        )

    def check_connection(self, execution: Execution) -> None:
        several = self.writes and self.statement(execution.context) is None
        if several and execution.backend.autocommit(execution.connection):
            raise self._refuse_autocommit(execution)

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        if statement is not None:
            return self.answer(execution, execution.execute(statement, self.arguments(execution)).one())
        with execution.waiting():
            if self.writes and execution.backend.single_writer:
                self._lock_file(execution)
            return self.run_statements(execution, self.statements(execution))

    def arguments(self, execution: Execution) -> dict[str, Any]:
        """Return the values of the function's arguments, by the names of its bind parameters."""
        wait = None if execution.wait is None else milliseconds(execution.wait)
        return {**execution.values, "wait_ms": wait}

    def answer(self, execution: Execution, row: Row[Any]) -> Any:
        """Return the operation's value, of the one row that the function returned."""
        return row[0]

    def run_statements(self, execution: Execution, sql: Statements) -> Any:
        """Return the operation's value where there is no function."""
        raise NotImplementedError

    def statements(self, execution: Execution) -> Statements:
        return statements(execution.context.tables, stale_reads=execution.backend.stale_reads)

    def _lock_file(self, execution: Execution) -> None:
        execution.take_write_lock(execution.context.tables.semaphore)
        if not execution.backend.transaction_begun(execution.connection):
            raise self._refuse_autocommit(execution)


def lock_semaphore(execution: Execution, sql: Statements, name: str) -> Row[Any] | None:
    """Lock a semaphore's row until the transaction ends, and return it; ``None`` without one, or when it is deleted."""
    row = execution.execute(sql.lock_semaphore, {"by_name": name}).first()
    return None if row is None or row.capacity is None else row


def share_request(execution: Execution, sql: Statements) -> Row[Any] | None:
    """Lock the request's row so that it can't end before this transaction does, and return it, if there is one.

    Whether it has ``expired`` is as of the instant at which the lock was granted.
    """
    return _lock_request(execution, sql, sql.share_request, sql.share_request_by_row)


def lock_request(execution: Execution, sql: Statements) -> Row[Any] | None:
    """Lock the request's row until the transaction ends, and return it, if there is one."""
    return _lock_request(execution, sql, sql.lock_request, sql.lock_request_by_row)


def _lock_request(
    execution: Execution, sql: Statements, by_external_id: Executable, by_row: Executable
) -> Row[Any] | None:
    values = {"by_external_id": execution.values["external_id"]}
    if reads_snapshot(execution):
        # above READ COMMITTED, MariaDB locks the gap before what it finds by any key but the primary one
        row_id = execution.execute(sql.find_request, values).scalar()
        if row_id is None and not execution.execute(_read_committed, {}).scalar():
            # where it is absent, a locking read would lock the gap: other ids couldn't be asked for
            committed = _read_committed_rows(execution, [sql.find_request], values)
            if committed is not None:
                if not committed[0]:
                    return None
                row_id = committed[0][0].id
        row = None if row_id is None else execution.execute(by_row, {"row_id": row_id}).first()
        if row is not None:
            return row
    return execution.execute(by_external_id, values).first()


def _read_committed_rows(
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
    return execution.backend.stale_reads and not execution.read_committed


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

    A plain read of InnoDB may be as old as its transaction's snapshot. Another's grant that it doesn't show has changed
    the fence of the locked row, though: then, and where the row shows this transaction's own change instead, the sum is
    infinite. What was released since the snapshot is counted as held. :func:`sum_again` decides then.
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
        dirty = row.dirty and not execution.read_committed
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
    committed = _read_committed_rows(execution, [sql.read_expired, sql.sum_held_of_one], {"row_id": row.id})
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


def delete_request(execution: Execution, sql: Statements, request: int) -> None:
    """Delete a request that this transaction has inserted, or locked, with its permits."""
    permits = execution.execute(sql.read_permit_ids, {"row_id": request}).scalars().all()
    if permits:
        execution.execute(sql.delete_permit, [{"row_id": permit} for permit in permits])
    execution.execute(sql.delete_request, {"row_id": request})


def identity_of(request: str | Grant) -> dict[str, Any]:
    """Return the values that identify a request: of a grant its own, and of a bare id any."""
    if isinstance(request, Grant):
        # a denied grant has no request: "" matches none
        return {"external_id": request.external_id, "token": request.token or ""}
    return {"external_id": valid_name(request, EXTERNAL_ID), "token": None}

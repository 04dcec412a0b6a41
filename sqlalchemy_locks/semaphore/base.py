"""What the operations of a semaphore share: one call of a function where there are functions, else some statements.

Rows are locked in one order everywhere: a request before its permits, a request before semaphores, and semaphores
by name. A release locks no semaphore, so it never waits for an acquire.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Text, bindparam, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.core.operation import (
    BuildContext,
    Execution,
    Operation,
    OperationImpl,
    fetch_one,
    side_connection,
)
from sqlalchemy_locks.errors import LockTimeout, Unsupported
from sqlalchemy_locks.semaphore.statements import statements
from sqlalchemy_locks.sql.elements import LockFunction, ReadCommitted
from sqlalchemy_locks.values import Grant

#: of the functions: how long to wait, as the server's own setting takes it
LOCK_WAIT = bindparam("lock_wait", type_=Text())
#: the semaphores whose rows a transaction of InnoDB has changed itself: there it sees its own version of the row
_CHANGED: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
#: transactions of InnoDB that have released something themselves
_RELEASING: WeakSet[Any] = WeakSet()
_read_committed = select(ReadCommitted())


class SemaphoreImpl(OperationImpl):
    """An operation that is one function call on PostgreSQL and YugabyteDB, and several statements elsewhere."""

    sends_wait = True
    uses_nonce = False

    def call(self) -> LockFunction | None:
        """Return the function's call; ``None`` where there is none on any engine."""
        return None

    def build(self, context: BuildContext) -> Executable | None:
        call = self.call() if context.backend.calls_functions else None
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
        super().check_connection(execution)
        several = self.writes and self.statement(execution.context) is None
        if several and execution.backend.autocommit(execution.connection):
            raise self._refuse_autocommit(execution)

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        if statement is not None:
            wait = None if execution.wait is None else execution.backend.wait_value(execution.wait)
            values = {**execution.values, "lock_wait": wait}
            if self.uses_nonce:
                values["nonce"] = execution.nonce
            return self.answer(execution, execution.by_cursor(statement, values, fetch_one))
        with execution.waiting():
            if self.writes and execution.backend.single_writer:
                self._lock_file(execution)
            return self.run_statements(execution, self.statements(execution))

    def answer(self, execution: Execution, row: Any) -> Any:
        """Return the operation's value, of the one row that the function returned."""
        return row[0]

    def run_statements(self, execution: Execution, sql: Any) -> Any:
        """Return the operation's value where there is no function. :param sql: the :func:`statements`."""
        raise NotImplementedError

    def statements(self, execution: Execution) -> Any:
        return statements(execution.context.tables, stale_reads=execution.backend.stale_reads)

    def _lock_file(self, execution: Execution) -> None:
        with execution.backend.classify_timeouts(execution.connection):
            execution.take_write_lock(execution.context.tables.semaphore)
        if not execution.backend.transaction_begun(execution.connection):
            raise self._refuse_autocommit(execution)


def lock_semaphore(execution: Execution, sql: Any, name: str) -> Any:
    """Lock a semaphore's row until the transaction ends, and return it; ``None`` without one, or when it is deleted."""
    row = execution.execute(sql.lock, {"called": name}).first()
    return None if row is None or row.capacity is None else row


def lock_request_shared(execution: Execution, sql: Any) -> Any:
    """Lock the request's row so that it can't end before this transaction does, and return it, if there is one.

    Whether it has ``expired`` is as of the instant at which the lock was granted.
    """
    return _lock_request(execution, sql.request, sql.chosen_shared, sql.request_shared)


def lock_request(execution: Execution, sql: Any) -> Any:
    """Lock the request's row until the transaction ends, and return it, if there is one."""
    return _lock_request(execution, sql.request, sql.chosen_locked, sql.request_locked)


def _lock_request(execution: Execution, look: Any, by_row_id: Any, by_external_id: Any) -> Any:
    values = {"called": execution.values["external_id"]}
    if reads_snapshot(execution):
        # above READ COMMITTED, MariaDB locks the gap before what it finds by any key but the primary one
        seen = execution.execute(look, values).scalar()
        if seen is None and not execution.execute(_read_committed, {}).scalar():
            # where it is absent, a locking read would lock the gap: other ids couldn't be asked for
            with contextlib.suppress(DBAPIError, LockTimeout), side_connection(execution, within=1) as connection:
                seen = connection.execute(look, values, execution_options=execution.options).scalar()
                if seen is None:
                    return None
        row = None if seen is None else execution.execute(by_row_id, {"which": seen}).first()
        if row is not None:
            return row
    return execution.execute(by_external_id, values).first()


def reads_snapshot(execution: Execution) -> bool:
    """Return whether a plain read may show rows as they were when the transaction began."""
    return execution.backend.stale_reads and not execution.read_committed


def mark_changed(execution: Execution, semaphore: int) -> None:
    """Remember that this transaction has changed the semaphore's row itself."""
    transaction = execution.connection.get_transaction()
    if reads_snapshot(execution) and transaction is not None:
        _CHANGED.setdefault(transaction, set()).add(semaphore)


class LockedUsage(NamedTuple):
    """What was read of locked semaphores, after the locks."""

    #: how many permits of each are held, at most
    sums: dict[int, float]
    #: the instant of the read
    now: Any
    #: when the request was inserted, before the waits
    began: Any


def read_usage(execution: Execution, sql: Any, rows: Iterable[Any], request: int | None = None) -> LockedUsage:
    """Return how many permits of locked semaphores are held, at most, and the instant: read after the locks.

    A plain read of InnoDB may be as old as its transaction's snapshot. Another's grant that it doesn't show has changed
    the fence of the locked row, though: then, and where the row shows this transaction's own change instead, the sum is
    infinite. What was released since the snapshot is counted as held. :func:`may_have_room` and
    :func:`read_current_usage` ask again.
    """
    rows = list(rows)
    read = execution.execute(sql.used, {"ids": [row.id for row in rows], "which": request})
    found = {row.id: row for row in read}
    changed = _CHANGED.get(execution.connection.get_transaction(), ())
    sums: dict[int, float] = {}
    now = began = None
    for row in rows:
        seen = found.get(row.id)
        # READ UNCOMMITTED shows a release that may be rolled back; a snapshot from before a semaphore doesn't show it
        dirty = row.dirty and not execution.read_committed
        # the sum of a statement that was killed is NULL, without an error
        if dirty or seen is None or seen.used is None or row.fence != seen.fence or row.id in changed:
            sums[row.id] = math.inf
        else:
            sums[row.id] = int(seen.used)
            now, began = now or seen.now, seen.began
    return LockedUsage(sums, now, began)


def read_current_usage(execution: Execution, sql: Any, row: Any) -> tuple[int, Any]:
    """As :func:`read_usage`, of one semaphore, current in any snapshot; it may lock, so it precedes a refusal only."""
    if not reads_snapshot(execution):
        usage = read_usage(execution, sql, [row])
        return int(usage.sums[row.id]), usage.now
    total: Any = execution.execute(sql.used_now, {"which": row.id}).scalar_one()
    # in a later statement, since the first one may have waited for a release
    return int(total), execution.execute(sql.clock, {}).scalar_one()


def may_have_room(execution: Execution, sql: Any, semaphore: int, most: int) -> bool:
    """Release what has expired; return whether no more than ``most`` permits may be held after all.

    The sum that said otherwise may be older than a release (InnoDB). A locking read would keep the holders from
    releasing, and others from acquiring, until this transaction ends: so what is committed is read on a connection of
    its own, and where there is no room, there is none. A grant is never based on that read.
    """
    if not reads_snapshot(execution):
        return release_expired(execution, sql, semaphore) > 0
    try:
        with side_connection(execution, within=1) as connection:
            values, options = {"which": semaphore}, execution.options
            expired = connection.execute(sql.expired_of, values, execution_options=options).all()
            held = connection.execute(sql.held_of, values, execution_options=options).scalar_one()
    except (DBAPIError, LockTimeout):
        # without that connection, only the locking read can tell
        release_expired(execution, sql, semaphore)
        return True
    ended = end_if_unchanged(execution, sql, [tuple(row) for row in expired])
    # what this transaction has released itself, no other connection sees
    return bool(ended) or held <= most or execution.connection.get_transaction() in _RELEASING


def release_expired(execution: Execution, sql: Any, semaphore: int) -> int:
    """Release what has expired on a semaphore; return how many requests that was."""
    expired = execution.execute(sql.expired_of, {"which": semaphore})
    return len(end_if_unchanged(execution, sql, [tuple(row) for row in expired]))


def end_if_unchanged(execution: Execution, sql: Any, requests: list[tuple[int, datetime]]) -> list[int]:
    """Release the requests that have expired or are unchanged since they were read, except locked ones.

    :return: their row ids.
    """
    if not requests:
        return []
    known = dict(requests)
    rows = execution.execute(sql.still, {"ids": list(known)}).all()
    ended = [row.id for row in rows if row.expired or row.renewed_at == known[row.id]]
    for request in ended:
        end_request(execution, sql, request)
    return ended


def end_request(execution: Execution, sql: Any, request: int) -> None:
    """Release a locked request: its permits first, so that a wait for them that times out can be repeated."""
    transaction = execution.connection.get_transaction()
    if reads_snapshot(execution) and transaction is not None:
        _RELEASING.add(transaction)
    # by their own ids, which locks no gap; only a snapshot from before them doesn't show them
    permits = execution.execute(sql.permits_of, {"which": request}).scalars().all()
    if permits:
        execution.execute(sql.free_one, [{"which": permit} for permit in permits])
    else:
        execution.execute(sql.free, {"which": request})
    execution.execute(sql.end, {"which": request})


def delete_request(execution: Execution, sql: Any, request: int) -> None:
    """Delete a request that this transaction has inserted, or locked, with its permits."""
    permits = execution.execute(sql.permits_of, {"which": request}).scalars().all()
    if permits:
        execution.execute(sql.drop_permit, [{"which": permit} for permit in permits])
    execution.execute(sql.forget, {"which": request})


def external_id_of(value: Any) -> str:
    """Return the id of a request, validated, as it is stored; of a grant, its own."""
    return valid_name(getattr(value, "external_id", value), "the external_id of a request")


def token_of(value: str | Grant) -> str | None:
    """Return what tells a grant's request from every other of its id; ``None`` for a bare id, which matches any."""
    # a denied grant has no request: "" matches none
    return value.token or "" if isinstance(value, Grant) else None

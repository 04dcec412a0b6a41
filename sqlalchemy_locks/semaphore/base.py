"""The base of a semaphore's operations: one function call on engines with functions, several statements elsewhere.

Every operation locks rows in the same order: a request before its permits, a request before semaphores, and semaphores
by name. A release locks no semaphore, so it never waits for an acquire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from sqlalchemy import Row, Text, bindparam, select
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import milliseconds, valid_name
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl
from sqlalchemy_locks.core.side_pool import side_connection
from sqlalchemy_locks.errors import LockTimeout, MustRollback, UnknownSemaphore, Unsupported
from sqlalchemy_locks.semaphore.statements import Statements, statements
from sqlalchemy_locks.sql.elements import WAIT_MS, LockFunction
from sqlalchemy_locks.values import Grant

#: the name of an external id in error messages
EXTERNAL_ID = "the external_id of a request"
#: the arguments of the functions that find a request by the values of :func:`identity_of`
IDENTITY = (bindparam("external_id", type_=Text()), bindparam("token", type_=Text()))
#: transactions of InnoDB that have released permits, which other connections still see as held
releasing_transactions: WeakSet[Any] = WeakSet()


class SemaphoreImpl(OperationImpl):
    """An operation that is one function call on PostgreSQL and YugabyteDB, and several statements elsewhere."""

    wait_limit = "argument"
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
        return True  # a second run finds the result of the first one

    def _refused_autocommit(self, execution: Execution) -> Unsupported:
        return Unsupported(
            f"{self.name} is several statements on {execution.backend.name}, which must be one transaction, and this "
            "connection is in autocommit: execute it inside a transaction, or use Locks"
        )

    def check_connection(self, execution: Execution) -> None:
        several = self.writes and self.statement(execution.context) is None
        if several and execution.backend.autocommit(execution.connection):
            raise self._refused_autocommit(execution)

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
        return {**execution.values, WAIT_MS.key: milliseconds(execution.wait)}

    def answer(self, execution: Execution, row: Row[Any]) -> Any:
        """Return the operation's value from the row that the function returned."""
        return row[0]

    def run_statements(self, execution: Execution, sql: Statements) -> Any:
        """Execute the statements of an engine without functions, and return the operation's value."""
        raise NotImplementedError

    def statements(self, execution: Execution) -> Statements:
        return statements(execution.context.tables, stale_reads=execution.backend.stale_reads)

    def _lock_file(self, execution: Execution) -> None:
        execution.begin_as_writer(execution.context.tables.semaphore)
        if not execution.backend.transaction_begun(execution.connection):
            raise self._refused_autocommit(execution)


def reads_snapshot(execution: Execution) -> bool:
    """Return whether a plain read may show rows as they were when the transaction began."""
    return execution.backend.stale_reads and not execution.begun_by_locks


def read_committed_rows(
    execution: Execution, selects: Iterable[Executable], values: Mapping[str, Any]
) -> list[Sequence[Row[Any]]] | None:
    """Read the latest committed rows of each SELECT, without locks, by another connection.

    :return: the rows; ``None`` if the other connection can't read them, so that only a locking read can.
    """
    try:
        with side_connection(execution, row_wait=1) as connection:
            return [connection.execute(each, values).all() for each in selects]
    except (DBAPIError, LockTimeout, MustRollback):
        return None


def insert_unless_present(execution: Execution, insert: Executable, values: Mapping[str, Any]) -> int | None:
    """Insert a row and return its id; ``None`` if a row with the same name or external id exists."""
    try:
        result = execution.execute(insert, values)
    except IntegrityError as error:
        # a single writer has searched under its lock before, so this error isn't about a duplicate
        if execution.backend.single_writer or execution.backend.meaning(error) != "duplicate":
            raise
        return None
    key: Any = result.inserted_primary_key
    return int(key[0])


def unknown_semaphore(*names: str) -> UnknownSemaphore:
    return UnknownSemaphore(f"there is no semaphore {', '.join(map(repr, names))}: make it with semaphore.create")


def lock_semaphore(execution: Execution, sql: Statements, name: str) -> Row[Any] | None:
    """Lock a semaphore's row until the transaction ends, and return it; ``None`` if it is absent or deleted."""
    row = execution.execute(sql.lock_semaphore, {"by_name": name}).first()
    return None if row is None or row.capacity is None else row


def share_request(execution: Execution, sql: Statements) -> Row[Any] | None:
    """Lock the request's row in shared mode until the transaction ends, and return it; ``None`` if it is absent.

    The request can't be released meanwhile. Its column ``expired`` is evaluated after the lock was granted.
    """
    return _lock_request(execution, sql, sql.share_request, sql.share_request_by_row)


def hold_request(execution: Execution, sql: Statements) -> Row[Any] | None:
    """Lock the request as ``share_request`` does, also against releases on other nodes of a cluster."""
    if execution.context.cluster is None:
        return share_request(execution, sql)
    request = lock_request(execution, sql)  # of two transactions that share the row, neither could change it
    if request is not None:
        execution.execute(sql.touch_request, {"row_id": request.id})
        request = execution.execute(sql.share_request_by_row, {"row_id": request.id}).one()
    return request


def lock_request(execution: Execution, sql: Statements) -> Row[Any] | None:
    """Lock the request's row until the transaction ends, and return it; ``None`` if it is absent."""
    return _lock_request(execution, sql, sql.lock_request, sql.lock_request_by_row)


def lock_own_request(execution: Execution, sql: Statements) -> Row[Any] | None:
    """Lock the request's row and return it; ``None`` if it is absent, or belongs to a later request of the same id."""
    row = lock_request(execution, sql)
    return row if row is not None and execution.values["token"] in (None, row.token) else None


def _lock_request(
    execution: Execution, sql: Statements, by_external_id: Executable, by_row: Executable
) -> Row[Any] | None:
    values = {"by_external_id": execution.values["external_id"]}
    if reads_snapshot(execution):
        # above READ COMMITTED, MariaDB also locks the gap before a row, unless it finds the row by the primary key
        row_id = execution.execute(sql.find_request, values).scalar()
        if row_id is None and not execution.is_read_committed():
            # a locking read of an absent row would lock the gap, and block requests with other ids
            committed_rows = read_committed_rows(execution, [sql.find_request], values)
            if committed_rows is not None:
                if not committed_rows[0]:
                    return None
                row_id = committed_rows[0][0].id
        row = None if row_id is None else execution.execute(by_row, {"row_id": row_id}).first()
        if row is not None:
            return row
    return execution.execute(by_external_id, values).first()


def delete_request(execution: Execution, sql: Statements, request: int) -> None:
    """Delete a request, which this transaction has inserted or locked, and its permits."""
    permits = execution.execute(sql.read_permit_ids, {"row_id": request}).scalars().all()
    if permits:
        execution.execute(sql.delete_permit, [{"row_id": permit} for permit in permits])
    execution.execute(sql.delete_request, {"row_id": request})


def end_request(execution: Execution, sql: Statements, request: int) -> None:
    """Release a locked request, its permits first.

    If a wait for the permits times out, the request isn't released yet, and the call can be repeated.
    """
    if reads_snapshot(execution):
        releasing_transactions.add(execution.connection.get_transaction())
    # an UPDATE by the permits' own ids locks no gap, but a snapshot older than the permits doesn't show the ids
    permits = execution.execute(sql.read_permit_ids, {"row_id": request}).scalars().all()
    if permits:
        execution.execute(sql.release_permit, [{"row_id": permit} for permit in permits])
    else:
        execution.execute(sql.release_permits, {"row_id": request})
    execution.execute(sql.end_request, {"row_id": request})


def release_unchanged_requests(execution: Execution, sql: Statements, requests: Sequence[Any]) -> int:
    """Release the requests that have expired or are unchanged since they were read, except locked ones.

    :param requests: pairs of a request's id and its last renewal.
    :return: the number of released requests.
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


def identity_of(request: str | Grant) -> dict[str, Any]:
    """Return the values that identify a request: a grant's own request, or any request with an id."""
    if isinstance(request, Grant):
        # a denied grant has no request: "" matches none
        return {"external_id": request.external_id, "token": request.token or ""}
    return {"external_id": valid_name(request, EXTERNAL_ID), "token": None}

"""Fencing: the row itself refuses the write of a holder that is no longer the latest.

A holder can be paused for longer than its lock lasts, resume, and write. A lock service can't prevent that write, but
the row can: each acquisition gets a greater token than the one before, and the row refuses a token smaller than the
last one. One conditional UPDATE checks and stores it:
``UPDATE document SET body = ..., fence = :token WHERE id = 1 AND fence <= :token``.

For locks with one holder at a time (mutex, timeout, lease). A semaphore has several holders at once; use ``guarded``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Column, Integer, Select, Table, Update, func, select
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList

from sqlalchemy_locks._validation import valid_int
from sqlalchemy_locks.core.entities import MappedTable, entity_of
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl, columns_set_by
from sqlalchemy_locks.core.typing import BOOL_ROW, shaped
from sqlalchemy_locks.errors import StaleToken, Unsupported

if TYPE_CHECKING:
    from sqlalchemy.orm import MappedColumn


def Fence() -> MappedColumn[int]:
    """Return a mapped column for the fencing token of the last write; 0 before the first.

    >>> class Report(Base):
    ...     __tablename__ = "report"
    ...     id: Mapped[int] = mapped_column(primary_key=True)
    ...     fence: Mapped[int] = sl.Fence()
    """
    from sqlalchemy.orm import mapped_column

    return mapped_column(BigInteger, nullable=False, default=0, server_default="0")


@shaped(BOOL_ROW)
def fenced(statement: Update, fence: Any, token: int) -> Operation[Any]:
    """Execute an UPDATE only if no newer holder has written to the row, and store the token in it.

    :param statement: an UPDATE of one table (``update(Document).where(...).values(...)``), without RETURNING.
    :param fence: the column of that table that stores the token (:func:`Fence` makes one).
    :param token: the fencing token of the held lock, as ``acquire_token`` returned it.
    :return: ``True`` if the row was written, ``False`` if no row matches the statement's own condition. It may match no
        longer: a newer holder may have changed the columns that it compares, or, on PostgreSQL, another transaction may
        have deleted the row and inserted it again during the wait.
    :raises StaleToken: if a newer holder has written; nothing is written then. If the statement matches several rows,
        roll back: those without a newer token are written.
    :raises TypeError: :raises ValueError: for another statement, another table's column, or an invalid token.

    A holder may write any number of times with the same token.

    >>> session.scalar(sl.fenced(update(Document).where(Document.id == 1).values(body=text), Document.fence, token))
    """
    if not isinstance(statement, Update):
        raise TypeError(
            f"fenced takes an UPDATE, not {statement!r}: fence an UPDATE of a row of yours, and write the rest after "
            "it in the same transaction"
        )
    valid_int(token, "a fencing token", 1, 2**63 - 1)
    return Operation(_FencedUpdate(statement, fence, token), {"token": token})


class _FencedUpdate(OperationImpl):
    name = "fenced"
    wait_limit = "setting"
    needs_installation = False

    def __init__(self, statement: Update, fence: Any, token: int) -> None:
        super().__init__()
        self.target = MappedTable(entity_of(statement), "fenced")
        self.fence = self.target.column(fence, "fence")
        if len(statement.exported_columns):
            raise Unsupported("fenced returns True or False: leave out RETURNING, and SELECT afterwards")
        if not isinstance(self.fence.type, Integer):
            raise TypeError(f"fenced: {self.fence} must be an integer column for a token")
        self.token = token
        self.original = statement
        self.columns = [self._column(column) for column in columns_set_by(statement)]
        #: the condition matches one row at most
        self.single = self._equalities().keys() >= set(self.target.primary_key)
        try:
            self._fenced_update()
        except InvalidRequestError as error:
            raise Unsupported("fenced adds columns to the SET clause: use values(), not ordered_values()") from error

    def build(self, context: BuildContext) -> Update | None:
        # several rows must be checked for newer tokens afterwards, and can be rolled back only in a transaction
        return self._fenced_update() if self.single else None

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "where the statement doesn't select its row by the primary key, and may match several"

    def _fenced_update(self) -> Update:
        last = func.coalesce(self.fence, 0) if self.fence.nullable else self.fence
        not_newer = self.original.where(last <= self.token, *self.target.class_condition())
        fenced = not_newer.values({self.fence: self.token})
        already_set = {column.name for column in self.columns}
        bump = {column: value for column, value in self.target.version_bump().items() if column.name not in already_set}
        return (fenced.values(bump) if bump else fenced).execution_options(synchronize_session=False)

    def _condition(self) -> list[Any]:
        return [] if self.original.whereclause is None else [self.original.whereclause]

    def run(self, execution: Execution) -> bool:
        if not self.single:
            execution.require_transaction(self.target.table)
        rowcount = execution.execute(self._fenced_update(), {}).rowcount
        if not rowcount or not self.single:
            newer = self._newer_token(execution)
            if newer is not None:
                raise StaleToken(
                    f"a newer holder, with the token {newer}, has written to {self.target.name} already: the write "
                    f"with the token {self.token} is refused",
                    newer,
                )
        if rowcount and execution.session is not None:
            self.target.refresh(execution.session, [self.fence, *self.columns], self._equalities())
        return bool(rowcount)

    def _newer_token(self, execution: Execution) -> Any:
        """Return the greatest token for which a row was refused, or ``None``."""
        newer: Select[Any] = select(self.fence).where(
            self.fence > self.token, *self._condition(), *self.target.class_condition()
        )
        newer = newer.order_by(self.fence.desc()).limit(1)
        if execution.backend.stale_reads:  # a plain SELECT would read the snapshot
            newer = newer.with_for_update(read=True)
        return execution.execute(newer, {}).scalar()

    def _column(self, key: Any) -> Column[Any]:
        """Return a column that the statement sets, given by key, name or attribute."""
        if isinstance(key, str) and key in self.target.table.columns:
            column: Column[Any] = self.target.table.columns[key]
            return column
        return self.target.column(key, "values")

    def _equalities(self) -> dict[Column[Any], Any]:
        """Return the columns that the condition equates with a value."""
        values: dict[Column[Any], Any] = {}
        pending = self._condition()
        while pending:
            clause = pending.pop()
            if isinstance(clause, BooleanClauseList) and clause.operator is operators.and_:
                pending += clause.clauses
            elif isinstance(clause, BinaryExpression) and clause.operator is operators.eq:
                for left, right in ((clause.left, clause.right), (clause.right, clause.left)):
                    # not an alias, which is another table although its columns are based on the target's
                    if isinstance(right, BindParameter) and isinstance(getattr(left, "table", None), Table):
                        for column in self.target.table.columns:
                            if column in left.base_columns:
                                values[column] = right.effective_value
        return values

    def route(self) -> dict[str, Any]:
        return self.target.route()

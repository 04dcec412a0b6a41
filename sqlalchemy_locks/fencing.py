"""Fencing: a write that came too late is refused by the row it is for.

A holder can be stopped for longer than its lock lasts, go on, and write. No lock service can prevent that; the row
can, when each lock hands out a greater token than the one before, and the row takes no write with a smaller token
than the last. One conditional UPDATE does both:
``UPDATE document SET body = ..., fence = :token WHERE id = 1 AND fence <= :token``.

For locks of one holder at a time (mutex, timeout, lease). A semaphore's permits hold at once, and have ``guarded``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Column, Integer, Select, Table, Update, func, literal, select
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList

from sqlalchemy_locks.core.entities import MappedTable
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl
from sqlalchemy_locks.core.typing import shaped
from sqlalchemy_locks.errors import StaleToken, Unsupported

if TYPE_CHECKING:
    from sqlalchemy.orm import MappedColumn


def Fence() -> MappedColumn[int]:
    """A mapped column for the fencing token of the last write; 0 before the first.

    >>> class Report(Base):
    ...     __tablename__ = "report"
    ...     id: Mapped[int] = mapped_column(primary_key=True)
    ...     fence: Mapped[int] = sl.Fence()
    """
    from sqlalchemy.orm import mapped_column

    return mapped_column(BigInteger, nullable=False, default=0, server_default="0")


@shaped(select(literal(True)))
def fenced(statement: Update, fence: Any, token: int) -> Operation[Any]:
    """Run an UPDATE only if no newer holder has written to the row, and leave the token there.

    :param statement: an UPDATE of one table (``update(Document).where(...).values(...)``), without RETURNING.
    :param fence: the column of that table that keeps the token (:func:`Fence` makes one).
    :param token: the fencing token of the lock that you hold, as ``acquire_token`` gave it.
    :return: ``True`` when it was written, ``False`` when no row matches the statement's own condition (any more: a
        newer holder may have changed what it asks for).
    :raises StaleToken: when a newer holder has written; nothing is written then. Where the statement is for several
        rows, roll back: those that were not newer are written.
    :raises TypeError: :raises ValueError: for another statement, another table's column, or a token that is none.

    Writes with the same token follow each other: a holder may write as often as it likes.

    >>> session.scalar(sl.fenced(update(Document).where(Document.id == 1).values(body=text), Document.fence, token))
    """
    if not isinstance(statement, Update):
        raise TypeError(f"fenced takes an UPDATE, not {statement!r}")
    if isinstance(token, bool) or not isinstance(token, int):
        raise TypeError(f"a fencing token is an int, not {token!r}")
    if not 0 < token < 2**63:
        raise ValueError(f"a fencing token is at least 1 and has 63 bits, not {token}")
    return Operation(_Fenced(statement, fence, token), {"token": token})


class _Fenced(OperationImpl):
    name = "fenced"
    needs_installation = False

    def __init__(self, statement: Update, fence: Any, token: int) -> None:
        super().__init__()
        # not entity_description, which fails where a table's own UPDATE is conditioned by a class's attribute
        mapper = statement.table._annotations.get("parententity")
        self.target = MappedTable(statement.table if mapper is None else mapper.entity, "fenced")
        self.fence = self.target.column(fence, "fence")
        if statement._returning:
            raise Unsupported("fenced answers True or False: leave RETURNING out of its statement, and read afterwards")
        if getattr(statement, "_ordered_values", None) is not None:
            raise Unsupported("fenced adds to what its statement sets: use values(), not ordered_values()")
        if not isinstance(self.fence.type, Integer):
            raise TypeError(f"fenced: {self.fence} must be an integer column for a token")
        self.token = token
        self.given = statement
        self.columns = [self._column(column) for column in dict(statement._values or {})]
        #: the condition says that one row is meant, at the most
        self.single = self._pinned() >= {column.name for column in self.target.primary_key}

    def build(self, context: BuildContext) -> Update | None:
        # what several rows have become must be asked for, and the answer can still be undone only in a transaction
        return self._guarded() if self.single else None

    def because(self, context: BuildContext) -> str:
        return "where the statement doesn't name its row by the primary key, and may be for several"

    def _guarded(self) -> Update:
        guarded = self.given.where(*self._not_newer()).values({self.fence: self.token})
        set_already = {column.name for column in self.columns}
        bumped = {column: value for column, value in self.target.bumped().items() if column.name not in set_already}
        return (guarded.values(bumped) if bumped else guarded).execution_options(synchronize_session=False)

    def _not_newer(self) -> list[Any]:
        last = func.coalesce(self.fence, 0) if self.fence.nullable else self.fence
        return [last <= self.token, *self.target.own_rows()]

    def _meant(self) -> Select[Any]:
        condition = [] if self.given.whereclause is None else [self.given.whereclause]
        return select(self.fence).where(*condition, *self._not_newer()).limit(1)

    def run(self, execution: Execution) -> bool:
        if not self.single:
            self._refuse_autocommit(execution)
        written = 0
        for _ in execution.tries():
            with execution.waiting():
                written = execution.execute(self._guarded(), {}).rowcount
            if written or not execution.backend.misses_replaced or execution.execute(self._meant(), {}).first() is None:
                break
        if not written or not self.single:
            newer = execution.execute(self._newer(execution), {}).scalar()
            if newer is not None:
                raise StaleToken(
                    f"a newer holder, with the token {newer}, has written to {self.target.name} already: the write "
                    f"with the token {self.token} came too late",
                    newer,
                )
        if written and execution.session is not None:
            self._refresh(execution)
        return bool(written)

    def _refuse_autocommit(self, execution: Execution) -> None:
        if execution.backend.locking == "file":
            execution.take_file(self.target.table)
        if execution.backend.autocommit(execution.connection) or not execution.backend.transaction_begun(
            execution.connection
        ):
            raise execution.backend.refuse_autocommit(self.name)

    def _newer(self, execution: Execution) -> Select[Any]:
        condition = [] if self.given.whereclause is None else [self.given.whereclause]
        newer: Select[Any] = select(self.fence).where(self.fence > self.token, *condition, *self.target.own_rows())
        newer = newer.order_by(self.fence.desc()).limit(1)
        # what an old snapshot shows is not what the UPDATE met (InnoDB above READ COMMITTED)
        return newer.with_for_update(read=True) if execution.backend.locking == "rows" else newer

    def _refresh(self, execution: Execution) -> None:
        self.target.refresh(execution.session, [self.fence, *self.columns], self._pins())

    def _column(self, given: Any) -> Column[Any]:
        """A column that the statement sets, by whatever it was named."""
        if isinstance(given, str) and given in self.target.table.columns:
            found: Column[Any] = self.target.table.columns[given]
            return found
        return self.target.column(given, "values")

    def _pinned(self) -> set[str]:
        return {column.name for column in self._pins()}

    def _pins(self) -> dict[Column[Any], Any]:
        """The columns that the condition equates with a value."""
        found: dict[Column[Any], Any] = {}
        waiting: list[Any] = [] if self.given.whereclause is None else [self.given.whereclause]
        while waiting:
            clause = waiting.pop()
            if isinstance(clause, BooleanClauseList) and clause.operator is operators.and_:
                waiting += clause.clauses
            elif isinstance(clause, BinaryExpression) and clause.operator is operators.eq:
                for one, other in ((clause.left, clause.right), (clause.right, clause.left)):
                    # an alias is another table, though its columns are based on ours
                    if isinstance(other, BindParameter) and isinstance(getattr(one, "table", None), Table):
                        for column in self.target.table.columns:
                            if column in one.base_columns:
                                found[column] = other.effective_value
        return found

    def route(self) -> dict[str, Any]:
        return self.target.route()

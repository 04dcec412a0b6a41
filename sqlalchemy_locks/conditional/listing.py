"""List the rows of a pattern for monitoring: one SELECT on every engine, without locks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import DateTime, Integer, bindparam, func, literal_column, null, select, type_coerce
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Operation, OperationImpl
from sqlalchemy_locks.core.roles import RoleColumns, RoleMapping, param_name
from sqlalchemy_locks.sql.clock import UTC

Clauses = Callable[[RoleColumns], Sequence[Any]]

_LIMIT = bindparam(param_name("limit"), type_=Integer())


class Listing(OperationImpl):
    """A SELECT of the rows that meet some conditions, ordered and limited.

    :param select: returns the selected columns. :param where: the conditions. :param order_by: the order.
    :param ties: the order of the rows that are equal in ``order_by``, by the names of selected columns. They are sorted
        once the limit has applied: to sort many rows by long names is slow.
    """

    writes = False

    def __init__(
        self,
        mapping: RoleMapping,
        name: str,
        *,
        select: Clauses,
        where: Clauses,
        order_by: Clauses,
        ties: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.mapping, self.name = mapping, name
        self.select, self.where, self.order_by, self.ties = select, where, order_by, ties
        self.needs_installation = mapping.target is None
        self.count = Count(self)

    def build(self, context: BuildContext) -> Executable | None:
        columns = self.mapping.columns(context)
        found = select(*self.select(columns)).where(*self.where(columns), *self.mapping.class_condition())
        found = found.order_by(*self.order_by(columns)).limit(_LIMIT)
        if not self.ties:
            return found
        first = found.subquery("first_rows")
        return select(first).order_by(*(first.c[name] for name in self.ties))

    def route(self) -> dict[str, Any]:
        return self.mapping.route()


class Count(OperationImpl):
    """Count the rows of a listing, up to a limit."""

    writes = False

    def __init__(self, listing: Listing) -> None:
        super().__init__()
        self.listing, self.name = listing, listing.name
        self.needs_installation = listing.needs_installation

    def build(self, context: BuildContext) -> Executable | None:
        columns = self.listing.mapping.columns(context)
        # selected from the table, since there may be no condition that names it
        found: Any = select(literal_column("1").label("found")).select_from(columns.table)
        conditions = (*self.listing.where(columns), *self.listing.mapping.class_condition())
        return select(func.count()).select_from(found.where(*conditions).limit(_LIMIT).subquery())

    def route(self) -> dict[str, Any]:
        return self.listing.route()


def count_listed(rows: Operation[Any], limit: int) -> Operation[Any]:
    """Return the operation that counts the rows that a listing could return, whatever its own limit.

    :param limit: the most that are counted.
    """
    listing = rows._impl
    assert isinstance(listing, Listing)
    return Operation(listing.count, {**rows._values, _LIMIT.key: limit})


def labelled(columns: RoleColumns, role: str) -> Any:
    """Return the column of a role, labelled with the role; NULL where no column plays it."""
    if role not in columns:
        return null().label(role)
    column = columns[role]
    return type_coerce(column, UTC()).label(role) if isinstance(column.type, DateTime) else column.label(role)

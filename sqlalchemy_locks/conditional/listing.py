"""List the rows of a pattern for monitoring: one SELECT on every engine, without locks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import DateTime, Integer, Select, bindparam, func, null, select, type_coerce
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Operation, OperationImpl
from sqlalchemy_locks.core.roles import RoleColumns, RoleMapping, param_name
from sqlalchemy_locks.sql.clock import UTC

Clauses = Callable[[RoleColumns], Sequence[Any]]

_LIMIT = bindparam(param_name("limit"), type_=Integer())


class Listing(OperationImpl):
    """A SELECT of the rows that meet some conditions, ordered and limited.

    :param select: returns the selected columns. :param where: the conditions. :param order_by: the order.
    """

    writes = False

    def __init__(self, mapping: RoleMapping, name: str, *, select: Clauses, where: Clauses, order_by: Clauses) -> None:
        super().__init__()
        self.mapping, self.name = mapping, name
        self.select, self.where, self.order_by = select, where, order_by
        self.needs_installation = mapping.target is None
        self.count = Count(self)

    def rows(self, context: BuildContext) -> Select[Any]:
        """Return the SELECT of all rows that meet the conditions."""
        columns = self.mapping.columns(context)
        rows: Any = select(*self.select(columns))
        chosen: Select[Any] = rows.where(*self.where(columns), *self.mapping.class_condition())
        return chosen

    def build(self, context: BuildContext) -> Executable | None:
        return self.rows(context).order_by(*self.order_by(self.mapping.columns(context))).limit(_LIMIT)

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
        return select(func.count()).select_from(self.listing.rows(context).limit(_LIMIT).subquery())

    def route(self) -> dict[str, Any]:
        return self.listing.route()


def count_listed(rows: Operation[Any], limit: int) -> Operation[Any]:
    """Return the operation that counts the rows of a listing, without the listing's own limit.

    :param limit: the maximum number of counted rows.
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

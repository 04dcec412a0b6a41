"""Looks at the rows of a pattern, for people: one SELECT on every engine, which locks nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import DateTime, Integer, bindparam, null, select, type_coerce
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, OperationImpl
from sqlalchemy_locks.core.roles import RoleColumns, RoleMapping, param_name
from sqlalchemy_locks.sql.clock import UTC

Parts = Callable[[RoleColumns], Sequence[Any]]


class Listing(OperationImpl):
    """The rows that meet some conditions, in an order, so many at most.

    :param columns: what a row tells. :param conditions: which rows. :param order: which first.
    """

    writes = False

    def __init__(self, rows: RoleMapping, name: str, *, columns: Parts, conditions: Parts, order: Parts) -> None:
        super().__init__()
        self.rows, self.name = rows, name
        self.columns, self.conditions, self.order = columns, conditions, order
        self.needs_installation = rows.target is None

    def build(self, context: BuildContext) -> Executable | None:
        at = self.rows.at(context)
        found = select(*self.columns(at)).where(*self.conditions(at), *self.rows.own_rows())
        return found.order_by(*self.order(at)).limit(bindparam(param_name("limit"), type_=Integer()))

    def route(self) -> dict[str, Any]:
        return self.rows.route()


def told(at: RoleColumns, role: str) -> Any:
    """A column under the name of its role; NULL where no column plays it."""
    if role not in at:
        return null().label(role)
    column = at[role]
    return type_coerce(column, UTC()).label(role) if isinstance(column.type, DateTime) else column.label(role)

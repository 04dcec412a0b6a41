"""Looks at the rows of a pattern, for people: one SELECT on every engine, which locks nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import DateTime, Integer, bindparam, null, select, type_coerce
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import Body, Place
from sqlalchemy_locks.core.roles import At, Rows, named
from sqlalchemy_locks.sql.clock import UTC

Parts = Callable[[At], Sequence[Any]]


class Listing(Body):
    """The rows that meet some conditions, in an order, so many at most.

    :param columns: what a row tells. :param conditions: which rows. :param order: which first.
    """

    writes = False

    def __init__(self, rows: Rows, name: str, *, columns: Parts, conditions: Parts, order: Parts) -> None:
        super().__init__()
        self.rows, self.name = rows, name
        self.columns, self.conditions, self.order = columns, conditions, order
        self.needs_installation = rows.target is None

    def build(self, place: Place) -> Executable | None:
        at = self.rows.at(place)
        found = select(*self.columns(at)).where(*self.conditions(at), *self.rows.own_rows())
        return found.order_by(*self.order(at)).limit(bindparam(named("limit"), type_=Integer()))

    def route(self) -> dict[str, Any]:
        return self.rows.route()


def told(at: At, role: str) -> Any:
    """A column under the name of its role; NULL where no column plays it."""
    if role not in at:
        return null().label(role)
    column = at[role]
    return type_coerce(column, UTC()).label(role) if isinstance(column.type, DateTime) else column.label(role)

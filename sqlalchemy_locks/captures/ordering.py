"""The order of what was captured, where the statement that captures can't give it: Python sorts as SQLite does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import Column, Enum
from sqlalchemy.engine import FrozenResult, Result
from sqlalchemy.sql import operators
from sqlalchemy.types import TypeDecorator

from sqlalchemy_locks.captures.statements import CaptureSpec, unwrapped
from sqlalchemy_locks.core.operation import Execution

#: what Python compares as SQLite does
_COMPARABLE = (bool, int, float, Decimal, str, date, datetime)


def directions(taking: CaptureSpec) -> list[tuple[Column[Any], bool, bool]] | None:
    """Column, descending, NULLs last: how Python sorts as SQLite does; ``None`` where it can't."""
    found = []
    for element in taking.order_by:
        clause, modifiers = unwrapped(element)
        base = [column for column in getattr(clause, "base_columns", ()) if column in set(taking.table.c)]
        if not base or base[0] in taking.changed or not _comparable(base[0].type):
            return None
        if taking.target is not None and taking.mapper is not None and taking.target.key_of(base[0]) is None:
            return None  # an entity doesn't show it
        descending = operators.desc_op in modifiers
        last = descending
        if operators.nulls_first_op in modifiers:
            last = False
        if operators.nulls_last_op in modifiers:
            last = True
        found.append((base[0], descending, last))
    return found


def _comparable(type_: Any) -> bool:
    if isinstance(type_, (TypeDecorator, Enum)) or getattr(type_, "collation", None):
        return False
    try:
        return type_.python_type in _COMPARABLE
    except NotImplementedError:
        return False


def in_order(result: Result[Any], taking: CaptureSpec, execution: Execution) -> Result[Any]:
    """In order, with a NULL where SQLite has it."""
    columns, target = list(taking.table.c), taking.target if execution.session is not None else None
    frozen = result.freeze()
    rows = unframed(frozen)
    for column, descending, last in reversed(directions(taking) or []):
        number = columns.index(column)
        name = target.key_of(column) if target is not None and target.mapper is not None else None

        def key(
            row: Any, number: int = number, name: str | None = name, nulls_high: bool = last != descending
        ) -> tuple[bool, Any]:
            value = row[number] if name is None else getattr(row[0], name)
            return (value is None) == nulls_high, value

        rows.sort(key=key, reverse=descending)
    return _with(frozen, rows)


def rearranged(frozen: FrozenResult[Any], context: Callable[[Sequence[Any]], int]) -> Result[Any]:
    """The same rows in another order."""
    return _with(frozen, sorted(unframed(frozen), key=context))


def unframed(frozen: FrozenResult[Any]) -> list[tuple[Any, ...]]:
    # of one entity, SQLAlchemy keeps no row around it
    return [(each,) if frozen._source_supports_scalars else tuple(each) for each in frozen.data]


def _with(frozen: FrozenResult[Any], rows: Any) -> Result[Any]:
    return frozen.with_new_rows(rows)()

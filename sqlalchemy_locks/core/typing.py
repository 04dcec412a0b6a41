"""Types of operations for mypy and pyright: the rows that an operation over a mapped class returns.

SQLAlchemy 2.0 and 2.1 have different types for the row shape of an entity, so the shape is taken from ``select()``.
The checkers derive it in different ways: mypy from the type of a function, pyright by inference. Without a class, and
with a ``Table``, rows are of any shape.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Protocol

from sqlalchemy import literal, select

MYPY = False
#: SELECTs of one value, whose row shape an operation has
NONE_ROW, BOOL_ROW, INT_ROW = select(literal(None)), select(literal(True)), select(literal(1))
P = ParamSpec("P")
Shape = typing.TypeVar("Shape", covariant=True)
if TYPE_CHECKING:
    from sqlalchemy import Table
    from sqlalchemy.sql.selectable import TypedReturnsRows
    from typing_extensions import TypeVar

    from sqlalchemy_locks.core.operation import Operation, RowsOperation

    T = TypeVar("T")
    E = TypeVar("E", default=Any)
    R = TypeVar("R", bound=Any)
    #: a function from a class to the SELECT of it
    SelectOf = Callable[[type[T]], TypedReturnsRows[R]]
    #: an operation whose row shape a decorator declares
    AnyRowsOperation = Callable[..., RowsOperation[Any]]

    # for pyright, which infers the types of these calls

    def of_shape(shape: TypedReturnsRows[R]) -> RowsOperation[R]: ...

    def class_of(entity: type[E] | Table | None) -> type[E]: ...

    def class_in(pattern: EntityPattern[E]) -> type[E]: ...
else:
    E = typing.TypeVar("E")


class EntityPattern(Generic[E]):
    """A pattern over a mapped class."""


class ValueOperation(Protocol[Shape]):
    """To type checkers, an :class:`Operation` of any shape that is not a :class:`RowsOperation`."""

    @property
    def _gives_rows(self) -> Literal[False]: ...

    def _shape(self) -> Shape: ...


def shaped(_shape: TypedReturnsRows[R]) -> Callable[[Callable[P, Operation[Any]]], Callable[P, Operation[R]]]:
    """Type an operation by its rows, as ``Select`` is: SQLAlchemy 2.0 and 2.1 spell that shape differently."""

    def declare(function: Callable[P, Operation[Any]]) -> Callable[P, Operation[R]]:
        return function

    return declare


def shaped_rows(
    _shape: TypedReturnsRows[R],
) -> Callable[[Callable[P, RowsOperation[Any]]], Callable[P, RowsOperation[R]]]:
    """As ``shaped``, for an operation that returns rows."""

    def declare(function: Callable[P, RowsOperation[Any]]) -> Callable[P, RowsOperation[R]]:
        return function

    return declare

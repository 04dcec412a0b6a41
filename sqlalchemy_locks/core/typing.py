"""How the class that somebody gave becomes the type of what comes back, for mypy and for pyright.

SQLAlchemy 2.0 and 2.1 spell the row shape of "an entity" differently, so it is taken from ``select()``. Each checker
has its own way of carrying a generic through: mypy by the type of a function, pyright by inference. Without a class,
and with a ``Table``, rows are of any shape.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

from sqlalchemy_locks.core.operation import RowsOperation

MYPY = False
if TYPE_CHECKING:
    from sqlalchemy import Table
    from sqlalchemy.sql.selectable import TypedReturnsRows
    from typing_extensions import TypeVar

    T = TypeVar("T")
    E = TypeVar("E", default=Any)
    R = TypeVar("R", bound=Any)
    #: a function from a class to the SELECT of it
    Selects = Callable[[type[T]], TypedReturnsRows[R]]
    #: whatever it was said to give, a decorator says it better
    Vague = Callable[..., RowsOperation[Any]]

    # for pyright, which infers what these calls give

    def of_shape(shape: TypedReturnsRows[R]) -> RowsOperation[R]: ...

    def class_of(entity: type[E] | Table | None) -> type[E]: ...

    def class_in(pattern: Given[E]) -> type[E]: ...
else:
    E = typing.TypeVar("E")


class Given(Generic[E]):
    """A pattern over a class that somebody gave."""

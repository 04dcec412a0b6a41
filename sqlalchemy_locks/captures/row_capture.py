"""capture: rows of any mapped class or table, by any condition.

``capture.py`` does the work, for this and for every other pattern that captures rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

from sqlalchemy import Join, Table, select

from sqlalchemy_locks._validation import valid_int
from sqlalchemy_locks.captures.capture import CaptureImpl, capture_operation
from sqlalchemy_locks.captures.statements import LIMIT, CaptureSpec, search
from sqlalchemy_locks.core.entities import MappedTable
from sqlalchemy_locks.core.operation import BuildContext, RowsOperation
from sqlalchemy_locks.core.typing import MYPY

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy_locks.core.typing import AnyRowsOperation, E, R, SelectOf, T, class_of, of_shape


class _RowCapture(CaptureImpl):
    """The implementation of one :func:`capture`."""

    needs_installation = False

    def __init__(self, spec: CaptureSpec) -> None:
        super().__init__("capture")
        self._spec = spec

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        return self._spec

    def route(self) -> dict[str, Any]:
        assert self._spec.target is not None
        return self._spec.target.route()


def _capture(
    entity: Any, *, where: Any = (), values: Mapping[Any, Any], order_by: Any = (), limit: int = 1
) -> RowsOperation[Any]:
    """Capture rows: select those that no other session has locked, change them and return them, atomically.

    :param entity: a mapped class (a session then returns its entities, refreshed and in the identity map), or a
        ``Table``.
    :param where: which rows can be captured: a condition, or several. ``values`` must make it false, or the next
        capture takes the same rows again. Other tables go into an ``exists()``.
    :param values: the values or SQL expressions to set, by attribute, column or column name.
    :param order_by: which rows come first; one expression or several. An index should deliver this order (see the
        guide).
    :param limit: the maximum number of rows.
    :return: the rows, in that order; fewer than ``limit``, or none, if there are no more.
    :raises ValueError: for columns of another table than the class's own (a joined parent's), or empty ``values``.
    :raises MustRollback: on SQLite, if this transaction has read before and another one has written since.
    :raises Unsupported: in autocommit on MySQL and MariaDB, and on SQLite with ``order_by`` and a ``limit`` above 1:
        the rows would be unlocked before they are changed.

    Rows that another session has locked are skipped. A version counter (``version_id_col``) is incremented. To capture
    in a loop, create the operation once and execute it repeatedly.

    >>> orders = session.scalars(sl.capture(
    ...     Order, where=Order.status == "paid", values={"status": "shipping"}, order_by=Order.id, limit=10
    ... )).all()
    """
    target = MappedTable(entity, "capture", joins=True)
    changes = {target.column(column, "values"): value for column, value in values.items()}
    if not changes:
        raise ValueError("capture: values says what marks a row as captured, and must not be empty")
    if keys := [column for column in changes if column.primary_key]:
        raise ValueError(f"capture: {keys[0]} belongs to the primary key, which a capture can't set")
    spec = CaptureSpec(target.table, _as_tuple(where), changes, _as_tuple(order_by), target)
    _refuse_joins(spec)
    return capture_operation(_RowCapture(spec), target, {LIMIT: valid_int(limit, "limit")})


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _refuse_joins(spec: CaptureSpec) -> None:
    froms = search(spec).get_final_froms()
    if len(froms) == 1 and not isinstance(froms[0], (Join, Table)):
        raise ValueError(
            f"capture: a SELECT of {spec.entity.__name__} reads a union of tables (ConcreteBase), whose rows can't be "
            f"locked: capture from a Table, {spec.entity.__name__}.__table__"
        )
    if len(froms) > 1:
        others = ", ".join(str(each) for each in froms if each is not spec.table)
        raise ValueError(
            f"capture: the conditions join {others} to {spec.table}, and a row could be found twice: "
            "put the other table into an exists()"
        )


if TYPE_CHECKING:
    if MYPY:
        from mypy_extensions import DefaultNamedArg, NamedArg

        _Typed = Callable[
            [
                type[T],
                DefaultNamedArg(Any, "where"),
                NamedArg(Mapping[Any, Any], "values"),
                DefaultNamedArg(Any, "order_by"),
                DefaultNamedArg(int, "limit"),
            ],
            RowsOperation[R],
        ]

        def _of_class(selects: SelectOf[T, R]) -> Callable[[AnyRowsOperation], _Typed[T, R]]: ...

        @overload
        def capture(  # pyright: ignore[reportOverlappingOverload]
            entity: Table, *, where: Any = (), values: Mapping[Any, Any], order_by: Any = (), limit: int = 1
        ) -> RowsOperation[Any]: ...
        @overload
        @_of_class(select)
        def capture(entity: Any, *, values: Any) -> RowsOperation[Any]: ...
        def capture(entity: Any, **options: Any) -> Any: ...  # pyright: ignore[reportRedeclaration]

    else:

        def capture(
            entity: type[E] | Table, *, where: Any = (), values: Mapping[Any, Any], order_by: Any = (), limit: int = 1
        ):
            return of_shape(select(class_of(entity)))
else:
    capture = _capture
    capture.__name__ = capture.__qualname__ = "capture"

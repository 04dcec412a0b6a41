"""capture: rows of one's own that nobody else is taking, whatever the class and the condition.

How rows are captured is in ``capturing.py``, for this and for every other pattern that captures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

from sqlalchemy import select

from sqlalchemy_locks.captures.operation import CaptureImpl
from sqlalchemy_locks.captures.statements import LIMIT, CaptureSpec, select_candidates
from sqlalchemy_locks.core.entities import MappedTable
from sqlalchemy_locks.core.operation import BuildContext, RowsOperation
from sqlalchemy_locks.core.typing import MYPY
from sqlalchemy_locks.counts import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Table

    from sqlalchemy_locks.core.typing import E, R, Selects, T, Vague, class_of, of_shape


class _Own(CaptureImpl):
    """What :func:`capture` captures: one instance for each call of it."""

    needs_installation = False

    def __init__(self, taking: CaptureSpec) -> None:
        super().__init__("capture")
        self._taking = taking

    def taken(self, context: BuildContext) -> CaptureSpec:
        return self._taking

    def route(self) -> dict[str, Any]:
        assert self._taking.target is not None
        return self._taking.target.route()


def _capture(
    entity: Any, *, where: Any = (), values: Mapping[Any, Any], order_by: Any = (), limit: int = 1
) -> RowsOperation[Any]:
    """Take rows of your own that nobody else is taking: choose, change and get them, as one act.

    :param entity: a mapped class (in a session its entities come back, fresh and in the identity map), or a ``Table``.
    :param where: which rows can be taken: a condition, or several. What is set must make it false, or the next
        capture takes the same rows again. Other tables go into an ``exists()``.
    :param values: what to set: attributes, columns or their names, and values or expressions of SQL.
    :param order_by: which first; one expression or several. An index should deliver this order (see the guide).
    :param limit: how many at most.
    :return: the rows, in that order; as many as there were, maybe none.
    :raises ValueError: for columns of another table than the class's own (a joined parent's), or nothing to set.
    :raises MustRollback: SQLite, where this transaction has read before and somebody has written since.
    :raises Unsupported: MySQL and MariaDB in autocommit, where the rows would be free again before they are changed.

    Rows that another session holds are passed over. A version counter (``version_id_col``) rises. To capture in a
    loop, make the operation once and execute it again and again.

    >>> orders = session.scalars(sl.capture(
    ...     Order, where=Order.status == "paid", values={"status": "shipping"}, order_by=Order.id, limit=10
    ... )).all()
    """
    target = MappedTable(entity, "capture", joins=True)
    changes = {target.column(column, "values"): value for column, value in values.items()}
    if not changes:
        raise ValueError("capture: values says what marks a row as taken, and must not be empty")
    taking = CaptureSpec(target.table, _several(where), changes, _several(order_by), target)
    _refuse_joins(taking)
    operation: RowsOperation[Any] = RowsOperation(_Own(taking), {LIMIT: counted(limit, "limit")})
    if target.mapper is not None:
        operation._entity_is(entity)
    return operation


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _refuse_joins(taking: CaptureSpec) -> None:
    froms = select_candidates(taking, "file").get_final_froms()
    if len(froms) > 1:
        others = ", ".join(str(each) for each in froms if each is not taking.table)
        raise ValueError(
            f"capture: the conditions join {others} to {taking.table}, and a row could be found twice: "
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

        def _of_class(selects: Selects[T, R]) -> Callable[[Vague], _Typed[T, R]]: ...

        @overload
        def capture(  # pyright: ignore[reportOverlappingOverload]
            entity: Table, *, where: Any = (), values: Mapping[Any, Any], order_by: Any = (), limit: int = 1
        ) -> RowsOperation[Any]: ...
        @overload
        @_of_class(select)
        def capture(entity: Any, *, values: Any) -> RowsOperation[Any]: ...
        def capture(entity: Any, **given: Any) -> Any: ...  # pyright: ignore[reportRedeclaration]

    else:

        def capture(
            entity: type[E] | Table,
            *,
            where: Any = (),
            values: Mapping[Any, Any],
            order_by: Any = (),
            limit: int = 1,
        ):
            return of_shape(select(class_of(entity)))
else:
    capture = _capture
    capture.__name__ = capture.__qualname__ = "capture"

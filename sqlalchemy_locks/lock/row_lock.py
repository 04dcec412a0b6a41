"""``lock.row``: lock a row of the app's own, and return it as it is now.

It executes ``SELECT ... FOR UPDATE`` of the row that represents a business key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.sql import Executable
from sqlalchemy.sql.selectable import TypedReturnsRows

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl, execute_in_session
from sqlalchemy_locks.dialects.base import not_writable
from sqlalchemy_locks.errors import UnknownRow
from sqlalchemy_locks.lock import write_lock
from sqlalchemy_locks.sql.elements import Writable

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapper

T = TypeVar("T")
R = TypeVar("R", bound=Any)


class _Row(OperationImpl):
    """Lock rows of one mapped class or table; one instance for each."""

    name = "lock.row"
    held_by = "transaction"
    wait_limit = "setting"
    needs_installation = False

    def __init__(self, entity: Any) -> None:
        super().__init__()
        inspected: Any = sa.inspect(entity, raiseerr=False)
        if isinstance(entity, sa.Table):
            self.mapper: Mapper[Any] | None = None
            self.tables: tuple[Any, ...] = (entity,)
            self.key_columns: tuple[Any, ...] = tuple(entity.primary_key)
            self.names = [column.key for column in self.key_columns]
        elif getattr(inspected, "is_mapper", False):
            self.mapper = inspected
            self.tables = tuple(inspected.tables)
            self.key_columns = inspected.primary_key
            self.names = [inspected.get_property_by_column(column).key for column in self.key_columns]
        else:
            raise TypeError(f"lock.row takes a mapped class or a Table, not {entity!r}")
        if not self.key_columns:
            raise ValueError(f"lock.row needs a primary key, and {entity!r} has none")
        self.entity = entity

    def check_connection(self, execution: Execution) -> None:
        super().check_connection(execution)
        execution.refuse_cluster()

    def build(self, context: BuildContext) -> Executable | None:
        return self._select_row(context) if not context.backend.single_writer else None

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "which has no row locks: the write lock is acquired first, by a statement of its own"

    def _select_row(self, context: BuildContext) -> sa.Select[Any]:
        pairs = [column == sa.bindparam(f"pk_{n}", type_=column.type) for n, column in enumerate(self.key_columns)]
        statement = sa.select(self.entity).where(sa.and_(*pairs))
        if context.backend.key_rows:
            statement = statement.where(Writable())
        if not context.backend.single_writer:
            # OF: an eager join's nullable side can't be locked, and need not be
            statement = statement.with_for_update(of=self.tables)
        if self.mapper is not None:
            from sqlalchemy.orm import lazyload  # not loaded before it is needed

            statement = statement.options(lazyload("*")).execution_options(populate_existing=True)
        return statement

    def run(self, execution: Execution) -> Any:
        statement: Any = self.statement(execution.context)
        if statement is None:
            write_lock.acquire(execution, self.tables[0])
            statement = self._select_row(execution.context)
        # twice: PostgreSQL misses a row that was deleted and inserted again during the wait
        for _ in range(2):
            rows = self._select(execution, statement).freeze()
            if rows.data:
                return rows()
        if not execution.backend.writable(execution.connection):
            raise not_writable(execution.backend.name)
        raise UnknownRow(f"{self.described(execution.values)}: there is no such row, and nothing was locked")

    def described(self, values: Mapping[str, Any]) -> str:
        return f"lock.row({self._entity_name()}, {', '.join(map(repr, values.values()))})"

    def _select(self, execution: Execution, statement: Any) -> Any:
        if self.mapper is None or execution.session is None:
            return execution.execute(statement)
        options = execution.loader_options
        return execute_in_session(execution, statement.options(*options) if options else statement, execution.values)

    def _entity_name(self) -> str:
        entity: Any = self.entity
        return str(getattr(entity, "__name__", entity))

    def route(self) -> dict[str, Any]:
        if self.mapper is None:
            return {"clause": sa.update(self.tables[0])}
        table: Any = self.mapper.local_table
        return {"mapper": self.mapper, "clause": sa.update(table)}


_impl_of = lru_cache(maxsize=1024)(_Row)


def _row(entity: Any, ident: Any) -> Operation[Any]:
    """Lock one row of your own exclusively until the transaction ends, and return it as it is now.

    :param entity: a mapped class (a session returns the entity, refreshed, and has it in its identity map),
        or a ``Table`` (which gives its row).
    :param ident: its primary key, as ``Session.get`` takes it: a value, a tuple, or a dictionary by attribute.
    :return: the entity or the row.
    :raises TypeError: if the key of a text column is a number, or the key of a numeric column is a text.
    :raises UnknownRow: there is no such row, so nothing was locked.
    :raises Unsupported: in a cluster in which several nodes accept writes, without ``locks_one_node=True``: change the
        row instead, by an UPDATE, or use a lease.
    :raises LockTimeout: the database's own limit, or the option ``locks_wait`` (seconds), ended the wait.
    :raises NotWritable: on a standby or replica, and in a read-only transaction. (A transaction begun READ ONLY on
        a MySQL or MariaDB primary does lock rows against all others, and is accepted.)

    Changes of the entity that are not flushed, because autoflush is off, are overwritten, as by ``populate_existing``.

    On SQLite the database's write lock is acquired. Under REPEATABLE READ the row is as it is now on MySQL and
    MariaDB, and PostgreSQL raises a serialization failure when it has changed since the snapshot.

    >>> with Session(engine) as session, session.begin():
    ...     customer = session.scalars(sl.lock.row(Customer, 42)).one()
    """
    if not isinstance(entity, Hashable):
        raise TypeError(f"lock.row takes a mapped class or a Table, not {entity!r}")
    impl = _impl_of(entity)
    operation: Operation[Any] = Operation(impl, _values(impl, ident))
    if impl.mapper is not None:
        operation._entity_is(entity)
    return operation


def _values(impl: _Row, ident: Any) -> dict[str, Any]:
    if isinstance(ident, Mapping):
        if set(ident) != set(impl.names):
            raise ValueError(f"the primary key of {impl._entity_name()} is {', '.join(impl.names)}, not {list(ident)}")
        parts: Sequence[Any] = [ident[name] for name in impl.names]
    else:
        parts = ident if isinstance(ident, (tuple, list)) else (ident,)
    if len(parts) != len(impl.key_columns):
        raise ValueError(
            f"the primary key of {impl._entity_name()} is {', '.join(impl.names)}: it takes as many values, not "
            f"{len(parts)}"
        )
    if any(part is None for part in parts):
        raise ValueError(f"a primary key of {impl._entity_name()} can't be None")
    for column, part in zip(impl.key_columns, parts, strict=True):
        # a server might convert the value, and lock another row: to MySQL, '42-eu' is equal to the number 42
        type_ = column.type
        if isinstance(type_, sa.String) and not isinstance(type_, sa.Enum) and not isinstance(part, str):
            raise TypeError(f"the primary key {column} is a text, not {part!r}")
        if isinstance(type_, (sa.Integer, sa.Numeric)) and isinstance(part, (str, bytes)):
            raise TypeError(f"the primary key {column} is a number, not {part!r}")
    return {f"pk_{n}": part for n, part in enumerate(parts)}


# SQLAlchemy 2.0 and 2.1 spell the row shape of an entity differently, so the shape is taken from select(). mypy derives
# it from the function's type, pyright by inference.
MYPY = False
if TYPE_CHECKING:
    if MYPY:

        def _like(
            _select: Callable[[type[T]], TypedReturnsRows[R]],
        ) -> Callable[[Callable[..., Operation[Any]]], Callable[[type[T], Any], Operation[R]]]: ...

        @_like(sa.select)
        def row(entity: Any, ident: Any) -> Operation[Any]: ...  # pyright: ignore[reportRedeclaration]

    else:

        def _of_shape(shape: TypedReturnsRows[R]) -> Operation[R]: ...

        def row(entity: type[T], ident: Any):
            return _of_shape(sa.select(entity))
else:
    row = _row
    row.__name__ = row.__qualname__ = "row"

"""Lock the business row itself, when there is one: no table of ours, and the row comes back as it is now.

The pattern's own advice: where a row represents the business key, ``SELECT ... FOR UPDATE`` of that row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Select, Table, and_, bindparam, inspect, select, update
from sqlalchemy.sql import Executable
from sqlalchemy.sql.selectable import TypedReturnsRows

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl, execute_in_session
from sqlalchemy_locks.errors import LockTimeout, UnknownRow, Unsupported
from sqlalchemy_locks.sql.elements import Writable

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapper, Session

T = TypeVar("T")
R = TypeVar("R", bound=Any)


class _Row(OperationImpl):
    """Locks rows of one mapped class or table; made once for each."""

    name = "lock.row"
    held_by = "transaction"
    needs_installation = False

    def __init__(self, entity: Any) -> None:
        super().__init__()
        # whoever has a mapped class has loaded the ORM; who has a Table need not
        inspected: Any = inspect(entity, raiseerr=False)
        if isinstance(entity, Table):
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
        #: weak, since this body is kept in a dictionary that must not keep classes alive
        self.entity = weakref.ref(entity)

    def build(self, context: BuildContext) -> Executable | None:
        # SQLite has no row locks: there the write lock is taken first, by a statement of its own
        return None if context.backend.locking == "file" else self.locking(context)

    def because(self, context: BuildContext) -> str:
        return "which has no row locks, and whose write lock is taken first"

    def locking(self, context: BuildContext) -> Select[Any]:
        statement = self._chosen(self.entity())
        if context.backend.locks_on_replicas:
            statement = statement.where(Writable())
        if context.backend.locking != "file":
            # OF: an eager join's nullable side can't be locked, and need not be
            statement = statement.with_for_update(of=self.tables)
        if self.mapper is not None:
            from sqlalchemy.orm import lazyload

            statement = statement.options(lazyload("*")).execution_options(populate_existing=True)
        return statement

    def _chosen(self, *what: Any) -> Select[Any]:
        pairs = [column == bindparam(f"pk_{n}", type_=column.type) for n, column in enumerate(self.key_columns)]
        chosen: Select[Any] = select(*what)  # pyright: ignore[reportAssignmentType]
        return chosen.where(and_(*pairs))

    def _keys(self) -> Sequence[Any]:
        return self.key_columns if self.mapper is None else [getattr(self.entity(), name) for name in self.names]

    def run(self, execution: Execution) -> Any:
        if self.mapper is not None and execution.session is not None:
            self._refuse_unflushed(self.mapper, execution.session, execution)
        if execution.backend.locking == "file":
            with execution.waiting(), execution.backend.judging(execution.connection):
                execution.take_file(self.tables[0])
            if not execution.backend.began(execution.connection):
                raise execution.backend.refuse_autocommit(self.name)
            statement: Any = self.locking(execution.context)
        else:
            statement = self.statement(execution.context)
        for _ in execution.tries():
            with execution.waiting():
                found = self._select(execution, statement).freeze()
            if found.data:
                return found()
            if not (execution.backend.misses_replaced and self._select(execution, self._chosen(*self._keys())).first()):
                self._explain(execution)
        name = f"the row {_told(execution)} of {self._entity_name()}"
        raise LockTimeout(f"{name} was replaced each time that it was waited for: nothing was locked")

    def _refuse_unflushed(self, mapper: Mapper[Any], session: Session, execution: Execution) -> None:
        """Refuse to read anew what has changes that are to be flushed yet: autoflush is off, or they would be."""
        key = mapper.identity_key_from_primary_key(tuple(execution.values.values()))
        for changed in session.dirty:
            state: Any = inspect(changed)
            # as text: an id may be given as what the database takes for it, "7" for 7
            same = state.key[0] is key[0] and [*map(str, state.key[1])] == [*map(str, key[1])]
            if same and session.is_modified(changed):
                raise Unsupported(
                    f"lock.row reads {self._entity_name()} {_told(execution)} anew, which would discard its changes "
                    "that are not flushed: flush the session first, since autoflush is off"
                )

    def _select(self, execution: Execution, statement: Any) -> Any:
        if self.mapper is None or execution.session is None:
            return execution.execute(statement)
        added = execution.operation._with_options
        return execute_in_session(execution, statement.options(*added) if added else statement, execution.values)

    def _explain(self, execution: Execution) -> None:
        if execution.backend.locks_on_replicas and not execution.execute(select(Writable()), {}).scalar():
            raise execution.backend.not_writable()
        raise UnknownRow(f"{self._entity_name()} has no row {_told(execution)}: nothing was locked")

    def _entity_name(self) -> str:
        entity: Any = self.entity()
        return str(getattr(entity, "__name__", entity))

    def route(self) -> dict[str, Any]:
        if self.mapper is None:
            return {"clause": update(self.tables[0])}
        table: Any = self.mapper.local_table
        return {"mapper": self.mapper, "clause": update(table)}


def _told(execution: Execution) -> str:
    return ", ".join(repr(value) for value in execution.values.values())


_BODIES: weakref.WeakKeyDictionary[Any, _Row] = weakref.WeakKeyDictionary()


def _row(entity: Any, ident: Any) -> Operation[Any]:
    """Lock one row of your own exclusively until the transaction ends, and get it as it is now.

    :param entity: a mapped class (in a session the entity comes back, refreshed, and is in its identity map),
        or a ``Table`` (its row comes back).
    :param ident: its primary key, as ``Session.get`` takes it: a value, a tuple, or a dictionary by attribute.
    :return: the entity or the row.
    :raises UnknownRow: there is no such row, so nothing was locked.
    :raises LockTimeout: the database's own limit, or the option ``locks_wait``, ended the wait.
    :raises Unsupported: when the entity has changes that are not flushed, since autoflush is off: to read it anew
        would discard them.
    :raises NotWritable: on a standby or replica, and in a read-only transaction. (A transaction begun READ ONLY on
        a MySQL or MariaDB primary does lock rows, against everybody, and is let through.)

    On SQLite the database's write lock is taken. Under REPEATABLE READ the row is as it is now on MySQL and
    MariaDB, and PostgreSQL raises a serialization failure when it has changed since the snapshot.

    >>> with Session(engine) as session, session.begin():
    ...     customer = session.scalar(sl.lock.row(Customer, 42))
    """
    try:
        body = _BODIES.get(entity)
    except TypeError:
        raise TypeError(f"lock.row takes a mapped class or a Table, not {entity!r}") from None
    if body is None:
        body = _BODIES[entity] = _Row(entity)
    operation: Operation[Any] = Operation(body, _values(body, ident))
    if body.mapper is not None:
        operation._entity_is(entity)
    return operation


def _values(body: _Row, ident: Any) -> dict[str, Any]:
    if isinstance(ident, Mapping):
        if set(ident) != set(body.names):
            raise ValueError(f"the primary key of {body._entity_name()} is {', '.join(body.names)}, not {list(ident)}")
        parts: Sequence[Any] = [ident[name] for name in body.names]
    else:
        parts = ident if isinstance(ident, (tuple, list)) else (ident,)
    if len(parts) != len(body.key_columns):
        raise ValueError(
            f"the primary key of {body._entity_name()} has {len(body.key_columns)} columns "
            f"({', '.join(body.names)}), and {len(parts)} values were given"
        )
    if any(part is None for part in parts):
        raise ValueError(f"a primary key of {body._entity_name()} can't be None")
    return {f"pk_{n}": part for n, part in enumerate(parts)}


# The row shape of "an entity" is spelled differently by SQLAlchemy 2.0 and 2.1, so it is taken from select(). Each
# checker has its own way of carrying a generic through: mypy by the function's type, pyright by inference.
MYPY = False
if TYPE_CHECKING:
    if MYPY:

        def _like(
            _select: Callable[[type[T]], TypedReturnsRows[R]],
        ) -> Callable[[Callable[..., Operation[Any]]], Callable[[type[T], Any], Operation[R]]]: ...

        @_like(select)
        def row(entity: Any, ident: Any) -> Operation[Any]: ...  # pyright: ignore[reportRedeclaration]

    else:

        def _of_shape(shape: TypedReturnsRows[R]) -> Operation[R]: ...

        def row(entity: type[T], ident: Any):
            return _of_shape(select(entity))
else:
    row = _row
    row.__name__ = row.__qualname__ = "row"

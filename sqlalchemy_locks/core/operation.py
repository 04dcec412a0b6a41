"""Operation: an executable that is a value, and how it executes itself.

An operation holds an :class:`OperationImpl` (what to do, built once per pattern) and the *values* of one call. It
touches no database until it is executed: by a ``Session``, a ``Connection``, either's async twin, or ``Locks``. Where
the engine can do it in one statement, the operation compiles to that statement. Elsewhere the implementation runs the
few statements that the engine needs, on the same connection, and ``compile()`` raises with the reason.

These hooks of SQLAlchemy are private or semi-private. They are used in this file and nowhere else, and
``tests/core/test_private_names.py`` pins them on 2.0 and 2.1:

- ``_execute_on_connection`` / ``_execute_on_scalar``: a ``Connection`` calls them. Under async that call is inside the
  greenlet already, so one synchronous implementation serves both.
- ``CompileState.plugin_for("orm", visit name)``: a ``Session`` calls it, for autoflush, for ``get_bind`` and for
  entities. Its ``orm_pre_session_exec`` returns two values on 2.0 and three on 2.1.
- ``_propagate_attrs``, ``_with_options``, ``_compile_options``, ``_execution_options``, ``_compiler``,
  ``Session._autoflush``: what the two above read or call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import sqlalchemy
from sqlalchemy import Table, update
from sqlalchemy.engine import Connection, Dialect, IteratorResult, Result
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.exc import CompileError
from sqlalchemy.sql import Executable, visitors
from sqlalchemy.sql.base import CompileState, Generative
from sqlalchemy.sql.selectable import TypedReturnsRows
from sqlalchemy.util import immutabledict

from sqlalchemy_locks.core.execution import (
    BuildContext,
    Execution,
    build_context,
    fresh_nonce,
    side_connection,
    translated,
)
from sqlalchemy_locks.sql.tables import DEFAULT_SCHEMA, tables

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

# the patterns import everything that an implementation needs from here
__all__ = [
    "BuildContext",
    "Execution",
    "Operation",
    "OperationImpl",
    "RowsOperation",
    "build_context",
    "execute_in_session",
    "fresh_nonce",
    "listed",
    "side_connection",
    "translated",
]

R = TypeVar("R", bound=Any)

_THREE_VALUES = tuple(int(part) for part in sqlalchemy.__version__.split(".")[:2]) >= (2, 1)


class OperationImpl:
    """What one kind of operation does. One instance serves every call of it."""

    #: what error messages call it, e.g. ``lock.exclusive``
    name: str
    #: what its effect ends with; ``None`` where it is permanent
    held_by: ClassVar[Literal["transaction", "connection"] | None] = None
    #: it works on this library's own tables or functions
    needs_installation: bool = True
    #: it never waits; where even BEGIN would have to wait (SQLite), its result is ``refused``
    impatient: bool = False
    refused: Any = None
    #: it writes or locks, so that SQLite's queue of writers applies to it
    writes: ClassVar[bool] = True
    #: its one statement carries its longest wait, which needs no statement of its own
    sends_wait: ClassVar[bool] = False

    def __init__(self) -> None:
        self._built: dict[BuildContext, Executable | None] = {}

    def repeatable(self, operation: Operation[Any]) -> bool:
        """Return whether ``Locks`` may run it again when the outcome of the first attempt is unknown."""
        return not self.writes

    def build(self, context: BuildContext) -> Executable | None:
        """Build the one statement that does it; ``None`` where the engine needs several."""
        raise NotImplementedError

    def statement(self, context: BuildContext) -> Executable | None:
        """Return what ``build`` returns, built once per context: building at each call would double its time."""
        if context not in self._built:
            self._built[context] = self.build(context)
        return self._built[context]

    def statement_to_compile(
        self, context: BuildContext, dialect: Dialect, values: Mapping[str, Any]
    ) -> Executable | None:
        """Return the one statement for ``compile()``, which sets its bind parameters afterwards."""
        return self.statement(context)

    def compile_error(self, context: BuildContext) -> str:
        """Return the message of the error that ``compile()`` raises where there is no single statement."""
        reason = self.multi_statement_reason(context)
        return f"{self.name} is not one statement on {context.backend.name}, {reason}: execute it instead"

    def multi_statement_reason(self, context: BuildContext) -> str:
        """Return why it isn't one statement on this backend, as a clause of that message."""
        raise NotImplementedError

    def run(self, execution: Execution) -> Any:
        """Do it, and return a ``Result``, or a value that becomes the one row of one.

        By default the one statement is executed.
        """
        statement = self.statement(execution.context)
        assert statement is not None
        return execution.execute(statement)

    def route(self) -> dict[str, Any]:
        """Return the arguments of ``Session.get_bind``: an UPDATE, so that replicas are passed over."""
        return {"clause": _routed(tables(DEFAULT_SCHEMA, "").locked_keys)}

    def check_connection(self, execution: Execution) -> None:
        """Refuse a connection on which the effect would end too early.

        :raises Unsupported: on a connection in autocommit, when the effect ends with the transaction.
        """
        if self.held_by == "transaction" and execution.backend.autocommit(execution.connection):
            raise execution.backend.refuse_autocommit(self.name)


@cache
def _routed(table: Table) -> Any:
    return update(table)


class Operation(Generative, TypedReturnsRows[R], Generic[R]):
    """A database operation as a value: your session, your connection or ``Locks`` executes it.

    It has ``execution_options()`` as every SQLAlchemy statement has; three of them are this library's own:

    - ``locks_prefix``: the prefix of the tables, on engines without schemas (default ``lock_``);
    - ``locks_wait``: the longest wait for a lock, in seconds or as a ``timedelta``; then ``LockTimeout`` is raised;
    - ``locks_session_pooling``: an option of the engine, for connections through PgBouncer or another pooler: ``True``
      says that the pooler is in session mode, where a client keeps its server connection, so that session locks work.

    >>> operation = sl.Mutex().acquire("task_b").execution_options(locks_wait=5)
    >>> session.scalar(operation)  # in your transaction
    True
    >>> session.rollback()
    >>> locks.run(operation)  # in a short transaction of its own
    True
    """

    __visit_name__ = "sqlalchemy_locks_operation"
    # the statements inside have cache keys of their own; the operation is never compiled for execution
    inherit_cache = False
    is_select = False

    if TYPE_CHECKING:
        _gives_rows: Literal[False]

        def _shape(self) -> R: ...

    _with_options: tuple[Any, ...] = ()
    _propagate_attrs: Any = immutabledict({"compile_state_plugin": "orm", "plugin_subject": None})

    def __init__(self, impl: OperationImpl, values: Mapping[str, Any]) -> None:
        self._impl = impl
        self._values = dict(values)

    @property
    def name(self) -> str:
        """The name that error messages and events use, e.g. ``lock.exclusive``."""
        return self._impl.name

    @property
    def _effective_plugin_target(self) -> str:
        return self.__visit_name__

    def get_children(self, **kw: Any) -> Iterator[Any]:
        """Yield the table that it works on, for ``Session.get_bind``."""
        clause = self._impl.route().get("clause")
        return iter(() if clause is None else (clause,))

    def _compiler(self, dialect: Dialect, **kw: Any) -> Any:
        context = build_context(dialect, self._execution_options)
        statement: Any = self._impl.statement_to_compile(context, dialect, self._values)
        if statement is None:
            raise CompileError(self._impl.compile_error(context))

        def bind(parameter: Any) -> None:
            if parameter.key in self._values:
                parameter.value = self._values[parameter.key]

        bound: Any = visitors.cloned_traverse(statement, {}, {"bindparam": bind})
        return bound._compiler(dialect, **kw)

    def _execute_on_connection(self, connection: Connection, distilled_params: Any, execution_options: Any) -> Any:
        if distilled_params:
            _refuse_parameters(distilled_params)
        return self._result(Execution(connection, self, execution_options).perform())

    def _execute_on_scalar(self, connection: Connection, distilled_params: Any, execution_options: Any) -> Any:
        if distilled_params:
            _refuse_parameters(distilled_params)
        outcome = Execution(connection, self, execution_options).perform()
        return outcome.scalar() if isinstance(outcome, Result) else outcome

    def value(self, connection: Connection, execution_options: Mapping[str, Any]) -> Any:
        """Execute it and return its one value, or the list of its rows, without a ``Result`` around it."""
        return Execution(connection, self, execution_options).value()

    def _unpack(self, result: Result[Any]) -> Any:
        return result.scalar()

    def _result(self, outcome: Any) -> Result[Any]:
        """Return a ``Result`` as it is, and any other value as the one row of one."""
        if isinstance(outcome, Result):
            return outcome
        return IteratorResult(SimpleResultMetaData([self._impl.name.rpartition(".")[2]]), iter([(outcome,)]))

    def _entity_is(self, entity: Any) -> None:
        """Present the operation to the ORM as a SELECT of ``entity``, so that loader options and criteria apply."""
        shape = sqlalchemy.select(entity)
        self.is_select = True
        self._propagate_attrs = shape._propagate_attrs
        self._compile_options = shape._compile_options

    def __repr__(self) -> str:
        values = ", ".join(f"{name.removeprefix('locks_')}={value!r}" for name, value in self._values.items())
        return f"<{self._impl.name}({values})>"

    __str__ = __repr__


class RowsOperation(Operation[R]):
    """An operation that returns any number of rows, as a SELECT does, and not one value."""

    inherit_cache = False

    if TYPE_CHECKING:
        _gives_rows: Literal[True]  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]

    def _unpack(self, result: Result[Any]) -> list[Any]:
        return listed(result)


@CompileState.plugin_for("orm", Operation.__visit_name__)
class _InSession:
    """How a ``Session`` executes an operation."""

    @classmethod
    def orm_pre_session_exec(
        cls,
        session: Session,
        statement: Operation[Any],
        params: Any,
        execution_options: Any,
        bind_arguments: dict[str, Any],
        is_pre_event: bool,
    ) -> tuple[Any, ...]:
        if params:
            _refuse_parameters(params)
        if not bind_arguments.keys() & {"bind", "mapper", "clause"}:
            bind_arguments.update(statement._impl.route())
        options = statement._execution_options.merge_with(execution_options)
        if not is_pre_event and options.get("autoflush", True):
            session._autoflush()
        return (statement, options, params) if _THREE_VALUES else (statement, options)

    @classmethod
    def orm_execute_statement(
        cls,
        session: Session,
        statement: Operation[Any],
        params: Any,
        execution_options: Any,
        bind_arguments: dict[str, Any],
        conn: Connection,
    ) -> Result[Any]:
        execution = Execution(conn, statement, execution_options, session, bind_arguments)
        return statement._result(execution.perform())


def execute_in_session(execution: Execution, statement: Any, values: Mapping[str, Any]) -> Result[Any]:
    """Execute a statement that loads entities in the operation's session, without firing the session's events again."""
    session = execution.session
    assert session is not None
    plugin: Any = CompileState._get_plugin_class_for_plugin(statement, "orm")
    prepared = plugin.orm_pre_session_exec(
        session, statement, values, execution.options, execution.bind_arguments, True
    )
    with translated(execution.backend):
        result: Result[Any] = plugin.orm_execute_statement(
            session, prepared[0], values, prepared[1], execution.bind_arguments, execution.connection
        )
    return result


def listed(result: Result[Any]) -> list[Any]:
    """Return the rows of a result; where a row is one value, the values."""
    return list(result.scalars() if len(result.keys()) == 1 else result)


def _refuse_parameters(params: Any) -> None:
    if params and any(params if isinstance(params, (list, tuple)) else (params,)):
        raise TypeError("an operation carries its own values: execute it without parameters")

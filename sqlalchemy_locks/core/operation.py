"""Operation: the executable that is a value, and how it runs itself.

An operation holds a *body* (what to do, built once per pattern) and the *values* of this call. It touches no
database until somebody executes it: a ``Session``, a ``Connection``, either's async twin, or ``Locks``.
Where the engine can do it in one statement, the operation compiles to that statement; elsewhere the body runs
the few statements that the engine needs, on the same connection, and ``compile()`` refuses with the reason.

SQLAlchemy's hooks that this relies on are semi-private. They are used in this file and nowhere else; the
tests pin them on 2.0 and 2.1:

- ``_execute_on_connection`` / ``_execute_on_scalar``: a Core runner hands itself over. Under async that call
  is inside the greenlet already, so one synchronous body serves both worlds.
- ``CompileState.plugin_for("orm", visit name)``: a ``Session`` hands itself over, for autoflush, for
  ``get_bind`` and for entities. Its ``orm_pre_session_exec`` returns two values on 2.0 and three on 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, ParamSpec, Protocol, TypeVar

import sqlalchemy
from sqlalchemy import Table, update
from sqlalchemy.engine import Connection, Dialect, IteratorResult, Result
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.exc import CompileError
from sqlalchemy.sql import Executable, visitors
from sqlalchemy.sql.base import CompileState, Generative
from sqlalchemy.sql.selectable import TypedReturnsRows
from sqlalchemy.util import immutabledict

from sqlalchemy_locks._validation import seconds
from sqlalchemy_locks.core.execution import (
    BuildContext,
    Execution,
    build_context,
    fresh_nonce,
    side_connection,
    translated,
)
from sqlalchemy_locks.dialects import Backend
from sqlalchemy_locks.sql.tables import DEFAULT_SCHEMA, tables

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

#: what a body needs of an execution can be had from here, too
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
    "seconds",
    "shaped",
    "shaped_rows",
    "side_connection",
    "translated",
    "verify",
]

R = TypeVar("R", bound=Any)
Shape = TypeVar("Shape", covariant=True)
P = ParamSpec("P")

_THREE_VALUES = tuple(int(part) for part in sqlalchemy.__version__.split(".")[:2]) >= (2, 1)


class OperationImpl:
    """What one kind of operation does. One instance serves every call of it."""

    #: what sentences call it, e.g. ``lock.exclusive``
    name: str
    #: what its effect ends with, where that isn't for good
    held_by: ClassVar[Literal["transaction", "connection"] | None] = None
    #: it works on this library's own tables or functions
    needs_installation: bool = True
    #: it never waits, and even where beginning a transaction would, there is an answer (SQLite): ``refused``
    impatient: bool = False
    refused: Any = None
    #: it writes, or locks; where that is done in turn
    writes: ClassVar[bool] = True
    #: its longest wait goes along in its one statement, and is no statement of its own
    sends_wait: ClassVar[bool] = False

    def __init__(self) -> None:
        self._built: dict[BuildContext, Executable | None] = {}

    def repeatable(self, operation: Operation[Any]) -> bool:
        """Whether it may be run again when it is not known if it was done: ``Locks`` then does so."""
        return not self.writes

    def build(self, context: BuildContext) -> Executable | None:
        """The one statement that does it there; ``None`` where the engine needs several."""
        raise NotImplementedError

    def statement(self, context: BuildContext) -> Executable | None:
        """As ``build``, made once for each place: a statement built anew at each call costs about twice the time."""
        if context not in self._built:
            self._built[context] = self.build(context)
        return self._built[context]

    def shown(self, context: BuildContext, dialect: Dialect, values: Mapping[str, Any]) -> Executable | None:
        """The one statement as ``compile()`` is to show it; values go into what SQLAlchemy finds in it by itself."""
        return self.statement(context)

    def several(self, context: BuildContext) -> str:
        """The sentence that ``compile()`` refuses with where there is more than one statement."""
        return (
            f"{self.name} is not one statement on {context.backend.name}, {self.because(context)}: execute it instead"
        )

    def because(self, context: BuildContext) -> str:
        """Why it isn't one statement there, as a clause of that sentence."""
        raise NotImplementedError

    def run(self, execution: Execution) -> Any:
        """Do it. A ``Result`` is handed on as it is; anything else becomes the one value of one row."""
        statement = self.statement(execution.context)
        assert statement is not None
        return execution.execute(statement)

    def route(self) -> dict[str, Any]:
        """What ``Session.get_bind`` is offered: an UPDATE, which a splitting session sends to the primary."""
        return {"clause": _routed(tables(DEFAULT_SCHEMA, "").locked_keys)}

    def check_connection(self, execution: Execution) -> None:
        if self.held_by == "transaction" and execution.backend.autocommit(execution.connection):
            raise execution.backend.refuse_autocommit(self.name)


@cache
def _routed(table: Table) -> Any:
    return update(table)


class Operation(Generative, TypedReturnsRows[R], Generic[R]):
    """Something to be done in the database, as a value: executing it is up to your session or to ``Locks``.

    It has ``execution_options()`` as every SQLAlchemy statement has; three of them are this library's own:

    - ``locks_prefix``: the prefix of the tables, on engines without schemas (default ``lock_``);
    - ``locks_wait``: the longest wait for a lock, in seconds or as a ``timedelta``; ``LockTimeout`` ends it.
    - ``locks_session_pooling``: on an engine whose connections lead through PgBouncer, or another pooler: it is in
      session mode, where a client keeps its server connection, and so what belongs to a session works.

    >>> operation = sl.Mutex().acquire("task_b").execution_options(locks_wait=5)
    >>> session.scalar(operation)  # in your transaction
    True
    >>> session.rollback()
    >>> locks.run(operation)  # in one of its own
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

    def __init__(self, body: OperationImpl, values: Mapping[str, Any]) -> None:
        self._body = body
        self._values = dict(values)

    @property
    def name(self) -> str:
        """What sentences call it, e.g. ``lock.exclusive``."""
        return self._body.name

    @property
    def _effective_plugin_target(self) -> str:
        return self.__visit_name__

    def get_children(self, **kw: Any) -> Iterator[Any]:
        """The table that it works on, as ``Session.get_bind`` looks for it."""
        clause = self._body.route().get("clause")
        return iter(() if clause is None else (clause,))

    def _compiler(self, dialect: Dialect, **kw: Any) -> Any:
        context = build_context(dialect, self._execution_options)
        statement: Any = self._body.shown(context, dialect, self._values)
        if statement is None:
            raise CompileError(self._body.several(context))

        def bind(parameter: Any) -> None:
            if parameter.key in self._values:
                parameter.value = self._values[parameter.key]

        bound: Any = visitors.cloned_traverse(statement, {}, {"bindparam": bind})
        return bound._compiler(dialect, **kw)

    def _execute_on_connection(self, connection: Connection, distilled_params: Any, execution_options: Any) -> Any:
        _refuse_parameters(distilled_params)
        return self._run(connection, self._execution_options.merge_with(execution_options))

    def _execute_on_scalar(self, connection: Connection, distilled_params: Any, execution_options: Any) -> Any:
        _refuse_parameters(distilled_params)
        outcome = self._outcome(connection, self._execution_options.merge_with(execution_options), None, None)
        return outcome.scalar() if isinstance(outcome, Result) else outcome

    def value(self, connection: Connection, execution_options: Mapping[str, Any]) -> Any:
        """What it gives, without a ``Result`` around it: its one value, or the list of its rows."""
        outcome = self._outcome(connection, self._execution_options.merge_with(execution_options), None, None)
        return self._taken_out(outcome) if isinstance(outcome, Result) else outcome

    def _taken_out(self, result: Result[Any]) -> Any:
        return result.scalar()

    def _run(
        self,
        connection: Connection,
        options: Mapping[str, Any],
        session: Session | None = None,
        bind_arguments: dict[str, Any] | None = None,
    ) -> Result[Any]:
        outcome = self._outcome(connection, options, session, bind_arguments)
        return outcome if isinstance(outcome, Result) else _one(self._body.name, outcome)

    def _outcome(
        self,
        connection: Connection,
        options: Mapping[str, Any],
        session: Session | None,
        bind_arguments: dict[str, Any] | None,
    ) -> Any:
        execution = Execution(connection, options, self._values, self, session, bind_arguments or {})
        if execution.first_writes:
            with translated(execution.backend):
                execution.backend.prepare(connection, execution.wait)
        verify(connection, execution.backend)
        self._body.check_connection(execution)
        return self._body.run(execution)

    def _entity_is(self, entity: Any) -> None:
        """Let SQLAlchemy's ORM see this as a SELECT of ``entity``: loader options and criteria then apply to it."""
        shape = sqlalchemy.select(entity)
        self.is_select = True
        self._propagate_attrs = shape._propagate_attrs
        self._compile_options = shape._compile_options

    def __repr__(self) -> str:
        values = ", ".join(f"{name.removeprefix('locks_')}={value!r}" for name, value in self._values.items())
        return f"<{self._body.name}({values})>"

    __str__ = __repr__


class RowsOperation(Operation[R]):
    """An operation that gives any number of rows, as a SELECT does, and not one value."""

    inherit_cache = False

    if TYPE_CHECKING:
        _gives_rows: Literal[True]  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]

    def _taken_out(self, result: Result[Any]) -> list[Any]:
        return listed(result)


class ValueOperation(Protocol[Shape]):
    """An :class:`Operation` that is no :class:`RowsOperation`, to type checkers, whatever its shape may be."""

    @property
    def _gives_rows(self) -> Literal[False]: ...

    def _shape(self) -> Shape: ...


@CompileState.plugin_for("orm", Operation.__visit_name__)
class _InSession:
    """How a ``Session`` runs an operation."""

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
        _refuse_parameters(params)
        if not bind_arguments.keys() & {"bind", "mapper", "clause"}:
            bind_arguments.update(statement._body.route())
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
        return statement._run(conn, execution_options, session, bind_arguments)


def execute_in_session(execution: Execution, statement: Any, values: Mapping[str, Any]) -> Result[Any]:
    """Run a statement that gives entities in the operation's own session, without a second round of its events."""
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


def shaped(_shape: TypedReturnsRows[R]) -> Callable[[Callable[P, Operation[Any]]], Callable[P, Operation[R]]]:
    """Type an operation by the rows it gives, as ``Select`` is: SQLAlchemy 2.0 and 2.1 spell that shape differently."""

    def declare(function: Callable[P, Operation[Any]]) -> Callable[P, Operation[R]]:
        return function

    return declare


def shaped_rows(
    _shape: TypedReturnsRows[R],
) -> Callable[[Callable[P, RowsOperation[Any]]], Callable[P, RowsOperation[R]]]:
    """As ``shaped``, for an operation that gives rows."""

    def declare(function: Callable[P, RowsOperation[Any]]) -> Callable[P, RowsOperation[R]]:
        return function

    return declare


def listed(result: Result[Any]) -> list[Any]:
    """The rows of a result; where a row is one value, the values."""
    return list(result.scalars() if len(result.keys()) == 1 else result)


def verify(connection: Connection, engine: Backend) -> None:
    """Ask, once per engine of the app, whether the driver and the server's settings keep our promises."""
    # an attribute of the dialect, which lives as long as the app's engine and is shared by its options' copies
    dialect: Any = connection.dialect
    if not getattr(dialect, "_sqlalchemy_locks_verified", False):
        engine.verify(connection)
        dialect._sqlalchemy_locks_verified = True


def _refuse_parameters(params: Any) -> None:
    if params and any(params if isinstance(params, (list, tuple)) else (params,)):
        raise TypeError("an operation carries its own values: execute it without parameters")


def _one(name: str, value: Any) -> IteratorResult[Any]:
    return IteratorResult(SimpleResultMetaData([name.rpartition(".")[2]]), iter([(value,)]))

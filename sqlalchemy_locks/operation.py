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

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, ParamSpec, TypeVar

import sqlalchemy
from sqlalchemy import Table, delete, false, update
from sqlalchemy.engine import Connection, CursorResult, Dialect, IteratorResult, Result
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.exc import CompileError, DBAPIError
from sqlalchemy.sql import Executable, visitors
from sqlalchemy.sql.base import CompileState, Generative
from sqlalchemy.sql.selectable import TypedReturnsRows
from sqlalchemy.util import immutabledict

from .dialects import Engine, engine_of
from .durations import seconds as seconds
from .schema import DEFAULT_PREFIX, DEFAULT_SCHEMA, Tables, tables

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

R = TypeVar("R", bound=Any)
T = TypeVar("T")
P = ParamSpec("P")

_THREE_VALUES = tuple(int(part) for part in sqlalchemy.__version__.split(".")[:2]) >= (2, 1)


class Place(NamedTuple):
    """Which engine, and under which prefix its tables are: what a statement is built for, once."""

    engine: Engine
    prefix: str

    @property
    def tables(self) -> Tables:
        if self.engine.schemas:
            return tables(DEFAULT_SCHEMA, "")
        return tables(None, self.prefix)


def place_of(dialect: Dialect, options: Mapping[str, Any]) -> Place:
    return Place(engine_of(dialect), options.get("locks_prefix", DEFAULT_PREFIX))


@dataclass
class Run:
    """One execution of one operation: what its body may ask and do."""

    connection: Connection
    options: Mapping[str, Any]
    values: dict[str, Any]
    operation: Operation[Any]
    session: Session | None = None
    bind_arguments: dict[str, Any] = field(default_factory=dict)
    place: Place = field(init=False)
    wait: float | None = field(init=False)
    moved: bool = field(init=False)
    #: this transaction was begun at READ COMMITTED, whatever the server's variable tells of the session
    read_committed: bool = field(init=False)
    nonce: str = field(init=False)
    again: bool = field(init=False)
    #: whoever executes this has made the driver commit by itself: there is no transaction, nor will there be
    alone: bool = field(init=False)

    def __post_init__(self) -> None:
        every: Mapping[str, Any] = self.connection.get_execution_options()
        if self.options:
            every = {**every, **self.options}
        # a server-side cursor would run the statement when its rows are fetched, and take the lock only then
        if "stream_results" in every or "yield_per" in every:
            self.options = {**self.options, "stream_results": False, "yield_per": None}
        self.moved = "schema_translate_map" in every
        self.read_committed = bool(every.get("locks_read_committed"))
        #: tells this call from every other: what it leaves in a row is known again after a lost reply
        self.nonce = every.get("locks_nonce") or fresh_nonce()
        #: an earlier try of this very call may have come into effect, its answer lost
        self.again = bool(every.get("locks_again"))
        self.alone = "locks_alone" in every
        self.place = place_of(self.connection.dialect, every)
        wait = every.get("locks_wait")
        #: how long a lock may be waited for, in seconds; ``None``: as long as the server lets one wait
        self.wait = None if wait is None else seconds(wait, "locks_wait")

    @property
    def engine(self) -> Engine:
        return self.place.engine

    def execute(
        self, statement: Executable, values: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> CursorResult[Any]:
        """Run one statement, once or for each of several rows; what the driver says about locks is raised as ours."""
        with translated(self.engine, self.operation._body.needs_installation):
            return self.connection.execute(
                statement, self.values if values is None else values, execution_options=self.options
            )

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Around statements that may wait for a lock: for no longer than was asked for."""
        return contextlib.nullcontext() if self.wait is None else self.engine.bounded(self.connection, self.wait)

    def take_file(self, table: Table) -> None:
        """SQLite: take the write lock, by a write that writes nothing.

        Python's driver begins a transaction before it, as it does before no statement that begins with WITH.
        """
        self.execute(delete(table).where(false()), {})

    def scalar(self, statement: Executable, values: Mapping[str, Any]) -> Any:
        """The one value of one statement."""
        return self.by_cursor(statement, values, _one_value)

    def by_cursor(
        self, statement: Executable, values: Mapping[str, Any], read: Callable[[Any], T], *, plain: bool = True
    ) -> T:
        """What ``read`` takes from one statement's cursor: the driver's own where nobody would see the difference.

        That costs a third of what a prebuilt statement costs. Whoever listens to events, logs statements or moves
        schemas gets SQLAlchemy's full path and its cursor result, and so do values that aren't ``plain`` (numbers and
        texts, which every driver takes as they are).
        """
        connection: Any = self.connection
        dialect = connection.dialect
        if (
            not plain
            or self.moved
            or connection._nested_transaction is not None
            or connection._has_events
            or connection.engine._has_events
            or dialect._has_events
            or connection._echo
            or not (self.alone or connection.in_transaction())
        ):
            return read(self.execute(statement, values))
        sql, given, names = _spelt(dialect, statement)
        named = {**given, **values}
        parameters = named if names is None else tuple(named[name] for name in names)
        cursor = None
        with translated(self.engine, self.operation._body.needs_installation):
            try:
                cursor = connection.connection.cursor()
                cursor.execute(sql, parameters)
                return read(cursor)
            except dialect.loaded_dbapi.Error as error:
                raise self._wrapped(error, sql, parameters, cursor) from error
            except BaseException as error:
                connection.invalidate(error)  # what the server still sends would be the next one's answer
                raise
            finally:
                if cursor is not None:
                    cursor.close()

    def _wrapped(self, error: Any, sql: str, parameters: Any, cursor: Any) -> BaseException:
        """As SQLAlchemy would have raised it."""
        connection: Any = self.connection
        dialect = connection.dialect
        lost = dialect.is_disconnect(error, connection.connection.dbapi_connection, cursor)
        if lost:
            # its contemporaries in the pool have died with it
            connection.engine.pool._invalidate(connection.connection, error)
            connection.invalidate(error)
        wrapped: BaseException = DBAPIError.instance(
            sql, parameters, error, dialect.loaded_dbapi.Error, connection_invalidated=lost, dialect=dialect
        )
        return wrapped


def fresh_nonce() -> str:
    """What tells one call from every other; a valid UUID, since MariaDB's type takes no other 128 bits."""
    digits = os.urandom(16).hex()
    return f"{digits[:12]}4{digits[13:16]}8{digits[17:]}"


def _one_value(cursor: Any) -> Any:
    return cursor.fetchone()[0]


def _spelt(dialect: Any, statement: Any) -> tuple[str, dict[str, Any], list[str] | None]:
    """A statement as this dialect spells it, made once: its SQL, its own values, the order of its parameters."""
    known: dict[Any, Any] = dialect.__dict__.setdefault("_sqlalchemy_locks_spelt", {})
    if statement not in known:
        compiled: Any = statement.compile(dialect=dialect)
        known[statement] = compiled.string, compiled.params, compiled.positiontup if compiled.positional else None
    spelt: tuple[str, dict[str, Any], list[str] | None] = known[statement]
    return spelt


class translated:
    """Errors of the driver that speak of locks leave this block as ours, with the driver's as their cause."""

    def __init__(self, engine: Engine, needs_installation: bool = False) -> None:
        self.engine = engine
        self.needs_installation = needs_installation

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, DBAPIError):
            ours = self.engine.translate(error)
            if ours is None and self.needs_installation and self.engine.missing(error):
                ours = self.engine.not_installed()
            if ours is not None:
                raise ours from error


@contextlib.contextmanager
def beside(run: Run) -> Iterator[Connection]:
    """A connection of its own, opened and closed for what a transaction can't do, or see, itself; in autocommit.

    Not one of the pool's, which may have none left for who is holding one.
    """
    app = run.connection.engine
    aside = sqlalchemy.Engine(app.pool.recreate(), app.dialect, app.url)
    try:
        with translated(run.engine), aside.connect() as connection:
            yield connection.execution_options(
                **{**run.connection.get_execution_options(), "isolation_level": "AUTOCOMMIT"}
            )
    finally:
        aside.dispose()


class Body:
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
    #: its longest wait goes along in its one statement, and is no statement of its own
    sends_wait: ClassVar[bool] = False

    def __init__(self) -> None:
        self._built: dict[Place, Executable | None] = {}

    def repeatable(self, operation: Operation[Any]) -> bool:
        """Whether it may be run again when nobody knows if it was done: ``Locks`` then does so."""
        return False

    def build(self, place: Place) -> Executable | None:
        """The one statement that does it there; ``None`` where the engine needs several."""
        raise NotImplementedError

    def statement(self, place: Place) -> Executable | None:
        """As ``build``, made once for each place: a statement built anew at each call costs about twice the time."""
        if place not in self._built:
            self._built[place] = self.build(place)
        return self._built[place]

    def shown(self, place: Place, dialect: Dialect, values: Mapping[str, Any]) -> Executable | None:
        """The one statement as ``compile()`` is to show it; values go into what SQLAlchemy finds in it by itself."""
        return self.statement(place)

    def several(self, place: Place) -> str:
        """The sentence that ``compile()`` refuses with where there is more than one statement."""
        return f"{self.name} is not one statement on {place.engine.name}, {self.because(place)}: execute it instead"

    def because(self, place: Place) -> str:
        """Why it isn't one statement there, as a clause of that sentence."""
        raise NotImplementedError

    def run(self, run: Run) -> Any:
        """Do it. A ``Result`` is handed on as it is; anything else becomes the one value of one row."""
        statement = self.statement(run.place)
        assert statement is not None
        return run.execute(statement)

    def route(self) -> dict[str, Any]:
        """What ``Session.get_bind`` is offered: an UPDATE, which a splitting session sends to the primary."""
        return {"clause": _routed(tables(DEFAULT_SCHEMA, "").locked_keys)}

    def check_connection(self, run: Run) -> None:
        if self.held_by == "transaction" and run.engine.autocommit(run.connection):
            raise run.engine.refuse_autocommit(self.name)


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

    _with_options: tuple[Any, ...] = ()
    _propagate_attrs: Any = immutabledict({"compile_state_plugin": "orm", "plugin_subject": None})

    def __init__(self, body: Body, values: Mapping[str, Any]) -> None:
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
        place = place_of(dialect, self._execution_options)
        statement: Any = self._body.shown(place, dialect, self._values)
        if statement is None:
            raise CompileError(self._body.several(place))

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
        run = Run(connection, options, self._values, self, session, bind_arguments or {})
        verify(connection, run.engine)
        self._body.check_connection(run)
        return self._body.run(run)

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

    def _taken_out(self, result: Result[Any]) -> list[Any]:
        return listed(result)


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


def execute_in_session(run: Run, statement: Any, values: Mapping[str, Any]) -> Result[Any]:
    """Run a statement that gives entities in the operation's own session, without a second round of its events."""
    session = run.session
    assert session is not None
    plugin: Any = CompileState._get_plugin_class_for_plugin(statement, "orm")
    prepared = plugin.orm_pre_session_exec(session, statement, values, run.options, run.bind_arguments, True)
    with translated(run.engine):
        result: Result[Any] = plugin.orm_execute_statement(
            session, prepared[0], values, prepared[1], run.bind_arguments, run.connection
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


def verify(connection: Connection, engine: Engine) -> None:
    """Ask the server, once per engine of the app, whether its settings keep our promises."""
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

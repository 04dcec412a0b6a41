"""Operation: an executable that is a value, and its execution.

An operation holds an :class:`OperationImpl` (what to do, built once per pattern) and the *values* of one call. It
touches no database until it is executed: by a ``Session``, a ``Connection``, either's async twin, or ``Locks``. Where
the engine can do it in one statement, the operation compiles to that statement. Elsewhere the implementation runs the
few statements that the engine needs, on the same connection, and ``compile()`` raises with the reason.

Every statement of this library is sent by :meth:`Execution.execute`, through ``Connection.execute``. Errors of the
driver that are about locks leave it as this library's.

These hooks of SQLAlchemy are private or semi-private. They are used in this file and nowhere else, and
``tests/core/test_private_names.py`` pins them on 2.0 and 2.1:

- ``_execute_on_connection``: a ``Connection`` calls it. Under async that call is inside the greenlet already, so one
  synchronous implementation serves both. ``facade/async_locks.py`` runs ``Locks`` itself in a greenlet.
- ``CompileState.plugin_for("orm", visit name)``: a ``Session`` calls it, for autoflush, for ``get_bind`` and for
  entities; ``_get_plugin_class_for_plugin`` returns that of a SELECT. Its ``orm_pre_session_exec`` returns two values
  on 2.0 and three on 2.1.
- ``_propagate_attrs``, ``_with_options``, ``_compile_options``, ``_execution_options``, ``_compiler``,
  ``Session._autoflush``: what the two above read or call.
- ``SessionTransaction._prepare_impl``: the part of a commit that comes before the COMMIT.
- ``Update._values``: which columns an UPDATE of the app's sets.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import sqlalchemy
from sqlalchemy import Engine, Table, Update, delete, event, false, select, update
from sqlalchemy.engine import Connection, CursorResult, Dialect, IteratorResult, Result, TwoPhaseTransaction
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.exc import CompileError, DBAPIError
from sqlalchemy.sql import Executable, visitors
from sqlalchemy.sql.base import CompileState, Generative
from sqlalchemy.sql.selectable import TypedReturnsRows
from sqlalchemy.util import immutabledict

from sqlalchemy_locks._validation import seconds
from sqlalchemy_locks.core.ended_transactions import (
    ROLLED_BACK,
    forbid_savepoints,
    lost_when_ended,
    note_end,
    note_failure,
    rolled_back_transactions,
)
from sqlalchemy_locks.dialects import Backend, Server, backend_for
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.errors import LockTimeout, MustRollback, NotInstalled, PoolTimeout, Unsupported
from sqlalchemy_locks.sql.elements import READ_COMMITTED
from sqlalchemy_locks.sql.tables import DEFAULT_PREFIX, DEFAULT_SCHEMA, Tables, tables

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from sqlalchemy_locks.values import Holder

R = TypeVar("R", bound=Any)
T = TypeVar("T")

#: How many keys, each of one or more columns, one statement binds of a list whose length the caller decides. SQLite
#: limits its parameters, MySQL the memory of a plan, and MariaDB makes a subquery of a list of 1000: both then scan the
#: table, and wait for other rows that are locked.
MAX_KEYS = 400
#: a statement that fails earlier, in seconds, was sent on a connection that was dead already
_DEAD_ON_ARRIVAL = 0.2
_THREE_VALUES = tuple(int(part) for part in sqlalchemy.__version__.split(".")[:2]) >= (2, 1)


class EngineState(NamedTuple):
    """What the first connection of an engine has told about its server, asked once.

    It is kept by the engine's dialect, which copies of the engine with other execution options share. What may change
    while the app runs, such as whether the server accepts writes, is never kept.
    """

    #: a URL of PostgreSQL may lead to YugabyteDB, one of MySQL to MariaDB
    backend: Backend
    server: Server


#: of each engine whose first connection has told about its server
engine_states: WeakKeyDictionary[Dialect, EngineState] = WeakKeyDictionary()


def engine_state(connection: Connection) -> EngineState:
    """Return the state of a connection's engine; the first call asks the server.

    :raises Unsupported: for an engine or a server on which locks don't keep their promises; for one of several nodes
        that grant them, unless the connection's option ``locks_one_node`` says that all locks go to one.
    """
    state = engine_states.get(connection.dialect)
    if state is None:
        begun = has_begun(connection)
        server = backend_for(connection.dialect).ask_server(connection)
        if not begun:
            connection.rollback()  # the level of a transaction can be set before its first statement only
        state = EngineState(backend_for(connection.dialect, server), server)
        engine_states[connection.dialect] = state
        # of the dialect's class, whose listeners are called first: after one of the engine's that raises none is called
        kind, note = type(connection.dialect), note_failure if state.backend.schemas else note_end
        if (kind.is_async or note is note_end) and note not in connection.dialect.dispatch.handle_error:
            event.listen(kind, "handle_error", note, retval=True)
    several_nodes = state.server.several_nodes
    if several_nodes is not None and not connection.get_execution_options().get("locks_one_node"):
        raise Unsupported(several_nodes)
    return state


def has_begun(connection: Connection) -> bool:
    """Return whether a transaction has begun, if only with the driver, as by a listener of the app's."""
    return connection.in_transaction() or backend_for(connection.dialect).transaction_state(connection) != "ended"


def behind_pooler(connection: Connection) -> bool:
    """Return whether a pooler such as PgBouncer may give each transaction another session of the server."""
    session_pooling = connection.get_execution_options().get("locks_session_pooling")
    return engine_state(connection).server.pooled and not session_pooling


def cluster_behind(engine: Engine) -> str | None:
    """Return the cluster behind an engine, as far as it is known without a connection; none with ``locks_one_node``."""
    state = engine_states.get(engine.dialect)
    one_node = engine.get_execution_options().get("locks_one_node")
    return None if state is None or one_node else state.server.cluster


def backend_of(dialect: Dialect) -> Backend:
    """Return the backend of an engine, as far as it is known without a connection."""
    state = engine_states.get(dialect)
    return backend_for(dialect) if state is None else state.backend


class BuildContext(NamedTuple):
    """What a statement is built for, once: the backend, the prefix of its tables, and the cluster of its server."""

    backend: Backend
    prefix: str
    #: as in ``Server``. A lock counts there only where its row is changed; with ``locks_one_node``, after a failover.
    cluster: str | None = None

    @property
    def tables(self) -> Tables:
        if self.backend.schemas:
            return tables(DEFAULT_SCHEMA, "")
        return tables(None, self.prefix)


def build_context(dialect: Dialect, options: Mapping[str, Any]) -> BuildContext:
    return BuildContext(backend_of(dialect), options.get("locks_prefix", DEFAULT_PREFIX))


def translated_schema(options: Mapping[str, Any], schema: str | None) -> Any:
    """Return what the execution option ``schema_translate_map`` makes of a schema."""
    return (options.get("schema_translate_map") or {}).get(schema, schema)


def installation(engine: Engine) -> str:
    """Return what tells the tables of one schema or prefix from those of another in the same database.

    Copies of an engine with other options (``engine.execution_options(locks_prefix="app_")``) may have other tables.
    """
    options = engine.get_execution_options()
    table = build_context(engine.dialect, options).tables.semaphore
    return f"{translated_schema(options, table.schema)}.{table.name}"


class OperationImpl:
    """What one kind of operation does. One instance serves every call of it."""

    #: what error messages call it, e.g. ``lock.exclusive``
    name: str
    #: which value says what it waits for: a name, an id, or a list of names
    subject: ClassVar[str] = "lock_name"
    #: what its effect ends with; ``None`` where it is permanent
    held_by: ClassVar[Literal["transaction", "connection"] | None] = None
    #: it works on this library's own tables or functions
    needs_installation: bool = True
    #: it never waits; where even BEGIN would have to wait (SQLite), its result is ``refused``
    impatient: bool = False
    refused: Any = None
    #: it writes or locks, so that SQLite's queue of writers applies to it
    writes: ClassVar[bool] = True
    #: What limits its waits for locks: a setting around all its statements, or an argument of its one statement. With
    #: ``None``, and with an argument on engines where it takes several statements, it calls ``waiting`` itself.
    wait_limit: Literal["setting", "argument"] | None = None
    #: it stores the nonce of its call, or may do so
    uses_nonce: ClassVar[bool] = True

    def __init__(self) -> None:
        #: what ``build`` returns, built once per context: building at each call would double its time
        self.statement: Callable[[BuildContext], Executable | None] = cache(self.build)

    def repeatable(self, operation: Operation[Any]) -> bool:
        """Return whether ``Locks`` may run it again when the outcome of the first attempt is unknown."""
        return not self.writes

    def build(self, context: BuildContext) -> Executable | None:
        """Build the one statement that does it; ``None`` where the engine needs several."""
        raise NotImplementedError

    def is_one_statement(self, execution: Execution) -> bool:
        """Return whether this execution is one statement."""
        return self.statement(execution.context) is not None

    def statement_to_compile(
        self, context: BuildContext, dialect: Dialect, values: Mapping[str, Any]
    ) -> Executable | None:
        """Return the one statement for ``compile()``, which sets its bind parameters afterwards."""
        return self.statement(context)

    def multi_statement_reason(self, context: BuildContext) -> str:
        """Return why it isn't one statement on this backend, as a clause of the error that ``compile()`` raises."""
        raise NotImplementedError

    def run(self, execution: Execution) -> Any:
        """Do it, and return a ``Result``, or a value that becomes the one row of one.

        By default the one statement is executed.
        """
        statement = self.statement(execution.context)
        assert statement is not None
        return execution.execute(statement)

    def described(self, values: Mapping[str, Any]) -> str:
        """Return the call as error messages show it."""
        # of a list, its members
        return self.name + (f"({repr(values[self.subject]).strip('[]')})" if self.subject in values else "")

    def holders(self, execution: Execution) -> tuple[Holder, ...]:
        """Return the holders of what could not be acquired, where the transaction can still ask for them."""
        return ()

    def route(self) -> dict[str, Any]:
        """Return the arguments of ``Session.get_bind``: an UPDATE, so that replicas are passed over."""
        return {"clause": _routed(tables(DEFAULT_SCHEMA, "").locked_keys)}

    def check_connection(self, execution: Execution) -> None:
        """Refuse a connection on which the effect would end too early.

        :raises Unsupported: on a connection in autocommit, or in a two-phase transaction that releases locks before its
            COMMIT, when the effect ends with the transaction.
        """
        if self.held_by == "transaction":
            if execution.backend.key_rows:
                self.refuse_two_phase(execution)
            if execution.backend.autocommit(execution.connection):
                raise execution.refused_autocommit()

    def refuse_two_phase(self, execution: Execution) -> None:
        """:raises Unsupported: in a two-phase transaction, where InnoDB may release locks before its COMMIT."""
        if isinstance(execution.connection.get_transaction(), TwoPhaseTransaction):
            raise Unsupported(
                f"{self.name} in a two-phase transaction of {execution.backend.name} would end at PREPARE, before the "
                "COMMIT: use a session without twophase=True, or Locks"
            )


@cache
def _routed(table: Table) -> Any:
    return update(table)


class Operation(Generative, TypedReturnsRows[R], Generic[R]):
    """A database operation as a value: your session, your connection or ``Locks`` executes it.

    It has ``execution_options()`` as every SQLAlchemy statement has; four of them are this library's own:

    - ``locks_prefix``: the prefix of the tables, on engines without schemas (default ``lock_``);
    - ``locks_wait``: the longest wait for a lock, in seconds or as a ``timedelta``; then ``LockTimeout`` is raised;
    - ``locks_session_pooling``: an option of the engine, for connections through PgBouncer or another pooler: ``True``
      says that the pooler is in session mode, where a client keeps its server connection, so that session locks work;
    - ``locks_one_node``: an option of the engine or a connection, for clusters whose nodes grant locks of their own:
      ``True`` says that all that uses locks connects to one and the same node.

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
            reason = self._impl.multi_statement_reason(context)
            raise CompileError(
                f"{self.name} is not one statement on {context.backend.name}, {reason}: execute it instead"
            )

        def bind(parameter: Any) -> None:
            if parameter.key in self._values:
                parameter.value = self._values[parameter.key]

        bound: Any = visitors.cloned_traverse(statement, {}, {"bindparam": bind})
        return bound._compiler(dialect, **kw)

    def _execute_on_connection(self, connection: Connection, distilled_params: Any, execution_options: Any) -> Any:
        _refuse_parameters(distilled_params)
        return self._result(Execution(connection, self, execution_options).perform())

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
        """Return the rows; where a row is one value, the values."""
        return list(result.scalars() if len(result.keys()) == 1 else result)


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
        _refuse_parameters(params)
        if not bind_arguments.keys() & {"bind", "mapper", "clause"}:
            bind_arguments.update(statement._impl.route())
        options = statement._execution_options.merge_with(execution_options)
        if is_pre_event:
            options = options.union({"locks_executions": []})
        elif options.get("autoflush", True):
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
        # those of one call, where the session has listeners of do_orm_execute, which may execute it several times
        executions: list[Execution] = execution_options.get("locks_executions", [])
        if executions:
            raise Unsupported(
                f"{statement.name} takes effect in one database, and a listener of do_orm_execute executes it again, "
                "as a ShardedSession does for each shard: roll back, and name the shard, "
                'bind_arguments={"shard_id": ...} or options(set_shard_id(...))'
            )
        execution = Execution(conn, statement, execution_options, session, bind_arguments)
        result = statement._result(execution.perform())
        executions.append(execution)
        return result


def prepare_commit(session: Session) -> None:
    """Do what ``session.commit()`` does before its COMMIT: a later ``commit()`` does what follows it.

    Its ``before_commit`` is called, and it is flushed.
    """
    transaction: Any = session.get_transaction() or session.begin()
    transaction._prepare_impl()


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


def _refuse_parameters(params: Any) -> None:
    if params and any(params if isinstance(params, (list, tuple)) else (params,)):
        raise TypeError("an operation carries its own values: execute it without parameters")


_LEVEL = select(READ_COMMITTED)


class Execution:
    """One execution of one operation: what its implementation may ask and do.

    :param options: the execution options of this call, besides those of the operation.
    :param deadline: when a wait for a lock ends, by ``time.monotonic()``; by default after what the option
        ``locks_wait`` says.
    """

    def __init__(
        self,
        connection: Connection,
        operation: Any,
        options: Mapping[str, Any],
        session: Session | None = None,
        bind_arguments: dict[str, Any] | None = None,
        *,
        deadline: float | None = None,
    ) -> None:
        self.connection, self.operation = connection, operation
        impl: OperationImpl = operation._impl
        #: the values of this call, by the names of the statement's parameters
        self.values: dict[str, Any] = operation._values
        self.session, self.bind_arguments = session, {} if bind_arguments is None else bind_arguments
        options = operation._execution_options.merge_with(options)
        every: Mapping[str, Any] = connection.get_execution_options()
        #: the level at which transactions of the connection begin, as far as SQLAlchemy knows without asking the server
        self.level: str | None = every.get("isolation_level", connection.default_isolation_level)
        if options:
            every = {**every, **options}
        # a server-side cursor would run the statement when its rows are fetched, and lock only then
        if "stream_results" in every or "yield_per" in every:
            options = {**options, "stream_results": False, "yield_per": None}
        self.options = options
        #: the token of this call, unique: a row that holds it is recognized after a lost reply
        self.nonce: str = every.get("locks_nonce") or (fresh_nonce() if impl.uses_nonce else "")
        state = engine_state(connection)
        self.backend, self.server = state.backend, state.server
        self.context = BuildContext(self.backend, every.get("locks_prefix", DEFAULT_PREFIX), self.server.cluster)
        #: a ``schema_translate_map`` moves the tables
        self.schema_map: Mapping[str | None, Any] = every.get("schema_translate_map") or {}
        #: ``Locks`` or a worker has begun this transaction, at READ COMMITTED; InnoDB's variable doesn't show its level
        self.begun_by_locks = bool(every.get("locks_begun"))
        #: an earlier attempt at this very call may have come into effect, its reply lost
        self.is_retry = bool(every.get("locks_again"))
        #: a statement has been sent
        self.sent = False
        #: the first statement of a transaction may have to wait for its turn to write
        self.takes_write_lock: bool = impl.writes and self.backend.single_writer
        #: the longest wait for a lock, in seconds; ``None``: as long as the server allows
        self.wait: float | None = None
        if deadline is not None:
            self.wait = max(0.0, deadline - time.monotonic())
        elif (option := every.get("locks_wait")) is not None:
            self.wait = seconds(option, "locks_wait")
            deadline = time.monotonic() + self.wait
        self.deadline = deadline
        #: a setting limits the waits of all its statements
        self.sets_limit = self.wait is not None and impl.wait_limit == "setting"
        if self.wait is not None and impl.wait_limit == "argument" and not self.backend.functions_limit_waits:
            self.sets_limit = self.wait > 0 or impl.held_by is None  # a lock for which there is no time is tried

    def perform(self, *, unpack: bool = False) -> Any:
        """Do what the operation says; return a ``Result``, or the value that becomes the one row of one.

        :param unpack: return the one value, or the list of the rows, without a ``Result`` around it.
        :raises LockTimeout: when a time limit has ended the wait for a lock, which it names.
        """
        connection, impl = self.connection, self.operation._impl
        if connection.get_transaction() in rolled_back_transactions:
            raise MustRollback(f"{impl.name}: {self.backend.name} {ROLLED_BACK}")
        end_session = self.backend.session_ender(connection) if self.backend.key_rows else None
        began = time.monotonic()
        try:
            if self.takes_write_lock:
                with translated(self.backend):
                    self.backend.begin_before_write(connection, self.wait)
            impl.check_connection(self)
            if self.server.savepoint_hides_end and impl.writes:
                forbid_savepoints(connection, self.server.cluster)
            # the app may pass over an error that has ended its transaction; Locks ends its own ones
            of_app = impl.writes and not self.begun_by_locks
            if of_app and self.backend.key_rows and not self.backend.autocommit(connection):
                lost_when_ended(connection, None)
            with self.waiting() if self.sets_limit else contextlib.nullcontext():
                outcome = impl.run(self)
            if of_app and self.backend.single_writer and self.backend.transaction_begun(connection):
                lost_when_ended(connection, None)
        except (DBAPIError, DriverTimeout) as error:
            waited = time.monotonic() - began
            if not died_waiting(error, waited):
                raise
            if end_session is not None:
                self._call_beside_pool(end_session)
            if impl.held_by is None:
                raise  # whether it was done depends on how it was sent
            raise LockTimeout(f"{impl.described(self.values)}: {ended_by_limit(waited)}") from error
        except LockTimeout as error:
            holders = () if isinstance(error, PoolTimeout) else impl.holders(self)
            raise type(error)(f"{impl.described(self.values)}: {error}", holders, error.kind) from error.__cause__
        return self.operation._unpack(outcome) if unpack and isinstance(outcome, Result) else outcome

    def _call_beside_pool(self, end_session: Callable[[Connection], object]) -> None:
        """Call it with a connection beside the pool, which may have none left."""
        engine = self.connection.engine
        pool = engine.pool.recreate()
        with contextlib.suppress(Exception), Connection(engine, connection=pool.connect()) as connection:
            end_session(connection)
        pool.dispose()

    @property
    def loader_options(self) -> Any:
        """The options of the operation for loading entities, as ``options()`` has taken them."""
        return self.operation._with_options

    def execute(
        self, statement: Executable, values: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> CursorResult[Any]:
        """Run one statement through SQLAlchemy, once or for each of several rows.

        :raises LockError: for an error of the driver that is about locks.
        """
        parameters = self.values if values is None else values
        send = partial(self.connection.execute, statement, parameters, execution_options=self.options)
        self.sent = True
        try:
            return self.backend.take_write_lock(self.connection, send) if self.takes_write_lock else send()
        except DBAPIError:
            with translated(self.backend, self.operation._impl.needs_installation):
                raise

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Limit the lock waits of the statements inside to ``wait`` seconds.

        :raises Unsupported: in autocommit through a pooler, where another client's session would get the limit.
        """
        if self.wait is None:
            return contextlib.nullcontext()
        if behind_pooler(self.connection) and self.backend.autocommit(self.connection):
            raise Unsupported(
                f"{self.operation.name} with locks_wait in autocommit, through a pooler such as PgBouncer, would set "
                "the lock_timeout of another client's session: execute it inside a transaction, or use Locks"
            )
        return self.backend.bounded(self.connection, self.wait)

    def is_read_committed(self) -> bool:
        """Return whether the transaction is at READ COMMITTED or below; only called with ``stale_reads``."""
        return self.begun_by_locks or bool(self.execute(_LEVEL, {}).scalar())

    def begin_as_writer(self, table: Table) -> None:
        """Take SQLite's write lock before other statements.

        Python's driver begins a transaction before a DELETE, which it doesn't do before what begins with WITH.
        """
        self.execute(write_nothing(table), {})

    def batches(self, keys: Sequence[T], table: Table | None = None) -> Iterator[Sequence[T]]:
        """Divide keys into as many as one statement may bind.

        :param table: that the statements change; several are executed in one transaction only.
        :raises Unsupported: for several batches in autocommit, where they change a table.
        """
        if table is not None and len(keys) > MAX_KEYS:
            self.require_transaction(table, f"{self.operation.name} of more than {MAX_KEYS}")
        for start in range(0, len(keys), MAX_KEYS):
            yield keys[start : start + MAX_KEYS]

    def require_transaction(self, table: Table | None = None, what: str | None = None) -> None:
        """Refuse a connection in autocommit, where a lock ends with its statement.

        :param table: whose write lock begins SQLite's transaction, if none has begun; by default it has been taken.
        :param what: what is refused; by default the operation.
        :raises Unsupported: in autocommit.
        """
        backend, connection = self.backend, self.connection
        if table is not None and not backend.transaction_begun(connection):
            self.begin_as_writer(table)
        if backend.autocommit(connection) or not backend.transaction_begun(connection):
            raise self.refused_autocommit(what)

    def refuse_cluster(
        self, why: str = "would be held on one node only", remedy: str = "use a lease, which all nodes know"
    ) -> None:
        """:raises Unsupported: in a cluster each of whose nodes grants locks of its own."""
        if self.context.cluster is not None and not self.connection.get_execution_options().get("locks_one_node"):
            raise Unsupported(
                f"{self.operation.name} {why} of {self.context.cluster}: {remedy}; or, if all locks go to one node, "
                "set the engine's execution option locks_one_node=True"
            )

    def refused_autocommit(self, what: str | None = None) -> Unsupported:
        return Unsupported(
            f"{what or self.operation.name} on a {self.backend.name} connection in autocommit would end with its own "
            "statement: execute it inside a transaction, or use Locks"
        )


def columns_set_by(statement: Update) -> list[Any]:
    """Return the columns that an UPDATE sets, each as it was given: by key, name or attribute."""
    return list(statement._values or ())


def write_nothing(table: Table) -> Executable:
    """Return a write that changes nothing: SQLite takes its write lock when the statement starts, rows or no rows."""
    return delete(table).where(false())


def died_waiting(error: BaseException, waited: float) -> bool:
    """Return whether a connection has died in a statement, and not before it; a driver's own time limit is as good.

    :param waited: in seconds.
    """
    if isinstance(error, DBAPIError):
        return error.connection_invalidated and error.statement is not None and waited > _DEAD_ON_ARRIVAL
    return isinstance(error, DriverTimeout)


def ended_by_limit(waited: float) -> str:
    """Return the sentence of a wait that ended with its connection."""
    return (
        f"a time limit ended the wait after {waited:.1f} s, and with it the transaction: the driver's "
        "(command_timeout, read_timeout), the server's (transaction_timeout), or that of a proxy in between"
    )


def fresh_nonce() -> str:
    """Return a token that is unique to one call; a valid UUID, since MariaDB's type takes no other 128 bits."""
    # not a counter, nor Python's own random numbers: copies of a process (a snapshot of its machine) would repeat them
    digits = os.urandom(16).hex()
    return f"{digits[:12]}4{digits[13:16]}8{digits[17:]}"


_NOT_INSTALLED = (
    "install the tables and functions of sqlalchemy-locks in the way that the app uses (`alembic upgrade heads`, after "
    "`op.upgrade_locks` in a revision; `sqlalchemy-locks install`; or `sl.metadata().create_all(engine)`), or name "
    "the schema or prefix that they were installed under; `sqlalchemy-locks check` tells what is missing"
)
#: of an error of the driver's
GRANT_HINT = "`grant_to` in a migration, or `sqlalchemy-locks install --grant-to`, grants a user what locks need"


@contextlib.contextmanager
def translated(backend: Backend, needs_installation: bool = False) -> Iterator[None]:
    """Raise errors of the driver that are about locks as this library's, with the driver's as their cause."""
    try:
        yield
    except DBAPIError as error:
        ours = backend.translate(error)
        meaning = backend.meaning(error) if needs_installation else None
        if ours is None and meaning == "missing":
            ours = NotInstalled(f"{str(error.orig).splitlines()[0]}: {_NOT_INSTALLED}")
        if ours is not None:
            raise ours from error
        if meaning == "denied":
            error.add_detail(GRANT_HINT)
        raise

"""Connections: how one is checked out and returned, how a driver's error is raised, whether the server closed it.

What SQLAlchemy keeps private of a ``Connection`` and of a pool, and psycopg of a connection, is used in this module,
and pinned by ``tests/core/test_private_names.py``.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import re
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from functools import cache
from typing import Any, NoReturn, TypeVar

from sqlalchemy import URL, Engine, event
from sqlalchemy.engine import Connection
from sqlalchemy.event.base import _JoinedDispatcher
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as CheckoutTimeout
from sqlalchemy.pool import QueuePool, SingletonThreadPool, StaticPool
from sqlalchemy.util.langhelpers import only_once
from sqlalchemy.util.queue import Empty

from sqlalchemy_locks.errors import NotWritable, OutcomeUnknown, PoolTimeout

T = TypeVar("T")

#: in the ``info`` of a pooled connection, which ends with the driver's connection
_CURSOR = "_sqlalchemy_locks_cursor"
#: what PostgreSQL says of a prepared statement whose columns have other types since
PLAN_CHANGED = "cached plan must not change result type"
#: libpq's PQTRANS_IDLE
TRANSACTION_IDLE = 0
_WORD = re.compile(r"[A-Za-z0-9_]+")


def raise_translated(
    connection: Connection, error: BaseException, sql: str | None = None, parameters: Any = None, cursor: Any = None
) -> NoReturn:
    """Raise a driver's error as SQLAlchemy raises it, and invalidate a connection that it has ended.

    For an ``except`` clause around a call of the driver that SQLAlchemy doesn't know of. It asks the dialect whether
    the connection is dead, calls ``handle_error`` listeners, and has the pool replace the dead connection's
    contemporaries.
    """
    private: Any = connection
    stale = getattr(connection.dialect.loaded_dbapi, "InvalidCachedStatementError", None)
    if stale is not None and isinstance(error, stale):
        private.dialect._invalidate_schema_cache()
    private._handle_dbapi_exception(error, sql, parameters, cursor, None)
    raise AssertionError("SQLAlchemy raises every error that it is given")


@contextlib.contextmanager
def driver_calls(connection: Connection) -> Iterator[None]:
    """Raise errors of direct calls to the driver's connection as SQLAlchemy raises them."""
    try:
        yield
    except connection.dialect.loaded_dbapi.Error as error:
        raise_translated(connection, error)


def on_driver_error(connection: Connection, listener: Callable[[BaseException], object]) -> None:
    """Call a listener with each error of a statement on this connection, before SQLAlchemy handles it.

    SQLAlchemy's ``handle_error`` event is one of all connections of the engine, and would slow all of them down. What
    the listener raises is handled in the error's place.
    """
    private: Any = connection
    handle = private._handle_dbapi_exception

    def intercept(error: BaseException, *rest: Any, **named: Any) -> None:
        try:
            listener(error)
        except BaseException as raised:
            handle(raised, *rest, **named)
        handle(error, *rest, **named)

    private._handle_dbapi_exception = intercept


def on_statement_and_commit(
    connection: Connection, before_statement: Callable[[], object], on_commit: Callable[[], object]
) -> None:
    """Call listeners before each statement of this connection, and when it commits.

    Two calls of ``event.listen`` would cost a block as much as three checkouts, and each statement more.
    """
    private: Any = connection
    commit = private._commit_impl

    def intercept_commit() -> None:
        on_commit()
        commit()

    def intercept_statement(dialect: Any, context: Any, *given: Any) -> Any:
        try:
            before_statement()
        except BaseException:
            context.cursor.close()
            raise
        return execute(dialect, context, *given)

    def intercept_batches(dialect: Any, context: Any) -> Any:
        def before_batch(*_: Any) -> None:
            before_statement()

        event.listen(connection, "before_cursor_execute", before_batch)
        try:
            return execute_batches(dialect, context)
        finally:
            event.remove(connection, "before_cursor_execute", before_batch)

    def intercept_cursor(*given: Any, **named: Any) -> None:
        before_statement()
        cursor_execute(*given, **named)

    # these call the events' listeners
    execute, execute_batches = private._exec_single_context, private._exec_insertmany_context
    cursor_execute = private._cursor_execute
    private._commit_impl, private._cursor_execute = intercept_commit, intercept_cursor
    private._exec_single_context, private._exec_insertmany_context = intercept_statement, intercept_batches


def is_guarded(connection: Connection) -> bool:
    """Return whether every statement is preceded by a look at a lock, as inside a block of ``Locks``."""
    return "_cursor_execute" in connection.__dict__


def autobegin(connection: Connection) -> None:
    """Begin a transaction as SQLAlchemy does before the first statement."""
    private: Any = connection
    private._autobegin()


def begin_failed(connection: Connection) -> None:
    """Forget a BEGIN that raised in the app's ``begin`` listener.

    SQLAlchemy would continue as if the listener were still running, and execute what follows without a transaction.
    """
    connection.__dict__["_Connection__in_begin"] = False


class DriverAutocommit:
    """A driver of PostgreSQL's in autocommit for a block: an attribute of its own, which costs no round trip.

    psycopg's setter takes a lock and runs a generator; its async one also yields to the event loop, and a cancellation
    raised there would come after the change. While no transaction is open, the setter only sets this attribute.
    """

    __slots__ = ("_at_checkin", "_attribute", "_changed", "_connection", "_driver", "_idle")

    def __init__(self, connection: Connection, idle: Callable[[Any], bool]) -> None:
        """Create the block.

        :param idle: whether the server has no transaction open on a connection of the driver's.
        """
        self._connection, self._idle = connection, idle
        #: what has the attribute, where it was changed
        self._changed: Any = None

    def __enter__(self) -> None:
        connection = self._connection
        pooled: Any = connection.connection
        changed = self._driver = pooled.driver_connection
        attribute = "_autocommit"
        if not hasattr(changed, "pgconn"):
            changed, attribute = pooled.dbapi_connection, "autocommit"
        if getattr(changed, attribute):
            return
        try:
            try:
                if not self._idle(self._driver):
                    pooled.dbapi_connection.rollback()  # a listener of the app's has left a transaction open
                self._changed, self._attribute = changed, attribute
                record = pooled._connection_record  # None for one that a listener has detached
                self._at_checkin = [] if record is None else record.finalize_callback
                # otherwise a signal handler that raises before __exit__ does would leave it to the app's transactions
                self._at_checkin.append(self._end)
                setattr(changed, attribute, True)  # psycopg2 sends the engine's isolation level along
            except connection.dialect.loaded_dbapi.Error as error:
                raise_translated(connection, error)
        except BaseException as error:
            connection.invalidate(error)
            raise

    def _end(self, _: object = None) -> None:
        setattr(self._changed, self._attribute, False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        connection, begun = self._connection, False
        try:
            if isinstance(error, DBAPIError) and PLAN_CHANGED in str(error.orig):
                connection.invalidate()  # psycopg prepares its statements again after a ROLLBACK only
            if not connection.invalidated:
                begun = not self._idle(self._driver)
                if begun:
                    connection.invalidate()
                elif self._changed is not None:
                    self._end()
                    self._at_checkin.remove(self._end)
            if connection.in_transaction():
                connection.rollback()  # SQLAlchemy's own view; nothing is open on the server
        except BaseException as raised:
            # the reply has been read, or there is an error that says more than this one
            connection.invalidate(raised)
            if not isinstance(raised, Exception):
                raise
        if begun and kind is None:
            raise OutcomeUnknown(
                "a listener of the app's began a transaction around a statement in autocommit, and nothing commits it: "
                "it was done before that, or rolled back; begin none in before_cursor_execute or after_cursor_execute"
            )


def closed(connection: Connection) -> bool:
    """Return whether the server is known to have closed the connection.

    Unread data doesn't tell: it may be the reply to another thread's statement, or rows that are still to be fetched.
    """
    driver: Any = connection.connection.driver_connection
    owner: Any = driver if hasattr(driver, "fileno") else getattr(driver, "_sock", driver)
    if owner is None:
        return True
    if not hasattr(owner, "fileno"):
        return False
    try:
        descriptor = owner.fileno()
        monkey = sys.modules.get("gevent.monkey")
        poll = getattr(select, "poll", None) if monkey is None else monkey.get_original("select", "poll")
        ended = False
        if poll is None:  # Windows; elsewhere, select() takes no number above 1023
            readable = bool(select.select([descriptor], [], [], 0)[0])
        else:
            # macOS reports as POLLHUP what Linux reports only when asked for POLLRDHUP
            end = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR | select.POLLNVAL
            asked = poll()
            asked.register(descriptor, select.POLLIN | end)
            found = asked.poll(0)
            events = found[0][1] if found else 0
            readable, ended = bool(events & select.POLLIN), bool(events & end)
        if ended or not readable or hasattr(select, "POLLRDHUP"):
            return ended
        twin = socket.socket(fileno=descriptor)
        try:
            return not twin.recv(1, socket.MSG_PEEK)
        finally:
            twin.detach()
    except Exception:  # each driver has its own error for a closed socket
        return True


def pool_capacity(pool: Any) -> float:
    """Return how many connections a pool can have checked out at the same time; infinite without a limit."""
    if not isinstance(pool, QueuePool) or pool._max_overflow < 0:
        return math.inf
    return pool.size() + pool._max_overflow


class StatementForm(IntEnum):
    """The form in which a statement must be executed so that SQLAlchemy's listeners and its log see it."""

    #: nothing sees it: the driver's own cursor suffices
    DRIVER_CALL = 0
    #: listeners of the cursor's events see it: :func:`execute_by_cursor`
    CURSOR_EVENTS = 1
    #: the text that is sent
    TEXT = 2
    #: the construct that it was compiled from
    CONSTRUCT = 3


def statement_form(connection: Connection) -> StatementForm:
    """Return the form in which a statement on this connection must be executed, by the events that have listeners.

    Most listeners (``connect``, ``begin``, ``handle_error``, an isolation level as an option of the engine) see no
    statement, or are called wherever it is sent.
    """
    private: Any = connection
    form = StatementForm.CURSOR_EVENTS if is_guarded(connection) else StatementForm.DRIVER_CALL
    if private._has_events or private.engine._has_events:
        # a connection joins each event of its engine's when it is first looked at
        dispatch = private.dispatch if private._has_events else private.engine.dispatch
        if dispatch.before_execute or dispatch.after_execute:
            return StatementForm.CONSTRUCT
        if dispatch.before_cursor_execute or dispatch.after_cursor_execute:
            form = StatementForm.CURSOR_EVENTS
    if private.dialect._has_events:
        dispatch = private.dialect.dispatch
        if dispatch.do_execute or dispatch.do_execute_no_params or dispatch.do_setinputsizes:
            return StatementForm.TEXT
    # inside begin_nested() SQLAlchemy raises for a savepoint that an error has ended
    return StatementForm.TEXT if private._echo or private._nested_transaction is not None else form


def execute_by_cursor(
    connection: Connection,
    how: StatementForm,
    sql: str,
    parameters: Any,
    options: Mapping[str, Any],
    read: Callable[[Any], T],
    simple: bool = False,
) -> T:
    """Execute a text on a cursor of the driver's, and return what ``read`` takes from it.

    :param how: whether the listeners of the cursor's events are called.
    :param parameters: as the driver takes them.
    :param simple: the statement is planned quickly, and all parameters are integers or single words: psycopg may send
        it together with BEGIN.
    :raises DBAPIError: as SQLAlchemy raises the driver's errors.
    """
    cursor: Any = None
    kept: Any = None
    if how is StatementForm.CURSOR_EVENTS:
        cursor, kept = _cursor_with_events(connection, sql, parameters, options, simple)
    try:
        if cursor is None:
            cursor = kept = _take_cursor(connection)
            # with asyncpg, what was prepared before a change of the schema was noticed is prepared again
            noticed = getattr(connection.dialect, "_invalidate_schema_cache_asof", None)
            if noticed is not None:
                cursor._invalidate_schema_cache_asof = noticed
            if simple and _begins_transaction(connection):
                cursor = _BeginningCursor(cursor)
            cursor.execute(sql, parameters)
        found = read(cursor)
    except BaseException as error:
        if isinstance(error, connection.dialect.loaded_dbapi.Error):
            raise_translated(connection, error, sql, parameters, cursor)
        connection.invalidate(error)  # the server's reply would be read as the next statement's
        raise
    if kept is not None and _keep_cursor(connection, kept):
        return found
    try:
        cursor.close()
    except Exception as error:
        connection.invalidate(error)  # the answer has been read
    return found


def _take_cursor(connection: Connection) -> Any:
    """Return the cursor that :func:`_keep_cursor` has kept for this connection, or a new one."""
    pooled: Any = connection.connection
    return pooled.info.pop(_CURSOR, None) or pooled.cursor()


def _keep_cursor(connection: Connection, cursor: Any) -> bool:
    """Keep an open cursor of psycopg's for the next statement, which takes 7 to 10 µs less than with a new one.

    A new one copies the connection's adapters, and finds the dumper of each type again.
    """
    if connection.dialect.driver != "psycopg" or connection.dialect.is_async or cursor.closed:
        return False
    connection.connection.info[_CURSOR] = cursor
    return True


def _begins_transaction(connection: Connection) -> bool:
    """Return whether psycopg would send BEGIN before a statement, which is a round trip of its own."""
    if connection.dialect.driver != "psycopg" or connection.dialect.is_async:
        return False
    driver: Any = connection.connection.dbapi_connection
    return not driver.autocommit and driver.pgconn.transaction_status == TRANSACTION_IDLE


class _BeginningCursor:
    """A cursor of psycopg that sends psycopg's own BEGIN and a statement in one round trip."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def execute(self, sql: str, parameters: Mapping[str, Any]) -> None:
        # a listener may have added others
        if not all(isinstance(value, int) or _WORD.fullmatch(str(value)) for value in parameters.values()):
            self._cursor.execute(sql, parameters)
            return
        driver = self._cursor.connection
        begin = driver._get_tx_start_command().decode()
        # a text of several statements can have no parameters
        statement = sql % {name: f"'{value}'" for name, value in parameters.items()}
        # in autocommit, as psycopg would send BEGIN itself; its setter refuses to change that in a transaction
        driver._autocommit = True
        try:
            self._cursor.execute(f"{begin}; {statement}", prepare=False)
        finally:
            driver._autocommit = False
        self._cursor.nextset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


def _cursor_with_events(
    connection: Connection, sql: str, parameters: Any, options: Mapping[str, Any], simple: bool
) -> tuple[Any, Any]:
    """Execute a text on a cursor of the driver's, and call the listeners of the cursor's events.

    Return what was executed, and the cursor if it may be kept.

    SQLAlchemy executes defaults of columns in this way; its ``exec_driver_sql`` costs as much again as the cursor.

    Parameters and errors as :func:`execute_by_cursor`.
    """
    private: Any = connection
    cursor: Any = None
    source = _CursorSource(connection)
    try:
        context = private.dialect.execution_ctx_cls._init_statement(
            private.dialect,
            connection,
            source,
            connection.get_execution_options().merge_with(options),
            sql,
            [parameters],
        )
        cursor = _BeginningCursor(context.cursor) if simple and _begins_transaction(connection) else context.cursor
        context.pre_exec()
        private._cursor_execute(cursor, sql, parameters, context)
    except BaseException as error:
        # a listener may raise after the execution; an open cursor of SQLite's keeps its lock
        if cursor is not None:
            with contextlib.suppress(Exception):
                cursor.close()
        # SQLAlchemy 2.0 raises an error of a listener as it is; and a driver may refuse to make a cursor
        if isinstance(error, connection.dialect.loaded_dbapi.Error):
            raise_translated(connection, error)
        raise
    return cursor, source.taken


class _CursorSource:
    """Stands for the connection where SQLAlchemy makes a cursor."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.taken: Any = None

    def cursor(self, *arguments: Any, **named: Any) -> Any:
        if arguments or named:  # one of the server's, or an unbuffered one
            pooled: Any = self._connection.connection
            return pooled.cursor(*arguments, **named)
        self.taken = _take_cursor(self._connection)
        return self.taken


def has_room(engine: Engine) -> bool:
    """Return whether a connection can be checked out of the engine's pool without a wait."""
    pool: Any = engine.pool
    limit = pool_capacity(pool)
    return limit == math.inf or pool.checkedout() < limit


def engine_with_own_pool(engine: Engine) -> Engine:
    """Return an engine with a pool of its own, and the options and listeners of another one."""
    own: Any = Engine(
        engine.pool.recreate(),
        engine.dialect,
        engine.url,
        execution_options=engine.get_execution_options(),
        hide_parameters=engine.hide_parameters,
    )
    own.dispatch = own.dispatch._join(engine.dispatch)
    own._has_events = engine._has_events
    # The first connection of any of the pools would be the only one that finds out what server it is: while this pool's
    # did, the app's would compile for an unknown one, and SQLAlchemy would keep those statements.
    listeners = own.pool.dispatch.connect.listeners
    for number, listener in enumerate(listeners):
        if getattr(listener, "__qualname__", "") == "only_once.<locals>.go":
            first = inspect.getclosurevars(listener).nonlocals["fn"]
            if getattr(first, "__qualname__", "") == "create_engine.<locals>.first_connect":
                listeners[number] = only_once(first, retry_on_exception=True)
    return own  # type: ignore[no-any-return]


def abort(connection: Connection) -> None:
    """Shut the socket of a connection down, so that a call that waits for its server raises an error immediately."""
    with contextlib.suppress(Exception):
        pooled: Any = connection.connection
        driver: Any = pooled.driver_connection
        if hasattr(driver, "fileno"):
            with socket.socket(fileno=os.dup(driver.fileno())) as twin:
                twin.shutdown(socket.SHUT_RDWR)
        elif connection.dialect.has_terminate:
            connection.dialect.do_terminate(pooled.dbapi_connection)


def shares_one_connection(pool: Any) -> bool:
    """Return whether the pool shares one connection, and so one transaction, between checkouts."""
    return isinstance(pool, (StaticPool, SingletonThreadPool))


def is_in_memory(url: URL) -> bool:
    """Return whether a SQLite database is in memory, and ends with its last connection."""
    return ":memory:" in (url.database or ":memory:") or url.query.get("mode") == "memory"


def connect(engine: Engine, within: float | None = None) -> Connection:
    """Check a connection out of the engine's pool; ``engine.connect()`` without its leak on a dead connection.

    ``engine.connect()`` sends a statement where the isolation level is an execution option of the engine. On a dead
    connection it raises the driver's own error, and the connection stays checked out. Here SQLAlchemy's error is
    raised, as where no connection can be made, and the pool replaces the dead connection and its contemporaries.

    :param within: the longest wait for a free connection, in seconds; the pool's own ``pool_timeout`` without it.
    :raises PoolTimeout: when no connection was free in time.
    """
    private: Any = engine.pool, Connection
    pool, connection_class = private
    pooled: Any = None
    try:
        if within is None or not isinstance(pool, QueuePool):
            pooled = engine.raw_connection()
        else:
            bounded_pool = _with_timeout(type(pool))  # type: ignore[arg-type]
            pooled = bounded_pool(pool, min(within, threading.TIMEOUT_MAX)).connect()
        # to join the engine's listeners costs a sixth of a checkout, even where there are none: see hear_engine()
        watched = engine._has_events or getattr(connection_class, "_has_events", False)
        return engine._connection_cls(engine, pooled, None if watched else False)
    except CheckoutTimeout as error:
        limit = "its own pool_timeout" if within is None else "the timeout"
        raise PoolTimeout(
            f"no connection was free in the pool within {limit}: all {pool_capacity(pool):g} are in use"
        ) from error
    except engine.dialect.loaded_dbapi.Error as error:
        if pooled is not None:
            pool._invalidate(pooled, error)
        try:
            connection_class._handle_dbapi_exception_noconnection(error, engine.dialect, engine)
        except DBAPIError as wrapped:
            # drivers don't say whether the new connection died or was refused; nothing was sent in either case
            wrapped.connection_invalidated = True
            raise
        raise
    except BaseException as error:
        if pooled is not None and pooled.is_valid:
            pooled.invalidate()
        if isinstance(error, _own_errors(engine)):
            raise OperationalError(None, None, error, connection_invalidated=True) from error
        raise


def _own_errors(engine: Engine) -> tuple[type[BaseException], ...]:
    """Return the errors outside its DBAPI that a driver raises when a connection dies as it is made."""
    asyncpg: Any = getattr(engine.dialect.loaded_dbapi, "asyncpg", None)
    if asyncpg is None:
        return (ConnectionError,)
    return (ConnectionError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError, asyncpg.CannotConnectNowError)


@cache
def _with_timeout(kind: type[QueuePool]) -> Callable[[QueuePool, float], QueuePool]:
    """Return a subclass of a pool class: a view of a pool for one checkout, with a timeout of its own.

    SQLAlchemy has one ``pool_timeout`` for a pool and none for a checkout. To ask first whether the pool has room is
    no substitute: a moment later it may have none.
    """

    class BoundedPool(kind):  # type: ignore[misc,valid-type]
        __slots__ = ("_seconds", "_shared")

        def __init__(self, pool: QueuePool, seconds: float) -> None:
            self.__dict__ = pool.__dict__  # type: ignore[misc]
            self._shared, self._seconds = pool, seconds

        @property
        def _timeout(self) -> float:
            return self._seconds

        def _do_get(self) -> Any:
            try:
                # asyncio.wait_for(0) gives up even where a connection is free
                return self._pool.get(False)
            except Empty:
                return super()._do_get()

        def _create_connection(self) -> Any:
            return self._shared._create_connection()  # the record keeps its pool, which must not be this view

    return BoundedPool


def hear_engine(connection: Connection) -> None:
    """Have a connection of :func:`connect` hear what its engine's listeners, of now and later, are to hear."""
    private: Any = connection
    if not isinstance(private.dispatch, _JoinedDispatcher):
        private.dispatch = private.dispatch._join(private.engine.dispatch)


def return_to_pool(connection: Connection, error: BaseException | None = None, *, committed: bool = False) -> None:
    """Return a connection to its pool; one that dies while its isolation level is reset is invalidated.

    ``close()`` would raise the driver's error, and the pool would count the connection as checked out forever. One on
    which nothing can be written is replaced: the name of the server may lead to the primary by now.

    :param error: what its use has raised.
    :param committed: COMMIT was the last statement, so that no transaction is open: the pool then sends no ROLLBACK,
        which is a round trip on MySQL and MariaDB.
    """
    if isinstance(error, NotWritable) and not (connection.closed or connection.invalidated):
        connection.invalidate()
    if not connection.closed and not connection.invalidated:
        pooled: Any = connection.connection
        record = pooled._connection_record
        try:
            if record is not None and record.finalize_callback:
                if connection.in_transaction():
                    connection.rollback()
                while record.finalize_callback:
                    record.finalize_callback.pop()(pooled.dbapi_connection)
        except (connection.dialect.loaded_dbapi.Error, DBAPIError) as raised:
            connection.invalidate(raised)
        if committed and not connection.invalidated and not connection.in_transaction():
            # as Connection.close() does after a transaction that it has ended itself; close() then only closes
            pooled._close_special(transaction_reset=True)
    connection.close()


@contextlib.contextmanager
def connected(engine: Engine, within: float | None = None) -> Iterator[Connection]:
    """Check a connection out for the length of a block, as :func:`connect`."""
    connection = connect(engine, within)
    try:
        yield connection
    except BaseException as error:
        return_to_pool(connection, error)
        raise
    return_to_pool(connection)


@contextlib.contextmanager
def disposing_replaced_pool(engine: Engine) -> Iterator[None]:
    """Close the connections of a background task's engine when the app disposes of the engine meanwhile.

    A connection that is returned after ``Engine.dispose()`` goes to the old pool, and would stay open until the
    garbage collector finds it.
    """
    pool, process = engine.pool, os.getpid()
    try:
        yield
    finally:
        # after a fork the connections are the parent's
        if engine.pool is not pool and os.getpid() == process:
            pool.dispose()

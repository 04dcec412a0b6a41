"""Execution: one execution of an operation, with everything its implementation may ask of the database.

Every statement of this library is sent by an ``Execution``: through SQLAlchemy, or, where no listener could notice,
through the driver's own cursor. Errors of the driver that are about locks leave it as this library's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import sqlalchemy
from sqlalchemy import Engine, Table, delete, false
from sqlalchemy.engine import Connection, CursorResult, Dialect, Result
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import seconds
from sqlalchemy_locks.dialects import Backend, backend_for
from sqlalchemy_locks.dialects.connections import (
    StatementForm,
    cursor_with_events,
    driver_calls,
    driver_cursor,
    raise_translated,
    statement_form,
)
from sqlalchemy_locks.sql.tables import DEFAULT_PREFIX, DEFAULT_SCHEMA, Tables, tables

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

T = TypeVar("T")

#: how often a row may be replaced while a statement waits for it, before the search for it is given up
_MAX_REPLACED = 10
_CACHE = "_sqlalchemy_locks"


class BuildContext(NamedTuple):
    """What a statement is built for, once: the backend, and the prefix of its tables."""

    backend: Backend
    prefix: str

    @property
    def tables(self) -> Tables:
        if self.backend.schemas:
            return tables(DEFAULT_SCHEMA, "")
        return tables(None, self.prefix)


def build_context(dialect: Dialect, options: Mapping[str, Any]) -> BuildContext:
    return BuildContext(backend_for(dialect), options.get("locks_prefix", DEFAULT_PREFIX))


def installation(engine: Engine) -> str:
    """Return what tells the tables of one schema or prefix from those of another in the same database.

    Copies of an engine with other options (``engine.execution_options(locks_prefix="app_")``) may have other tables.
    """
    options = engine.get_execution_options()
    table = build_context(engine.dialect, options).tables.semaphore
    schema = (options.get("schema_translate_map") or {}).get(table.schema, table.schema)
    return f"{schema}.{table.name}"


class DialectCache:
    """What is found out once for each engine of the app; an attribute of its dialect, which engine copies share.

    Made at the first execution: only a connection tells whether a ``mysql://`` URL leads to MariaDB.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.backend = backend_for(dialect)
        #: the backend has checked the server's settings
        self.verified = False
        #: statements as the dialect compiles them: SQL, their own values, the order of the parameters
        self.compiled: dict[Executable, tuple[str, dict[str, Any], list[str] | None]] = {}


class Execution:
    """One execution of one operation: what its implementation may ask and do.

    :param options: the execution options of this call, besides those of the operation.
    """

    def __init__(
        self,
        connection: Connection,
        operation: Any,
        options: Mapping[str, Any],
        session: Session | None = None,
        bind_arguments: dict[str, Any] | None = None,
    ) -> None:
        self.connection, self.operation = connection, operation
        #: the values of this call, by the names of the statement's parameters
        self.values: dict[str, Any] = operation._values
        self.session, self.bind_arguments = session, {} if bind_arguments is None else bind_arguments
        options = operation._execution_options.merge_with(options)
        every: Mapping[str, Any] = connection.get_execution_options()
        if options:
            every = {**every, **options}
        # a server-side cursor would run the statement when its rows are fetched, and lock only then
        if "stream_results" in every or "yield_per" in every:
            options = {**options, "stream_results": False, "yield_per": None}
        self.options = options
        self._every = every
        dialect: Any = connection.dialect
        cache: DialectCache | None = dialect.__dict__.get(_CACHE)
        # through a second pool, a thread may execute while another one's first connection finds out that it is MariaDB
        if cache is None or cache.backend is not backend_for(dialect):
            cache = dialect.__dict__[_CACHE] = DialectCache(dialect)
        self.cache = cache
        self.backend = cache.backend
        self.context = BuildContext(cache.backend, every.get("locks_prefix", DEFAULT_PREFIX))
        #: a ``schema_translate_map`` moves the tables
        self.schema_translated = "schema_translate_map" in every
        #: this transaction was begun at READ COMMITTED, whatever the server's variable says of the session
        self.read_committed = bool(every.get("locks_read_committed"))
        #: an earlier attempt at this very call may have come into effect, its reply lost
        self.is_retry = bool(every.get("locks_again"))
        #: the driver is in autocommit for this one statement: there is no transaction
        self.in_autocommit = False
        #: the first statement of a transaction may have to wait for its turn to write
        self.first_writes: bool = operation._impl.writes and cache.backend.single_writer
        wait = every.get("locks_wait")
        #: the longest wait for a lock, in seconds; ``None``: as long as the server allows
        self.wait = None if wait is None else seconds(wait, "locks_wait")

    def perform(self) -> Any:
        """Do what the operation says; return a ``Result``, or the value that becomes the one row of one."""
        connection, impl = self.connection, self.operation._impl
        if self.first_writes:
            with translated(self.backend):
                self.backend.prepare(connection, self.wait)
        if not self.cache.verified:
            self.backend.verify(connection)
            self.cache.verified = True
        impl.check_connection(self)
        return impl.run(self)

    def value(self) -> Any:
        """Do what the operation says; return its one value, or the list of its rows."""
        outcome = self.perform()
        return self.operation._unpack(outcome) if isinstance(outcome, Result) else outcome

    @cached_property
    def nonce(self) -> str:
        """The token of this call, unique: a row that holds it is recognized after a lost reply."""
        return self._every.get("locks_nonce") or fresh_nonce()

    def execute(
        self, statement: Executable, values: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> CursorResult[Any]:
        """Run one statement through SQLAlchemy, once or for each of several rows.

        :raises LockError: for an error of the driver that is about locks.
        """
        given = self.values if values is None else values

        def send() -> CursorResult[Any]:
            return self.connection.execute(statement, given, execution_options=self.options)

        with translated(self.backend, self.operation._impl.needs_installation):
            return self.backend.take_write_lock(self.connection, send) if self.first_writes else send()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Limit the lock waits of the statements inside to ``wait`` seconds."""
        return contextlib.nullcontext() if self.wait is None else self.backend.bounded(self.connection, self.wait)

    def attempts(self) -> Iterator[int]:
        """Number the attempts at a row that may be replaced while a statement waits for it.

        One, unless the engine then finds no row. Each attempt may wait for what is left of ``wait``.
        """
        started, wait = time.monotonic(), self.wait
        for number in range(_MAX_REPLACED if self.backend.misses_replaced else 1):
            if number and wait is not None:
                self.wait = max(0.0, wait - (time.monotonic() - started))
            yield number

    def take_write_lock(self, table: Table) -> None:
        """Take SQLite's write lock, by a DELETE of no row.

        Python's driver begins a transaction before it, which it doesn't do before a statement that begins with WITH.
        """
        self.execute(delete(table).where(false()), {})

    def scalar(self, statement: Executable, values: Mapping[str, Any]) -> Any:
        """Return the one value of one statement, as :meth:`by_cursor`."""
        return self.by_cursor(statement, values, _first_value)

    def by_cursor(
        self, statement: Executable, values: Mapping[str, Any], read: Callable[[Any], T], *, plain: bool = True
    ) -> T:
        """Run one statement and return what ``read`` takes from its cursor.

        It is the driver's own cursor, at a third of the cost of a prebuilt statement, unless that could be noticed.
        With listeners that see constructs, a log of statements, a ``schema_translate_map``, or inside
        ``begin_nested()``, ``read`` is given SQLAlchemy's cursor result.

        :param plain: all values are numbers and texts, which every driver takes as they are.
        """
        connection = self.connection
        how = statement_form(connection) if plain and not self.schema_translated else StatementForm.CONSTRUCT
        if how is StatementForm.CONSTRUCT:
            return read(self.execute(statement, values))
        own = how <= StatementForm.CURSOR_EVENTS and (self.in_autocommit or connection.in_transaction())
        send = partial(self._by_cursor, how) if own else self._by_text
        if self.first_writes:
            return self.backend.take_write_lock(connection, lambda: send(statement, values, read))
        return send(statement, values, read)

    def _compiled(self, statement: Executable, values: Mapping[str, Any]) -> tuple[str, Any]:
        """Return the SQL of a statement, and its parameters as the driver takes them."""
        compiled = self.cache.compiled.get(statement)
        if compiled is None:
            made: Any = statement.compile(dialect=self.connection.dialect)  # type: ignore[attr-defined]
            compiled = made.string, made.params, made.positiontup if made.positional else None
            self.cache.compiled[statement] = compiled
        sql, given, names = compiled
        named = {**given, **values}
        return sql, named if names is None else tuple(named[name] for name in names)

    def _by_text(self, statement: Executable, values: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        sql, parameters = self._compiled(statement, values)
        with translated(self.backend, self.operation._impl.needs_installation):
            return read(self.connection.exec_driver_sql(sql, parameters, execution_options=self.options))

    def _by_cursor(
        self, how: StatementForm, statement: Executable, values: Mapping[str, Any], read: Callable[[Any], T]
    ) -> T:
        connection: Any = self.connection
        sql, parameters = self._compiled(statement, values)
        cursor = None
        if how is StatementForm.CURSOR_EVENTS:
            with translated(self.backend, self.operation._impl.needs_installation):
                cursor = cursor_with_events(connection, sql, parameters, self.options)
        try:
            if cursor is None:
                cursor = driver_cursor(connection)
                cursor.execute(sql, parameters)
            found = read(cursor)
        except BaseException as error:
            with translated(self.backend, self.operation._impl.needs_installation):
                if isinstance(error, connection.dialect.loaded_dbapi.Error):
                    raise_translated(connection, error, sql, parameters, cursor)
                connection.invalidate(error)  # the server's reply would be read as the next statement's
                raise
        try:
            cursor.close()
        except Exception as error:
            connection.invalidate(error)  # the answer has been read
        return found


def fresh_nonce() -> str:
    """Return a token that is unique to one call; a valid UUID, since MariaDB's type takes no other 128 bits."""
    digits = os.urandom(16).hex()
    return f"{digits[:12]}4{digits[13:16]}8{digits[17:]}"


def _first_value(cursor: Any) -> Any:
    return cursor.fetchone()[0]


class translated:
    """Raise errors of the driver that are about locks as this library's, with the driver's as their cause."""

    def __init__(self, backend: Backend, needs_installation: bool = False) -> None:
        self.backend = backend
        self.needs_installation = needs_installation

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, DBAPIError):
            ours = self.backend.translate(error)
            if ours is None and self.needs_installation and self.backend.missing(error):
                ours = self.backend.not_installed()
            if ours is not None:
                raise ours from error


@contextlib.contextmanager
def side_connection(execution: Execution, *, within: float | None = None) -> Iterator[Connection]:
    """Open a second connection in autocommit, for what the transaction can't do or see itself.

    It isn't checked out of the app's pool, which may have no connection left.

    :param within: how long its statements may wait for a table, in seconds; without it, as long as for a row. An ALTER
        that waits for this transaction blocks them, and the server doesn't detect that deadlock.
    :raises LockTimeout: when that was not enough.
    """
    app = execution.connection.engine
    aside = sqlalchemy.Engine(app.pool.recreate(), app.dialect, app.url)
    try:
        with translated(execution.backend), aside.connect() as connection:
            with driver_calls(connection):
                connection.execution_options(
                    **{**execution.connection.get_execution_options(), "isolation_level": "AUTOCOMMIT"}
                )
            connection.detach()  # else the pool resets the isolation level, and raises the driver's error untranslated
            execution.backend.limit_table_waits(connection, within)
            yield connection
    finally:
        aside.dispose()

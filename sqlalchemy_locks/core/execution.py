"""One execution of an operation: where it is, what its body may ask and do, and whose errors leave it.

Everything that reaches the database goes through an ``Execution``. It relies on the backend (``dialects``), and on a
driver's own cursor where nobody would see the difference.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import sqlalchemy
from sqlalchemy import Table, delete, false
from sqlalchemy.engine import Connection, CursorResult, Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from sqlalchemy_locks.dialects import Backend, backend_for
from sqlalchemy_locks.dialects.base import driver_calls, raise_translated
from sqlalchemy_locks.durations import seconds
from sqlalchemy_locks.sql.tables import DEFAULT_PREFIX, DEFAULT_SCHEMA, Tables, tables

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

T = TypeVar("T")

#: so often a row may be replaced while it is waited for
_REPLACED = 10


class BuildContext(NamedTuple):
    """Which engine, and under which prefix its tables are: what a statement is built for, once."""

    backend: Backend
    prefix: str

    @property
    def tables(self) -> Tables:
        if self.backend.schemas:
            return tables(DEFAULT_SCHEMA, "")
        return tables(None, self.prefix)


def build_context(dialect: Dialect, options: Mapping[str, Any]) -> BuildContext:
    return BuildContext(backend_for(dialect), options.get("locks_prefix", DEFAULT_PREFIX))


@dataclass
class Execution:
    """One execution of one operation: what its body may ask and do."""

    connection: Connection
    options: Mapping[str, Any]
    values: dict[str, Any]
    #: the operation itself
    operation: Any
    session: Session | None = None
    bind_arguments: dict[str, Any] = field(default_factory=dict)
    context: BuildContext = field(init=False)
    wait: float | None = field(init=False)
    moved: bool = field(init=False)
    #: this transaction was begun at READ COMMITTED, whatever the server's variable tells of the session
    read_committed: bool = field(init=False)
    nonce: str = field(init=False)
    again: bool = field(init=False)
    #: the first statement of a transaction may have to wait for its turn to write
    first_writes: bool = field(init=False)
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
        self.context = build_context(self.connection.dialect, every)
        self.first_writes = self.operation._body.writes and self.context.backend.single_writer
        wait = every.get("locks_wait")
        #: how long a lock may be waited for, in seconds; ``None``: as long as the server lets one wait
        self.wait = None if wait is None else seconds(wait, "locks_wait")

    @property
    def backend(self) -> Backend:
        return self.context.backend

    def execute(
        self, statement: Executable, values: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> CursorResult[Any]:
        """Run one statement, once or for each of several rows; what the driver says about locks is raised as ours."""
        given = self.values if values is None else values

        def sent() -> CursorResult[Any]:
            return self.connection.execute(statement, given, execution_options=self.options)

        with translated(self.backend, self.operation._body.needs_installation):
            return self.backend.take_write_lock(self.connection, sent) if self.first_writes else sent()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Around statements that may wait for a lock: for no longer than was asked for."""
        return contextlib.nullcontext() if self.wait is None else self.backend.bounded(self.connection, self.wait)

    def tries(self) -> Iterator[int]:
        """The tries at a row that may be replaced while it is waited for: one, unless the engine then finds none.

        Each may wait for as long as is left of ``wait``. They end, since each needs another replacement.
        """
        asked, wait = time.monotonic(), self.wait
        for number in range(_REPLACED if self.backend.misses_replaced else 1):
            if number and wait is not None:
                self.wait = max(0.0, wait - (time.monotonic() - asked))
            yield number

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
        if (
            not plain
            or self.moved
            or connection._nested_transaction is not None
            or connection._has_events
            or connection.engine._has_events
            or connection.dialect._has_events
            or connection._echo
            or not (self.alone or connection.in_transaction())
        ):
            return read(self.execute(statement, values))
        if self.first_writes:
            return self.backend.take_write_lock(connection, lambda: self._by_cursor(statement, values, read))
        return self._by_cursor(statement, values, read)

    def _by_cursor(self, statement: Executable, values: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        connection: Any = self.connection
        dialect = connection.dialect
        sql, given, names = _spelt(dialect, statement)
        named = {**given, **values}
        parameters = named if names is None else tuple(named[name] for name in names)
        cursor = None
        with translated(self.backend, self.operation._body.needs_installation):
            try:
                cursor = connection.connection.cursor()
                cursor.execute(sql, parameters)
                found = read(cursor)
            except dialect.loaded_dbapi.Error as error:
                raise_translated(connection, error, sql, parameters, cursor)
            except BaseException as error:
                connection.invalidate(error)  # what the server still sends would be the next one's answer
                raise
        try:
            cursor.close()
        except Exception as error:
            connection.invalidate(error)  # the answer has been read
        return found


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
def side_connection(execution: Execution) -> Iterator[Connection]:
    """A connection of its own, opened and closed for what a transaction can't do, or see, itself; in autocommit.

    Not one of the pool's, which may have none left for who is holding one.
    """
    app = execution.connection.engine
    aside = sqlalchemy.Engine(app.pool.recreate(), app.dialect, app.url)
    try:
        with translated(execution.backend), aside.connect() as connection:
            with driver_calls(connection):
                connection.execution_options(
                    **{**execution.connection.get_execution_options(), "isolation_level": "AUTOCOMMIT"}
                )
            connection.detach()  # a pool would put the isolation level back, and pass on what the driver says to that
            yield connection
    finally:
        aside.dispose()

"""Backend: the differences between engines, as flags and methods. One instance per engine, in the module of its name.

Code outside this package asks a backend what it can do, and never for the name of a dialect, except for column types,
indexes and hints (``sql/``, ``queue/mixin.py``). ARCHITECTURE.md lists what a new engine needs.

Drivers' own objects are touched in this package; in ``core/transaction.py``, which closes connections whose state is
unknown; in ``core/ended_transactions.py``, which reads asyncpg's errors; in ``lock/session_lock.py`` and ``sqlite.py``,
which listen to the pool; and in ``workers/``, which listen for jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from sqlalchemy import Column, Engine, Insert, Table
from sqlalchemy.engine import Connection, Dialect, RootTransaction
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.util import await_only

from sqlalchemy_locks.errors import LockError, NotWritable

if TYPE_CHECKING:
    from sqlalchemy_locks.dialects.findings import Finding

T = TypeVar("T")
#: the engines that share one script of a migration step
Family = Literal["postgresql", "mysql", "sqlite"]

#: What an error of the driver means: a table, function or schema is missing; a column is missing; the user lacks a
#: privilege; the key of an INSERT is present; a conflict with other transactions, after which the whole transaction may
#: succeed when it is run again; a row is newer than the snapshot, so that the transaction was rolled back; the server
#: isn't ready, or lacks memory, disk space or something else for the moment.
Meaning = Literal["missing", "no column", "denied", "duplicate", "conflict", "newer row", "unavailable"]
#: ``failed``: it can only be rolled back. ``closed``: its connection is closed.
TransactionState = Literal["open", "ended", "failed", "closed"]
#: raised by a driver's own time limit, such as asyncpg's command_timeout; an OSError from Python 3.11 on
DriverTimeout = asyncio.TimeoutError
#: sleeps for some seconds
Sleep = Callable[[float], object]
#: after how many seconds without a statement the server disconnects a session at the head of a queue
IDLE = 10
#: isolation levels at which a statement reads all changes that were committed before it began
COMMITTED = ("READ COMMITTED", "READ UNCOMMITTED")


@dataclass(frozen=True)
class Server:
    """What the server has told at the first connection of an engine."""

    #: the version of YugabyteDB, to which a URL of PostgreSQL may lead
    yugabytedb: str | None = None
    #: why advisory locks are refused: they don't exclude every session of the database; ``None`` where they do
    no_advisory_locks: str | None = None
    #: it lists the holders of row locks, or of advisory locks, and their waiters
    lists_holders: bool = True
    #: sessions that listen are notified
    notifies: bool = True
    #: a pooler such as PgBouncer is in between, which may give each transaction another session of the server
    pooled: bool = False
    #: a transaction of the app's begins at READ COMMITTED
    begins_read_committed: bool = False
    #: a statement in autocommit is executed at READ COMMITTED
    autocommits_read_committed: bool = False
    #: why locks are refused without the execution option ``locks_one_node``: other nodes grant them, too
    several_nodes: str | None = None
    #: the cluster that it is a node of, as error messages name it. Several nodes of the cluster accept writes, and each
    #: grants row locks of its own. Of two transactions that have changed one row, only the first to commit succeeds
    cluster: str | None = None
    #: when it has rolled a transaction back for another node's, a SAVEPOINT begins a new transaction, without an error
    savepoint_hides_end: bool = False


class ServerQueues(NamedTuple):
    """FIFO queues of waiters that a server keeps; a session that dies leaves them."""

    #: the shortest wait in a queue, in seconds
    shortest_wait: float
    #: the SQL that lists the sessions in the queues where ``HeldKeys`` doesn't; its columns, and ``name`` and ``kind``
    sessions: str | None = None


class Backend:
    """One engine: its capabilities, and its own way of each step.

    Flags are class attributes; methods that not every engine needs do nothing here.
    """

    #: the engine in error messages
    name: ClassVar[str]
    #: which script of a migration step installs the tables
    family: ClassVar[Family]
    #: the tables are in a schema, where the migration also installs the functions that operations call; elsewhere their
    #: names have a prefix
    schemas: ClassVar[bool] = False
    #: a database file has one writer at a time, and no other lock; it has no users
    single_writer: ClassVar[bool] = False
    #: a lock's key is a row of the table ``locked_keys``: a replica grants its lock, too, and PREPARE of a two-phase
    #: transaction may release it
    key_rows: ClassVar[bool] = False
    #: an UPDATE can return its rows (RETURNING), and an INSERT can ignore rows that are present (ON CONFLICT)
    returning: ClassVar[bool] = False
    #: an index can have a condition (``CREATE INDEX ... WHERE``)
    partial_indexes: ClassVar[bool] = False
    #: the index of the jobs that are ready is partial (``started_at IS NULL``), and keeps the entries of captured jobs
    #: until no snapshot needs them; elsewhere ``started_at`` is a column of it
    partial_ready_index: ClassVar[bool] = False
    #: above READ COMMITTED a plain SELECT reads the transaction's snapshot, and one with a lock the latest rows
    stale_reads: ClassVar[bool] = False
    #: a CTE of a statement can lock rows, change them and return them, and an array can be bound and read as rows, so
    #: that several steps are one statement
    writable_ctes: ClassVar[bool] = False
    #: at READ COMMITTED a locking search releases the locks of the rows that it skips
    releases_skipped_rows: ClassVar[bool] = True
    #: the queues of waiters that the server keeps
    server_queues: ClassVar[ServerQueues | None] = None
    #: sessions can be notified that a job was enqueued, if the server says so
    supports_listen: ClassVar[bool] = False
    #: a function never waits longer than its argument says; if ``False``, it may do so for a row
    functions_limit_waits: ClassVar[bool] = True

    #: the marker is a savepoint, so that ``marker_lost`` releases savepoints that were made after it
    marker_is_savepoint: ClassVar[bool] = False

    def translate(self, error: DBAPIError) -> LockError | None:
        """Return this library's error for an error of the driver, or ``None`` if that isn't about locks."""
        raise NotImplementedError

    def insert_unless_present(self, table: Table, key: Column[Any]) -> Insert:
        """Return an INSERT that ignores a row whose ``key`` is present; the column has a unique constraint."""
        raise NotImplementedError

    def insert_or_lock(self, table: Table, key: Sequence[Column[Any]], touched: Column[Any] | None) -> Insert:
        """Return an INSERT that, if a row with this ``key`` is present, locks that row and leaves it as it is.

        :param key: the columns of a unique index, whose condition, if any, is that the last one isn't NULL.
        :param touched: in a cluster, a column whose instant is changed by a microsecond: other nodes don't see a lock,
            but they see the change.
        """
        raise NotImplementedError

    def meaning(self, error: DBAPIError) -> Meaning | None:
        """Return the meaning of a driver's error, as far as this library distinguishes it."""
        raise NotImplementedError

    def is_conflict(self, error: DBAPIError) -> bool:
        """Return whether the whole transaction may succeed when it is run again."""
        return self.meaning(error) in ("conflict", "newer row")

    def session_ender(self, connection: Connection) -> Callable[[Connection], object]:
        """Return a function that ends the session of this connection, called with another connection.

        Otherwise a session would go on waiting for a row although its client has gone. Only called where ``key_rows``.
        """
        raise NotImplementedError

    def may_be_committed(self, error: DBAPIError) -> bool:
        """Return whether a COMMIT that failed with this error may have committed the transaction nevertheless."""
        return False

    def ends_transaction(self, error: DBAPIError, connection: Connection | None = None) -> bool:
        """Return whether an error has rolled the transaction back, so that further statements begin another one.

        Only called without ``schemas``: there every further statement fails.
        """
        raise NotImplementedError

    def prepare_side(self, connection: Connection, caller: Connection, row_wait: int) -> str | None:
        """Set a side connection to READ COMMITTED, autocommit, short waits and the caller's role.

        Only called where ``key_rows``.

        :param row_wait: the longest wait for a row in seconds; the server may have a longer one as its shortest.
        :return: the database in which the caller works; the session may have chosen another one than its URL.
        """
        raise NotImplementedError

    def findings(self, connection: Connection) -> Iterator[Finding]:
        """Check the server's version and settings, for administrators; only SELECTs are executed."""
        raise NotImplementedError

    @contextlib.contextmanager
    def serialized_install(self, connection: Connection, key: int) -> Iterator[None]:
        """Wait for a concurrent installation, where the server itself doesn't serialize DDL.

        :param key: identifies the schema.
        """
        yield

    def ask_server(self, connection: Connection) -> Server:
        """Ask the server, once per engine of the app, for the facts that decide how operations are executed.

        :raises Unsupported: for a server that breaks a guarantee, with the setting to change, or what to use instead.
        """
        return Server()

    def writable(self, connection: Connection) -> bool:
        """Return whether the server still accepts writes: some can become read-only and keep their connections."""
        return True

    def committing(self, connection: Connection, wait: float | None) -> contextlib.AbstractContextManager[None]:
        """Limit the wait of the COMMIT inside, which can wait for readers; called only with ``single_writer``.

        :param wait: in seconds; the app's own limit without it.
        :raises LockTimeout: when the time was up; nothing is committed, and the transaction is still open.
        """
        raise NotImplementedError

    def autocommit(self, connection: Connection) -> bool:
        """Return whether the driver is in autocommit, where a lock ends with its statement."""
        raise NotImplementedError

    def transaction_begun(self, connection: Connection) -> bool:
        """Return whether the statement just executed was in a transaction; where only the driver knows, ask it."""
        return True

    def require_time_zone(self, what: str, columns: Iterable[Column[Any]]) -> None:
        """Refuse timestamp columns whose value depends on the time zone of a session.

        :raises Unsupported: with the name of the column.
        """

    def begin(
        self, connection: Connection, server: Server, wait: float | None = None, *, writes: bool = True
    ) -> RootTransaction:
        """Begin a transaction, READ COMMITTED where the engine has levels.

        The pool restores the app's own level when the connection returns.

        :param wait: the longest wait in seconds, where BEGIN can wait; may be infinite.
        :param writes: where there is one writer at a time, it is the writer.
        """
        raise NotImplementedError

    def begin_before_write(self, connection: Connection, wait: float | None) -> None:
        """Begin, as SQLAlchemy would do it before the first statement; called only with ``single_writer``.

        :param wait: the longest wait for BEGIN, in seconds; by default the app's own settings decide.
        """
        raise NotImplementedError

    def take_write_lock(self, connection: Connection, take: Callable[[], T]) -> T:
        """Run a statement that may be the first write of its transaction; called only with ``single_writer``.

        :param take: executes the statement; raises, and changes nothing, when the write lock isn't free.
        """
        raise NotImplementedError

    def allows_autocommit(self, connection: Connection, server: Server, level: str | None) -> bool:
        """Return whether one statement may be executed by :meth:`autocommitted` on this connection.

        ``False`` if the app does something at BEGIN, or if statements in autocommit have another isolation level.

        :param level: the level at which its transactions begin, as far as SQLAlchemy knows.
        """
        return False

    def autocommitted(self, connection: Connection, run: Callable[[], T]) -> T:
        """Return the value of ``run()``, which executes one statement, without BEGIN and COMMIT."""
        raise NotImplementedError

    def set_marker(self, connection: Connection) -> None:
        """Leave a marker in the transaction that ends with it, where its end could go unnoticed."""

    def marker_lost(self, connection: Connection) -> bool:
        """Remove the marker; return whether the marked transaction had ended, or can only be rolled back."""
        return False

    def transaction_state(self, connection: Connection) -> TransactionState:
        """Return the state of an open transaction as far as the driver knows, without asking the server."""
        raise NotImplementedError

    def read_notifications(self, driver: Any) -> list[str]:
        """Return the payloads that a listening connection has received; only called where ``supports_listen``.

        :param driver: the driver's own connection, which has data to read.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def bounded(self, connection: Connection, seconds: float) -> Iterator[None]:
        """Limit the lock waits inside to ``seconds``; the setting is restored afterwards."""
        raise NotImplementedError
        yield

    def join_queue(self, connection: Connection, key: int, seconds: float) -> bool:
        """Wait for the head of the queue of a key.

        Only called with ``server_queues``, in a short transaction. The server disconnects a session at the head
        that sends nothing for ``IDLE`` seconds, so that a process that is stopped doesn't block the others.

        :param seconds: the longest wait.
        :return: whether the head was reached; some engines raise an error if it wasn't.
        """
        raise NotImplementedError

    def leave_queue(self, connection: Connection, key: int) -> None:
        """Leave the head of the queue of a key, unless the end of the transaction does that."""

    def queue_is_free(self, connection: Connection, key: int) -> bool:
        """Return whether the queue of a key is empty; not called where ``schemas``."""
        raise NotImplementedError


def not_writable(engine: str) -> NotWritable:
    """Return the error of a connection that can't write.

    :param engine: the name of its backend.
    """
    return NotWritable(
        f"{engine} answered that this connection can't write (a standby, a replica, or a read-only transaction), where "
        "a lock has no effect on the primary: use a read-write transaction on the primary"
    )


def sleep_for(dialect: Dialect) -> Sleep:
    """Return the function by which the thread, or under an async driver the task, sleeps for some seconds."""
    if dialect.is_async:
        return lambda seconds: await_only(asyncio.sleep(seconds))
    return time.sleep


def set_level(connection: Connection, level: Any) -> None:
    """Set the isolation level of a connection until it returns to its pool, before its transaction begins.

    :raises DBAPIError: with ``connection_invalidated`` when it is dead: nothing was sent.
    """
    try:
        connection.execution_options(isolation_level=level)
    except connection.dialect.loaded_dbapi.Error as error:
        connection.invalidate(error)
        raise OperationalError(None, None, error, connection_invalidated=True) from error
    except asyncio.CancelledError as error:
        connection.invalidate(error)  # the level may be set, and SQLAlchemy doesn't know that it must be reset
        raise


def checkout_errors(engine: Engine) -> tuple[type[BaseException], ...]:
    """Return the errors that a driver raises at a checkout and that SQLAlchemy doesn't translate."""
    asyncpg: Any = sys.modules.get("asyncpg")
    errors: tuple[type[BaseException], ...] = engine.dialect.loaded_dbapi.Error, ConnectionError
    return errors if asyncpg is None else (*errors, asyncpg.InterfaceError, asyncpg.PostgresError)


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

"""What the library asks of an engine: facts, the errors it translates, and how a short transaction begins.

One instance per engine, in the file of its name. Nobody outside this folder asks for a dialect's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar

from sqlalchemy import Column, Engine, Insert, Table
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.errors import LockError, NotInstalled, NotWritable, Unsupported
from sqlalchemy_locks.sql.elements import HeldKeys

if TYPE_CHECKING:
    from sqlalchemy_locks.dialects.sqlite_line import Line

T = TypeVar("T")

Locking = Literal["functions", "rows", "file"]

#: of a limit of the driver's own, such as asyncpg's command_timeout; an OSError from Python 3.11 on
DriverTimeout = asyncio.TimeoutError
#: seconds for which whoever has the turn in a line may be silent
IDLE = 10
#: drivers that wait in C, where Python runs no handler of a signal before the answer has come
_DEAF = frozenset(["psycopg2", "mysqldb", "mysqlconnector", "mariadbconnector"])


def nothing() -> None:
    """What there is to put back when nothing was changed."""


class Backend:
    """The facts of one engine."""

    #: as our sentences call it
    name: ClassVar[str]
    #: tables live in a schema of their own; elsewhere their names carry a prefix
    schemas: ClassVar[bool] = False
    #: where a lock lives: in the server's functions, in the row of a table, or in the database file itself
    locking: ClassVar[Locking]
    #: the shipped functions, or the server's own, do an operation in one call
    calls_functions: ClassVar[bool] = False
    #: a SELECT can lock rows (FOR UPDATE)
    row_locks: ClassVar[bool] = True
    #: a database file has one writer at a time, and no other lock
    single_writer: ClassVar[bool] = False
    #: a lock's key is a row of the table ``locked_keys``
    key_rows: ClassVar[bool] = False
    #: an INSERT can be told how long to wait, not at all included
    bounded_insert: ClassVar[bool] = False
    #: an UPDATE can give back what it has written
    update_returning: ClassVar[bool] = False
    #: an index can have a condition (``CREATE INDEX ... WHERE``)
    partial_indexes: ClassVar[bool] = False
    #: a data-modifying statement with RETURNING can be a CTE of another statement
    writable_ctes: ClassVar[bool] = False
    #: several values can be bound as one array, which unnest() reads as rows
    arrays: ClassVar[bool] = False
    #: a lock is refused by the server itself where the isolation level makes what its holder reads stale
    refuses_stale: ClassVar[bool] = False
    #: autocommit can be had on a pooled connection without a round trip and without touching what the app has set
    one_trip: ClassVar[bool] = False
    #: a row that is read to be locked must also be asked whether the server takes writes
    locks_on_replicas: ClassVar[bool] = False
    #: a statement that has waited for a row finds none where the row was deleted and inserted again meanwhile
    misses_replaced: ClassVar[bool] = False
    #: the statement that gives up every session lock of a connection, where the server has such locks
    release_session_locks: ClassVar[str | None] = None

    #: what a statement is preceded by to be told its plan, in the form that ``explain`` reads
    explain: ClassVar[str]
    #: a search with locks gives up the locks of the rows that it passes by, at READ COMMITTED
    frees_passed: ClassVar[bool] = True
    #: those who wait can stand in a line that the server keeps, and that a dead one drops out of
    lines: ClassVar[bool] = False
    #: the shortest wait in one, in seconds
    shortest_line: ClassVar[float] = 0
    #: an index keeps entries of rows that are not in it any more until no snapshot needs them, and a look passes them
    keeps_passed: ClassVar[bool] = False
    #: sessions can be told at once that something was put
    listens: ClassVar[bool] = False

    #: what ``mark`` leaves is a savepoint, and ``unmarked`` takes away those that were made after it
    marks_by_savepoint: ClassVar[bool] = False

    #: the question who holds a key and who waits for one, where the server's tables tell it
    held_keys: ClassVar[type[HeldKeys] | None] = None
    #: otherwise why not, as the end of a sentence
    untold: ClassVar[str]

    def translate(self, error: DBAPIError) -> LockError | None:
        """Our error for the driver's, or ``None`` where it isn't about locks."""
        raise NotImplementedError

    def insert_unless_present(self, table: Table, key: Column[Any]) -> Insert:
        """Return an INSERT that ignores a row whose ``key`` is present; the column has a unique constraint."""
        raise NotImplementedError

    def missing(self, error: DBAPIError) -> bool:
        """Whether a table, function or schema of the statement isn't there."""
        raise NotImplementedError

    def duplicate(self, error: DBAPIError) -> bool:
        """Whether a row with that key was there; asked only where an INSERT can't be told to pass over it."""
        raise NotImplementedError

    def transient(self, error: DBAPIError) -> bool:
        """Whether the whole transaction, run again, may succeed."""
        raise NotImplementedError

    def verify(self, connection: Connection) -> None:
        """Refuse a server whose settings break a promise; asked once per engine."""

    def committing(self, connection: Connection, wait: float | None) -> contextlib.AbstractContextManager[None]:
        """Around a COMMIT, where that can wait for others.

        :param wait: for how long, in seconds; as long as the app lets it without it.
        :raises LockTimeout: when that was not enough; nothing is committed then, and the transaction is still open.
        """
        return contextlib.nullcontext()

    def autocommit(self, connection: Connection) -> bool:
        """Whether a statement's locks would end with the statement."""
        raise NotImplementedError

    def began(self, connection: Connection) -> bool:
        """Whether the statement just executed has a transaction around it, where only the driver can tell."""
        return True

    def refuse_zoneless(self, what: str, columns: Iterable[Column[Any]]) -> None:
        """Refuse columns that don't keep the server's clock, whatever zone a session has."""

    def judging(self, connection: Connection) -> contextlib.AbstractContextManager[None]:
        """Around a wait, where the engine's answer must be told apart afterwards."""
        return contextlib.nullcontext()

    def wait_value(self, seconds: float) -> Any:
        """A longest wait as the engine's own setting takes it, never one that means "for ever"."""
        raise NotImplementedError

    def begin(self, connection: Connection, wait: float | None = None) -> tuple[RootTransaction, Callable[[], None]]:
        """Begin a transaction, READ COMMITTED where the engine has levels.

        Also returns what puts the connection back as the app had it; called when the transaction has ended. Where
        beginning itself can wait, it waits ``wait`` seconds at most, which may be endless.
        """
        raise NotImplementedError

    def begin_writing(
        self, connection: Connection, wait: float | None = None
    ) -> tuple[RootTransaction, Callable[[], None]]:
        """As :meth:`begin`, for who is going to write: where one can at a time, it is this one's turn then."""
        return self.begin(connection, wait)

    def prepare(self, connection: Connection, wait: float | None) -> None:
        """Begin, as SQLAlchemy would by itself at the first statement; called only with ``single_writer``.

        :param wait: how long that may wait, in seconds; by default as long as the app's own settings say.
        """
        raise NotImplementedError

    def take_write_lock(self, connection: Connection, take: Callable[[], T]) -> T:
        """Run what may be the first statement of its transaction to write; called only with ``single_writer``.

        :param take: raises when the write lock isn't free, and has done nothing then.
        """
        raise NotImplementedError

    def alone(self, connection: Connection, bounded: bool) -> bool:
        """Whether a lone statement may go without a transaction on this connection.

        :param bounded: a longest wait is set before it, and put back after it.
        """
        return True

    def pooled(self, connection: Connection) -> bool:
        """Whether each transaction may be another session of the server's: a pooler such as PgBouncer is in between."""
        return False

    def autocommitted(self, connection: Connection) -> contextlib.AbstractContextManager[None]:
        """Statements inside go without BEGIN and COMMIT; asked only where ``one_trip``."""
        raise NotImplementedError

    def mark(self, connection: Connection) -> None:
        """Leave in the transaction what goes with it, where its end could pass unnoticed."""

    def unmarked(self, connection: Connection) -> bool:
        """Whether the transaction that was marked is over, or can only be rolled back; takes the mark away."""
        return False

    def ended(self, connection: Connection) -> bool:
        """Whether a transaction that was open is known to be over, without asking the server."""
        return False

    def aborted(self, connection: Connection) -> bool:
        """Whether an open transaction takes no statement any more but the way back, as far as the driver remembers."""
        return False

    def heed(self, connection: Connection, error: Exception) -> bool:
        """Learn what has become of the transaction of a statement that failed, where the driver has to ask for that.

        :return: it is aborted, and the driver will not remember.
        """
        return False

    def rolls_back(self, error: Exception) -> bool:
        """Whether what ended the transaction, with this error of the driver's, was a rollback for certain."""
        return False

    def heard(self, driver: Any) -> list[str]:
        """What a connection that listens was told since it was last asked; asked only where ``listens``.

        :param driver: the driver's own connection, which has something to read.
        """
        raise NotImplementedError

    def deaf(self, connection: Connection) -> bool:
        """Whether a wait for the server keeps signals from being heard."""
        return connection.dialect.driver in _DEAF

    def hung_up(self, connection: Connection) -> bool:
        """Whether the server has ended this idle connection, as far as that is known without asking it."""
        return False

    def brief(self, connection: Connection) -> contextlib.AbstractContextManager[None]:
        """A question inside ends within a second, answered or not."""
        return contextlib.nullcontext()

    def by_index(self, connection: Connection) -> contextlib.AbstractContextManager[bool]:
        """Plans asked for inside go by an index wherever there is one, however small the table: whether they do."""
        return contextlib.nullcontext(False)

    def read_plan(self, rows: Any, table: Table, search: str, ordered: bool) -> tuple[list[str], list[str]]:
        """Return the steps of a capture's plan, and what makes it slow.

        :param rows: what the statement that begins with ``explain`` returned, as mappings.
        :param search: the name of the CTE that searches, where the search is part of a larger statement.
        :param ordered: the capture has an ORDER BY.
        """
        raise NotImplementedError

    def denied(self, error: DBAPIError) -> bool:
        """Whether the user may not do it; asked only where the catalog doesn't tell what a user may do."""
        raise NotImplementedError

    def blind(self, error: DBAPIError) -> str | None:
        """Why the server didn't tell who holds a key, as the end of a sentence; ``None`` for any other error."""
        return None

    @contextlib.contextmanager
    def bounded(self, connection: Connection, seconds: float) -> Iterator[None]:
        """Lock waits inside end after ``seconds``; the setting is as it was afterwards."""
        raise NotImplementedError
        yield

    def join_line(self, connection: Connection, key: int, seconds: float) -> bool:
        """Wait for one's turn in the line of a key, ``seconds`` at most: whether it came, where no error says so.

        Asked only where ``lines``, in a short transaction. Whoever has the turn and is silent for ``IDLE`` seconds is
        cut off by the server, so that a process that is stopped doesn't stop the others.
        """
        raise NotImplementedError

    def leave_line(self, connection: Connection, key: int) -> None:
        """Let the next one have its turn, where the end of the transaction doesn't do that."""

    def line_free(self, connection: Connection, key: int) -> bool:
        """Whether nobody stands in a line; asked only where there are ``lines``, and no functions that look."""
        raise NotImplementedError

    def line_beside(self, engine: Engine, within: float | None = None) -> Line | None:
        """Where waiters of all processes can queue outside the database; ``None`` without such a place.

        :param within: the longest wait for a free connection of the engine's pool, in seconds.
        """
        return None

    def interrupted(self, error: DBAPIError) -> bool:
        """Whether a limit of the server's on statements ended this one."""
        return False

    def refuse_autocommit(self, what: str) -> Unsupported:
        return Unsupported(
            f"{what} on a {self.name} connection in autocommit would be over with its own statement: "
            "execute it inside a transaction, or use Locks"
        )

    def not_installed(self) -> NotInstalled:
        return NotInstalled(
            "the tables or functions of sqlalchemy-locks are not in this database: run `alembic upgrade "
            "sqlalchemy_locks@head`, or name the schema or prefix that they were installed under"
        )

    def not_writable(self) -> NotWritable:
        return NotWritable(
            f"{self.name} answered that this connection can't write (a standby, a replica, or a read-only "
            "transaction): its locks would bind nobody else; use a read-write transaction on the primary"
        )


def raise_translated(
    connection: Connection, error: BaseException, sql: str | None = None, parameters: Any = None, cursor: Any = None
) -> NoReturn:
    """Raise a driver's error as SQLAlchemy raises it, and invalidate a connection that it has ended.

    To be called where the error is caught, after a call of the driver's own that SQLAlchemy knows nothing of. What it
    does with an error is private (``Connection._handle_dbapi_exception``), and used here only: it asks the dialect
    whether the connection is dead, calls ``handle_error`` listeners, and has the pool replace the dead one's
    contemporaries.
    """
    private: Any = connection
    private._handle_dbapi_exception(error, sql, parameters, cursor, None)
    raise AssertionError("SQLAlchemy raises every error that it is given")


@contextlib.contextmanager
def driver_calls(connection: Connection) -> Iterator[None]:
    """Around calls of the driver's own connection, any of which may talk to the server: its errors are SQLAlchemy's."""
    try:
        yield
    except connection.dialect.loaded_dbapi.Error as error:
        raise_translated(connection, error)


def closed(connection: Connection) -> bool:
    """Whether the server is known to have closed the connection.

    What has arrived says nothing: it may be the answer to what another thread is asking just now, or rows that are to
    be fetched yet.
    """
    driver: Any = connection.connection.driver_connection
    owner: Any = driver if hasattr(driver, "fileno") else getattr(driver, "_sock", driver)
    if owner is None:
        return True
    if not hasattr(owner, "fileno"):
        return False
    try:
        descriptor = owner.fileno()
        readable, ended = _events(descriptor)
        if ended or not readable or hasattr(select, "POLLRDHUP"):
            return ended
        twin = socket.socket(fileno=descriptor)
        try:
            return not twin.recv(1, socket.MSG_PEEK)
        finally:
            twin.detach()
    except Exception:  # each driver says in its own words that there is no socket any more
        return True


def _events(descriptor: int) -> tuple[bool, bool]:
    """Whether there is something to read, and whether the other end is known to have closed the connection."""
    monkey = sys.modules.get("gevent.monkey")
    poll = getattr(select, "poll", None) if monkey is None else monkey.get_original("select", "poll")
    if poll is None:  # Windows; elsewhere, select() takes no number above 1023
        return bool(select.select([descriptor], [], [], 0)[0]), False
    # macOS tells by POLLHUP what Linux is to be asked for
    end = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR | select.POLLNVAL
    asked = poll()
    asked.register(descriptor, select.POLLIN | end)
    events = sum(found for _, found in asked.poll(0))
    return bool(events & select.POLLIN), bool(events & end)

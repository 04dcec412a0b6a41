"""SQLite: every lock is the database's one write lock, held until the transaction ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

from sqlalchemy import Column, Insert, Table
from sqlalchemy.engine import Connection, Dialect, RootTransaction
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.util import await_only
from sqlalchemy.util.concurrency import in_greenlet

from sqlalchemy_locks.dialects.base import Backend, restore_nothing
from sqlalchemy_locks.dialects.checks import Finding, version_finding
from sqlalchemy_locks.dialects.connections import autobegin, begin_failed, is_guarded
from sqlalchemy_locks.dialects.forks import forked, is_inherited
from sqlalchemy_locks.errors import LockError, LockTimeout, MustRollback, Unsupported
from sqlalchemy_locks.sql.clock import Elapsed, Epoch, Now, NowAfterWait, PlusSeconds, SecondsAgo, StatementStart
from sqlalchemy_locks.sql.elements import InsertAbsent

T = TypeVar("T")

_BUSY_SNAPSHOT = "SQLITE_BUSY_SNAPSHOT"
#: of a connection: the process that has seen that it doesn't share the file with its parent
_OWN = "sqlalchemy_locks_own_file"
#: Seconds of one wait inside SQLite, and of the pause after it. SQLite's own busy handler backs off to 0.1 s, and so
#: lets waiters starve.
_BUSY_WAIT, _SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.001, 0.005
#: how long a rollback waits for the statement of a cancelled call before it interrupts it, in seconds
_INTERRUPT_AFTER = 0.05
#: transactions with savepoints: begun before the first one, or not begun at all
_begun: WeakSet[Any] = WeakSet()
_autocommitting: WeakSet[Any] = WeakSet()


class SQLite(Backend):
    name = "SQLite"
    family = "sqlite"
    has_users = False
    single_writer = True
    evaluates_constants_first = False
    on_conflict = True
    row_locks = False
    holders_unavailable = "whose one lock is the file's, which keeps no list of holders"
    explain_prefix = "EXPLAIN QUERY PLAN"
    update_returning = True
    partial_indexes = True

    def translate(self, error: DBAPIError) -> LockError | None:
        message = str(error.orig)
        if getattr(error.orig, "sqlite_errorname", None) == _BUSY_SNAPSHOT:
            return _must_rollback()
        if "database is locked" in message or "database table is locked" in message:
            return LockTimeout("the database is locked by another writer (busy timeout)")
        if "readonly database" in message:
            return self.not_writable()
        return None

    def read_plan(self, rows: Any, table: Table, search: str, ordered: bool) -> tuple[list[str], list[str]]:
        plan = [str(row["detail"]) for row in rows]
        problems = []
        for step in plan:
            # a scan in the order of a key reads all rows nevertheless
            whole = "USING" not in step or "sqlite_autoindex" in step
            if step.startswith(f"SCAN {table.name}") and whole:
                problems.append(f"the whole of {table} is scanned")
            if "TEMP B-TREE FOR" in step:
                problems.append("all candidates are sorted before the first is captured")
        return plan, problems

    def insert_unless_present(self, table: Table, key: Column[Any]) -> Insert:
        from sqlalchemy.dialects.sqlite import insert  # not loaded before it is needed

        return insert(table).on_conflict_do_nothing(index_elements=[key])

    def insert_or_lock(self, table: Table, key: Sequence[Column[Any]]) -> Insert:
        from sqlalchemy.dialects.sqlite import insert  # not loaded before it is needed

        inserting, last = insert(table), key[-1]
        return inserting.on_conflict_do_update(
            index_elements=key, index_where=last.is_not(None), set_={last.name: inserting.excluded[last.key]}
        )

    def missing(self, error: DBAPIError) -> bool:
        return "no such table" in str(error.orig)

    def transient(self, error: DBAPIError) -> bool:
        return "is locked" in str(error.orig)

    def verify(self, connection: Connection) -> None:
        raw: Any = connection.connection.driver_connection
        if connection.dialect.is_async:
            # private: aiosqlite has no attribute of its own for it, and sqlite3 answers in the connection's thread only
            ignores_commit = await_only(raw._execute(lambda: getattr(raw._conn, "autocommit", None))) is True
        else:
            ignores_commit = getattr(raw, "autocommit", None) is True
        if ignores_commit:
            connection.invalidate()  # rollback() does nothing, either
            raise Unsupported(
                "sqlite3's connect(autocommit=True) makes commit() and rollback() do nothing, so that what Locks and "
                'sessions do is never committed: leave it out of connect_args, and use isolation_level="AUTOCOMMIT" of '
                "SQLAlchemy where you need autocommit"
            )

    @contextlib.contextmanager
    def committing(self, connection: Connection, wait: float | None) -> Iterator[None]:
        with _BusyTimeout(connection) as busy_timeout:
            if wait is not None:
                busy_timeout.set(wait)
            try:
                yield
            except DBAPIError as error:
                if not self.transient(error):
                    raise
                raise LockTimeout(
                    "COMMIT waits for readers, and some were still reading at the end of the busy timeout (a process "
                    "that is stopped during a SELECT doesn't end it; in WAL mode, COMMIT doesn't wait for readers): "
                    "nothing is committed"
                ) from error

    def adapt(self, dialect: Dialect) -> None:
        if "do_savepoint" in dialect.__dict__:
            return
        send_savepoint, release, terminate = dialect.do_savepoint, dialect.do_release_savepoint, dialect.do_terminate

        # Python's driver sends no BEGIN before a SAVEPOINT, so that its RELEASE would commit, and release the lock

        def do_savepoint(connection: Connection, name: str) -> None:
            transaction = connection.get_transaction()
            # a block of Locks has begun: there the transaction is lost, which the SAVEPOINT finds
            if not (in_transaction(connection) or is_guarded(connection)):
                if _begins(connection):
                    _driver_rows(connection, "BEGIN")
                else:
                    _autocommitting.add(transaction)
            if in_transaction(connection) and connection.get_nested_transaction() is None:
                _begun.add(transaction)
            send_savepoint(connection, name)

        def do_release_savepoint(connection: Connection, name: str) -> None:
            # one that was sent before, and may be the outermost one, is left to COMMIT and ROLLBACK
            if connection.get_transaction() in _begun or not _begins(connection):
                release(connection, name)

        def do_terminate(dbapi_connection: Any) -> None:
            # SQLite keeps a closed connection, and its lock, until the garbage collector finds the cancelled cursor
            driver = dbapi_connection.driver_connection
            if in_greenlet():
                # a second cancellation doesn't wait, as in SQLAlchemy's own terminate(), and this goes on
                await_only(asyncio.shield(_roll_back_and_stop(driver)))
            else:
                terminate(dbapi_connection)

        dialect.do_savepoint = do_savepoint  # type: ignore[method-assign]
        dialect.do_release_savepoint = do_release_savepoint  # type: ignore[method-assign]
        if dialect.is_async:
            dialect.do_terminate = do_terminate  # type: ignore[method-assign]

    def autocommit(self, connection: Connection) -> bool:
        return False  # Python's driver begins with the first write; see `transaction_begun`

    def transaction_begun(self, connection: Connection) -> bool:
        return in_transaction(connection)

    def marker_lost(self, connection: Connection) -> bool:
        return not in_transaction(connection)  # a full disk or an I/O error ends it

    def transaction_ended(self, connection: Connection) -> bool:
        return not in_transaction(connection)  # the driver begins another one with the next write

    def error_rolled_back(self, error: Exception) -> bool:
        return True  # ON CONFLICT ROLLBACK, RAISE(ROLLBACK), a full disk: an error never commits

    @contextlib.contextmanager
    def classify_timeouts(self, connection: Connection) -> Iterator[None]:
        # BUSY well before the busy timeout, inside a transaction: SQLite doesn't let a transaction that has read wait,
        # because waiting couldn't help it
        begun = in_transaction(connection)
        with _BusyTimeout(connection) as busy_timeout:
            timeout = busy_timeout.get()
        started = time.monotonic()
        try:
            yield
        except LockTimeout as error:
            if begun and timeout and time.monotonic() - started < timeout / 2:
                raise _must_rollback() from error
            raise

    def wait_value(self, seconds: float) -> int:
        return math.ceil(min(seconds * 1000, 2**31 - 1))

    def begin(self, connection: Connection, wait: float | None = None) -> tuple[RootTransaction, Callable[[], None]]:
        transaction = _begin_within(connection, wait, connection.begin)
        if not in_transaction(connection):
            connection.exec_driver_sql("BEGIN")
        return transaction, restore_nothing

    def begin_writing(
        self, connection: Connection, wait: float | None = None
    ) -> tuple[RootTransaction, Callable[[], None]]:
        _refuse_inherited(connection)
        transaction = _begin_within(connection, wait, connection.begin)
        if not in_transaction(connection):
            take_write_lock(connection, lambda: connection.exec_driver_sql("BEGIN IMMEDIATE"), wait)
        return transaction, restore_nothing

    def prepare(self, connection: Connection, wait: float | None) -> None:
        _refuse_inherited(connection)
        # before the statement that is tried repeatedly: SQLAlchemy doesn't call the event again after a failure
        if not connection.in_transaction():
            _begin_within(connection, wait, lambda: autobegin(connection))
        elif connection.in_nested_transaction() and connection.get_transaction() in _autocommitting:
            raise Unsupported(
                "inside begin_nested(), on a SQLite connection in autocommit, where the savepoint's end commits: "
                "execute it in a transaction, or use Locks"
            )

    def take_write_lock(self, connection: Connection, take: Callable[[], T]) -> T:
        if in_transaction(connection):
            return take()
        raw: Any = connection.connection.driver_connection
        return take_write_lock(connection, take, commits=getattr(raw, "isolation_level", "") is None)

    def findings(self, connection: Connection) -> Iterator[Finding]:
        yield version_finding(self.name, str(connection.exec_driver_sql("SELECT sqlite_version()").scalar()))
        path = connection.exec_driver_sql("PRAGMA database_list").all()[0][2]
        if not path:
            yield Finding("writable", "problem", "a database in memory is private to its process: locks need a file")
        elif connection.exec_driver_sql("PRAGMA query_only").scalar() or not os.access(path, os.W_OK):
            says = f"{path} can't be written to, so that no lock can be acquired: chmod u+w {path}"
            yield Finding("writable", "problem", says)
        elif not _journal_writable(path, str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())):
            folder = os.path.dirname(path)
            says = f"the folder {folder} can't be written to, where SQLite keeps its journal: chmod u+w {folder}"
            yield Finding("writable", "problem", says)
        else:
            yield Finding("writable", "ok", "the file is writable")
        busy = int(connection.exec_driver_sql("PRAGMA busy_timeout").scalar() or 0)
        if busy:
            yield Finding("settings", "ok", f"a writer waits {busy / 1000:g} s for the write lock (busy_timeout)")
        else:
            says = "busy_timeout is 0: a second writer fails immediately instead of waiting"
            yield Finding("settings", "warning", says)

    @contextlib.contextmanager
    def bounded(self, connection: Connection, seconds: float) -> Iterator[None]:
        with _BusyTimeout(connection) as busy_timeout:
            busy_timeout.set(seconds)
            yield


def _refuse_inherited(connection: Connection) -> None:
    """Refuse a file that this process has inherited open from its parent: its locks would keep nobody out."""
    if not forked() or connection.info.get(_OWN) == os.getpid():
        return
    path = _file_of(connection)
    if path and is_inherited(path):
        raise Unsupported(
            f"this process was forked while {path} was open, and SQLite counts the locks of a file by process, so that "
            "it can't lock it: dispose of the file's engines before the fork, or start processes by spawn or forkserver"
        )
    connection.info[_OWN] = os.getpid()


def _begins(connection: Connection) -> bool:
    """Return whether Python's driver begins transactions by itself, before the first write."""
    raw: Any = connection.connection.dbapi_connection
    return raw.isolation_level is not None and getattr(raw, "autocommit", None) is not True


async def _roll_back_and_stop(driver: Any) -> None:
    """Roll back an aiosqlite connection, interrupting the statement that it waits for, and close it."""
    try:
        with contextlib.suppress(Exception):
            rolled_back = asyncio.ensure_future(driver.rollback())
            await asyncio.wait({rolled_back}, timeout=_INTERRUPT_AFTER)
            if not rolled_back.done():
                await driver.interrupt()
            # SQLite interrupts the ROLLBACK, too, where a SELECT has rows left
            try:
                await rolled_back
            except Exception:
                await driver.rollback()
    finally:
        # since aiosqlite 0.22 close() would wait forever for a thread that another stop() has ended
        stopped = driver.stop() if hasattr(driver, "stop") else asyncio.ensure_future(driver.close())
    if stopped is not None:
        await stopped


def _begin_within(connection: Connection, wait: float | None, begin: Callable[[], T]) -> T:
    """Begin, and wait ``wait`` seconds at most if an event of the app executes BEGIN IMMEDIATE."""
    with _BusyTimeout(connection) as busy_timeout:
        if wait is not None and wait < math.inf:
            busy_timeout.set(wait)
        try:
            return begin()
        except BaseException:
            # otherwise SQLAlchemy assumes that the event is still running, and the next statement commits by itself
            begin_failed(connection)
            raise


class _BusyTimeout:
    """The connection's busy timeout, restored at the end. It is set without SQLAlchemy, which would begin for it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._was: int | None = None

    def __enter__(self) -> _BusyTimeout:
        return self

    def __exit__(self, *_: object) -> None:
        if self._was is not None and not self._connection.invalidated:
            try:
                _driver_rows(self._connection, f"PRAGMA busy_timeout = {self._was}")
            except BaseException as error:
                self._connection.invalidate(error)  # interrupted: the next user would hardly wait
                raise

    def get(self) -> float:
        """Return the app's setting, in seconds."""
        if self._was is None:
            ((self._was,),) = _driver_rows(self._connection, "PRAGMA busy_timeout")
        return (self._was or 0) / 1000

    def set(self, seconds: float) -> None:
        self.get()
        _driver_rows(self._connection, f"PRAGMA busy_timeout = {BACKEND.wait_value(seconds)}")


def _driver_rows(connection: Connection, sql: str) -> list[Any]:
    """Execute on the driver's own connection, which begins no transaction for a PRAGMA."""
    raw: Any = connection.connection.driver_connection
    if connection.dialect.is_async:
        return list(await_only(raw.execute_fetchall(sql)))  # one round trip to its thread instead of four
    cursor = raw.execute(sql)
    try:
        return list(cursor.fetchall())
    finally:
        cursor.close()


def _file_of(connection: Connection) -> str:
    """Return the path of the database's file; empty for one in memory."""
    files = {name: file for _, name, file in _driver_rows(connection, "PRAGMA database_list")}
    return files["main"] or ""


def take_write_lock(
    connection: Connection, take: Callable[[], T], wait: float | None = None, *, commits: bool = False
) -> T:
    """Take the write lock, outside of any transaction; try every few milliseconds.

    :param take: takes it, or raises SQLite's error if it isn't free, and then has begun nothing.
    :param wait: the longest wait in seconds; by default the connection's busy timeout.
    :param commits: the statement also commits: SQLite admits no new readers while it waits for the present ones, so
        the whole wait is left to SQLite.
    """
    with _BusyTimeout(connection) as busy_timeout:
        left = busy_timeout.get() if wait is None else wait
        until = time.monotonic() + left
        while True:
            busy_timeout.set(left if commits else min(left, _BUSY_WAIT))
            started = time.monotonic()
            try:
                return take()
            except Exception as error:
                now = time.monotonic()
                # SQLite doesn't wait at all if this connection has an unfinished SELECT: the holder's COMMIT may be
                # waiting for that
                refused = now - started < _BUSY_WAIT / 2
                if refused or now >= until or not _busy(error):
                    raise
            _pause(connection, min(until - now, random.uniform(_SHORTEST_PAUSE, _LONGEST_PAUSE)))
            left = max(0.0, until - time.monotonic())


def _pause(connection: Connection, seconds: float) -> None:
    """Sleep, synchronously or not."""
    if connection.dialect.is_async:
        await_only(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


def _busy(error: BaseException | None) -> bool:
    """Return whether a busy file caused the error, which an app's ``handle_error`` may have replaced."""
    if isinstance(error, MustRollback):
        return False
    while error is not None:
        if isinstance(error, DBAPIError) and isinstance(BACKEND.translate(error), LockTimeout):
            return True
        if "is locked" in str(error) and type(error).__name__ == "OperationalError":
            return True
        error = error.__cause__ or error.__context__
    return False


def _journal_writable(path: str, mode: str) -> bool:
    """Return whether a transaction can write its journal, a file in its folder that most modes create each time."""
    if mode in ("memory", "off"):
        return True
    kept = [f"{path}-wal", f"{path}-shm"] if mode == "wal" else [] if mode == "delete" else [f"{path}-journal"]
    if kept and all(os.access(each, os.W_OK) for each in kept):
        return True
    return os.access(os.path.dirname(path), os.W_OK | os.X_OK)


@compiles(PlusSeconds, "sqlite")
def _plus_seconds(element: PlusSeconds, compiler: Any, **kw: Any) -> str:
    instant, seconds = (compiler.process(part, **kw) for part in element.clauses)
    return f"strftime('%Y-%m-%d %H:%M:%f000', {instant}, round({seconds}, 3) || ' seconds')"


# Six digits of a second, as SQLAlchemy writes and reads them; SQLite has three
@compiles(NowAfterWait, "sqlite")
@compiles(StatementStart, "sqlite")
@compiles(Now, "sqlite")
def _now(element: Any, compiler: Any, **kw: Any) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"


@compiles(Epoch, "sqlite")
def _epoch(element: Epoch, compiler: Any, **kw: Any) -> str:
    return "CAST(strftime('%s', 'now') AS INTEGER)"


@compiles(InsertAbsent, "sqlite")
def _insert_absent(element: InsertAbsent, compiler: Any, **kw: Any) -> str:
    return f"{compiler.visit_insert(element, **kw)} ON CONFLICT DO NOTHING"


@compiles(SecondsAgo, "sqlite")
def _seconds_ago(element: SecondsAgo, compiler: Any, **kw: Any) -> str:
    (seconds,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"strftime('%Y-%m-%d %H:%M:%f000', 'now', ROUND(-({seconds}), 3) || ' seconds')"


@compiles(Elapsed, "sqlite")
def _elapsed(element: Elapsed, compiler: Any, **kw: Any) -> str:
    (instant,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"(CAST(strftime('%s', 'now') AS INTEGER) - CAST(strftime('%s', {instant}) AS INTEGER))"


def in_transaction(connection: Connection) -> bool:
    """Return whether SQLite is in a transaction; Python's driver begins one with the first write only."""
    raw: Any = connection.connection.driver_connection
    return bool(raw.in_transaction)


def _must_rollback() -> MustRollback:
    return MustRollback(
        "this SQLite transaction has read before it asked for a lock, and another one has written since, or is "
        "writing: roll back and lock first, or install sqlalchemy_locks.sqlite.begin_immediate(engine)"
    )


BACKEND = SQLite()

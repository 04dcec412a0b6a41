"""SQLite: every lock is the database's one write lock, held until the transaction ends; a waiter polls for it."""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

from sqlalchemy import Column, Insert, Table
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import CompileError, DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.util import await_only

from sqlalchemy_locks._forks import shares_one_connection
from sqlalchemy_locks.dialects.base import Backend, Meaning, Server, TransactionState, not_writable, sleep_for
from sqlalchemy_locks.dialects.findings import Finding, version_finding
from sqlalchemy_locks.errors import LockError, LockTimeout, MustRollback, Unsupported
from sqlalchemy_locks.sql import clock, elements

T = TypeVar("T")

_UNAVAILABLE = ("disk I/O error", "is full", "unable to open", "out of memory", "interrupted", "locking protocol")
_BUSY_SNAPSHOT = "SQLITE_BUSY_SNAPSHOT"
#: in the ``info`` of a connection: every transaction on it begins with BEGIN IMMEDIATE
BEGINS_IMMEDIATE = "sqlalchemy_locks_begins_immediate"
#: Seconds of one wait inside SQLite, and of the pause after it. SQLite's own pauses grow to 0.1 s, so that waiters
#: starve, and nothing can interrupt them.
_BUSY_WAIT, _SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.001, 0.005
#: transactions that have taken the write lock outside of a savepoint
_writers: WeakSet[RootTransaction] = WeakSet()


class SQLite(Backend):
    name = "SQLite"
    family = "sqlite"
    single_writer = True
    returning = True
    partial_indexes = True

    def translate(self, error: DBAPIError) -> LockError | None:
        message = str(error.orig)
        if getattr(error.orig, "sqlite_errorname", None) == _BUSY_SNAPSHOT:
            return _must_rollback()
        if "database is locked" in message or "database table is locked" in message:
            return LockTimeout("the database is locked by another writer (busy timeout)")
        if "readonly database" in message:
            return not_writable(self.name)
        return None

    def insert_unless_present(self, table: Table, key: Column[Any]) -> Insert:
        from sqlalchemy.dialects.sqlite import insert  # not loaded before it is needed

        return insert(table).on_conflict_do_nothing(index_elements=[key])

    def insert_or_lock(self, table: Table, key: Sequence[Column[Any]], touched: Column[Any] | None) -> Insert:
        from sqlalchemy.dialects.sqlite import insert  # not loaded before it is needed

        inserting, last = insert(table), key[-1]
        return inserting.on_conflict_do_update(
            index_elements=key, index_where=last.is_not(None), set_={last.name: inserting.excluded[last.key]}
        )

    def meaning(self, error: DBAPIError) -> Meaning | None:
        message = str(error.orig)
        if "no such table" in message:
            return "missing"
        if "is locked" in message:
            return "conflict"
        return "unavailable" if any(part in message for part in _UNAVAILABLE) else None

    @contextlib.contextmanager
    def committing(self, connection: Connection, wait: float | None) -> Iterator[None]:
        with contextlib.nullcontext() if wait is None else self.bounded(connection, wait):
            try:
                yield
            except DBAPIError as error:
                if not self.is_conflict(error):
                    raise
                raise LockTimeout(
                    "COMMIT waits for readers, and some were still reading at the end of the busy timeout (a process "
                    "that is stopped during a SELECT doesn't end it; in WAL mode, COMMIT doesn't wait for readers): "
                    "nothing is committed"
                ) from error
            # with autocommit=False, sqlite3 has already begun the next transaction
            if in_transaction(connection) and driver_autocommit(connection.connection.driver_connection) is not False:
                connection.invalidate()  # rollback() does nothing, either
                raise Unsupported(
                    "sqlite3's connect(autocommit=True) makes commit() and rollback() do nothing, so that what Locks "
                    "and sessions do is never committed: leave it out of connect_args, and use "
                    'isolation_level="AUTOCOMMIT" of SQLAlchemy where you need autocommit'
                )

    def ask_server(self, connection: Connection) -> Server:
        if connection.dialect.paramstyle.startswith("numeric"):
            raise Unsupported(
                f'paramstyle="{connection.dialect.paramstyle}": Python\'s sqlite3 takes these numbers for names, and '
                "binds values in the order in which the names first occur, so that a parameter gets the value of "
                "another: leave paramstyle out of create_engine"
            )
        if getattr(connection.dialect, "skip_autocommit_rollback", False):
            raise Unsupported("skip_autocommit_rollback=True leaves transactions open on SQLite: leave it out")
        query = connection.engine.url.query
        if "nolock" in query or query.get("vfs") == "unix-none":
            raise Unsupported("nolock and vfs=unix-none switch off SQLite's locks of a file: leave them out of its URL")
        return Server(lists_holders=False)

    def autocommit(self, connection: Connection) -> bool:
        return False  # Python's driver begins with the first write; see `transaction_begun`

    def transaction_begun(self, connection: Connection) -> bool:
        return in_transaction(connection)

    def ends_transaction(self, error: DBAPIError, connection: Any = None) -> bool:
        raw: Any = connection.connection.driver_connection
        # ON CONFLICT ROLLBACK or a full disk ends a transaction. In AUTOCOMMIT the app may have ended it by a textual
        # statement; in memory, another session that shares the connection may have done so.
        begins = raw.isolation_level is not None or bool(connection.dispatch.begin)
        return begins and not (raw.in_transaction or shares_one_connection(connection.engine.pool))

    def marker_lost(self, connection: Connection) -> bool:
        return not in_transaction(connection)  # a full disk or an I/O error ends it

    def transaction_state(self, connection: Connection) -> TransactionState:
        return "open" if in_transaction(connection) else "ended"  # the driver begins another one with the next write

    def begin(
        self, connection: Connection, server: Server, wait: float | None = None, *, writes: bool = True
    ) -> RootTransaction:
        with self._begin_bounded(connection, wait):
            # a listener of the app's may have begun one
            transaction = connection.get_transaction() or connection.begin()
        if not in_transaction(connection):
            if writes:
                poll_for_write_lock(connection, lambda: connection.exec_driver_sql("BEGIN IMMEDIATE"), wait)
            else:
                connection.exec_driver_sql("BEGIN")
        return transaction

    def begin_before_write(self, connection: Connection, wait: float | None) -> None:
        raw: Any = connection.connection.driver_connection
        # aiosqlite doesn't tell its autocommit
        foreign = raw.in_transaction and not (connection.in_transaction() or connection.info.get(BEGINS_IMMEDIATE))
        if (foreign or driver_autocommit(raw) is False) and raw.isolation_level is None:
            raise Unsupported(
                "sqlite3's connect(autocommit=False) begins a transaction that SQLAlchemy's AUTOCOMMIT never commits: "
                "use one of the two"
            )
        if not connection.in_transaction():
            if connection.dispatch.begin:
                self._begin_by_event(connection, wait)
        elif connection.in_nested_transaction() and not (
            connection.get_transaction() in _writers or connection.info.get(BEGINS_IMMEDIATE)
        ):
            raise Unsupported(
                "inside begin_nested(), whose end may commit and release the lock on SQLite (Python's driver sends no "
                "BEGIN before a savepoint): lock before begin_nested(), or install "
                "sqlalchemy_locks.sqlite.begin_immediate(engine)"
            )

    def _begin_by_event(self, connection: Connection, wait: float | None) -> None:
        """Let SQLAlchemy begin, and call the app's ``begin`` event, before the operation's own statement.

        That statement is tried repeatedly, but SQLAlchemy doesn't call the event again after it has failed: this and
        all later statements of the connection would be executed in autocommit. So the connection is then closed.
        """
        try:
            with self._begin_bounded(connection, wait):
                connection.exec_driver_sql("SELECT 1")
        except BaseException:
            if not connection.in_transaction():
                connection.close()
            raise

    def _begin_bounded(self, connection: Connection, wait: float | None) -> contextlib.AbstractContextManager[None]:
        """Limit the wait of an event of the app's that executes BEGIN IMMEDIATE."""
        return contextlib.nullcontext() if wait is None or wait == math.inf else self.bounded(connection, wait)

    def take_write_lock(self, connection: Connection, take: Callable[[], T]) -> T:
        if in_transaction(connection) and connection.get_transaction() in _writers:
            return take()
        return poll_for_write_lock(connection, take)

    def findings(self, connection: Connection) -> Iterator[Finding]:
        try:
            self.ask_server(connection)
        except Unsupported as refusal:
            yield Finding("settings", "problem", str(refusal))
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


class _BusyTimeout:
    """The connection's busy timeout, restored at the end. Set without SQLAlchemy, which would begin a transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        ((self.milliseconds,),) = _driver_rows(connection, "PRAGMA busy_timeout")

    def __enter__(self) -> _BusyTimeout:
        return self

    def set(self, seconds: float) -> None:
        _driver_rows(self._connection, f"PRAGMA busy_timeout = {math.ceil(min(seconds * 1000, 2**31 - 1))}")

    def __exit__(self, *_: object) -> None:
        if not self._connection.invalidated:
            try:
                _driver_rows(self._connection, f"PRAGMA busy_timeout = {self.milliseconds}")
            except BaseException as error:
                self._connection.invalidate(error)  # its busy timeout is not the app's any more
                raise


def _driver_rows(connection: Connection, sql: str) -> list[Any]:
    """Execute on the driver's own connection, which begins no transaction for a PRAGMA."""
    raw: Any = connection.connection.driver_connection
    if connection.dialect.is_async:
        return list(await_only(raw.execute_fetchall(sql)))
    return list(raw.execute(sql).fetchall())


def poll_for_write_lock(connection: Connection, take: Callable[[], T], wait: float | None = None) -> T:
    """Take the write lock; poll for it with random pauses.

    :param take: takes it, or raises SQLite's error if it isn't free.
    :param wait: the longest wait in seconds; by default the connection's busy timeout.
    :raises MustRollback: when SQLite doesn't let this connection wait: it has read, and its COMMIT would conflict with
        the holder's.
    """
    with _BusyTimeout(connection) as busy_timeout:
        limit = busy_timeout.milliseconds / 1000 if wait is None else wait
        deadline = time.monotonic() + limit
        while True:
            busy_timeout.set(min(limit, _BUSY_WAIT))
            started = time.monotonic()
            try:
                value = take()
                break
            except Exception as error:
                now = time.monotonic()
                if not _busy(error):
                    raise
                if limit > _BUSY_WAIT and now - started < _BUSY_WAIT / 2:
                    raise _must_rollback() from error
                if now >= deadline:
                    raise
            sleep_for(connection.dialect)(min(deadline - now, random.uniform(_SHORTEST_PAUSE, _LONGEST_PAUSE)))
            limit = max(0.0, deadline - time.monotonic())
    transaction = connection.get_transaction()
    if transaction is not None and in_transaction(connection) and not connection.in_nested_transaction():
        _writers.add(transaction)
    return value


def _busy(error: Exception) -> bool:
    """Return whether a locked file caused the error."""
    cause = getattr(error, "orig", None)
    return "database is locked" in str(cause) and getattr(cause, "sqlite_errorname", None) != _BUSY_SNAPSHOT


def _journal_writable(path: str, mode: str) -> bool:
    """Return whether a transaction can write its journal, a file in its folder that most modes create each time."""
    if mode in ("memory", "off"):
        return True
    files = [f"{path}-wal", f"{path}-shm"] if mode == "wal" else [] if mode == "delete" else [f"{path}-journal"]
    if files and all(os.access(each, os.W_OK) for each in files):
        return True
    return os.access(os.path.dirname(path), os.W_OK | os.X_OK)


@compiles(clock.PlusSeconds, "sqlite")
def _plus_seconds(element: clock.PlusSeconds, compiler: Any, **kw: Any) -> str:
    instant, seconds = (compiler.process(part, **kw) for part in element.clauses)
    return f"strftime('%Y-%m-%d %H:%M:%f000', {instant}, round({seconds}, 3) || ' seconds')"


# Six digits of a second, as SQLAlchemy writes and reads them; SQLite has three
@compiles(clock.NowAfterWait, "sqlite")
@compiles(clock.StatementStart, "sqlite")
@compiles(clock.Now, "sqlite")
def _now(element: Any, compiler: Any, **kw: Any) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"


@compiles(clock.Epoch, "sqlite")
def _epoch(element: clock.Epoch, compiler: Any, **kw: Any) -> str:
    return "CAST(strftime('%s', 'now') AS INTEGER)"


@compiles(elements.LimitIdle, "sqlite")
def _limit_idle(element: elements.LimitIdle, compiler: Any, **kw: Any) -> str:
    return "NULL"


@compiles(elements.InsertAbsent, "sqlite")
def _insert_absent(element: elements.InsertAbsent, compiler: Any, **kw: Any) -> str:
    return f"{compiler.visit_insert(element, **kw)} ON CONFLICT DO NOTHING"


@compiles(clock.SecondsAgo, "sqlite")
def _seconds_ago(element: clock.SecondsAgo, compiler: Any, **kw: Any) -> str:
    (seconds,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"strftime('%Y-%m-%d %H:%M:%f000', 'now', ROUND(-({seconds}), 3) || ' seconds')"


@compiles(clock.Elapsed, "sqlite")
def _elapsed(element: clock.Elapsed, compiler: Any, **kw: Any) -> str:
    (instant,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"(CAST(strftime('%s', 'now') AS INTEGER) - CAST(strftime('%s', {instant}) AS INTEGER))"


@compiles(elements.HeldKeys, "sqlite")
def _held_keys(element: elements.HeldKeys, compiler: Any, **kw: Any) -> str:
    raise CompileError(f"{elements.HOLDERS_UNAVAILABLE} on SQLite, where no table of the server lists them")


@compiles(elements.SessionLock, "sqlite")
@compiles(elements.SessionUnlock, "sqlite")
def _session_lock(element: Any, compiler: Any, **kw: Any) -> str:
    name = "session_exclusive" if isinstance(element, elements.SessionLock) else "session_unlock"
    raise CompileError(
        f"lock.{name} locks a session of the server, and SQLite has none: use lock.exclusive, which ends with the "
        "transaction"
    )


def in_transaction(connection: Connection) -> bool:
    """Return whether SQLite is in a transaction; Python's driver begins one with the first write only."""
    raw: Any = connection.connection.driver_connection
    return bool(raw.in_transaction)


def driver_autocommit(driver: Any) -> bool | None:
    """Return the ``autocommit`` of a connection of sqlite3 that is ``True`` or ``False``, from Python 3.12 on."""
    autocommit = getattr(driver, "autocommit", None)
    return autocommit if isinstance(autocommit, bool) else None


def _must_rollback() -> MustRollback:
    return MustRollback(
        "this SQLite transaction has read before it asked for a lock, and another one has written since, or is "
        "writing: roll back and lock first, or install sqlalchemy_locks.sqlite.begin_immediate(engine)"
    )


BACKEND = SQLite()

"""SQLite: any lock takes the database's one write lock, and holds it until the transaction ends."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles

from ..clock import Ago, Began, Elapsed, Epoch, Fresh, Later, Now
from ..elements import InsertAbsent
from ..errors import LockError, LockTimeout, MustRollback
from .base import Engine, nothing

_BUSY_SNAPSHOT = "SQLITE_BUSY_SNAPSHOT"


class SQLite(Engine):
    name = "SQLite"
    locking = "file"
    untold = "whose one lock is the file's, which keeps no list of who has it"
    explain = "EXPLAIN QUERY PLAN"
    update_returning = True

    def translate(self, error: DBAPIError) -> LockError | None:
        message = str(error.orig)
        if getattr(error.orig, "sqlite_errorname", None) == _BUSY_SNAPSHOT:
            return must_rollback()
        if "database is locked" in message or "database table is locked" in message:
            return LockTimeout("the database was not free in time (busy timeout): another transaction writes")
        if "readonly database" in message:
            return self.not_writable()
        return None

    def missing(self, error: DBAPIError) -> bool:
        return "no such table" in str(error.orig)

    def transient(self, error: DBAPIError) -> bool:
        return "is locked" in str(error.orig)

    def autocommit(self, connection: Connection) -> bool:
        return False  # Python's driver begins with the first write; see `began`

    def began(self, connection: Connection) -> bool:
        return in_transaction(connection)

    def unmarked(self, connection: Connection) -> bool:
        return not in_transaction(connection)  # a full disk, or an I/O error, rolls back by itself

    def judging(self, connection: Connection) -> contextlib.AbstractContextManager[None]:
        return judged(connection)

    def stops_greenlets(self, connection: Connection) -> str | None:
        return "use threads, or another engine"

    def wait_value(self, seconds: float) -> int:
        return math.ceil(min(seconds * 1000, 2**31 - 1))

    def begin(self, connection: Connection, wait: float | None = None) -> tuple[RootTransaction, Callable[[], None]]:
        # the app's own event may begin with BEGIN IMMEDIATE, which waits; a PRAGMA through SQLAlchemy would begin first
        raw: Any = connection.connection.dbapi_connection
        cursor, was = raw.cursor(), None
        try:
            if wait is not None:
                cursor.execute("PRAGMA busy_timeout")
                (was,) = cursor.fetchone()
                cursor.execute(f"PRAGMA busy_timeout = {self.wait_value(wait)}")
            try:
                transaction = connection.begin()
            finally:
                if wait is not None:
                    cursor.execute(f"PRAGMA busy_timeout = {was}")
        finally:
            cursor.close()
        if not in_transaction(connection):
            connection.exec_driver_sql("BEGIN")
        return transaction, nothing

    @contextlib.contextmanager
    def bounded(self, connection: Connection, seconds: float) -> Iterator[None]:
        was = connection.exec_driver_sql("PRAGMA busy_timeout").scalar()
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {self.wait_value(seconds)}")
        try:
            yield
        finally:
            if not connection.invalidated:
                connection.exec_driver_sql(f"PRAGMA busy_timeout = {was}")


@compiles(Later, "sqlite")
def _later(element: Later, compiler: Any, **kw: Any) -> str:
    instant, seconds = (compiler.process(part, **kw) for part in element.clauses)
    return f"strftime('%Y-%m-%d %H:%M:%f000', {instant}, round({seconds}, 3) || ' seconds')"


# Six digits of a second, as SQLAlchemy writes and reads them; SQLite has three
@compiles(Fresh, "sqlite")
@compiles(Began, "sqlite")
@compiles(Now, "sqlite")
def _now(element: Any, compiler: Any, **kw: Any) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"


@compiles(Epoch, "sqlite")
def _epoch(element: Epoch, compiler: Any, **kw: Any) -> str:
    return "CAST(strftime('%s', 'now') AS INTEGER)"


@compiles(InsertAbsent, "sqlite")
def _insert_absent(element: InsertAbsent, compiler: Any, **kw: Any) -> str:
    return f"{compiler.visit_insert(element, **kw)} ON CONFLICT DO NOTHING"


@compiles(Ago, "sqlite")
def _ago(element: Ago, compiler: Any, **kw: Any) -> str:
    (seconds,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"strftime('%Y-%m-%d %H:%M:%f000', 'now', ROUND(-({seconds}), 3) || ' seconds')"


@compiles(Elapsed, "sqlite")
def _elapsed(element: Elapsed, compiler: Any, **kw: Any) -> str:
    (instant,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"(CAST(strftime('%s', 'now') AS INTEGER) - CAST(strftime('%s', {instant}) AS INTEGER))"


def in_transaction(connection: Connection) -> bool:
    """Whether SQLite itself is in a transaction; Python's driver begins one only when it must."""
    raw: Any = connection.connection.driver_connection
    return bool(raw.in_transaction)


def must_rollback() -> MustRollback:
    return MustRollback(
        "this SQLite transaction has read before it asked for a lock, and somebody has written since or is "
        "writing: roll back and lock first, or install sqlalchemy_locks.sqlite.begin_immediate(engine)"
    )


@contextlib.contextmanager
def judged(connection: Connection) -> Iterator[None]:
    """Tell "not free in time" from "can never become free in this transaction".

    A transaction that has read waits for nobody: SQLite answers BUSY at once, whatever the busy timeout, since
    waiting could not help. An answer well before the timeout, inside a transaction, is therefore that case.
    """
    began = in_transaction(connection)
    timeout = float(connection.exec_driver_sql("PRAGMA busy_timeout").scalar() or 0) / 1000
    asked = time.monotonic()
    try:
        yield
    except LockTimeout as error:
        if began and timeout and time.monotonic() - asked < timeout / 2:
            raise must_rollback() from error
        raise


ENGINE = SQLite()

"""PostgreSQL: locks are the functions that the migration installs, over the server's own advisory locks."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from sqlalchemy import BigInteger, Column, Insert, Table, Text, bindparam, func, literal, select, text
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.dialects import postgresql_compiler  # noqa: F401  (registers how they are spelt)
from sqlalchemy_locks.dialects.base import IDLE, Backend, closed, driver_calls
from sqlalchemy_locks.errors import LockError, LockTimeout, NotWritable, StaleSnapshot, Unsupported
from sqlalchemy_locks.sql.elements import HeldKeys, LockFunction, Void

_WAIT = text("SELECT current_setting('lock_timeout'), set_config('lock_timeout', :wait, :local)")
_RESTORE = text("SELECT set_config('lock_timeout', :was, :local)")
_PLANNER = text("SELECT current_setting('enable_seqscan'), current_setting('enable_sort')")
_PLAN = text("SELECT set_config('enable_seqscan', :walks, :local), set_config('enable_sort', :sorts, :local)")
_BRIEF = text("SELECT set_config('statement_timeout', '1s', true)")
# the settings first, since they are for the wait; a postgresql:// URL may lead to YugabyteDB
_JOIN = text(
    "SELECT CASE WHEN strpos(version(), '-YB-') = 0 THEN concat(set_config('lock_timeout', :wait, true), "
    f"set_config('idle_in_transaction_session_timeout', '{IDLE}s', true), "
    "CAST(pg_advisory_xact_lock(:key) AS TEXT)) END"
).bindparams(bindparam("key", type_=BigInteger()))

# YugabyteDB: its row locks heed no lock_timeout, and no limit of a statement is that of the statement that sets it
_LIMIT = text(
    "SELECT current_setting('statement_timeout'), set_config('statement_timeout', :wait, true), "
    f"set_config('idle_in_transaction_session_timeout', '{IDLE}s', true)"
)
_JOIN_BY_ROW = select(
    LockFunction("exclusive", bindparam("key", type_=BigInteger()), literal(True), type_=Void()),
    func.set_config("statement_timeout", bindparam("was", type_=Text()), True),
)

_IDLE, _IN_TRANSACTION, _IN_ERROR = 0, 2, 3  # libpq's PQTRANS_IDLE, PQTRANS_INTRANS, PQTRANS_INERROR
_POOLED = "_sqlalchemy_locks_pooled"


class PostgreSQL(Backend):
    name = "PostgreSQL"
    schemas = True
    one_trip = True
    listens = True
    lines = True
    keeps_passed = True
    explain = "EXPLAIN (FORMAT JSON)"
    update_returning = True
    writable_ctes = True
    partial_indexes = True
    arrays = True
    refuses_stale = True
    misses_replaced = True
    held_keys: ClassVar[type[HeldKeys] | None] = HeldKeys
    locking = "functions"
    calls_functions = True
    release_session_locks = "SELECT pg_advisory_unlock_all()"

    def translate(self, error: DBAPIError) -> LockError | None:
        code = _sqlstate(error)
        if code == "55P03":
            return LockTimeout("the lock was not free in time (lock_timeout)")
        if code in ("SL001", "SL002"):
            return NotWritable(_sentence(error))
        if code == "SL003":
            return StaleSnapshot(_sentence(error))
        if code == "25006":
            return self.not_writable()
        return None

    def insert_unless_present(self, table: Table, key: Column[Any]) -> Insert:
        from sqlalchemy.dialects.postgresql import insert  # not loaded before it is needed

        return insert(table).on_conflict_do_nothing(index_elements=[key])

    def missing(self, error: DBAPIError) -> bool:
        return _sqlstate(error) in ("42883", "42P01", "3F000")

    def transient(self, error: DBAPIError) -> bool:
        # "aborted while waiting for locks": YugabyteDB before 2.25 says so of a deadlock, without a SQLSTATE
        return _sqlstate(error) in ("40001", "40P01") or "aborted while waiting for locks" in str(error.orig)

    def refuse_zoneless(self, what: str, columns: Iterable[Column[Any]]) -> None:
        from sqlalchemy.dialects.postgresql import dialect  # not by whoever imports this library

        spelling: Any = dialect()  # type: ignore[no-untyped-call]
        for column in columns:
            if "WITHOUT TIME ZONE" in column.type.compile(dialect=spelling):
                raise Unsupported(
                    f"{what}: on {self.name} {column} must be DateTime(timezone=True): a timestamp without time zone "
                    "is another instant in a session with another TimeZone"
                )

    def autocommit(self, connection: Connection) -> bool:
        autocommit: bool = _raw(connection).autocommit
        return autocommit

    def begin(self, connection: Connection, wait: float | None = None) -> tuple[RootTransaction, Callable[[], None]]:
        # The level is the driver's own attribute, sent with its BEGIN: no round trip, and, unlike the
        # execution option, put back to what the app's connect event had set rather than to a default.
        raw = _raw(connection)
        with driver_calls(connection):
            autocommit = raw.autocommit
            source = raw if hasattr(raw, "isolation_level") else raw.driver_connection
            level = source.isolation_level
            connection.dialect.set_isolation_level(raw, "READ COMMITTED")

        def restore() -> None:
            with driver_calls(connection):
                raw.set_isolation_level(level)
                raw.autocommit = autocommit

        try:
            return connection.begin(), restore
        except BaseException:
            if not connection.invalidated:
                restore()
            raise

    def alone(self, connection: Connection, bounded: bool) -> bool:
        # Without a transaction around them, two statements may come to two servers of a pooler's; so may the two
        # halves of one of asyncpg's, which prepares and executes apart.
        if not bounded and connection.dialect.driver != "asyncpg":
            return True
        known: dict[str, Any] = connection.dialect.__dict__
        if _POOLED not in known:
            transaction, restore = self.begin(connection)
            try:
                known[_POOLED] = self.pooled(connection)
            finally:
                transaction.rollback()
                restore()
        return not known[_POOLED]

    def pooled(self, connection: Connection) -> bool:
        # A pooler tells whoever connects of a server process of its own invention. It doesn't tell in which mode it is.
        if connection.get_execution_options().get("locks_session_pooling"):
            return False
        known = connection.info
        if _POOLED not in known:
            told = process_told(connection.connection.driver_connection)
            known[_POOLED] = told is not None and told != connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        return bool(known[_POOLED])

    def autocommitted(self, connection: Connection) -> _Autocommitted:
        return _Autocommitted(connection)

    def unmarked(self, connection: Connection) -> bool:
        # COMMIT of a failed transaction is a ROLLBACK, and no error: who passed over the first would never know.
        # Nor would who has sent a COMMIT of his own
        driver: Any = connection.connection.driver_connection
        info: Any = getattr(driver, "info", None)
        if info is not None:
            return bool(info.transaction_status != _IN_TRANSACTION)
        if not driver.is_in_transaction():
            return True
        try:
            connection.exec_driver_sql("SELECT 1")
        except DBAPIError as error:
            if error.connection_invalidated:
                raise
            return True
        return False

    def ended(self, connection: Connection) -> bool:
        # psycopg begins another transaction by itself where one was ended by a COMMIT that it doesn't know of
        driver: Any = connection.connection.driver_connection
        info: Any = getattr(driver, "info", None)
        return info.transaction_status == _IDLE if info is not None else not driver.is_in_transaction()

    def aborted(self, connection: Connection) -> bool:
        info: Any = getattr(connection.connection.driver_connection, "info", None)
        return info is not None and bool(info.transaction_status == _IN_ERROR)

    def heed(self, connection: Connection, error: Exception) -> bool:
        # asyncpg keeps to itself whether its transaction is aborted, and not every error of its aborts one
        if hasattr(connection.connection.driver_connection, "info"):
            return False
        raw: Any = connection.connection.dbapi_connection
        cursor = raw.cursor()
        try:
            cursor.execute("SELECT 1")
        except Exception as refused:
            return getattr(refused, "sqlstate", None) == "25P02"
        finally:
            cursor.close()
        return False

    def heard(self, driver: Any) -> list[str]:
        if hasattr(driver, "pgconn"):  # psycopg, of either kind
            driver.pgconn.consume_input()
            told = []
            while note := driver.pgconn.notifies():
                told.append(note.extra.decode())
            return told
        driver.poll()
        told = [note.payload for note in driver.notifies]
        driver.notifies.clear()
        return told

    def hung_up(self, connection: Connection) -> bool:
        driver: Any = connection.connection.driver_connection
        if hasattr(driver, "is_closed"):  # asyncpg reads all the time, and knows
            return bool(driver.is_closed())
        return closed(connection)

    @contextlib.contextmanager
    def brief(self, connection: Connection) -> Iterator[None]:
        connection.execute(_BRIEF)  # ends with the transaction
        yield

    def read_plan(self, rows: Any, table: Table, search: str, ordered: bool) -> tuple[list[str], list[str]]:
        (document,) = rows[0].values()
        if isinstance(document, str):
            document = json.loads(document)
        plan, problems = [], []
        for depth, node, searching in _plan_nodes(document[0]["Plan"], search):
            name = node["Node Type"]
            on = " ".join(f"{node[key]}" for key in ("Index Name", "Relation Name") if key in node)
            plan.append(f"{'  ' * depth}{name}{f' on {on}' if on else ''}")
            if not searching:
                continue  # how the rows that were found are changed: by their key, or all of a small table at once
            if name == "Seq Scan" and node["Relation Name"] == table.name:
                problems.append(f"the whole of {table} is scanned")
            if name in ("Sort", "Incremental Sort"):
                problems.append("all candidates are sorted before the first is captured")
        return plan, problems

    @contextlib.contextmanager
    def by_index(self, connection: Connection) -> Iterator[bool]:
        local = not self.autocommit(connection)
        if not local and self.pooled(connection):
            yield False  # two statements may come to two servers, and a setting to somebody else
            return
        walks, sorts = connection.execute(_PLANNER).one()
        connection.execute(_PLAN, {"walks": "off", "sorts": "off", "local": local})
        try:
            yield True
        finally:
            connection.execute(_PLAN, {"walks": walks, "sorts": sorts, "local": local})

    def blind(self, error: DBAPIError) -> str | None:
        if _sqlstate(error) != "42703":  # where the view would be, there is a table of keys
            return None
        return "where the table bodies are installed: their locks are row locks, which no table of the server's lists"

    def join_line(self, connection: Connection, key: int, seconds: float) -> bool:
        # the transaction's own: it ends with the transaction, and so do the settings
        if connection.execute(_JOIN, {"key": key, "wait": self.wait_value(seconds)}).scalar() is None:
            join_by_row(connection, key, self.wait_value(seconds))
        return True

    def interrupted(self, error: DBAPIError) -> bool:
        return _sqlstate(error) == "57014"

    def wait_value(self, seconds: float) -> str:
        return f"{max(1, math.ceil(min(seconds * 1000, 2**31 - 1)))}ms"

    @contextlib.contextmanager
    def bounded(self, connection: Connection, seconds: float) -> Iterator[None]:
        local = not self.autocommit(connection)
        if not local and self.pooled(connection):
            raise Unsupported(
                f"a longest wait (locks_wait) on a {self.name} connection in autocommit is a setting of the session, "
                "and the pooler in between would give it to somebody else: execute it in a transaction, or use Locks"
            )
        was = connection.execute(_WAIT, {"wait": self.wait_value(seconds), "local": local}).scalar()
        try:
            yield
        except BaseException:
            # a transaction that failed takes the setting, which was its own, with it
            if not local and not connection.invalidated:
                connection.execute(_RESTORE, {"was": was, "local": local})
            raise
        connection.execute(_RESTORE, {"was": was, "local": local})


def join_by_row(connection: Connection, key: int, wait: str) -> None:
    """YugabyteDB: wait in the line for the row of a key, whoever is in front of which has it locked."""
    was = connection.execute(_LIMIT, {"wait": wait}).scalar()
    connection.execute(_JOIN_BY_ROW, {"key": key, "was": was})


class _Autocommitted:
    """The driver commits by itself inside; by an attribute of its own, which costs no round trip."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._raw: Any = None

    def __enter__(self) -> None:
        raw = _raw(self._connection)
        if raw.autocommit:
            return
        with driver_calls(self._connection):  # psycopg2 sends the engine's isolation level along
            try:
                raw.autocommit = True
            except Exception:
                raw.rollback()  # the app's connect event has run something, and left its transaction open
                raw.autocommit = True
        self._raw = raw

    def __exit__(self, *_: object) -> None:
        try:
            if self._connection.in_transaction():
                self._connection.rollback()  # SQLAlchemy's own view; nothing is open on the server
            if self._raw is not None and not self._connection.invalidated:
                self._raw.autocommit = False
        except BaseException as error:
            # the answer is there, or an error that says more than this one
            self._connection.invalidate(error)
            if not isinstance(error, Exception):
                raise


def process_told(driver: Any) -> int | None:
    """The server process that a driver's connection was told of when it connected."""
    if hasattr(driver, "get_server_pid"):  # asyncpg
        return int(driver.get_server_pid())
    pid = getattr(getattr(driver, "info", None), "backend_pid", None)
    return None if pid is None else int(pid)


def _sqlstate(error: DBAPIError) -> str | None:
    origin: Any = error.orig
    return getattr(origin, "sqlstate", None) or getattr(origin, "pgcode", None)


def _raw(connection: Connection) -> Any:
    return connection.connection.dbapi_connection


def _sentence(error: DBAPIError) -> str:
    origin: Any = error.orig
    diag = getattr(origin, "diag", None)
    primary = getattr(diag, "message_primary", None)
    text_ = str(primary or origin)
    return text_.split(": ", 1)[1] if text_.startswith("<class") else text_


def _plan_nodes(node: Any, search: str, depth: int = 0, searching: bool = False) -> Iterator[tuple[int, Any, bool]]:
    """Yield each step with its depth, and whether it is part of the search."""
    searching = searching or node.get("Subplan Name") == f"CTE {search}"
    yield depth, node, searching
    for below in node.get("Plans", ()):
        yield from _plan_nodes(below, search, depth + 1, searching)


BACKEND = PostgreSQL()

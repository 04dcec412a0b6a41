"""PostgreSQL: locks are functions that the migration installs, over the server's advisory locks.

Their bodies are in ``alembic_templates/sql/``. A timeout becomes ``lock_timeout`` in ``PostgreSQL.bounded``, or inside
the functions, from their argument ``wait_ms``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from sqlalchemy import BigInteger, Column, Insert, Table, bindparam, text
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import milliseconds
from sqlalchemy_locks.dialects import postgresql_compiler  # noqa: F401  (registers compilers)
from sqlalchemy_locks.dialects.base import (
    COMMITTED,
    IDLE,
    Backend,
    DriverTimeout,
    Meaning,
    Server,
    ServerQueues,
    T,
    TransactionState,
    not_writable,
    set_level,
)
from sqlalchemy_locks.dialects.findings import Finding, idle_finding, version_finding
from sqlalchemy_locks.errors import LockError, LockTimeout, NotWritable, OutcomeUnknown, StaleSnapshot, Unsupported

_WAIT = text("SELECT current_setting(:setting), set_config(:setting, :wait, :local)")
_RESTORE = text("SELECT set_config(:setting, :was, :local)")
_JOIN = text(
    f"SELECT set_config('idle_in_transaction_session_timeout', '{IDLE}s', true), "
    "CAST(pg_advisory_xact_lock(:key) AS TEXT)"
).bindparams(bindparam("key", type_=BigInteger()))

# held to the end of the transaction; older releases of YugabyteDB lack such locks
_INSTALL_LOCK = text(
    "SELECT CASE WHEN strpos(version(), '-YB-') = 0 THEN CAST(pg_advisory_xact_lock(:key) AS TEXT) END"
).bindparams(bindparam("key", type_=BigInteger()))

_SERVER = text(
    "SELECT version() AS version, pg_backend_pid() AS pid, current_setting('transaction_isolation') AS level, "
    "current_setting('default_transaction_isolation') AS default_level, current_setting('DateStyle') AS date_style, "
    "current_setting('server_version') AS server_version, "
    # settings of YugabyteDB
    "coalesce(current_setting('yb_enable_advisory_locks', true), 'off') = 'on' AND coalesce("
    "current_setting('yb_silence_advisory_locks_not_supported_error', true), 'off') = 'off' AS advisory_locks, "
    "coalesce(current_setting('yb_enable_listen_notify', true), 'off') = 'on' AS notifies, "
    "(SELECT min(extname) FROM pg_extension WHERE extname IN ('bdr', 'citus', 'pgactive', 'spock')) AS extension, "
    # not to_regclass(), which needs the USAGE of a schema
    "(SELECT count(*) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace "
    "WHERE n.nspname = 'sys' AND c.relname IN ('jobs', 'iam_pg_role_mappings')) = 2 AS dsql"
)
_CITUS_WORKERS = text("SELECT EXISTS (SELECT FROM pg_dist_node WHERE hasmetadata AND groupid <> 0)")
_ONE_NODE = "connect everything that uses locks to one node, and set the engine's execution option locks_one_node=True"
_LAST_WRITE_WINS = (
    "PostgreSQL with the extension {} has several nodes that accept writes, each of which grants every lock, and keeps "
    f"the last one of two conflicting updates: {_ONE_NODE}"
)
_CITUS = (
    "Citus with metadata on its workers takes locks on every node, and an advisory lock is one node's own, so that two "
    f"nodes grant it: {_ONE_NODE}, that of the coordinator"
)
_NO_ADVISORY_LOCKS = (
    "YugabyteDB has no advisory locks without yb_enable_advisory_locks (from 2025.1 on), and may pretend to have them "
    "with yb_silence_advisory_locks_not_supported_error: turn the first on and the second off"
)
_LIMITLESS = (
    "Aurora PostgreSQL Limitless Database has several routers, one of which each connection gets, and an advisory lock "
    "is one router's own, so that two routers grant it: use Aurora PostgreSQL with a writer instance, or Redis"
)
_DSQL = (
    "Aurora DSQL has no locks: FOR UPDATE doesn't wait, and of two holders one fails at its COMMIT, after both have "
    "worked: use Aurora PostgreSQL with a writer instance, or Redis"
)
_DSQL_HOST = re.compile(r"\.dsql[.-]")
_IN_TRANSACTION = 2  # libpq's PQTRANS_INTRANS
#: by libpq's PQTRANS_IDLE, PQTRANS_INERROR and PQTRANS_UNKNOWN
_STATES: dict[int, TransactionState] = {0: "ended", 3: "failed", 4: "closed"}
#: PostgreSQL's error for a prepared statement whose columns have got other types since
_PLAN_CHANGED = "cached plan must not change result type"
_READ_COMMITTED = "read committed"
#: the SQLSTATE of a level that is set after the first query
_IN_PROGRESS = "25001"
#: by SQLSTATE
_MEANINGS: dict[str | None, Meaning] = {
    "40001": "conflict",
    "40P01": "conflict",
    "42501": "denied",
    "42703": "no column",
    "42883": "missing",
    "42P01": "missing",
    "3F000": "missing",
}
#: Classes of SQLSTATEs: connections, resources, the state of an object, interventions of operators, the system, and
#: internal errors, as which YugabyteDB reports many errors that pass.
_UNAVAILABLE = ("08", "53", "55", "57", "58", "XX")
#: Texts of errors after which the transaction may succeed when it is run again. The first is YugabyteDB's for a
#: deadlock, without a SQLSTATE, before 2.25. The others are psycopg's and asyncpg's for a statement that was prepared
#: before the schema changed, and is prepared again.
_CONFLICTS = ("aborted while waiting for locks", _PLAN_CHANGED, "cached statement plan is invalid")
_POOLER = (
    "a pooler such as PgBouncer is between here and the server. Locks that end with their transaction work in "
    "transaction mode, too; session locks (session_exclusive) are refused, and workers poll, unless the engine's "
    "execution option locks_session_pooling=True says that it is in session mode; tell drivers that prepare statements "
    "(psycopg, asyncpg) not to, unless the pooler keeps track of them (PgBouncer 1.21, by max_prepared_statements); in "
    "statement mode no lock works"
)


class PostgreSQL(Backend):
    name = "PostgreSQL"
    family = "postgresql"
    schemas = True
    partial_ready_index = True
    supports_listen = True
    server_queues: ClassVar[ServerQueues | None] = ServerQueues(0)
    returning = True
    writable_ctes = True
    #: the setting that limits the waits of the statements after it, and its shortest useful value in seconds
    wait_setting: ClassVar[str] = "lock_timeout"
    shortest_wait: ClassVar[float] = 0
    partial_indexes = True

    def translate(self, error: DBAPIError) -> LockError | None:
        code = _sqlstate(error)
        if code == "55P03":
            return LockTimeout("the lock was not free in time (lock_timeout)")
        if code == "57014":
            return LockTimeout(
                "the server's time limit of a statement (statement_timeout), or another session, ended the statement"
            )
        if code in ("SL001", "SL002"):
            return NotWritable(_sentence(error))
        if code == "SL003":
            return StaleSnapshot(_sentence(error))
        if code == "SL004":
            return Unsupported(_sentence(error))
        if code == "25006":
            return not_writable(self.name)
        return None

    def insert_unless_present(self, table: Table, key: Column[Any]) -> Insert:
        from sqlalchemy.dialects.postgresql import insert  # not loaded before it is needed

        return insert(table).on_conflict_do_nothing(index_elements=[key])

    def insert_or_lock(self, table: Table, key: Sequence[Column[Any]], touched: Column[Any] | None) -> Insert:
        from sqlalchemy.dialects.postgresql import insert  # not loaded before it is needed

        inserting, last = insert(table), key[-1]
        return inserting.on_conflict_do_update(
            index_elements=key, index_where=last.is_not(None), set_={last.name: inserting.excluded[last.key]}
        )

    def meaning(self, error: DBAPIError) -> Meaning | None:
        if any(phrase in str(error.orig) for phrase in _CONFLICTS):
            return "conflict"
        code = _sqlstate(error)
        # an error without a code is the driver's
        return "unavailable" if code is None or code[:2] in _UNAVAILABLE else _MEANINGS.get(code)

    @contextlib.contextmanager
    def serialized_install(self, connection: Connection, key: int) -> Iterator[None]:
        # IF NOT EXISTS and OR REPLACE fail if two sessions look at the same time and neither finds the object
        if not self.autocommit(connection) or self.transaction_state(connection) != "ended":
            _at_once(connection, _INSTALL_LOCK, {"key": key})
            yield
            return
        # the lock is a transaction's, and nobody begins one in AUTOCOMMIT, or in Alembic's autocommit_block
        connection.exec_driver_sql("BEGIN")
        try:
            _at_once(connection, _INSTALL_LOCK, {"key": key})
            yield
        except BaseException:
            with contextlib.suppress(DBAPIError):  # the connection may have been lost
                connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("COMMIT")

    def findings(self, connection: Connection) -> Iterator[Finding]:
        def ask(sql: str) -> Any:
            return connection.exec_driver_sql(sql).scalar()

        try:
            server = self.ask_server(connection)
        except Unsupported as refusal:
            yield Finding("server", "problem", str(refusal))
            return
        if server.several_nodes is not None and connection.get_execution_options().get("locks_one_node"):
            yield Finding("server", "ok", "one of several nodes; locks_one_node says that all locks are acquired here")
        elif server.several_nodes is not None:
            yield Finding("server", "problem", server.several_nodes)
        yield version_finding(self.name, server.yugabytedb or str(ask("SHOW server_version")).split()[0])
        if ask("SELECT pg_is_in_recovery()"):
            says = "this is a standby, where a lock has no effect on the primary: connect to the primary"
            yield Finding("writable", "problem", says)
        elif ask("SHOW transaction_read_only") == "on":
            says = "sessions are read-only (default_transaction_read_only): every lock is refused"
            yield Finding("writable", "problem", says)
        else:
            yield Finding("writable", "ok", "the server accepts writes")
        level = str(ask("SHOW transaction_isolation")).upper()
        if level in COMMITTED:
            yield Finding("isolation", "ok", f"sessions begin at {level}")
        else:
            says = f"sessions begin at {level}, where a lock in a session of yours is refused; Locks sets its own level"
            yield Finding("isolation", "warning", says)
        for limit in ("statement_timeout", "transaction_timeout"):
            if ask(f"SELECT coalesce(current_setting('{limit}', true), '0')") != "0":
                says = f"{limit} is set: it ends the waits of a session's locks, and not those of Locks"
                yield Finding("settings", "warning", says)
        if ask("SHOW idle_in_transaction_session_timeout") == "0":
            yield idle_finding("for ever", "idle_in_transaction_session_timeout")
        if server.pooled:
            yield Finding("pooler", "warning", _POOLER)

    def require_time_zone(self, what: str, columns: Iterable[Column[Any]]) -> None:
        from sqlalchemy.dialects.postgresql import dialect  # not at the import of this library

        spelling: Any = dialect()  # type: ignore[no-untyped-call]
        for column in columns:
            if "WITHOUT TIME ZONE" in column.type.compile(dialect=spelling):
                raise Unsupported(
                    f"{what}: on {self.name} {column} must be DateTime(timezone=True): a timestamp without time zone "
                    "is another instant in a session with another TimeZone"
                )

    def autocommit(self, connection: Connection) -> bool:
        raw: Any = connection.connection.dbapi_connection
        return bool(raw.autocommit)

    def ask_server(self, connection: Connection) -> Server:
        if _DSQL_HOST.search(connection.engine.url.host or ""):
            raise Unsupported(_DSQL)
        row = _at_once(connection, _SERVER).one()
        if row.dsql:
            raise Unsupported(_DSQL)
        if "limitless" in row.server_version:
            raise Unsupported(_LIMITLESS)
        yugabytedb = re.search(r"-YB-([\d.]*)", row.version)
        driver: Any = connection.connection.driver_connection
        # The process id that the driver got when it connected: a pooler invents one, and doesn't tell its mode.
        asyncpg = hasattr(driver, "get_server_pid")
        pid = driver.get_server_pid() if asyncpg else driver.info.backend_pid
        if hasattr(driver, "pgconn") and not row.date_style.startswith("ISO"):
            raise Unsupported(
                f"psycopg can't read timestamps under DateStyle {row.date_style!r}: set it to ISO, for the role (ALTER "
                'ROLE ... SET "DateStyle" = ...) or by connect_args={"options": "-c DateStyle=ISO"}'
            )
        several_nodes = None if row.extension is None else _LAST_WRITE_WINS.format(row.extension)
        if row.extension == "citus":
            several_nodes = _CITUS if _at_once(connection, _CITUS_WORKERS).scalar() else None
        return Server(
            yugabytedb=None if yugabytedb is None else yugabytedb[1],
            no_advisory_locks=None if yugabytedb is None or row.advisory_locks else _NO_ADVISORY_LOCKS,
            lists_holders=yugabytedb is None,
            notifies=yugabytedb is None or row.notifies,
            pooled=pid != row.pid,
            begins_read_committed=row.level == _READ_COMMITTED,
            autocommits_read_committed=row.default_level == _READ_COMMITTED,
            several_nodes=several_nodes,
        )

    def begin(
        self, connection: Connection, server: Server, wait: float | None = None, *, writes: bool = True
    ) -> RootTransaction:
        # ``server`` is shared by all copies of an engine, but each may have a level of its own
        level = connection.get_execution_options().get("isolation_level", connection.default_isolation_level)
        read_committed = server.begins_read_committed and level in COMMITTED
        set_read_committed = not read_committed or self.autocommit(connection)
        # by a listener of the app's, of engine_connect or checkout
        begun = self.transaction_state(connection) != "ended"
        if set_read_committed and not begun:
            connection.rollback()  # SQLAlchemy's own view
            set_level(connection, "READ COMMITTED")
        transaction = connection.get_transaction() or connection.begin()
        if set_read_committed and begun:
            # not after a ROLLBACK, which would undo the listener's settings
            try:
                connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            except DBAPIError as error:
                if _sqlstate(error) != _IN_PROGRESS:
                    raise
                raise Unsupported(
                    'a listener of "engine_connect" or "checkout" has read in a transaction whose level isn\'t READ '
                    f'COMMITTED, and {self.name} doesn\'t change it any more: do that in a listener of "begin", or set '
                    'isolation_level="READ COMMITTED" for the engine of Locks'
                ) from error
        return transaction

    def allows_autocommit(self, connection: Connection, server: Server, level: str | None) -> bool:
        return (
            server.autocommits_read_committed
            # psycopg2 executes statements in autocommit at the level of the app's transactions
            and server.begins_read_committed
            and (level in COMMITTED or self.autocommit(connection))
            # behind a pooler the two halves of one of asyncpg's statements may reach two sessions of the server
            and not (server.pooled and connection.dialect.driver == "asyncpg")
            and not connection.in_transaction()
            and not connection.dispatch.begin
            and getattr(connection.dialect.do_begin, "__func__", None) is DefaultDialect.do_begin
            and self.transaction_state(connection) == "ended"
        )

    def autocommitted(self, connection: Connection, run: Callable[[], T]) -> T:
        # The attribute of the driver takes no round trip. SQLAlchemy's option does with psycopg2, and on a shared pool
        # it resets the level that the app has set in a connect listener.
        raw: Any = connection.connection.dbapi_connection
        errors = connection.dialect.loaded_dbapi.Error
        autocommit, begun, restored = raw.autocommit, False, False
        state: TransactionState | None = None
        try:
            try:
                raw.autocommit = begun = True
                value = run()
                state = self.transaction_state(connection)
                if state != "ended":  # a listener of the app's has begun
                    connection.commit()
                    state = self.transaction_state(connection)
                if state != "ended":  # psycopg2 commits nothing in autocommit
                    raise OutcomeUnknown(
                        "a listener of the app's began a transaction around a statement in autocommit, which nothing "
                        "commits: the statement is rolled back, unless it was executed before that; begin none in "
                        "before_cursor_execute or after_cursor_execute"
                    )
                return value
            except DBAPIError as error:
                if _PLAN_CHANGED in str(error.orig):
                    connection.invalidate()  # psycopg prepares its statements again after a ROLLBACK only
                raise
            except errors as error:
                if begun:
                    raise
                raise OperationalError(None, None, error, connection_invalidated=True) from error
            finally:
                # suppressed: the reply has been read, or an error is raised that says more than these would
                with contextlib.suppress(DBAPIError, errors):
                    if not connection.invalidated and (state or self.transaction_state(connection)) == "ended":
                        # SQLAlchemy still thinks that a transaction is open: the statement has committed by itself
                        if state is None:
                            connection.rollback()
                        else:
                            connection.commit()
                        raw.autocommit = autocommit
                        restored = True
        finally:
            # whatever was raised: the connection must never go back to the app in autocommit
            if not restored and not connection.invalidated:
                connection.invalidate()

    def marker_lost(self, connection: Connection) -> bool:
        # COMMIT of a failed transaction is a ROLLBACK without an error: code that ignored the first error would never
        # know. Nor would code that has sent a COMMIT itself.
        driver: Any = connection.connection.driver_connection
        if hasattr(driver, "info"):  # libpq knows whether it has failed; asyncpg doesn't
            return int(driver.info.transaction_status) != _IN_TRANSACTION
        if not driver.is_in_transaction():
            return True
        try:
            connection.exec_driver_sql("SELECT 1")
        except DBAPIError as error:
            if error.connection_invalidated:
                raise
            return True
        return False

    def transaction_state(self, connection: Connection) -> TransactionState:
        driver: Any = connection.connection.driver_connection
        if not hasattr(driver, "info"):  # asyncpg
            if driver.is_closed():
                return "closed"
            return "open" if driver.is_in_transaction() else "ended"
        # psycopg begins another transaction by itself after a COMMIT that was executed as a statement
        return _STATES.get(int(driver.info.transaction_status), "open")

    def read_notifications(self, driver: Any) -> list[str]:
        if hasattr(driver, "pgconn"):  # psycopg, of either kind
            driver.pgconn.consume_input()
            payloads = []
            while note := driver.pgconn.notifies():
                payloads.append(note.extra.decode())
            return payloads
        driver.poll()
        payloads = [note.payload for note in driver.notifies]
        driver.notifies.clear()
        return payloads

    def join_queue(self, connection: Connection, key: int, seconds: float) -> bool:
        # the lock and the setting end with the transaction
        with self.bounded(connection, seconds):
            _at_once(connection, _JOIN, {"key": key})
        return True

    @contextlib.contextmanager
    def bounded(self, connection: Connection, seconds: float) -> Iterator[None]:
        local = not self.autocommit(connection)
        setting = {"setting": self.wait_setting, "local": local}
        wait = milliseconds(max(seconds, self.shortest_wait))
        was = _at_once(connection, _WAIT, {**setting, "wait": str(wait)}).scalar()
        try:
            yield
        except BaseException as error:
            # After the driver's error the transaction has failed, and a local setting ends with it. Any other error has
            # left the transaction open.
            drivers = DBAPIError, DriverTimeout
            failed = isinstance(error, drivers) or isinstance(error.__cause__, drivers)
            if ((isinstance(error, Exception) and not failed) or not local) and not connection.invalidated:
                _at_once(connection, _RESTORE, {**setting, "was": was})
            raise
        _at_once(connection, _RESTORE, {**setting, "was": was})


def _at_once(connection: Connection, statement: Executable, values: Mapping[str, Any] | None = None) -> Any:
    """Execute a statement now. ``stream_results`` would defer it to the fetch of its rows, and needs a transaction."""
    return connection.execute(statement, values, execution_options={"stream_results": False, "yield_per": None})


def _sqlstate(error: DBAPIError) -> str | None:
    origin: Any = error.orig
    return getattr(origin, "sqlstate", None) or getattr(origin, "pgcode", None)


def _sentence(error: DBAPIError) -> str:
    origin: Any = error.orig
    diag = getattr(origin, "diag", None)
    primary = getattr(diag, "message_primary", None)
    text_ = str(primary or origin)
    return text_.split(": ", 1)[1] if text_.startswith("<class") else text_


BACKEND = PostgreSQL()

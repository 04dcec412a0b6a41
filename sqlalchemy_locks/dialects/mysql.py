"""MySQL: a lock on a key is the lock of its row."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from sqlalchemy import TIMESTAMP, Column, Insert, Table, text
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles

from sqlalchemy_locks.dialects.base import (
    COMMITTED,
    IDLE,
    Backend,
    Meaning,
    Server,
    ServerQueues,
    TransactionState,
    not_writable,
    set_level,
)
from sqlalchemy_locks.dialects.findings import Finding, idle_finding, version_finding
from sqlalchemy_locks.errors import LockError, LockTimeout, MustRollback, NotWritable, Unsupported
from sqlalchemy_locks.sql import clock, elements

_MARKER = "sqlalchemy_locks"
_GROUP = "Group Replication with several primaries"
_TOUCH = "INTERVAL 1 MICROSECOND"
# the variable is a stack of the previous settings, so that one limit of waits can be set inside another
_WAIT = text(
    "SET @sqlalchemy_locks_wait = CONCAT_WS(',', @@session.innodb_lock_wait_timeout, @sqlalchemy_locks_wait), "
    "SESSION innodb_lock_wait_timeout = :wait"
)
_PREVIOUS_WAIT = "SUBSTRING_INDEX(@sqlalchemy_locks_wait, ',', 1)"
_RESTORE = text(
    f"SET SESSION innodb_lock_wait_timeout = CAST({_PREVIOUS_WAIT} AS UNSIGNED), @sqlalchemy_locks_wait = "
    f"NULLIF(SUBSTRING(@sqlalchemy_locks_wait, LENGTH({_PREVIOUS_WAIT}) + 2), '')"
)


def lock_name(what: str, key: str) -> str:
    """Return the SQL of a name for ``GET_LOCK``, of 64 characters at most: the database is hashed, the key is not."""
    return f"CONCAT(LEFT(SHA2(CONCAT_WS(':', 'sqlalchemy_locks.{what}', DATABASE()), 256), 40), ':', {key})"


_QUEUE_NAME = lock_name("queue", ":key")
_IDLE = text(f"SET @sqlalchemy_locks_idle = @@session.wait_timeout, SESSION wait_timeout = {IDLE}")
_JOIN = text(f"SELECT GET_LOCK({_QUEUE_NAME}, :seconds)")
_LEAVE = text(
    f"SET @sqlalchemy_locks_left = RELEASE_LOCK({_QUEUE_NAME}), SESSION wait_timeout = @sqlalchemy_locks_idle"
)
_QUEUE_FREE = text(f"SELECT IS_FREE_LOCK({_QUEUE_NAME})")

# not innodb_trx, which takes one more privilege and has whole seconds of the server's own zone
_AGO = "TIMESTAMPADD(MICROSECOND, -({}) DIV 1000000, UTC_TIMESTAMP(6))"
_BEGAN = _AGO.format(
    "SELECT began.timer_wait FROM performance_schema.events_transactions_current AS began"
    " WHERE began.thread_id = session.thread_id AND began.state = 'ACTIVE'"
)
_PENDING = _AGO.format(
    "SELECT MAX(pending.timer_wait) FROM performance_schema.events_statements_current AS pending"
    " WHERE pending.thread_id = session.thread_id AND pending.end_event_id IS NULL"
)
#: columns of HeldKeys, where ``held`` is a lock of the server and ``session`` the thread that has it
_SESSION = (
    "held.lock_status = 'GRANTED' AS granted, session.processlist_id AS session, program.attr_value AS owner,"
    " session.processlist_user AS user, session.processlist_host AS host, session.processlist_command AS state,"
    f" IF(held.lock_status = 'GRANTED', {_BEGAN}, {_PENDING}) AS since"
)
_PROGRAM = (
    "LEFT JOIN performance_schema.session_connect_attrs AS program"
    " ON program.processlist_id = session.processlist_id AND program.attr_name = 'program_name'"
)
#: the newest semaphores, and the keys of their queues
NEWEST = (
    "(SELECT name, IF(on_demand, 'lease', 'semaphore') AS kind FROM {semaphores} WHERE capacity IS NOT NULL"
    " ORDER BY id DESC LIMIT {limit}) AS queue"
)
KEY = "CONV(LEFT(SHA2(CONCAT(:queue_beginning, queue.name), 256), 16), 16, -10)"
_LAST = "SUBSTRING_INDEX(held.object_name, ':', -1)"

_ASKED = (
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'version_comment', 'innodb_rollback_on_timeout',"
    " 'wsrep_on', 'group_replication_group_name', 'group_replication_single_primary_mode')"
)
_WITHOUT_TRANSACTIONS = text(
    "SELECT table_name, engine FROM information_schema.tables JOIN information_schema.engines USING (engine) "
    "WHERE table_schema = database() AND transactions <> 'YES' ORDER BY table_name"
)
_SETTINGS = (
    "SHOW SESSION VARIABLES WHERE Variable_name IN"
    " ('log_bin', 'binlog_format', 'completion_type', 'max_execution_time', 'max_statement_time',"
    " 'wait_timeout', 'idle_transaction_timeout')"
)
#: seconds for which an app's transaction is hardly ever idle
_LONG_IDLE = 600
#: read_only is a number, or from MariaDB 12 on a text. With innodb_read_only alone, InnoDB grants a row's lock to two
#: sessions.
_WRITABLE = "CAST(@@global.read_only AS CHAR) IN ('0', 'OFF') AND @@global.innodb_read_only = 0"
_IN_TRANSACTION = 1  # SERVER_STATUS_IN_TRANS
_TABLE_READ_ONLY = "errno: 165"
#: the transaction's level can't be set while it is in progress
_IN_PROGRESS = 1568
_MEANINGS: dict[Any, Meaning] = {
    1020: "newer row",
    1044: "denied",
    1062: "duplicate",
    1142: "denied",
    1143: "denied",
    1146: "missing",
    1206: "conflict",
    1213: "conflict",
    1227: "denied",
    1305: "conflict",  # a deadlock has rolled the savepoint back, with everything before it
    3101: "conflict",  # at COMMIT, by another node of a cluster
}


#: error codes: disk, memory, connections, threads or tables are exhausted; the server, or a node of a cluster, starts,
#: stops or isn't ready
_UNAVAILABLE = {
    *(0, 3, 1015, 1021, 1026, 1028, 1030, 1037, 1038, 1040, 1041, 1047, 1053, 1105, 1114, 1135, 1181, 1203),
    *(1226, 1412, 1615, 1637, 1878, 1927, 3100, 3168, 3169, 4031),
}
_STATEMENT_LOG = (
    "binlog_format=STATEMENT refuses what InnoDB writes at READ COMMITTED, which Locks and workers use: set it to ROW "
    "or MIXED"
)
_CHAINS = (
    "completion_type=CHAIN begins a transaction at each COMMIT and ROLLBACK, at the level of the one before, so that "
    "Locks can't set its own: set it to NO_CHAIN"
)

_TIDB = (
    "TiDB ignores SKIP LOCKED, so that two capture the same row, and doesn't implement shared row locks: use MySQL, "
    "MariaDB or PostgreSQL"
)
_VITESS = (
    "Vitess: with more than one shard, a key's row, a semaphore and its permits may be in several, whose locks and "
    "commits are not one: keep the tables of the locks in a keyspace without shards"
)

#: after these errors the server has ended the whole transaction: the next statement begins another one
_ENDED = (1020, 1206, 1213, 3101)
#: the same after these errors, if the storage engine's "deadlock" or "no savepoint with that name" caused them: another
#: node of a cluster was the first to commit
_CAUSED = {1030: "error 153", 1180: "error 149"}
#: The server has lost the majority of its cluster, or is ending: the other nodes may commit the changes that it has
#: sent. (Seen on both kinds of clusters with two of three nodes stopped: after 1180 and 3100 all nodes, or the
#: majority, had the changes.)
_UNSURE = {1047, 1053, 1180, 1317, 1927, 3100}


class MySQL(Backend):
    name = "MySQL"
    family = "mysql"
    key_rows = True
    stale_reads = True
    marker_is_savepoint = True
    #: the setting of a session's isolation level
    level_setting: ClassVar[str] = "transaction_isolation"
    #: the setting that limits a statement's time
    statement_limit: ClassVar[str] = "max_execution_time"
    #: the setting that ends transactions which are idle
    idle_limit: ClassVar[str] = "wait_timeout"
    #: the smallest innodb_lock_wait_timeout, in seconds
    shortest_row_wait: ClassVar[int] = 1
    server_queues = ServerQueues(
        1,
        f"SELECT queue.*, CAST({KEY} AS SIGNED) AS `key`, 'exclusive' AS mode, {_SESSION},"
        " CONCAT(NULLIF(IS_USED_LOCK(held.object_name), session.processlist_id)) AS waits_for"
        " FROM performance_schema.metadata_locks AS held"
        " STRAIGHT_JOIN performance_schema.threads AS session ON session.thread_id = held.owner_thread_id"
        f" STRAIGHT_JOIN {NEWEST} ON {KEY} = {_LAST} {_PROGRAM}"
        f" WHERE held.object_type = 'USER LEVEL LOCK' AND held.object_name = {lock_name('queue', _LAST)}"
        " ORDER BY granted DESC, since",
    )

    def insert_unless_present(self, table: Table, key: Column[Any]) -> Insert:
        return elements.TakeRow(table)

    def insert_or_lock(self, table: Table, key: Sequence[Column[Any]], touched: Column[Any] | None) -> Insert:
        return elements.TakeRow(table, None if touched is None else touched.key)

    def translate(self, error: DBAPIError) -> LockError | None:
        code = _errno(error)
        if code in (1205, 3572):
            return LockTimeout("the lock was not free in time (innodb_lock_wait_timeout, or NOWAIT)")
        if code in (1317, 1969, 3024):
            return LockTimeout(
                f"the server's time limit of a statement ({self.statement_limit}), or another session, ended the "
                "statement"
            )
        if code == 1047:
            return NotWritable(f"this node of {self.name} has no majority of its cluster: use one that has")
        if code in (1036, 1290, 1792, 1836) or (code == 1015 and _TABLE_READ_ONLY in str(error.orig)):
            return not_writable(self.name)
        if code == 1665:
            return Unsupported(f"{self.name}: {_STATEMENT_LOG}")
        if self.ends_transaction(error):
            again = "run it again, and lock before the first read" if code == 1020 else "run it again"
            return MustRollback(
                f"{self.name} has rolled this transaction back (error {code}), and released every lock that it held: "
                f"roll it back here, too, {again}"
            )
        return None

    def ends_transaction(self, error: DBAPIError, connection: Connection | None = None) -> bool:
        code = _errno(error)
        return code in _ENDED or (code in _CAUSED and _CAUSED[code] in str(error.orig))

    def may_be_committed(self, error: DBAPIError) -> bool:
        return _errno(error) in _UNSURE and not self.ends_transaction(error)

    def meaning(self, error: DBAPIError) -> Meaning | None:
        code = _errno(error)
        if code in _CAUSED and self.ends_transaction(error):
            return "conflict"
        # 2000 to 2999 are the client's codes, from 9000 on a proxy's (ProxySQL): both are about a connection
        if not isinstance(code, int) or code in _UNAVAILABLE or 2000 <= code < 3000 or code >= 9000:
            return "unavailable"
        if code == 1305 and "SAVEPOINT" not in str(error.orig):
            return None  # a function or a procedure of the app's
        return _MEANINGS.get(code)

    def ask_server(self, connection: Connection) -> Server:
        variables = {str(row[0]).lower(): str(row[1]).upper() for row in connection.exec_driver_sql(_ASKED)}
        if "TIDB" in f"{variables.get('version')} {variables.get('version_comment')}":
            raise Unsupported(_TIDB)
        if variables.get("innodb_rollback_on_timeout") == "ON":
            raise Unsupported(
                f"{self.name} runs with innodb_rollback_on_timeout=ON, where a lock timeout silently releases "
                "the locks acquired before it: set it to OFF"
            )
        cluster = "a Galera cluster" if variables.get("wsrep_on") == "ON" else None
        # also for a member that has left its group: it comes back by itself
        single = variables.get("group_replication_single_primary_mode")
        if cluster is None and single == "OFF" and variables["group_replication_group_name"]:
            cluster = _GROUP
        return Server(cluster=cluster, savepoint_hides_end=cluster == _GROUP)

    def require_time_zone(self, what: str, columns: Iterable[Column[Any]]) -> None:
        for column in columns:
            if isinstance(column.type, TIMESTAMP):
                raise Unsupported(
                    f"{what}: on {self.name} {column} must be DATETIME, with 6 digits of a second: a TIMESTAMP is "
                    "another instant in a session with another time_zone"
                )

    def writable(self, connection: Connection) -> bool:
        return bool(connection.exec_driver_sql(f"SELECT {_WRITABLE}").scalar())

    def findings(self, connection: Connection) -> Iterator[Finding]:
        version = str(connection.exec_driver_sql("SELECT CONCAT(VERSION(), ' ', @@version_comment)").scalar())
        if "TiDB" in version:
            yield Finding("server", "problem", _TIDB)
            return
        if "vitess" in version.lower():
            yield Finding("server", "warning", _VITESS)
        yield version_finding(self.name, re.split(r"[-+]", version)[0])
        if self.writable(connection):
            yield Finding("writable", "ok", "the server accepts writes")
        else:
            says = "the server is read_only, as replicas are: a lock here has no effect on the primary"
            yield Finding("writable", "problem", says)
        level = str(connection.get_isolation_level())
        if level in COMMITTED:
            yield Finding("isolation", "ok", f"sessions begin at {level}")
        else:
            says = f"sessions begin at {level}: lock before you read there, or use Locks, which sets its own level"
            yield Finding("isolation", "warning", says)
        try:
            cluster = self.ask_server(connection).cluster
        except Unsupported as refusal:
            yield Finding("settings", "problem", str(refusal))
        else:
            yield Finding("settings", "ok", "innodb_rollback_on_timeout is off")
            if cluster is not None:
                says = (
                    f"a node of {cluster}: exclusive() writes the row of its key, so that of two holders on two nodes "
                    "one commits; shared(), session locks and lock.row are refused without locks_one_node=True"
                )
                yield Finding("cluster", "ok", says)
        settings: dict[str, str] = dict(map(tuple, connection.exec_driver_sql(_SETTINGS)))
        if settings.get("log_bin") == "ON" and settings.get("binlog_format") == "STATEMENT":
            yield Finding("settings", "problem", _STATEMENT_LOG)
        if settings["completion_type"] != "NO_CHAIN":
            yield Finding("settings", "problem", _CHAINS)
        limit = settings.get(self.statement_limit, "0")
        if float(limit):
            says = f"{self.statement_limit} is {limit}: it ends the waits of a session's locks, and not those of Locks"
            yield Finding("settings", "warning", says)
        idle = min(int(settings[name]) for name in {"wait_timeout", self.idle_limit} if settings[name] != "0")
        if idle > _LONG_IDLE:
            yield idle_finding(f"for {idle} seconds", self.idle_limit)
        for table, engine in connection.execute(_WITHOUT_TRANSACTIONS):
            says = f"{table} is kept by {engine}, which has no row locks: a lock or capture on it is given to several"
            yield Finding("storage engine", "warning", f"{says}; ALTER TABLE {table} ENGINE=InnoDB")

    def autocommit(self, connection: Connection) -> bool:
        raw: Any = connection.connection.dbapi_connection
        return bool(raw.get_autocommit())

    def begin(
        self, connection: Connection, server: Server, wait: float | None = None, *, writes: bool = True
    ) -> RootTransaction:
        if connection.in_transaction():
            connection.rollback()  # a listener of the app's has read something
        if self.autocommit(connection):
            # off until the connection returns; at the default level, since the pool restores autocommit, but no level
            set_level(connection, connection.default_isolation_level)
        transaction = self._begin_read_committed(connection) or self._begin_read_committed(connection)
        if transaction is None:
            if connection.exec_driver_sql("SELECT @@session.completion_type").scalar() not in ("NO_CHAIN", 0):
                raise Unsupported(f"{self.name}: {_CHAINS}")
            raise Unsupported(
                'a listener of "begin" or "before_cursor_execute" opens the transaction before Locks sets its '
                f'isolation level, which {self.name} refuses afterwards: do it in a listener of "checkout" instead'
            )
        return transaction

    def _begin_read_committed(self, connection: Connection) -> RootTransaction | None:
        """Begin. Where a connect or checkout listener of the app has left a transaction open, end it: ``None``."""
        transaction = connection.begin()
        try:
            # for this transaction only: the session's own level stays as it is
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        except DBAPIError as error:
            if _errno(error) != _IN_PROGRESS:
                raise
            connection.rollback()
            return None
        return transaction

    def set_marker(self, connection: Connection) -> None:
        connection.exec_driver_sql(f"SAVEPOINT {_MARKER}")

    def marker_lost(self, connection: Connection) -> bool:
        # The savepoint is gone when a deadlock has rolled the whole transaction back, or a DDL statement has committed
        # it. Code that ignores the error, or executes DDL, continues in another transaction, without the lock.
        try:
            connection.exec_driver_sql(f"RELEASE SAVEPOINT {_MARKER}")
        except DBAPIError as error:
            if _errno(error) == 1305:
                return True
            raise
        return False

    def transaction_state(self, connection: Connection) -> TransactionState:
        driver: Any = connection.connection.driver_connection
        if hasattr(driver, "closed"):  # aiomysql
            closed = driver.closed
        else:  # pymysql; asyncmy
            closed = not (driver.open if hasattr(driver, "open") else getattr(driver, "connected", True))
        if closed:
            return "closed"
        status = getattr(driver, "server_status", None)
        return "open" if status is None or status & _IN_TRANSACTION else "ended"

    def session_ender(self, connection: Connection) -> Callable[[Connection], object]:
        number = _session_number(connection)

        def end(side: Connection) -> None:
            # a proxy tells its clients numbers of its own, which on the server may be other sessions'
            if side.exec_driver_sql("SELECT CONNECTION_ID()").scalar() == _session_number(side):
                side.exec_driver_sql(f"KILL {number}")

        return end

    def prepare_side(self, connection: Connection, caller: Connection, row_wait: int) -> str | None:
        database, role = caller.exec_driver_sql("SELECT DATABASE(), CURRENT_ROLE()").one()
        if role not in (None, "NONE"):
            connection.exec_driver_sql(f"SET ROLE {self.role_name(role)}".replace("%", "%%"))
        # lock_wait_timeout limits the wait for the table: an ALTER that waits for the caller's transaction blocks this
        # connection, and the server doesn't detect that deadlock
        connection.exec_driver_sql(
            f"SET SESSION autocommit = 1, {self.level_setting} = 'READ-COMMITTED', lock_wait_timeout = 1,"
            f" innodb_lock_wait_timeout = {max(row_wait, self.shortest_row_wait)}"
        )
        return None if database is None else str(database)

    def role_name(self, role: str) -> str:
        """Return the SQL of a value of CURRENT_ROLE(), which may be several roles."""
        return role

    def join_queue(self, connection: Connection, key: int, seconds: float) -> bool:
        connection.execute(_IDLE)
        # 0 at the timeout, NULL when the server aborted the wait
        return bool(connection.execute(_JOIN, {"key": key, "seconds": int(seconds)}).scalar())

    def leave_queue(self, connection: Connection, key: int) -> None:
        connection.execute(_LEAVE, {"key": key})

    def queue_is_free(self, connection: Connection, key: int) -> bool:
        return bool(connection.execute(_QUEUE_FREE, {"key": key}).scalar())

    @contextlib.contextmanager
    def bounded(self, connection: Connection, seconds: float) -> Iterator[None]:
        # InnoDB waits in whole seconds; in a strict sql_mode MariaDB refuses more than three years
        connection.execute(_WAIT, {"wait": max(1, math.ceil(min(seconds, 100_000_000)))})
        try:
            yield
        finally:
            if not connection.invalidated:
                connection.execute(_RESTORE)


def _errno(error: DBAPIError) -> Any:
    args = getattr(error.orig, "args", ())
    return args[0] if args else None


def _session_number(connection: Connection) -> int:
    driver: Any = connection.connection.driver_connection
    return int(driver.thread_id())


@compiles(elements.TakeRow, "mysql", "mariadb")
def _take_row(element: elements.TakeRow, compiler: Any, **kw: Any) -> str:
    columns = [element.table.c[element.touched]] if element.touched else element.table.primary_key
    (column,) = map(compiler.preparer.format_column, columns)
    value = f"{column} + {_TOUCH}" if element.touched else column
    return f"{compiler.visit_insert(element, **kw)} ON DUPLICATE KEY UPDATE {column} = {value}"


@compiles(elements.Touched, "mysql", "mariadb")
def _touched(element: elements.Touched, compiler: Any, **kw: Any) -> str:
    (instant,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"{instant} + {_TOUCH}"


@compiles(elements.SessionLevelIn, "mysql", "mariadb")
def _session_level_in(element: elements.SessionLevelIn, compiler: Any, **kw: Any) -> str:
    variable = "tx_isolation" if compiler.dialect.is_mariadb else "transaction_isolation"
    return f"@@session.{variable} IN ({', '.join(map(repr, element.levels))})"


@compiles(clock.Instant, "mysql", "mariadb")
def _instant(element: clock.Instant, compiler: Any, **kw: Any) -> str:
    return "DATETIME(6)"


@compiles(clock.StatementStart, "mysql", "mariadb")
@compiles(clock.Now, "mysql", "mariadb")
def _now(element: Any, compiler: Any, **kw: Any) -> str:
    return "(UTC_TIMESTAMP(6))"


@compiles(clock.PlusSeconds, "mysql", "mariadb")
def _plus_seconds(element: clock.PlusSeconds, compiler: Any, **kw: Any) -> str:
    instant, seconds = (compiler.process(part, **kw) for part in element.clauses)
    return f"TIMESTAMPADD(MICROSECOND, {seconds} * 1000000, {instant})"


@compiles(clock.Epoch, "mysql", "mariadb")
def _epoch(element: clock.Epoch, compiler: Any, **kw: Any) -> str:
    return f"({_ticks(compiler)} DIV 10000000 - 12219292800)"


@compiles(clock.NowAfterWait, "mysql", "mariadb")
def _now_after_wait(element: clock.NowAfterWait, compiler: Any, **kw: Any) -> str:
    microseconds = f"{_ticks(compiler)} DIV 10 - 12219292800000000"
    return f"TIMESTAMPADD(MICROSECOND, {microseconds}, TIMESTAMP'1970-01-01 00:00:00')"


def _ticks(compiler: Any) -> str:
    """Return the SQL of tenths of a microsecond since 15 October 1582: the 60 time bits of a version 1 UUID.

    These servers have no other clock that is read when the expression is evaluated, such as after a wait, and that is
    independent of time zones. UTC_TIMESTAMP is the statement's start. SYSDATE is in the session's zone, where an hour
    in autumn comes twice.
    """
    if compiler.dialect.is_mariadb:
        # CHAR(92) is a backslash, whatever the sql_mode makes of one in a string
        order = "CONCAT(CHAR(92), 3, CHAR(92), 2, CHAR(92), 1)"
        digits = f"REGEXP_REPLACE(UUID(), '^(.{{8}})-(.{{4}})-1(.{{3}})-.*$', {order})"
    else:
        digits = "SUBSTRING(HEX(UUID_TO_BIN(UUID(), 1)), 2, 15)"
    return f"CAST(CONV({digits}, 16, 10) AS UNSIGNED)"


@compiles(clock.SecondsAgo, "mysql", "mariadb")
def _seconds_ago(element: clock.SecondsAgo, compiler: Any, **kw: Any) -> str:
    (seconds,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"TIMESTAMPADD(MICROSECOND, ROUND({seconds} * -1000000), UTC_TIMESTAMP(6))"


@compiles(clock.Elapsed, "mysql", "mariadb")
def _elapsed(element: clock.Elapsed, compiler: Any, **kw: Any) -> str:
    (instant,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"TIMESTAMPDIFF(SECOND, {instant}, UTC_TIMESTAMP(6))"


@compiles(elements.Writable, "mysql", "mariadb")
def _writable(element: elements.Writable, compiler: Any, **kw: Any) -> str:
    return _WRITABLE


def held_keys(element: elements.HeldKeys, compiler: Any, **kw: Any) -> str:
    """Return the SQL of holders and waiters on MySQL."""
    return (
        "SELECT CAST(held.lock_data AS SIGNED) AS `key`,"
        f" IF(LEFT(held.lock_mode, 1) = 'X', 'exclusive', 'shared') AS mode, {_SESSION},"
        " (SELECT GROUP_CONCAT(DISTINCT other.processlist_id) FROM performance_schema.data_lock_waits AS wait"
        " JOIN performance_schema.threads AS other ON other.thread_id = wait.blocking_thread_id"
        " WHERE wait.requesting_engine_lock_id = held.engine_lock_id) AS waits_for"
        " FROM performance_schema.data_locks AS held"
        f" JOIN performance_schema.threads AS session ON session.thread_id = held.thread_id {_PROGRAM}"
        f" WHERE held.object_schema = {element.schema(compiler, **kw)} AND held.object_name = '{element.table.name}'"
        " AND held.lock_mode IN ('X', 'S', 'X,REC_NOT_GAP', 'S,REC_NOT_GAP')"
        " AND held.lock_data <> 'supremum pseudo-record'"
        f" AND {element.among('CAST(held.lock_data AS SIGNED)', compiler, **kw)}"
        " ORDER BY `key`, granted DESC, since"
    )


@compiles(elements.SessionLock, "mysql", "mariadb")
def _session_lock(element: elements.SessionLock, compiler: Any, **kw: Any) -> str:
    key, wait = (compiler.process(part, **kw) for part in element.clauses)
    return f"CASE WHEN {_WRITABLE} THEN GET_LOCK({lock_name('session', key)}, {wait}) ELSE 'refused' END"


@compiles(elements.SessionUnlock, "mysql", "mariadb")
def _session_unlock(element: elements.SessionUnlock, compiler: Any, **kw: Any) -> str:
    (key,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"RELEASE_LOCK({lock_name('session', key)})"


@compiles(elements.ReleaseSessionLocks, "mysql", "mariadb")
def _release_session_locks(element: elements.ReleaseSessionLocks, compiler: Any, **kw: Any) -> str:
    return "RELEASE_ALL_LOCKS()"


BACKEND = MySQL()

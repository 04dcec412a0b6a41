"""MariaDB: as MySQL, with the names and limits of its own settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy.engine import Connection
from sqlalchemy.ext.compiler import compiles

from sqlalchemy_locks.dialects.base import COMMITTED, ServerQueues
from sqlalchemy_locks.dialects.findings import Finding
from sqlalchemy_locks.dialects.mysql import KEY, NEWEST, MySQL, held_keys, lock_name
from sqlalchemy_locks.sql.elements import HeldKeys


class MariaDB(MySQL):
    name = "MariaDB"
    releases_skipped_rows = False  # when it searches by a secondary index
    level_setting = "tx_isolation"
    statement_limit = "max_statement_time"
    idle_limit = "idle_transaction_timeout"
    shortest_row_wait = 0
    # No table lists these locks. IS_USED_LOCK tells the holder of one, and the text of a statement what it waits for.
    server_queues = ServerQueues(
        1,
        f"SELECT queue.*, CAST({KEY} AS SIGNED) AS `key`, 'exclusive' AS mode, session.id AS session, NULL AS owner,"
        " session.user, session.host, session.command AS state, session.id = queue.head AS granted,"
        " IF(session.id = queue.head, NULL, TIMESTAMPADD(MICROSECOND, session.time_ms * -1000, UTC_TIMESTAMP(6)))"
        " AS since, CONCAT(NULLIF(queue.head, session.id)) AS waits_for"
        f" FROM (SELECT queue.*, IS_USED_LOCK({lock_name('queue', KEY)}) AS head FROM {NEWEST}"
        " HAVING head IS NOT NULL) AS queue"
        " JOIN information_schema.processlist AS session ON session.id = queue.head"
        " OR session.state = 'User lock' AND session.db <=> DATABASE()"
        f" AND session.info REGEXP CONCAT('GET_LOCK.*sqlalchemy_locks[.]queue.* ', {KEY}, '[)]')"
        " ORDER BY granted DESC, since",
    )

    def role_name(self, role: str) -> str:
        name = role.replace("`", "``")
        return f"`{name}`"

    def findings(self, connection: Connection) -> Iterator[Finding]:
        yield from super().findings(connection)
        setting = connection.exec_driver_sql("SHOW VARIABLES WHERE variable_name = 'innodb_snapshot_isolation'").first()
        level = connection.get_isolation_level()
        if setting is not None and setting[1] == "ON" and level not in COMMITTED:
            says = (
                f"innodb_snapshot_isolation is ON, and sessions begin at {level}: the server rolls back a transaction "
                "that has read, and then locks or changes a row that was changed since (MustRollback); lock before you "
                "read, or use READ COMMITTED"
            )
            yield Finding("snapshot isolation", "warning", says)


# a mysql:// URL to MariaDB compiles under the name "mysql"
@compiles(HeldKeys, "mysql", "mariadb")
def _held_keys(element: HeldKeys, compiler: Any, **kw: Any) -> str:
    if not compiler.dialect.is_mariadb:
        return held_keys(element, compiler, **kw)
    utc = "CONVERT_TZ({}, 'SYSTEM', '+00:00')"
    return (
        "SELECT CAST(held.lock_data AS SIGNED) AS `key`,"
        " IF(LEFT(held.lock_mode, 1) = 'X', 'exclusive', 'shared') AS mode,"
        " NOT (trx.trx_requested_lock_id <=> held.lock_id) AS granted, trx.trx_mysql_thread_id AS session,"
        " NULL AS owner, session.user, session.host, session.command AS state,"
        f" {utc.format('COALESCE(trx.trx_wait_started, trx.trx_started)')} AS since,"
        " (SELECT GROUP_CONCAT(DISTINCT other.trx_mysql_thread_id) FROM information_schema.innodb_lock_waits AS wait"
        " JOIN information_schema.innodb_trx AS other ON other.trx_id = wait.blocking_trx_id"
        " AND other.trx_id <> 0"
        " WHERE wait.requested_lock_id = held.lock_id) AS waits_for"
        " FROM information_schema.innodb_locks AS held"
        # every transaction with only shared locks has the id 0, so the holder of a granted one can't be identified
        " LEFT JOIN information_schema.innodb_trx AS trx ON trx.trx_id = held.lock_trx_id"
        " AND (trx.trx_id <> 0 OR trx.trx_requested_lock_id = held.lock_id)"
        " LEFT JOIN information_schema.processlist AS session ON session.id = trx.trx_mysql_thread_id"
        f" WHERE held.lock_table = CONCAT('`', {element.schema(compiler, **kw)}, '`.`{element.table.name}`')"
        " AND held.lock_type = 'RECORD' AND held.lock_data <> 'supremum pseudo-record'"
        f" AND {element.among('CAST(held.lock_data AS SIGNED)', compiler, **kw)}"
        " ORDER BY `key`, granted DESC, since"
    )


BACKEND = MariaDB()

"""MariaDB: as MySQL, but an INSERT can be told not to wait, so that no named lock is needed."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.compiler import compiles

from sqlalchemy_locks.dialects.mysql import MySQL, take_row
from sqlalchemy_locks.sql.elements import ContendedKeys, NowaitInsert, NowaitTakeRow


class MariaDB(MySQL):
    name = "MariaDB"
    bounded_insert = True
    releases_skipped_rows = False  # when it searches by a secondary index
    held_keys = ContendedKeys
    limit = ("max_statement_time", 1)


_NOWAIT = "SET STATEMENT innodb_lock_wait_timeout=0 FOR "


# a mysql:// URL to MariaDB compiles under the name "mysql"
@compiles(NowaitInsert, "mysql")
@compiles(NowaitInsert, "mariadb")
def _nowait(element: NowaitInsert, compiler: Any, **kw: Any) -> str:
    return f"{_NOWAIT}{compiler.visit_insert(element, **kw)}"


@compiles(NowaitTakeRow, "mysql")
@compiles(NowaitTakeRow, "mariadb")
def _nowait_take_row(element: NowaitTakeRow, compiler: Any, **kw: Any) -> str:
    return f"{_NOWAIT}{take_row(element, compiler, **kw)}"


@compiles(ContendedKeys, "mysql")
@compiles(ContendedKeys, "mariadb")
def _contended_keys(element: ContendedKeys, compiler: Any, **kw: Any) -> str:
    utc = "CONVERT_TZ({}, 'SYSTEM', '+00:00')"
    return (
        "SELECT CAST(held.lock_data AS SIGNED) AS `key`,"
        " IF(LEFT(held.lock_mode, 1) = 'X', 'exclusive', 'shared') AS mode,"
        " NOT (trx.trx_requested_lock_id <=> held.lock_id) AS granted, trx.trx_mysql_thread_id AS session,"
        " NULL AS owner, session.user, session.host, session.command AS state,"
        f" {utc.format('COALESCE(trx.trx_wait_started, trx.trx_started)')} AS since,"
        " (SELECT GROUP_CONCAT(DISTINCT other.trx_mysql_thread_id) FROM information_schema.innodb_lock_waits AS wait"
        " JOIN information_schema.innodb_trx AS other ON other.trx_id = wait.blocking_trx_id"
        " WHERE wait.requested_lock_id = held.lock_id) AS waits_for"
        " FROM information_schema.innodb_locks AS held"
        " JOIN information_schema.innodb_trx AS trx ON trx.trx_id = held.lock_trx_id"
        " LEFT JOIN information_schema.processlist AS session ON session.id = trx.trx_mysql_thread_id"
        f" WHERE held.lock_table = CONCAT('`', DATABASE(), '`.`{element.table.name}`')"
        " AND held.lock_type = 'RECORD' AND held.lock_data <> 'supremum pseudo-record'"
        f" AND {element.among('CAST(held.lock_data AS SIGNED)', compiler, **kw)}"
        " ORDER BY `key`, granted DESC, since"
    )


BACKEND = MariaDB()

"""MariaDB: as MySQL, but an INSERT can be told not to wait, so that no gate is needed."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.compiler import compiles

from ..elements import NowaitInsert, NowaitTakeRow
from .mysql import MySQL, take_row


class MariaDB(MySQL):
    name = "MariaDB"
    bounded_insert = True
    explain = "EXPLAIN"
    frees_passed = False  # where it goes by a secondary index


_NOWAIT = "SET STATEMENT innodb_lock_wait_timeout=0 FOR "


# a mysql:// URL to MariaDB compiles under the name "mysql", though its facts are these
@compiles(NowaitInsert, "mysql")
@compiles(NowaitInsert, "mariadb")
def _nowait(element: NowaitInsert, compiler: Any, **kw: Any) -> str:
    return f"{_NOWAIT}{compiler.visit_insert(element, **kw)}"


@compiles(NowaitTakeRow, "mysql")
@compiles(NowaitTakeRow, "mariadb")
def _nowait_take_row(element: NowaitTakeRow, compiler: Any, **kw: Any) -> str:
    return f"{_NOWAIT}{take_row(element, compiler, **kw)}"


ENGINE = MariaDB()

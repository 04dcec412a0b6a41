"""MariaDB: as MySQL, but an INSERT can be told not to wait, so that no gate is needed."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.compiler import compiles

from ..elements import NowaitInsert
from .mysql import MySQL


class MariaDB(MySQL):
    name = "MariaDB"
    bounded_insert = True


# a mysql:// URL to MariaDB compiles under the name "mysql", though its facts are these
@compiles(NowaitInsert, "mysql")
@compiles(NowaitInsert, "mariadb")
def _nowait(element: NowaitInsert, compiler: Any, **kw: Any) -> str:
    return f"SET STATEMENT innodb_lock_wait_timeout=0 FOR {compiler.visit_insert(element, **kw)}"


ENGINE = MariaDB()

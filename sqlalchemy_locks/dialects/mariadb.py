"""MariaDB: as MySQL, but an INSERT can be told not to wait, so that every lock is one statement."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.compiler import compiles

from ..elements import BoundedInsert
from .mysql import MySQL


class MariaDB(MySQL):
    name = "MariaDB"
    bounded_insert = True


# a mysql:// URL to MariaDB compiles under the name "mysql", though its facts are these
@compiles(BoundedInsert, "mysql")
@compiles(BoundedInsert, "mariadb")
def _bounded(element: BoundedInsert, compiler: Any, **kw: Any) -> str:
    wait = compiler.process(element.wait, **kw)
    return f"SET STATEMENT innodb_lock_wait_timeout={wait} FOR {compiler.visit_insert(element, **kw)}"


ENGINE = MariaDB()

"""SQL elements that each engine compiles in its own way; the compilers are in ``dialects/``, one file per engine.

None of them has a default compiler: an unsupported engine raises instead of guessing.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, BindParameter, Boolean, DateTime, Insert, Integer, String, Table, bindparam, text
from sqlalchemy.sql import Executable
from sqlalchemy.sql.elements import ClauseElement, ColumnElement
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.visitors import InternalTraversal
from sqlalchemy.types import TypeEngine


class LockFunction(FunctionElement[Any]):
    """A function in the schema of the tables."""

    name: str
    # without the name, two functions would share a cache key
    _traverse_internals = [*FunctionElement._traverse_internals, ("name", InternalTraversal.dp_string)]

    def __init__(self, name: str, *arguments: ColumnElement[Any], type_: TypeEngine[Any]) -> None:
        super().__init__(*arguments)
        self.name = name
        self.type = type_


#: the parameter of every statement about one key
LOCK_KEY = bindparam("lock_key", type_=BigInteger())
#: the argument of the functions that wait: how long, in milliseconds
WAIT_MS = bindparam("wait_ms", None, Integer())


class SessionLevelIn(ColumnElement[bool]):
    """Whether the session's isolation level is one of ``levels``, in the server's spelling (MySQL, MariaDB)."""

    # not Boolean, which these engines would compile to a second `= 1`
    type: Any = Integer()
    _traverse_internals = [("levels", InternalTraversal.dp_plain_obj)]

    def __init__(self, *levels: str) -> None:
        self.levels = levels


READ_UNCOMMITTED = SessionLevelIn("READ-UNCOMMITTED")
#: READ COMMITTED or below, where a search for an absent row locks no gap
READ_COMMITTED = SessionLevelIn("READ-COMMITTED", "READ-UNCOMMITTED")
#: levels at which a plain SELECT reads without locks; at SERIALIZABLE it locks the rows that it reads
PLAIN_READS = SessionLevelIn("REPEATABLE-READ", "READ-COMMITTED", "READ-UNCOMMITTED")


class Writable(ColumnElement[bool]):
    """Whether this server accepts writes (MySQL, MariaDB): a replica grants row locks without effect on the primary."""

    # not Boolean, which these engines would compile to a second `= 1`
    type: Any = Integer()
    _traverse_internals = []


class SessionLock(FunctionElement[str]):
    """Acquire the server's session lock of a key; arguments are the key and, on MySQL and MariaDB, the longest wait.

    Its value is ``refused`` where the lock would have no effect, ``0`` at the timeout.
    """

    type = String()
    inherit_cache = True


class SessionUnlock(FunctionElement[bool]):
    """Release the session lock of a key; its value is whether it was held."""

    type = Boolean()
    inherit_cache = True


class ReleaseSessionLocks(FunctionElement[int]):
    """Release every session lock of the connection."""

    type = Integer()
    inherit_cache = True


class LimitIdle(FunctionElement[str]):
    """Limit how long this transaction may be idle, in seconds; then the server ends it (PostgreSQL).

    A shorter limit of the session stays. NULL sets no limit. The value of the element has no meaning.
    """

    type = String()
    inherit_cache = True


class InsertAbsent(Insert):
    """An INSERT that ignores duplicate keys (not on MySQL and MariaDB, where that hides other errors)."""

    inherit_cache = True


class Notify(FunctionElement[str]):
    """Notify listeners when the transaction commits; arguments are the channel and the payload (PostgreSQL)."""

    type = String()
    inherit_cache = True


class TakeRow(Insert):
    """An INSERT that locks the row of a duplicate key exclusively (MySQL, MariaDB).

    SQLAlchemy's own ON DUPLICATE KEY UPDATE isn't cached by 2.0.

    :param touched: the name of an instant's column, to which a microsecond is added; by default nothing is changed.
    """

    inherit_cache = True
    _traverse_internals = [*Insert._traverse_internals, ("touched", InternalTraversal.dp_string)]

    def __init__(self, table: Table, touched: str | None = None) -> None:
        super().__init__(table)
        self.touched = touched


class Touched(FunctionElement[datetime]):
    """The instant of the argument plus a microsecond: the smallest change of a row (MySQL, MariaDB)."""

    type = DateTime()
    inherit_cache = True


#: the beginning of the error on an engine that can't list the holders
HOLDERS_UNAVAILABLE = "the holders of keys are not available"


class HeldKeys(Executable, ClauseElement):
    """A SELECT of the holders and waiters of keys from the server's own tables; MariaDB's have only keys with waiters.

    Its columns are ``key``, ``mode``, ``granted``, ``session``, ``owner``, ``user``, ``host``, ``state``, ``since`` and
    ``waits_for``, numbers of sessions with commas; the holders of a key come first, then its waiters, the longest wait
    first.
    """

    inherit_cache = False
    _traverse_internals = [
        ("keys", InternalTraversal.dp_clauseelement),
        ("database", InternalTraversal.dp_clauseelement),
    ]

    def __init__(self, table: Table, some: bool) -> None:
        self.table = table
        #: the keys to list; ``None`` for all of them
        self.keys: BindParameter[int] | None = None
        if some:
            self.keys = bindparam("keys", expanding=True, required=False, type_=BigInteger())
        #: where the table is, if not in the session's database (MySQL, MariaDB)
        self.database: BindParameter[str] = bindparam("database", None, type_=String())

    def schema(self, compiler: Any, **kw: Any) -> str:
        """Return the SQL of the table's database."""
        return f"COALESCE({compiler.process(self.database, **kw)}, DATABASE())"

    def among(self, key: str, compiler: Any, **kw: Any) -> str:
        """Return the condition on the keys; ``key`` is the SQL of the key."""
        return "1 = 1" if self.keys is None else f"{key} IN {compiler.process(self.keys, **kw)}"


def skip_locked(statement: Any, **options: Any) -> Any:
    """Return the SELECT that locks the rows which no other session has locked.

    The hint is for MySQL: in a plan that merges several indexes it waits for locked rows nevertheless.
    """
    hint = text("/*+ SET_VAR(optimizer_switch='index_merge=off') */")
    return statement.prefix_with(hint, dialect="mysql").with_for_update(skip_locked=True, **options)


def force_index(statement: Any, index: str, table: Table | None = None) -> Any:
    """Return a statement with a hint that MySQL and MariaDB follow, and other engines don't get.

    :param table: the table of a SELECT; an UPDATE has only one.
    """
    for name in ("mysql", "mariadb"):
        options = {} if table is None else {"selectable": table}
        statement = statement.with_hint(text=f"FORCE INDEX ({index})", dialect_name=name, **options)
    return statement

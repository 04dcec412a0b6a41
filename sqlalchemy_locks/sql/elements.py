"""Constructs that render differently on each engine; the hooks are in ``dialects/``, one file an engine.

None of them has a default hook: an engine that is unknown here must refuse, never guess.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, BindParameter, Boolean, Delete, Insert, Integer, String, Table, bindparam
from sqlalchemy.sql import Executable
from sqlalchemy.sql.elements import ClauseElement, ColumnElement
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.visitors import InternalTraversal
from sqlalchemy.types import NullType, TypeDecorator, TypeEngine

from sqlalchemy_locks.sql.tables import DEFAULT_SCHEMA


class Void(TypeDecorator[None]):
    """A function that returns nothing: drivers disagree whether that is ``None`` or an empty string."""

    impl = NullType
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Any) -> None:
        return None


class LockFunction(FunctionElement[Any]):
    """A function of our schema, which ``schema_translate_map`` can move as it moves a table."""

    name: str
    schema = DEFAULT_SCHEMA
    _use_schema_map = True
    # the name is part of what makes two of them different: without it two functions would share a cache key
    _traverse_internals = [*FunctionElement._traverse_internals, ("name", InternalTraversal.dp_string)]

    def __init__(self, name: str, *arguments: ColumnElement[Any], type_: TypeEngine[Any]) -> None:
        super().__init__(*arguments)
        self.name = name
        self.type = type_


class Gate(FunctionElement[str]):
    """The name of the gate of one key (MySQL): arguments are the table's full name and the key."""

    type = String()
    inherit_cache = True


class ReadCommitted(ColumnElement[bool]):
    """Whether this session reads at READ COMMITTED or below, where a look for an absent row locks no gap (MySQL)."""

    # not Boolean, which these engines would spell `= 1` a second time
    type: Any = Integer()
    _traverse_internals = []


class ReadUncommitted(ColumnElement[bool]):
    """Whether this session reads what nobody has committed (MySQL)."""

    # not Boolean, which these engines would spell `= 1` a second time
    type: Any = Integer()
    _traverse_internals = []


class PlainReads(ColumnElement[bool]):
    """Whether a plain SELECT reads without a lock; under SERIALIZABLE it locks what it passes (InnoDB)."""

    # not Boolean, which these engines would spell `= 1` a second time
    type: Any = Integer()
    _traverse_internals = []


class Writable(ColumnElement[bool]):
    """Whether this server takes writes (MySQL, MariaDB): a replica grants row locks that bind nobody on the primary."""

    # not Boolean, which these engines would spell `= 1` a second time
    type: Any = Integer()
    _traverse_internals = []


class SessionLock(FunctionElement[str]):
    """The server's session lock, waited for; arguments are the key and, for those that take one, the longest wait.

    Gives ``refused`` where it would bind nobody else, ``0`` when the time was up.
    """

    type = String()
    inherit_cache = True


class SessionUnlock(FunctionElement[bool]):
    """Give the session lock of a key up; whether it was held."""

    type = Boolean()
    inherit_cache = True


class InsertAbsent(Insert):
    """An INSERT that passes over a row whose key is there (not on MySQL and MariaDB, where that hides other errors)."""

    inherit_cache = True


class DeleteByKey(Delete):
    """A DELETE by primary key that goes by the primary key, however small the table is.

    InnoDB locks, and waits for, every row that it reads on its way. An UPDATE can be told so by a hint of SQLAlchemy's.
    """

    inherit_cache = True


class Notify(FunctionElement[str]):
    """Tell those who listen, when the transaction commits; arguments are the channel and what is told (PostgreSQL)."""

    type = String()
    inherit_cache = True


class TakeRow(Insert):
    """An INSERT that holds the row of a duplicate exclusively, and changes nothing (MySQL, MariaDB).

    Not SQLAlchemy's own ON DUPLICATE KEY UPDATE, which 2.0 keeps out of the compiled cache.
    """

    inherit_cache = True


class NowaitInsert(Insert):
    """An INSERT that fails at once where it would have to wait for another transaction's lock (MariaDB)."""

    inherit_cache = True


class NowaitTakeRow(TakeRow):
    """As ``TakeRow``, failing at once where it would have to wait (MariaDB)."""

    inherit_cache = True


class HeldKeys(Executable, ClauseElement):
    """A SELECT of who holds keys and who waits for one, out of the server's own tables.

    Gives ``key``, ``mode``, ``granted``, ``session``, ``owner``, ``user``, ``host``, ``state``, ``since`` and
    ``waits_for``, the holders of a key first, then who waits longest.
    """

    inherit_cache = False
    _traverse_internals = [("keys", InternalTraversal.dp_clauseelement)]

    def __init__(self, table: Table, some: bool) -> None:
        self.table = table
        #: only of these keys; without it, of all
        self.keys: BindParameter[int] | None = None
        if some:
            self.keys = bindparam("keys", expanding=True, required=False, type_=BigInteger())

    def among(self, key: str, compiler: Any, **kw: Any) -> str:
        """The condition that the key is one of those, ``key`` being how it is spelt there."""
        return "1 = 1" if self.keys is None else f"{key} IN {compiler.process(self.keys, **kw)}"


class ContendedKeys(HeldKeys):
    """As ``HeldKeys``, where only what somebody waits for is in the server's tables (MariaDB)."""

    inherit_cache = False

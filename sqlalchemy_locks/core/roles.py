"""Roles: which column of which table is a lock's id, its flag, its fence; shipped tables and a user's own alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

from sqlalchemy import (
    Column,
    ColumnElement,
    Float,
    Integer,
    SmallInteger,
    String,
    Table,
    Update,
    Uuid,
    bindparam,
    func,
    literal_column,
    or_,
    update,
)

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.core.entities import MappedTable
from sqlalchemy_locks.core.operation import BuildContext
from sqlalchemy_locks.sql.tables import DEFAULT_SCHEMA, Tables, tables

DEFAULT_QUEUE = "default"
ONE: Any = literal_column("1")
#: the shape of an id: of whatever type its column has
ID: ColumnElement[Any] = literal_column("id")
#: the columns of the shipped tables whose name is not that of the role
_SHIPPED = {"queue": "queue_id", "retries": "retries_left"}


@dataclass(frozen=True, eq=False)
class RoleColumns:
    """The rows of one place: their table, and which of its columns plays which role."""

    table: Table
    roles: Mapping[str, Column[Any]]

    def __getitem__(self, role: str) -> Any:
        return self.roles[role]

    def __getattr__(self, role: str) -> Any:
        try:
            return self.roles[role]
        except KeyError:
            raise AttributeError(role) from None

    def __contains__(self, role: object) -> bool:
        return role in self.roles


class RoleMapping:
    """Where a pattern's rows are, and what plays which role there.

    :param what: what sentences call the pattern, e.g. ``Mutex``.
    :param shipped: the shipped table, and the roles that it has.
    :param entity: the user's own class or table, with ``given``: its column for each role, ``None`` where it has none.
    """

    def __init__(
        self,
        what: str,
        shipped: Callable[[Tables], Table],
        roles: Iterable[str],
        entity: Any = None,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        self.what = what
        self._shipped, self._roles = shipped, tuple(roles)
        given = {role: column for role, column in (given or {}).items() if column is not None}
        if entity is None and given:
            raise TypeError(f"{what}: {', '.join(given)} name columns of a class or table, and none was given")
        self.target = None if entity is None else MappedTable(entity, what)
        self._own: RoleColumns | None = None
        if self.target is not None:
            own = {role: self.target.column(column, role) for role, column in given.items()}
            self._own = RoleColumns(self.target.table, own)
        self._refuse_types()
        token: Any = self._own["token"].type if self._own is not None and "token" in self._own else None
        #: the nonce's column takes UUID objects
        self.nonce_is_uuid = isinstance(token, Uuid) and token.as_uuid
        #: no two rows have the same id (in one queue): the shipped tables see to it, and a model may say so
        self.unique = True
        if self.target is not None and self._own is not None:
            self.unique = self.target.is_unique(self._own[role] for role in ("id", "queue") if role in self._own)

    def at(self, context: BuildContext) -> RoleColumns:
        return self.among(context.tables)

    def among(self, shipped: Tables) -> RoleColumns:
        """The columns, if they are not a user's own: of these tables."""
        return self._own or _shipped_at(self._shipped(shipped), self._roles)

    def has(self, role: str) -> bool:
        return role in (self._roles if self._own is None else self._own)

    def require(self, role: str, why: str) -> None:
        """:raises ValueError: when no column plays the role."""
        if not self.has(role):
            raise ValueError(f"{self.what}: {why} needs a column; name it by {role}= where the {self.what} is made")

    def of_type(self, role: str, types: tuple[type, ...], what: str) -> None:
        """:raises TypeError: when the column that plays the role is of another type."""
        if self._own is not None and role in self._own and not isinstance(self._own[role].type, types):
            kinds = " or ".join(type_.__name__ for type_ in types)
            raise TypeError(f"{self.what}: {role}={self._own[role]} must be {kinds} for {what}")

    def of_whole_seconds(self, role: str) -> None:
        """:raises TypeError: when the column can't keep every second that there will be."""
        if self._own is None or role not in self._own:
            return
        type_: Any = self._own[role].type
        digits = getattr(type_, "precision", None)
        narrow = digits is not None and digits - (type_.scale or 0) < 10
        if narrow or isinstance(type_, (Float, SmallInteger)):
            raise TypeError(f"{self.what}: {role}={self._own[role]} of type {type_!r} can't keep seconds exactly")

    def _refuse_types(self) -> None:
        if self._own is None:
            return
        if len(set(self._own.roles.values())) < len(self._own.roles):
            raise ValueError(f"{self.what}: one column can't play two roles: {', '.join(map(str, self._own.roles))}")
        self.of_type("fence", (Integer,), "a token")
        self.of_type("retries", (Integer,), "a number")
        self.of_type("token", (String, Uuid), "a nonce")
        type_: Any = self._own["token"].type if "token" in self._own else None
        if isinstance(type_, String) and type_.length is not None and type_.length < 32:
            raise TypeError(f"{self.what}: token={self._own['token']} must have room for the 32 characters of a nonce")

    def bumped(self) -> dict[Any, Any]:
        """What an UPDATE of a mapped class adds; see ``MappedTable.bumped``."""
        return {} if self.target is None else self.target.bumped()

    def own_rows(self) -> list[ColumnElement[bool]]:
        """The condition on rows of a mapped class; see ``MappedTable.own_rows``."""
        return [] if self.target is None else self.target.own_rows()

    def identity(self, id: Any, queue: Any) -> dict[str, Any]:
        """The values that tell one row."""
        if id is None:
            raise TypeError(f"{self.what}: an id can't be {id!r}")
        return {param_name("id"): self._typed("id", id, "an id")} | self.queue(queue)

    def _typed(self, role: str, value: Any, what: str) -> Any:
        """A value that the engine will not convert: some take '07' for 7, and 'x' for 0."""
        if self._own is None:
            return valid_name(value, what)
        column = self._own[role]
        try:
            expected = column.type.python_type
        except NotImplementedError:
            expected = object
        if isinstance(value, bool) or not isinstance(value, expected):
            raise TypeError(f"{self.what}: {what} is {expected.__name__}, as {column} keeps it, not {value!r}")
        return valid_name(value, what) if isinstance(value, str) else value

    def queue(self, queue: Any) -> dict[str, Any]:
        """The value that tells one queue, where there are queues."""
        if self._own is None:
            return {param_name("queue"): DEFAULT_QUEUE if queue is None else valid_name(queue, "a queue")}
        if "queue" in self._own:
            if queue is None:
                raise ValueError(f"{self.what}: ids are unique inside a queue only, so say queue=")
            return {param_name("queue"): self._typed("queue", queue, "a queue")}
        if queue is not None:
            raise ValueError(f"{self.what}: there are no queues without a column; name it by queue=")
        return {}

    def route(self) -> dict[str, Any]:
        if self.target is not None:
            return self.target.route()
        return {"clause": _routed(self._shipped(tables(DEFAULT_SCHEMA, "")))}


@cache
def _routed(table: Table) -> Update:
    return update(table)


@cache
def _shipped_at(table: Table, roles: tuple[str, ...]) -> RoleColumns:
    return RoleColumns(table, {role: table.c[_SHIPPED.get(role, role)] for role in roles})


def role_param(column: Column[Any], role: str) -> Any:
    """A value of the call, bound with the column's own type."""
    return bindparam(param_name(role), type_=column.type)


def param_name(role: str) -> str:
    """What a value is called in a statement: not as any column is, since an UPDATE would then set it."""
    return f"locks_{role}"


def one(rows: RoleMapping, at: RoleColumns) -> list[Any]:
    """The conditions that tell one row."""
    conditions = [at[role] == role_param(at[role], role) for role in ("queue", "id") if role in at]
    return conditions + rows.own_rows()


def nonce_of(rows: RoleMapping, nonce: str) -> Any:
    """A nonce as the column for it takes it."""
    return UUID(nonce) if rows.nonce_is_uuid else nonce


def raised(column: Column[Any]) -> Any:
    """A number that each acquisition raises, and that nothing has raised where it is ``NULL``: a fence, a claim."""
    number: Any = func.coalesce(column, literal_column("0")) if column.nullable else column
    return number + ONE


def retries_left(at: RoleColumns) -> list[Any]:
    """The condition that a retry is left, where retries are counted; NULL is as many as you like."""
    return [or_(at["retries"].is_(None), at["retries"] > literal_column("0"))] if "retries" in at else []

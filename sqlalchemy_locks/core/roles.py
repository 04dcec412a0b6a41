"""Roles: which column of which table holds a lock's id, flag, fence and so on, in shipped and mapped tables alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

import sqlalchemy as sa

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.core.entities import MappedTable
from sqlalchemy_locks.core.operation import BuildContext
from sqlalchemy_locks.sql.tables import DEFAULT_SCHEMA, Tables, tables

DEFAULT_QUEUE = "default"
ONE: Any = sa.literal_column("1")
#: the result shape of operations that return ids, whatever type their column has
ID: sa.ColumnElement[Any] = sa.literal_column("id")
#: the columns of the shipped tables whose name differs from their role
_SHIPPED_NAMES = {"queue": "queue_id", "retries": "retries_left"}


def param_name(role: str) -> str:
    """Return the name of a bound value: never a column's, since an UPDATE would then set that column."""
    return f"locks_{role}"


#: the values that every acquisition binds
ID_PARAM, QUEUE_PARAM, OWNER_PARAM, NONCE_PARAM = map(param_name, ("id", "queue", "owner", "nonce"))


class RoleColumns:
    """A table, and which of its columns plays which role; a column is also an attribute of that name."""

    def __init__(self, table: sa.Table, roles: Mapping[str, sa.Column[Any]]) -> None:
        self.table, self.roles = table, roles
        for role, column in roles.items():
            setattr(self, role, column)

    if TYPE_CHECKING:

        def __getattr__(self, role: str) -> Any: ...

    def __getitem__(self, role: str) -> Any:
        return self.roles[role]

    def __contains__(self, role: object) -> bool:
        return role in self.roles


class RoleMapping:
    """The table of a pattern's rows, and its column for each role.

    :param pattern: the pattern as errors name it, e.g. ``Mutex``.
    :param shipped: selects the shipped table. :param roles: the roles of its columns.
    :param entity: the user's own class or table. :param columns: its column for each role, ``None`` where it has none.
    :raises ValueError: if the model doesn't declare ids as unique (within a queue).
    """

    def __init__(
        self,
        pattern: str,
        shipped: Callable[[Tables], sa.Table],
        roles: Iterable[str],
        entity: Any = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        self.pattern = pattern
        self._shipped, self._roles = shipped, tuple(roles)
        columns = {role: column for role, column in (columns or {}).items() if column is not None}
        if entity is None and columns:
            raise TypeError(f"{pattern}: {', '.join(columns)} name columns of a class or table, and none was given")
        self.target = None if entity is None else MappedTable(entity, pattern)
        self._mapped: RoleColumns | None = None
        if self.target is not None:
            own = {role: self.target.column(column, role) for role, column in columns.items()}
            self._mapped = RoleColumns(self.target.table, own)
            identity = [self._mapped[role] for role in ("queue", "id") if role in self._mapped]
            if not self.target.is_unique(identity):
                raise ValueError(
                    f"{pattern}: two rows with one id would be two locks with one name: give "
                    f"({', '.join(column.name for column in identity)}) of {self.target.name} a unique constraint"
                )
        self._present = frozenset(self._roles if self._mapped is None else self._mapped.roles)
        self._check_columns()
        token: Any = self._mapped["token"].type if self._mapped is not None and "token" in self._mapped else None
        #: converts a nonce to a value of its column's type
        self.nonce_type: Callable[[str], Any] = UUID if isinstance(token, sa.Uuid) and token.as_uuid else str

    def columns(self, context: BuildContext) -> RoleColumns:
        """Return the columns; for a shipped table, those in the schema or with the prefix of a build context."""
        return self.columns_in(context.tables)

    def columns_in(self, shipped: Tables) -> RoleColumns:
        """Return the columns, those of shipped tables from ``shipped``."""
        return self._mapped or _shipped_columns(self._shipped(shipped), self._roles)

    def has(self, role: str) -> bool:
        """Return whether a column plays the role."""
        return role in self._present

    def require(self, role: str, why: str) -> None:
        """:raises ValueError: if no column plays the role."""
        if role not in self._present:
            raise ValueError(
                f"{self.pattern}: {why} needs a column; name it by {role}= where the {self.pattern} is made"
            )

    def require_type(self, role: str, types: tuple[type, ...], what: str, but: type | tuple[()] = ()) -> None:
        """:raises TypeError: if the column that plays the role has another type, or the excluded type ``but``."""
        if self._mapped is None or role not in self._mapped:
            return
        type_ = self._mapped[role].type
        if not isinstance(type_, types) or isinstance(type_, but):
            kinds = " or ".join(each.__name__ for each in types)
            raise TypeError(f"{self.pattern}: {role}={self._mapped[role]} must be {kinds} for {what}, not {type_!r}")

    def _check_columns(self) -> None:
        if self._mapped is None:
            return
        if len(set(self._mapped.roles.values())) < len(self._mapped.roles):
            raise ValueError(
                f"{self.pattern}: one column can't play two roles: {', '.join(map(str, self._mapped.roles))}"
            )
        self.require_type("fence", (sa.Integer,), "a token")
        self.require_type("retries", (sa.Integer,), "a number")
        self.require_type("token", (sa.String, sa.Uuid), "a nonce")
        type_: Any = self._mapped["token"].type if "token" in self._mapped else None
        if isinstance(type_, sa.String) and type_.length is not None and type_.length < 32:
            raise TypeError(
                f"{self.pattern}: token={self._mapped['token']} must have room for the 32 characters of a nonce"
            )

    def version_bump(self) -> dict[Any, Any]:
        """Return the version's increment for an UPDATE of a mapped class; see ``MappedTable.version_bump``."""
        return {} if self.target is None else self.target.version_bump()

    def class_condition(self) -> list[sa.ColumnElement[bool]]:
        """Return the condition on rows of a mapped class; see ``MappedTable.class_condition``."""
        return [] if self.target is None else self.target.class_condition()

    def row_condition(self, columns: RoleColumns) -> list[Any]:
        """Return the conditions that select one row."""
        return [
            *(columns[role] == role_param(columns[role], role) for role in ("queue", "id") if role in columns),
            *self.class_condition(),
        ]

    def identity(self, id: Any, queue: Any) -> dict[str, Any]:
        """Return the values that identify one row.

        :raises TypeError: :raises ValueError: for an id or queue that the columns can't store.
        """
        in_queue = self.queue(queue)
        if self._mapped is None:
            value = valid_name(id, "an id")
        elif id is None:
            raise TypeError(f"{self.pattern}: an id can't be {id!r}")
        else:
            value = self._typed(self._mapped["id"], id, "an id")
        return {ID_PARAM: value, **in_queue}

    def with_owner(self, values: dict[str, Any], owner: Any) -> dict[str, Any]:
        """Add the owner to store to the values of a call, if there is a column for it.

        :raises ValueError: for an owner without a column.
        """
        if "owner" in self._present:
            values[OWNER_PARAM] = None if owner is None else valid_name(owner, "an owner")
        elif owner is not None:
            self.require("owner", "owner")
        return values

    def _typed(self, column: Any, value: Any, what: str) -> Any:
        """Return a value of the column's type: the server might convert others, '07' to 7 and 'x' to 0."""
        try:
            expected = column.type.python_type
        except NotImplementedError:
            expected = object
        if isinstance(value, bool) or not isinstance(value, expected):
            raise TypeError(f"{self.pattern}: {what} is {expected.__name__}, the type of {column}, not {value!r}")
        return valid_name(value, what) if isinstance(value, str) else value

    def queue(self, queue: Any) -> dict[str, Any]:
        """Return the value that selects one queue; empty for a table without queues."""
        if self._mapped is None:
            return {QUEUE_PARAM: DEFAULT_QUEUE if queue is None else valid_name(queue, "a queue")}
        if "queue" in self._mapped:
            if queue is None:
                raise ValueError(f"{self.pattern}: ids are unique only within a queue, so pass queue=")
            return {QUEUE_PARAM: self._typed(self._mapped["queue"], queue, "a queue")}
        if queue is not None:
            raise ValueError(f"{self.pattern}: there are no queues without a column; name it by queue=")
        return {}

    def route(self) -> dict[str, Any]:
        """Return the arguments for ``Session.get_bind``."""
        if self.target is not None:
            return self.target.route()
        return {"clause": _update_of(self._shipped(tables(DEFAULT_SCHEMA, "")))}


@cache
def _update_of(table: sa.Table) -> sa.Update:
    return sa.update(table)


@cache
def _shipped_columns(table: sa.Table, roles: tuple[str, ...]) -> RoleColumns:
    return RoleColumns(table, {role: table.c[_SHIPPED_NAMES.get(role, role)] for role in roles})


def role_param(column: sa.Column[Any], role: str) -> Any:
    """Return a bound value with the type of its column."""
    return sa.bindparam(param_name(role), type_=column.type)


def incremented(column: sa.Column[Any]) -> Any:
    """Return the column plus one, counting ``NULL`` as 0: for fences."""
    number: Any = sa.func.coalesce(column, sa.literal_column("0")) if column.nullable else column
    return number + ONE


def retries_left(columns: RoleColumns) -> list[Any]:
    """Return the condition that a retry is left; ``NULL`` is unlimited, and so is a table without the column."""
    if "retries" not in columns:
        return []
    return [sa.or_(columns["retries"].is_(None), columns["retries"] > sa.literal_column("0"))]

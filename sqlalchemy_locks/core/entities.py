"""Columns of a user's own mapped class or ``Table``, for the patterns that work on them.

Statements go to the one table behind the class, as Core statements: they are what is documented, and nothing of
the session's state decides them. What the ORM promises of a class is kept all the same: rows of other classes
in the same table are left alone, a version counter rises, and loaded objects show what the row is now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import Column, ColumnElement, Index, Integer, Table, UniqueConstraint, inspect, literal_column, update

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapper, Session


class MappedTable:
    """One mapped class or ``Table``.

    :param entity: the class or the table.
    :param what: what sentences call the pattern, e.g. ``Mutex``.
    :param joins: the pattern finds rows by a SELECT of the class, which joins the tables of its parents.
    :raises TypeError: for anything else.
    :raises ValueError: for one without a primary key, or with a version counter that only Python can count.
    """

    def __init__(self, entity: Any, what: str, *, joins: bool = False) -> None:
        self.entity = entity
        self.what = what
        inspected: Any = inspect(entity, raiseerr=False)
        self.mapper: Mapper[Any] | None = inspected if getattr(inspected, "is_mapper", False) else None
        if self.mapper is None and not isinstance(entity, Table):
            raise TypeError(f"{what} takes a mapped class or a Table, not {entity!r}")
        table: Any = entity if self.mapper is None else self.mapper.local_table
        if not isinstance(table, Table):
            raise TypeError(f"{what} takes a class that is mapped to a table, and {self.name} is mapped to {table!r}")
        self.table = table
        self.primary_key: tuple[Column[Any], ...] = tuple(table.primary_key)
        if not self.primary_key:
            raise ValueError(f"{what} needs a primary key, and {self.name} has none")
        if self.mapper is not None and self.mapper.polymorphic_on is not None and not joins:
            kind: Any = self.mapper.polymorphic_on
            if getattr(kind, "table", None) is not table:
                raise ValueError(
                    f"{what}: what kind of {self.name} a row is, is kept in another table, which the same statement "
                    "can't look at; use the class that is mapped to that table"
                )
        self._version = self._version_column()

    @property
    def name(self) -> str:
        """What sentences call it."""
        return str(getattr(self.entity, "__name__", self.entity))

    def column(self, given: Any, role: str) -> Column[Any]:
        """The table's column that was given as an attribute of the class, as a ``Column``, or by its name.

        :raises TypeError: unless it is a column.
        :raises ValueError: for a column of another table, a joined parent's included.
        """
        if isinstance(given, str):
            attributes: Any = self.table.columns if self.mapper is None else self.mapper.columns
            if given not in attributes:
                raise ValueError(f"{self.what}: {self.name} has no column {given!r}")
            given = attributes[given]
        clause: Any = getattr(given, "expression", given)
        base: Any = getattr(clause, "base_columns", ())
        own: list[Column[Any]] = [column for column in self.table.columns if column in base]
        if own:
            return own[0]
        if isinstance(clause, ColumnElement):
            raise ValueError(
                f"{self.what}: {role}={given} is not a column of {self.table}, the table of {self.name}; columns of "
                "another table, a joined parent's included, can't be changed in the same statement"
            )
        raise TypeError(f"{self.what}: {role} is a column of {self.name}, not {given!r}")

    def is_unique(self, columns: Iterable[Column[Any]]) -> bool:
        """Whether the model says that no two rows share these columns' values."""
        wanted = {column.name for column in columns}
        declared: list[set[str]] = [{column.name for column in self.primary_key}]
        declared += [{column.name} for column in self.table.columns if column.unique]
        for constraint in (*self.table.constraints, *self.table.indexes):
            if isinstance(constraint, UniqueConstraint) or (
                isinstance(constraint, Index) and constraint.unique and not partial(constraint)
            ):
                declared.append({column.name for column in constraint.columns})
        return any(key <= wanted for key in declared)

    def own_rows(self) -> list[ColumnElement[bool]]:
        """The condition that leaves rows of sister classes in the same table alone."""
        mapper = self.mapper
        if mapper is None or not mapper.single or mapper.polymorphic_on is None:
            return []
        return [mapper.polymorphic_on.in_([each.polymorphic_identity for each in mapper.self_and_descendants])]

    def bumped(self) -> dict[Any, Any]:
        """What an UPDATE adds, so that a flush of what was loaded before it fails instead of undoing it."""
        return {} if self._version is None else {self._version: self._version + literal_column("1")}

    def first(self) -> dict[Any, Any]:
        """What an INSERT adds, so that the row is one of this class's."""
        first: dict[Any, Any] = {} if self._version is None else {self._version: 1}
        if self.mapper is not None and self.mapper.polymorphic_on is not None:
            first[self.mapper.polymorphic_on] = self.mapper.polymorphic_identity
        return first

    def _version_column(self) -> Column[Any] | None:
        if self.mapper is None or self.mapper.version_id_col is None or not self.mapper.version_id_generator:
            return None  # none, or one that the server counts
        column: Any = self.mapper.version_id_col
        counter: Any = self.mapper.version_id_generator
        if isinstance(column.type, Integer) and column.table is self.table and (counter(None), counter(41)) == (1, 42):
            return column  # type: ignore[no-any-return]
        raise ValueError(
            f"{self.what}: the version of {self.name} is counted by Python code of its own, or in another table, "
            "where a statement can't count it; use an integer version_id_col of its own, or a server-side one"
        )

    def route(self) -> dict[str, Any]:
        """What ``Session.get_bind`` is offered: an UPDATE of this table."""
        clause = update(self.table)
        return {"clause": clause} if self.mapper is None else {"mapper": self.mapper, "clause": clause}

    def refresh(
        self, session: Session | None, columns: Iterable[Column[Any]], where: Mapping[Column[Any], Any]
    ) -> None:
        """Read the changed columns anew into the loaded objects whose row was meant; none loaded, no query.

        Read, not only expired: an ``AsyncSession`` can't read an expired attribute when it is looked at. Where rows
        have a version, all that is loaded is read: what is then written was not decided on older values.
        """
        if session is None or self.mapper is None:
            return
        keys = {key: value for column, value in where.items() if (key := self.key_of(column)) is not None}
        by_itself = [column for column in self.table.columns if column.onupdate or column.server_onupdate]
        changed = {key for column in (*columns, *self.bumped(), *by_itself) if (key := self.key_of(column)) is not None}
        for loaded in list(session.identity_map.values()):
            state: Any = inspect(loaded)
            if not state.mapper.isa(self.mapper) or not changed & state.dict.keys():
                continue  # what is not loaded is read when it is looked at
            if all(key not in state.dict or _same(state.dict[key], value) for key, value in keys.items()):
                session.refresh(loaded, sorted(self._stale(state, changed)))

    def _stale(self, state: Any, changed: set[str]) -> set[str]:
        if self._version is None:
            return changed
        if state.modified:
            # what waits to be flushed was decided on older values: let its flush fail
            return {key for key in changed if key != self.key_of(self._version)}
        return changed | {attribute.key for attribute in state.mapper.column_attrs if attribute.key in state.dict}

    def key_of(self, column: Column[Any]) -> str | None:
        """The attribute that shows a column, where one does."""
        assert self.mapper is not None
        if column not in self.mapper.columns.values():
            return None
        return str(self.mapper.get_property_by_column(column).key)


def _same(one: Any, other: Any) -> bool:
    """Whether two ids may be the same row's; some collations know no case."""
    if isinstance(one, str) and isinstance(other, str):
        return one.casefold() == other.casefold()
    return bool(one == other)


def partial(index: Index) -> bool:
    """Whether an index is over some of the rows only."""
    return any(options.get("where") is not None for options in index.dialect_options.values())

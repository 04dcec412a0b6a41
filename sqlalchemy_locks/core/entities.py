"""MappedTable: a user's own mapped class or ``Table``, for the patterns that work on one.

Statements are Core statements on the one table of the class: they are what is documented, and no state of the session
changes them. The ORM's guarantees for a class still hold: rows of other classes in the same table are left alone, a
version counter is incremented, and loaded objects show the current values of the row.
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
    :param what: the pattern's name in error messages, e.g. ``Mutex``.
    :param joins: the pattern finds rows by a SELECT of the class, which joins the tables of its parents.
    :raises TypeError: for anything else.
    :raises ValueError: without a primary key, or with a version counter that only Python can increment.
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
                    f"{what}: the discriminator of {self.name} is a column of another table, which the same statement "
                    "can't read; use the class that is mapped to that table"
                )
        self._version = self._version_column()

    @property
    def name(self) -> str:
        """The name in error messages."""
        return str(getattr(self.entity, "__name__", self.entity))

    def column(self, given: Any, role: str) -> Column[Any]:
        """Return the table's column for an attribute of the class, a ``Column``, or a name.

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
        """Return whether the model declares that no two rows share these columns' values."""
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
        """Return the condition that excludes rows of other classes in the same table."""
        mapper = self.mapper
        if mapper is None or not mapper.single or mapper.polymorphic_on is None:
            return []
        return [mapper.polymorphic_on.in_([each.polymorphic_identity for each in mapper.self_and_descendants])]

    def bumped(self) -> dict[Any, Any]:
        """Return what an UPDATE adds, so that a flush of objects loaded before fails instead of undoing it."""
        return {} if self._version is None else {self._version: self._version + literal_column("1")}

    def first(self) -> dict[Any, Any]:
        """Return the values that an INSERT adds, so that the row is one of this class."""
        first: dict[Any, Any] = {} if self._version is None else {self._version: 1}
        if self.mapper is not None and self.mapper.polymorphic_on is not None:
            first[self.mapper.polymorphic_on] = self.mapper.polymorphic_identity
        return first

    def _version_column(self) -> Column[Any] | None:
        if self.mapper is None or self.mapper.version_id_col is None or not self.mapper.version_id_generator:
            return None  # none, or one that the server increments
        column: Any = self.mapper.version_id_col
        counter: Any = self.mapper.version_id_generator
        if isinstance(column.type, Integer) and column.table is self.table and (counter(None), counter(41)) == (1, 42):
            return column  # type: ignore[no-any-return]
        raise ValueError(
            f"{self.what}: the version of {self.name} is counted by custom Python code, or in another table, where a "
            "statement can't increment it; use an integer version_id_col of this table, or a server-side one"
        )

    def route(self) -> dict[str, Any]:
        """Return the arguments of ``Session.get_bind``: an UPDATE of this table."""
        clause = update(self.table)
        return {"clause": clause} if self.mapper is None else {"mapper": self.mapper, "clause": clause}

    def refresh(
        self, session: Session | None, columns: Iterable[Column[Any]], where: Mapping[Column[Any], Any]
    ) -> None:
        """Refresh the changed columns of loaded objects of the row; without such objects there is no query.

        They are read and not only expired, since an ``AsyncSession`` can't load an expired attribute on access. Where
        rows have a version, every loaded column is read, so that later writes aren't based on older values.
        """
        if session is None or self.mapper is None:
            return
        keys = {key: value for column, value in where.items() if (key := self.key_of(column)) is not None}
        by_itself = [column for column in self.table.columns if column.onupdate or column.server_onupdate]
        changed = {key for column in (*columns, *self.bumped(), *by_itself) if (key := self.key_of(column)) is not None}
        for loaded in list(session.identity_map.values()):
            state: Any = inspect(loaded)
            if not state.mapper.isa(self.mapper) or not changed & state.dict.keys():
                continue  # attributes that aren't loaded are read on access
            if all(key not in state.dict or _same(state.dict[key], value) for key, value in keys.items()):
                session.refresh(loaded, sorted(self._stale(state, changed)))

    def _stale(self, state: Any, changed: set[str]) -> set[str]:
        if self._version is None:
            return changed
        if state.modified:
            # pending changes are based on older values: let their flush fail
            return {key for key in changed if key != self.key_of(self._version)}
        return changed | {attribute.key for attribute in state.mapper.column_attrs if attribute.key in state.dict}

    def key_of(self, column: Column[Any]) -> str | None:
        """Return the name of the attribute that is mapped to a column, or ``None``."""
        assert self.mapper is not None
        if column not in self.mapper.columns.values():
            return None
        return str(self.mapper.get_property_by_column(column).key)


def _same(one: Any, other: Any) -> bool:
    """Return whether two ids may be equal to the database; some collations ignore case."""
    if isinstance(one, str) and isinstance(other, str):
        return one.casefold() == other.casefold()
    return bool(one == other)


def partial(index: Index) -> bool:
    """Return whether an index is partial."""
    return any(options.get("where") is not None for options in index.dialect_options.values())

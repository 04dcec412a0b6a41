"""MappedTable: a user's own mapped class or ``Table``, for the patterns that work on one.

Patterns execute the documented Core statements on the one table behind the class, independently of the session's state.
The ORM's guarantees still hold: rows of sibling classes in the same table are not touched, a version counter is
incremented, and loaded objects show the row's current values, also after a savepoint is rolled back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapper, Session


def entity_of(statement: sa.Update) -> Any:
    """Return the mapped class of an UPDATE, or its table if it has no class."""
    try:
        return statement.entity_description.get("entity", statement.table)
    except KeyError:  # SQLAlchemy's, for a Table's UPDATE with a condition on an attribute of a class
        return statement.table


class MappedTable:
    """A mapped class or ``Table`` that a pattern works on.

    :param entity: the class or the table.
    :param pattern: the pattern as errors name it, e.g. ``Mutex``.
    :param joins: the pattern finds rows by a SELECT of the class, which joins the tables of its parents.
    :raises TypeError: for anything else.
    :raises ValueError: for one without a primary key, or with a version counter that only Python can increment.
    """

    def __init__(self, entity: Any, pattern: str, *, joins: bool = False) -> None:
        self.entity = entity
        self.pattern = pattern
        inspected: Any = sa.inspect(entity, raiseerr=False)
        self.mapper: Mapper[Any] | None = inspected if getattr(inspected, "is_mapper", False) else None
        if self.mapper is None and not isinstance(entity, sa.Table):
            raise TypeError(f"{pattern} takes a mapped class or a Table, not {entity!r}")
        table: Any = entity if self.mapper is None else self.mapper.local_table
        if not isinstance(table, sa.Table):
            raise TypeError(
                f"{pattern} takes a class that is mapped to a table, and {self.name} is mapped to {table!r}"
            )
        self.table = table
        self.primary_key: tuple[sa.Column[Any], ...] = tuple(table.primary_key)
        if not self.primary_key:
            raise ValueError(f"{pattern} needs a primary key, and {self.name} has none")
        if self.mapper is not None and self.mapper.polymorphic_on is not None and not joins:
            discriminator: Any = self.mapper.polymorphic_on
            if getattr(discriminator, "table", None) is not table:
                raise ValueError(
                    f"{pattern}: the column that tells which class of {self.name} a row belongs to is in another "
                    "table, which the same statement can't read; use the class that is mapped to that table"
                )
        self._version = self._version_column()

    @property
    def name(self) -> str:
        """The class or table as errors name it."""
        return str(getattr(self.entity, "__name__", self.entity))

    def column(self, attribute: Any, role: str) -> sa.Column[Any]:
        """Return the table's column, given as an attribute of the class, a ``Column`` or a name.

        :raises TypeError: unless it is a column.
        :raises ValueError: for a column of another table, a joined parent's included.
        """
        if isinstance(attribute, str):
            attribute = self._named(attribute)
        clause: Any = getattr(attribute, "expression", attribute)
        base: Any = getattr(clause, "base_columns", ())
        own: list[sa.Column[Any]] = [column for column in self.table.columns if column in base]
        if own:
            return own[0]
        if isinstance(clause, sa.ColumnElement):
            raise ValueError(
                f"{self.pattern}: {role}={attribute} is not a column of {self.table}, the table of {self.name}; "
                "columns of another table, a joined parent's included, can't be changed in the same statement"
            )
        raise TypeError(f"{self.pattern}: {role} is a column of {self.name}, not {attribute!r}")

    def _named(self, name: str) -> Any:
        """Return the attribute, synonym or column of a name; of two, the attribute."""
        if self.mapper is not None and (name in self.mapper.columns or name in self.mapper.synonyms):
            return getattr(self.entity, name)
        for column in self.table.columns:
            if name in (column.key, column.name):
                return column
        raise ValueError(f"{self.pattern}: {self.name} has no column {name!r}")

    def is_unique(self, columns: Iterable[sa.Column[Any]]) -> bool:
        """Return whether the model declares that no two rows share these columns' values."""
        names = {column.name for column in columns}
        return any(key <= names for key in self.unique_keys())

    def unique_keys(self) -> list[set[str]]:
        """Return the names of the columns of each key that the model declares as unique, the primary key first."""
        keys: list[set[str]] = [{column.name for column in self.primary_key}]
        keys += [{column.name} for column in self.table.columns if column.unique]
        for constraint in (*self.table.constraints, *self.table.indexes):
            if isinstance(constraint, sa.UniqueConstraint) or (
                isinstance(constraint, sa.Index) and constraint.unique and not partial(constraint)
            ):
                keys.append({column.name for column in constraint.columns})
        return keys

    def class_condition(self) -> list[sa.ColumnElement[bool]]:
        """Return the condition that excludes rows of sibling classes in the same table."""
        mapper = self.mapper
        if mapper is None or not mapper.single or mapper.polymorphic_on is None:
            return []
        return [mapper.polymorphic_on.in_([each.polymorphic_identity for each in mapper.self_and_descendants])]

    def version_bump(self) -> dict[Any, Any]:
        """Return the version's increment for an UPDATE: a later flush of older values then fails, and can't undo it."""
        return {} if self._version is None else {self._version: self._version + sa.literal_column("1")}

    def insert_defaults(self) -> dict[Any, Any]:
        """Return the values with which an INSERTed row belongs to this class."""
        defaults: dict[Any, Any] = {} if self._version is None else {self._version: 1}
        if self.mapper is not None and self.mapper.polymorphic_on is not None:
            defaults[self.mapper.polymorphic_on] = self.mapper.polymorphic_identity
        return defaults

    def _version_column(self) -> sa.Column[Any] | None:
        if self.mapper is None or self.mapper.version_id_col is None or not self.mapper.version_id_generator:
            return None  # no version, or one that the server increments
        column: Any = self.mapper.version_id_col
        next_version: Any = self.mapper.version_id_generator
        increments = (next_version(None), next_version(41)) == (1, 42)
        if isinstance(column.type, sa.Integer) and column.table is self.table and increments:
            return column  # type: ignore[no-any-return]
        raise ValueError(
            f"{self.pattern}: the version of {self.name} is counted by Python code, or in another table, where a "
            "statement can't increment it; use an integer version_id_col in its own table, or a server-side one"
        )

    def route(self) -> dict[str, Any]:
        """Return the arguments for ``Session.get_bind``: an UPDATE of this table."""
        clause = sa.update(self.table)
        return {"clause": clause} if self.mapper is None else {"mapper": self.mapper, "clause": clause}

    def refresh(
        self, session: Session | None, columns: Iterable[sa.Column[Any]], identity: Mapping[sa.Column[Any], Any]
    ) -> None:
        """Reload the changed columns of loaded objects whose row was changed; without such objects, no query is sent.

        They are reloaded rather than expired, since an ``AsyncSession`` can't load an expired attribute on access. With
        a version counter all loaded attributes are reloaded, so that no later write is based on older values.

        :param columns: the changed columns.
        :param identity: values that the row is known to have.
        """
        if session is None or self.mapper is None:
            return
        keys = {key: value for column, value in identity.items() if (key := self.key_of(column)) is not None}
        changed = self._changed(columns)
        for entity in list(session.identity_map.values()):
            state: Any = sa.inspect(entity)
            if not state.mapper.isa(self.mapper):
                continue
            if all(key not in state.dict or _may_equal(state.dict[key], value) for key, value in keys.items()):
                if changed & state.dict.keys():  # attributes that aren't loaded are loaded on access
                    session.refresh(entity, sorted(self._stale(state, changed)))
                mark_altered(session, [entity])

    def expire(self, session: Session | None, columns: Iterable[sa.Column[Any]], ids: Iterable[Any]) -> None:
        """Expire the changed columns of loaded objects, which load them at the next access, as after the ORM's UPDATE.

        :param columns: the changed columns.
        :param ids: the primary keys, of one column.
        """
        if session is None or self.mapper is None:
            return
        changed = self._changed(columns)
        for id in ids:
            entity = session.identity_map.get(self.mapper.identity_key_from_primary_key((id,)))
            if entity is not None:
                state: Any = sa.inspect(entity)
                session.expire(entity, sorted(self._stale(state, changed) & state.unmodified))
                mark_altered(session, [entity])

    def _changed(self, columns: Iterable[sa.Column[Any]]) -> set[str]:
        """Return the attributes of the columns that an UPDATE sets, and of those that change with every UPDATE."""
        onupdate = [column for column in self.table.columns if column.onupdate or column.server_onupdate]
        every = (*columns, *self.version_bump(), *onupdate)
        return {key for column in every if (key := self.key_of(column)) is not None}

    def _stale(self, state: Any, changed: set[str]) -> set[str]:
        if self._version is None:
            return changed
        if state.modified:
            # pending changes were based on older values: let their flush fail
            return {key for key in changed if key != self.key_of(self._version)}
        return changed | {attribute.key for attribute in state.mapper.column_attrs if attribute.key in state.dict}

    def key_of(self, column: sa.Column[Any]) -> str | None:
        """Return the name of the attribute that maps a column, if any."""
        assert self.mapper is not None
        if column not in self.mapper.columns.values():
            return None
        return str(self.mapper.get_property_by_column(column).key)


def mark_altered(session: Session, entities: Iterable[Any]) -> None:
    """Let the rollback of a savepoint expire these entities, whose rows were changed since the savepoint began.

    A rollback expires entities that are dirty, or were dirty at a flush. So they are marked as dirty here: without
    changes, their flush sends nothing.
    """
    from sqlalchemy.orm.attributes import flag_dirty  # not loaded before it is needed

    if session.in_nested_transaction():
        for entity in entities:
            flag_dirty(entity)


def _may_equal(left: Any, right: Any) -> bool:
    """Return whether two ids may identify the same row; some collations ignore case."""
    if isinstance(left, str) and isinstance(right, str):
        return left.casefold() == right.casefold()
    return bool(left == right)


def partial(index: sa.Index) -> bool:
    """Return whether an index covers only some of the rows."""
    return any(options.get("where") is not None for options in index.dialect_options.values())

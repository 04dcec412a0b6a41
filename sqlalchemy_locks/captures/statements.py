"""What a capture takes, and the statements that take it, engine by engine; ``capture.py`` runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    ARRAY,
    Column,
    Index,
    Integer,
    Table,
    UniqueConstraint,
    and_,
    any_,
    bindparam,
    delete,
    func,
    literal,
    literal_column,
    or_,
    select,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import CompileError
from sqlalchemy.sql import Executable, visitors
from sqlalchemy.sql.elements import BindParameter, UnaryExpression

from sqlalchemy_locks.core.entities import MappedTable, partial
from sqlalchemy_locks.dialects.base import Locking

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapper

NUMBER = "sqlalchemy_locks_number"


@dataclass(frozen=True)
class CaptureSpec:
    """What is captured at one place."""

    table: Table
    #: conditions, all of them
    where: tuple[Any, ...]
    #: what the UPDATE sets; nothing: the rows are deleted
    values: Mapping[Any, Any]
    order_by: tuple[Any, ...] = ()
    target: MappedTable | None = None
    #: a column and values of which it has one: tried one at a time where an index must begin with an equality
    one_of: tuple[Column[Any], tuple[Any, ...]] | None = None
    #: the columns that prove who has captured a row: a captured entity keeps what they were
    proof: tuple[Column[Any], ...] = ()
    #: the primary key is one column, and what is ordered by are columns that keep their values
    steady: bool = False
    #: how many at most, for a statement that is for this number alone; otherwise it is bound
    limit: int | None = None

    @cached_property
    def mapper(self) -> Mapper[Any] | None:
        return None if self.target is None else self.target.mapper

    @property
    def entity(self) -> Any:
        return self.table if self.target is None else self.target.entity

    @cached_property
    def joined(self) -> bool:
        """Whether an entity has columns of other tables, too."""
        return self.mapper is not None and len(self.mapper.tables) > 1

    @property
    def deletes(self) -> bool:
        return not self.values

    @property
    def changed(self) -> dict[Any, Any]:
        return {**self.values, **(self.target.version_bump() if self.target else {})}

    @property
    def keys(self) -> list[Any]:
        """The primary key, as attributes of the class where there is one: the ORM then adds what it adds."""
        target = self.target
        if target is None or target.mapper is None:
            return list(self.table.primary_key)
        return [getattr(target.entity, str(target.key_of(column))) for column in self.table.primary_key]

    @property
    def positions(self) -> list[int]:
        """Where a row of the table has its primary key."""
        columns = list(self.table.c)
        return [columns.index(column) for column in self.table.primary_key]

    @property
    def key_changes(self) -> bool:
        """Whether a column changes that others may refer to, for which PostgreSQL's weaker row lock won't do."""
        keys: set[Any] = {column for column in self.table.c if column.primary_key or column.unique}
        for each in (*self.table.constraints, *self.table.indexes):
            if isinstance(each, UniqueConstraint) or (isinstance(each, Index) and each.unique and not partial(each)):
                keys.update(each.columns)
        return not keys.isdisjoint(self.values)


#: the names of what is bound: none that a column of anybody's table could have, which an UPDATE would then set
LIMIT, KEYS = "locks_limit", "locks_keys"


def among(table: Table) -> Any:
    """The rows whose primary keys are bound."""
    columns = list(table.primary_key)
    keys: Any = bindparam(KEYS, expanding=True)
    return columns[0].in_(keys) if len(columns) == 1 else tuple_(*columns).in_(keys)


def by_key(statement: Any) -> Any:
    """An UPDATE that InnoDB does by its primary key, however small the table: it locks whatever else it reads."""
    for dialect in ("mysql", "mariadb"):
        statement = statement.with_hint("FORCE INDEX (PRIMARY)", dialect_name=dialect)
    return statement


def keys_as_or(statement: Any, table: Table, keys: Sequence[tuple[Any, ...]]) -> Any:
    """The same for these keys of several columns, of which not every engine finds a list in an index."""
    columns = list(table.primary_key)
    return statement.where(or_(*(and_(*(c == v for c, v in zip(columns, key, strict=True))) for key in keys)))


def keys_of(table: Table, keys: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """The primary keys, as :func:`among` takes them."""
    return {KEYS: [key[0] for key in keys] if len(table.primary_key) == 1 else list(keys)}


def _limit(taking: CaptureSpec) -> Any:
    # as a literal: the plan depends on it
    if taking.limit is not None:
        return literal_column(str(taking.limit))
    return bindparam(LIMIT, type_=Integer(), literal_execute=True)


def select_candidates(taking: CaptureSpec, locking: Locking, options: Iterable[Any] = (), *, locks: bool = True) -> Any:
    """The SELECT that locks, and skips what others hold."""

    def chosen(*conditions: Any) -> Any:
        statement = (
            select(*taking.keys).where(*taking.where, *conditions).order_by(*taking.order_by).limit(_limit(taking))
        )
        statement = statement.options(*options)
        if locking == "file" or not locks:
            return statement
        # the weaker lock where it will do: a row that others refer to by a foreign key isn't taken
        return statement.with_for_update(
            skip_locked=True, key_share=not taking.key_changes, of=taking.table if taking.joined else None
        )

    if taking.one_of is None:
        return chosen()
    column, values = taking.one_of
    if len(values) == 1:
        return chosen(column == inlined(column, values[0]))
    if locking != "rows":
        return chosen(column.in_([inlined(column, value) for value in values]))
    return _merged(taking, [chosen(column == inlined(column, value)) for value in values])


def _merged(taking: CaptureSpec, each: Sequence[Any]) -> Any:
    """The first of several, each of which is read in the order of an index."""
    order = [unwrapped(element) for element in taking.order_by]
    labelled = [
        statement.add_columns(*(element.label(f"o{n}") for n, (element, _) in enumerate(order))) for statement in each
    ]
    merged: Any = union_all(*labelled).subquery("candidates")
    by = []
    for n, (_, modifiers) in enumerate(order):
        element = merged.c[f"o{n}"]
        for modifier in reversed(modifiers):
            element = UnaryExpression(element, modifier=modifier)
        by.append(element)
    return select(merged).order_by(*by).limit(_limit(taking))


def still_there(taking: CaptureSpec, keys: Sequence[tuple[Any, ...]], options: Iterable[Any]) -> Any:
    """The SELECT that locks those of these rows that can still be taken and that nobody holds; InnoDB's, and no gap."""
    statement: Any = select(*taking.keys).where(*taking.where).options(*options)
    if taking.one_of is not None:
        column, values = taking.one_of
        statement = statement.where(column.in_([inlined(column, value) for value in values]))
    for dialect in ("mysql", "mariadb"):
        statement = statement.with_hint(taking.table, "FORCE INDEX (PRIMARY)", dialect)
    return keys_as_or(statement, taking.table, keys).with_for_update(
        skip_locked=True, of=taking.table if taking.joined else None
    )


def inlined(column: Column[Any], value: Any) -> Any:
    """A value in the statement's text, without which no plan can tell that a partial index covers it.

    Bound, where its type can't be written as text.
    """
    made = bindparam(None, value, type_=column.type, literal_execute=True, unique=True)
    try:
        literal(value, column.type).compile(compile_kwargs={"literal_binds": True})
    except (CompileError, NotImplementedError):
        return literal(value, column.type)
    return made


def criteria(options: Iterable[Any]) -> list[Any]:
    """Of a session's options those that choose rows; the others are about what is loaded with them."""
    return [option for option in options if type(option).__name__ == "LoaderCriteriaOption"]


def loading(options: Iterable[Any], taking: CaptureSpec) -> list[Any]:
    """The others, and those that choose among rows of other classes: what was captured is read whatever it is now."""
    mapper: Any = taking.mapper
    return [
        option
        for option in options
        if option not in criteria([option])
        or not any(each.isa(mapper) or mapper.isa(each) for each in option._all_mappers())
    ]


def give(statement: Any, dialect: Dialect, values: Mapping[str, Any]) -> None:
    """Give the parameters of a statement, which nobody else has, their values, for people to read."""
    # each by itself: of several of one name the compiled statement knows one, and a traversal finds no CTE that is
    # only referred to
    found = [*visitors.iterate(statement), *statement.compile(dialect=dialect).binds.values()]
    for element in found:
        if isinstance(element, BindParameter) and element.key in values:
            element.value, element.required = values[element.key], False


def ordered(taking: CaptureSpec) -> Executable:
    """The whole as one statement of PostgreSQL, its rows in order."""
    changed, order = captured_cte(taking)
    return select(*(changed.c[column.key] for column in taking.table.c)).order_by(*order)


def _chosen(taking: CaptureSpec, locking: Locking = "functions") -> Any:
    """The rows, chosen once.

    PostgreSQL makes no subquery of a CTE that locks, nor SQLite of one with a limit. A subquery may be executed again
    for each row, and then takes more than the limit.
    """
    return select_candidates(taking, locking).cte("locks_chosen")


def captured_cte(taking: CaptureSpec) -> tuple[Any, list[Any]]:
    """The rows that a statement of PostgreSQL captures, and what puts them in order."""
    chosen = _chosen(taking)
    changing = update(taking.table).values(taking.changed)
    if taking.steady:
        (key,) = taking.table.primary_key
        captured = changing.where(one_of(key, chosen)).returning(*taking.table.c).cte("locks_captured")
        return captured, [captured.c[column.key] for column in taking.order_by]
    # materialised: of a subquery the planner knows what it numbers, and doesn't think any more that hardly any is left
    numbered = select(chosen, func.row_number().over().label(NUMBER)).cte("locks_numbered").prefix_with("MATERIALIZED")
    pairs = (column == key for column, key in zip(taking.table.primary_key, numbered.c, strict=False))
    captured = (
        changing.where(*pairs, few(numbered.c[NUMBER]))
        .returning(*taking.table.c, numbered.c[NUMBER])
        .cte("locks_captured")
    )
    return captured, [captured.c[NUMBER]]


def one_of(key: Any, chosen: Any) -> Any:
    """The rows with one of these keys: as an array, of which PostgreSQL expects ten, whatever its statistics say."""
    return key == any_(func.array(select(chosen.c[0]).scalar_subquery(), type_=ARRAY(key.type)))


def few(number: Any) -> Any:
    """A condition that each row meets, and of which PostgreSQL thinks that hardly any does.

    Without it statistics of another moment let it go through a whole table for what it has the keys of; and where a
    plan for these values seems to be much better than one for any, it makes a new one each time.
    """
    return number.between(literal_column("1"), literal_column("2147483647"))


def counting(taking: CaptureSpec) -> Executable:
    """As :func:`ordered`, but only how many there were."""
    chosen = _chosen(taking)
    changing: Any = delete(taking.table) if taking.deletes else update(taking.table).values(taking.changed)
    pairs = (column == key for column, key in zip(taking.table.primary_key, chosen.c, strict=True))
    changed = changing.where(*pairs).returning(literal_column("1").label("one")).cte("locks_captured")
    return select(func.count()).select_from(changed)


def updating(taking: CaptureSpec, *, returning: bool = True) -> Executable:
    """The whole as one statement of SQLite, its rows in no order."""
    chosen = _chosen(taking, "file")
    pairs = (column == key for column, key in zip(taking.table.primary_key, chosen.c, strict=True))
    changed = update(taking.table).where(*pairs).values(taking.changed)
    # not by rowcount, which Python's driver has for no statement that begins with WITH
    return changed.returning(*taking.table.c) if returning else changed.returning(literal_column("1"))


def unwrapped(element: Any) -> tuple[Any, list[Any]]:
    """What is ordered by, and the modifiers around it, the outermost first."""
    clause = element.__clause_element__() if hasattr(element, "__clause_element__") else element
    modifiers = []
    while isinstance(clause, UnaryExpression) and clause.modifier is not None:
        modifiers.append(clause.modifier)
        clause = clause.element
    return clause, modifiers

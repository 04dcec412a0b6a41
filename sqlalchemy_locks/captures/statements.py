"""The specification of a capture (:class:`CaptureSpec`), and its statements, which ``capture.py`` executes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    Column,
    Index,
    Integer,
    Table,
    UniqueConstraint,
    and_,
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
from sqlalchemy_locks.sql.elements import force_index, skip_locked

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapper

#: the CTE that searches the candidates
SEARCH = "locks_chosen"
NUMBER = "sqlalchemy_locks_number"


@dataclass(frozen=True)
class CaptureSpec:
    """The rows that a capture selects and the values that it sets, with the tables of one build context."""

    table: Table
    #: conditions, joined by AND
    where: tuple[Any, ...]
    #: the values that the UPDATE sets; if empty, the rows are deleted
    values: Mapping[Any, Any]
    order_by: tuple[Any, ...] = ()
    target: MappedTable | None = None
    #: a column and the values it may have; searched one value at a time where only an equality uses an index in order
    one_of: tuple[Column[Any], tuple[Any, ...]] | None = None
    #: the columns that identify a capture; their values are stored with a captured entity
    proof: tuple[Column[Any], ...] = ()
    #: a constant limit; by default each call binds one
    limit: int | None = None
    #: converts the table's columns to the expressions that a capture reads
    read: Callable[[Iterable[Any]], list[Any]] = list

    @cached_property
    def mapper(self) -> Mapper[Any] | None:
        return None if self.target is None else self.target.mapper

    @property
    def entity(self) -> Any:
        return self.table if self.target is None else self.target.entity

    @cached_property
    def joined(self) -> bool:
        """Whether a SELECT of the entity joins other tables: of its parents, or of subclasses that it loads too."""
        return self.mapper is not None and any(each is not self.table for each in select(*self.keys).get_final_froms())

    @cached_property
    def loads_others(self) -> bool:
        """Whether a SELECT of the entity loads more than the columns of its table."""
        if self.mapper is None:
            return False
        mappers, own = {self.mapper, *self.mapper.with_polymorphic_mappers}, self.table.c
        return self.joined or any(
            any(each.lazy in ("joined", False, "subquery") for each in mapper.relationships)
            or any(not each.deferred and not own.contains_column(each.columns[0]) for each in mapper.column_attrs)
            for mapper in mappers
        )

    @property
    def deletes(self) -> bool:
        return not self.values

    @property
    def changed(self) -> dict[Any, Any]:
        return {**self.values, **(self.target.version_bump() if self.target else {})}

    @property
    def keys(self) -> list[Any]:
        """The primary key, as attributes of a mapped class, so that the ORM adds its conditions to the SELECT."""
        target = self.target
        if target is None or target.mapper is None:
            return list(self.table.primary_key)
        return [getattr(target.entity, str(target.key_of(column))) for column in self.table.primary_key]

    @property
    def key_changes(self) -> bool:
        """Whether a column is set that a foreign key may refer to, so that the weaker row lock doesn't suffice."""
        keys: set[Any] = {column for column in self.table.c if column.primary_key or column.unique}
        for each in (*self.table.constraints, *self.table.indexes):
            if isinstance(each, UniqueConstraint) or (isinstance(each, Index) and each.unique and not partial(each)):
                keys.update(each.columns)
        return not keys.isdisjoint(self.values)


#: the names of bound parameters; an UPDATE would set a column of the same name
LIMIT, KEYS = "locks_limit", "locks_keys"


def where_keys(table: Table) -> Any:
    """Return the condition that a row has one of the primary keys that :func:`key_parameters` binds."""
    columns = list(table.primary_key)
    keys: Any = bindparam(KEYS, expanding=True)
    return columns[0].in_(keys) if len(columns) == 1 else tuple_(*columns).in_(keys)


def by_key(statement: Any) -> Any:
    """Return the UPDATE with a hint for InnoDB, which scans a small table otherwise, and locks every row it reads."""
    return force_index(statement, "PRIMARY")


def among_keys(statement: Any, table: Table, keys: Sequence[tuple[Any, ...]]) -> Any:
    """Restrict a statement to these primary keys, joined by OR: InnoDB uses no index for a list of tuples."""
    columns = list(table.primary_key)
    if len(columns) == 1:
        return statement.where(columns[0].in_([key for (key,) in keys]))  # compiled once
    return statement.where(or_(*(and_(*(c == v for c, v in zip(columns, key, strict=True))) for key in keys)))


def key_parameters(table: Table, keys: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Return the primary keys as the parameters of :func:`where_keys`."""
    return {KEYS: [key[0] for key in keys] if len(table.primary_key) == 1 else list(keys)}


def _limit(spec: CaptureSpec) -> Any:
    # a literal, since the plan depends on the limit
    if spec.limit is not None:
        return literal_column(str(spec.limit), Integer())
    return bindparam(LIMIT, type_=Integer(), literal_execute=True)


def search(spec: CaptureSpec, *conditions: Any) -> Any:
    """Return the SELECT of the candidates' primary keys, without locks and without ``spec.one_of``."""
    candidates = select(*spec.keys).where(*spec.where, *conditions)
    return candidates.order_by(*spec.order_by).limit(_limit(spec))


def select_candidates(
    spec: CaptureSpec, options: Iterable[Any] = (), *, locks: bool = True, merges: bool = False
) -> Any:
    """Return the SELECT of the candidates' primary keys, which skips rows that another session has locked.

    :param options: loader criteria of a session.
    :param locks: lock the rows.
    :param merges: search each value of ``spec.one_of`` by itself: an index without a condition is in order only after
        an equality.
    """

    def candidates(*conditions: Any) -> Any:
        statement = search(spec, *conditions).options(*options)
        if not locks:
            return statement
        # the weaker lock if possible: it doesn't conflict with the lock that a foreign key takes on a row
        return skip_locked(statement, key_share=not spec.key_changes, of=spec.table if spec.joined else None)

    if spec.one_of is None:
        return candidates()
    column, values = spec.one_of
    if len(values) == 1:
        return candidates(column == inlined(column, values[0]))
    if not merges:
        return candidates(column.in_([inlined(column, value) for value in values]))
    return _merged(spec, [candidates(column == inlined(column, value)) for value in values])


def _merged(spec: CaptureSpec, each: Sequence[Any]) -> Any:
    """Return the first rows of several SELECTs, each of which reads an index in order."""
    order = [_split_modifiers(element) for element in spec.order_by]
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
    return select(merged).order_by(*by).limit(_limit(spec))


def lock_candidates(spec: CaptureSpec, keys: Sequence[tuple[Any, ...]], options: Iterable[Any]) -> Any:
    """Return InnoDB's SELECT that locks those of these rows that are still unlocked candidates, and no gap."""
    statement: Any = select(*spec.keys).where(*spec.where).options(*options)
    if spec.one_of is not None:
        column, values = spec.one_of
        statement = statement.where(column.in_([inlined(column, value) for value in values]))
    statement = force_index(statement, "PRIMARY", spec.table)
    return among_keys(statement, spec.table, keys).with_for_update(
        skip_locked=True, of=spec.table if spec.joined else None
    )


def inlined(column: Column[Any], value: Any) -> Any:
    """Return a value as a literal, so that a plan can use a partial index whose condition contains the value.

    If the type can't be rendered as a literal, the value is bound.
    """
    rendered = bindparam(None, value, type_=column.type, literal_execute=True, unique=True)
    try:
        literal(value, column.type).compile(compile_kwargs={"literal_binds": True})
    except (CompileError, NotImplementedError):
        return literal(value, column.type)
    return rendered


def criteria(options: Iterable[Any]) -> list[Any]:
    """Return the options of a session that restrict rows; the other options are about loading."""
    from sqlalchemy.orm import LoaderCriteriaOption  # not loaded before it is needed

    return [option for option in options if isinstance(option, LoaderCriteriaOption)]


def loading(options: Iterable[Any], spec: CaptureSpec) -> list[Any]:
    """Return the options without criteria for the captured class, which a changed row may no longer meet."""
    return [option for option in options if option not in criteria([option]) or not _restricts(option, spec.mapper)]


def _restricts(option: Any, mapper: Any) -> bool:
    """Return whether criteria apply to a mapped class, or to a parent or subclass of it."""
    if option.entity is not None:
        return bool(option.entity.mapper.isa(mapper) or mapper.isa(option.entity.mapper))
    # criteria for a mixin
    return any(issubclass(each.class_, option.root_entity) for each in mapper.self_and_descendants)


def bind_values(statement: Any, dialect: Dialect, values: Mapping[str, Any]) -> None:
    """Set the parameters of a statement that is shown rather than executed."""
    # Every parameter is set: of several with one name the compiled statement knows only one. Every CTE is traversed: a
    # traversal doesn't reach a CTE that another CTE refers to.
    ctes = statement.compile(dialect=dialect).ctes or ()
    for part in (statement, *(cte.element for cte in ctes)):
        for element in visitors.iterate(part):
            if isinstance(element, BindParameter) and element.key in values:
                element.value, element.required = values[element.key], False


def _candidates_cte(spec: CaptureSpec, *, locks: bool = True) -> Any:
    """Return the candidates as a CTE, which is executed once.

    PostgreSQL doesn't inline a CTE with locks, and SQLite doesn't inline one with a limit. A subquery may be executed
    again for each row, and then captures more than the limit.
    """
    return select_candidates(spec, locks=locks).cte(SEARCH)


def capture_returning(spec: CaptureSpec) -> Executable:
    """Return one statement that captures rows and returns them in order; with ``writable_ctes``."""
    captured = captured_cte(spec)
    return select(*spec.read([captured.c[column.name] for column in spec.table.c])).order_by(captured.c[NUMBER])


def captured_cte(spec: CaptureSpec) -> Any:
    """Return a CTE that captures rows and returns them with their numbers in the order; with ``writable_ctes``."""
    candidates = _candidates_cte(spec)
    # materialized: otherwise the planner sees through the numbers, and selective_condition() has no effect
    numbered = (
        select(candidates, func.row_number().over().label(NUMBER)).cte("locks_numbered").prefix_with("MATERIALIZED")
    )
    pairs = (column == key for column, key in zip(spec.table.primary_key, numbered.c, strict=False))
    return (
        update(spec.table)
        .values(spec.changed)
        .where(*pairs, selective_condition(numbered.c[NUMBER]))
        # labelled: SQLAlchemy abbreviates long names of a CTE, by `label_length`, but not in a bare RETURNING
        .returning(*(column.label(column.name) for column in (*spec.table.c, numbered.c[NUMBER])))
        .cte("locks_captured")
    )


def selective_condition(number: Any) -> Any:
    """Return a condition that is true for every row, although PostgreSQL estimates that few rows meet it.

    Without it, stale statistics make PostgreSQL scan a whole table for rows whose keys it has. And if a plan for the
    given values seems much better than a generic one, it plans each execution separately.
    """
    return number.between(literal_column("1"), literal_column("2147483647"))


def capture_counting(spec: CaptureSpec) -> Executable:
    """Return one statement that captures rows and returns their number; with ``writable_ctes``."""
    candidates = _candidates_cte(spec)
    changing: Any = delete(spec.table) if spec.deletes else update(spec.table).values(spec.changed)
    pairs = (column == key for column, key in zip(spec.table.primary_key, candidates.c, strict=True))
    changed = changing.where(*pairs).returning(literal_column("1").label("one")).cte("locks_captured")
    return select(func.count()).select_from(changed)


def capture_unordered(spec: CaptureSpec, *, counts: bool) -> Executable:
    """Return one UPDATE that captures rows and returns them in no order; with ``single_writer``."""
    candidates = _candidates_cte(spec, locks=False)
    pairs = (column == key for column, key in zip(spec.table.primary_key, candidates.c, strict=True))
    changed = update(spec.table).where(*pairs).values(spec.changed)
    # not by rowcount: Python's driver doesn't set it for a statement that begins with WITH
    return changed.returning(literal_column("1")) if counts else changed.returning(*spec.read(spec.table.c))


def _split_modifiers(element: Any) -> tuple[Any, list[Any]]:
    """Return an ORDER BY expression without its modifiers (DESC, NULLS LAST), and these, the outermost first."""
    clause = element.__clause_element__() if hasattr(element, "__clause_element__") else element
    modifiers = []
    while isinstance(clause, UnaryExpression) and clause.modifier is not None:
        modifiers.append(clause.modifier)
        clause = clause.element
    return clause, modifiers

"""Capture rows: select, lock, change and return them as one atomic step, so that only one session gets each row.

A capture is ``SELECT ... FOR UPDATE SKIP LOCKED`` and the UPDATE of the selected rows, in one transaction.

Guarantees: a capture returns at most ``limit`` rows, in ``order_by`` order. It neither captures a row that another
session has locked, nor waits for it (except on SQLite, where a writer waits for another writer).

- *PostgreSQL, YugabyteDB*: one statement. A CTE locks and limits the rows: a subquery may be executed again for each
  row, and then captures more than the limit.
- *MySQL, MariaDB*: the locking SELECT, then an UPDATE by primary key alone, then a SELECT of the changed rows.
- *SQLite*: under the database's write lock, one UPDATE, which returns the rows in no order. If the order matters, a
  SELECT reads it before.

A pattern describes the rows that it captures by a :class:`CaptureSpec`; this module does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from sqlalchemy import bindparam, delete, inspect, select, update
from sqlalchemy.engine import Dialect, IteratorResult, Result
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql import Executable

from sqlalchemy_locks.captures.claims import frozen_rows, store_proof
from sqlalchemy_locks.captures.statements import (
    LIMIT,
    CaptureSpec,
    among_keys,
    bind_values,
    by_key,
    capture_counting,
    capture_returning,
    capture_unordered,
    criteria,
    key_parameters,
    loading,
    lock_candidates,
    select_candidates,
    where_keys,
)
from sqlalchemy_locks.core.entities import MappedTable, mark_altered
from sqlalchemy_locks.core.operation import (
    MAX_KEYS,
    BuildContext,
    Execution,
    OperationImpl,
    RowsOperation,
    execute_in_session,
)
from sqlalchemy_locks.errors import LockLost, Unsupported
from sqlalchemy_locks.sql.elements import PLAIN_READS, READ_COMMITTED

Keys = list[tuple[Any, ...]]


class CaptureImpl(OperationImpl):
    """The implementation of an operation that captures rows: one instance per pattern, or per :func:`capture`."""

    #: the operation returns the number of rows only
    counts: ClassVar[bool] = False
    #: may return fewer rows than there are, if other sessions capture at the same time
    fewer: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        #: the result of ``build_spec``, built once per context
        self.spec: Callable[[BuildContext], CaptureSpec] = cache(self.build_spec)
        self._loading: dict[tuple[BuildContext, bool], Any] = {}
        self._steps: dict[BuildContext, tuple[Any, Any]] = {}
        self._reading: dict[tuple[BuildContext, bool], Any] = {}

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        """Build the specification of the capture, with the tables of a build context."""
        raise NotImplementedError

    def build(self, context: BuildContext) -> Executable | None:
        return self._statement(context, self.spec(context))

    def statement_to_compile(
        self, context: BuildContext, dialect: Dialect, values: Mapping[str, Any]
    ) -> Executable | None:
        # built for this call, with its parameters: a traversal doesn't reach a CTE that an UPDATE refers to
        statement: Any = self._statement(context, self.build_spec(context))
        if statement is not None:
            bind_values(statement, dialect, values)
        return statement  # type: ignore[no-any-return]

    def _statement(self, context: BuildContext, spec: CaptureSpec, /) -> Executable | None:
        if context.backend.writable_ctes:
            return self.single_statement(spec)
        if context.backend.single_writer and not (self.counts and spec.deletes):
            return capture_unordered(spec, counts=self.counts)
        return None

    def single_statement(self, spec: CaptureSpec) -> Executable:
        """Return the capture as one statement, for engines with ``writable_ctes``."""
        return capture_counting(spec) if self.counts else capture_returning(spec)

    def multi_statement_reason(self, context: BuildContext) -> str:
        if context.backend.returning:
            return "where the rows to delete are searched first"
        return "which can't return the rows that it updates"

    def run(self, execution: Execution) -> Any:
        spec = self.spec(execution.context)
        entities = _gives_entities(execution, spec) and not self.counts
        if entities:
            self._refuse_pending_changes(execution, spec)
        result = self._as_writer(execution, spec) if execution.backend.single_writer else self._run(execution, spec)
        session = execution.session
        if not entities or session is None or not (spec.proof or session.in_nested_transaction()):
            return result
        frozen = result.freeze()
        captured_entities = [entity for (entity,) in frozen_rows(frozen)]
        store_proof(captured_entities, spec)
        mark_altered(session, captured_entities)
        return frozen()

    def _refuse_pending_changes(self, execution: Execution, spec: CaptureSpec) -> None:
        """Refuse to read captured rows over changes that were not flushed, which would be lost."""
        session, kind = execution.session, spec.entity
        assert session is not None
        if spec.loads_others or execution.loader_options:
            kind = object  # objects that are loaded with the entities are read again, too
        for each in session.dirty:
            if isinstance(each, kind) and session.is_modified(each):
                raise Unsupported(
                    f"{self.name} reads rows that may have unflushed changes in this session, of {each!r} for example, "
                    "and autoflush is off: flush() first"
                )

    def _as_writer(self, execution: Execution, spec: CaptureSpec) -> Any:
        """Capture under the write lock, which a statement that begins with WITH doesn't take by itself."""
        with execution.waiting():
            if not execution.backend.transaction_begun(execution.connection):
                execution.begin_as_writer(spec.table)
                several = self.statement(execution.context) is None or self._has_order(execution, spec)
                if several:
                    execution.require_transaction()
            return self._run(execution, spec)

    def _has_order(self, execution: Execution, spec: CaptureSpec) -> bool:
        """Return whether the order of the rows may matter: SQLite's single statement returns them in no order."""
        return not self.counts and bool(spec.order_by) and execution.values[LIMIT] > 1

    def _run(self, execution: Execution, spec: CaptureSpec) -> Any:
        statement: Any = self.statement(execution.context)
        if self.counts:
            if statement is None:
                return len(self._in_steps(execution, spec))
            numbers = execution.execute(statement).scalars().all()
            return numbers[0] if execution.backend.writable_ctes else len(numbers)
        if statement is None:
            return self._read(execution, spec, self._in_steps(execution, spec))
        keys: Keys | None = None
        if execution.backend.single_writer and self._has_order(execution, spec):
            # read the order before the UPDATE, which may change the columns of ORDER BY
            options = criteria(execution.loader_options)
            keys = _keys(execution, spec, select_candidates(spec, options, locks=False))
        if not _gives_entities(execution, spec):
            result: Result[Any] = execution.execute(statement)
            return result if keys is None else _sorted(execution, spec, result, keys)
        options = execution.loader_options
        # a loader option may load more than the columns of the table: then a SELECT of the class reads the rows again
        read_again = spec.loads_others or len(criteria(options)) < len(options)
        if (execution.context, read_again) not in self._loading:
            shape: Any = select(*(spec.keys if read_again else [spec.entity])).from_statement(statement)
            self._loading[execution.context, read_again] = shape.execution_options(populate_existing=True)
        prepared = self._loading[execution.context, read_again]
        prepared = prepared.options(*criteria(options))
        result = execute_in_session(execution, prepared, execution.values)
        if not read_again:
            return result if keys is None else _sorted(execution, spec, result, keys)
        captured_keys = [tuple(row) for row in result]
        if keys is not None:
            captured_keys.sort(key=_place_in(keys))
        return self._read(execution, spec, captured_keys)

    def _in_steps(self, execution: Execution, spec: CaptureSpec) -> Keys:
        """Lock the rows, then change them by primary key; return the keys in order."""
        if execution.backend.autocommit(execution.connection):
            raise execution.refused_autocommit()
        if execution.context not in self._steps:
            locking = _select(execution, spec, (), locks=not execution.backend.single_writer)
            self._steps[execution.context] = locking, _changing(spec).where(where_keys(spec.table))
        locking, changing = self._steps[execution.context]
        options = criteria(execution.loader_options)
        if not execution.backend.single_writer and not self._can_search_with_locks(execution, spec):
            keys = self._search_then_lock(execution, spec, options)
        else:
            if options:
                locking = _select(execution, spec, options, locks=not execution.backend.single_writer)
            keys = _keys(execution, spec, locking)
        rowcount = 0
        columns = {f"locks_key_{n}": column for n, column in enumerate(spec.table.primary_key)}
        if spec.deletes and keys and not execution.backend.single_writer:
            # one by one: for several keys InnoDB may scan the table, and wait for rows that others have locked
            deleting = delete(spec.table).where(*(column == bindparam(name) for name, column in columns.items()))
            rowcount = execution.execute(deleting, [dict(zip(columns, key, strict=True)) for key in keys]).rowcount
        else:
            for batch in execution.batches(keys):
                if len(columns) > 1:
                    changing = among_keys(_changing(spec), spec.table, batch)
                values = {**execution.values, **key_parameters(spec.table, batch)}
                rowcount += execution.execute(changing, values).rowcount
        if rowcount != len(keys):
            raise LockLost(f"{self.name} has locked {len(keys)} rows and changed {rowcount}: roll back")
        return keys

    def _can_search_with_locks(self, execution: Execution, spec: CaptureSpec) -> bool:
        """Return whether a search with locks, on InnoDB, locks no more than the captured rows."""
        level = execution.begun_by_locks or _read_committed(execution, self.name)
        one_search = spec.one_of is None or len(spec.one_of[1]) == 1
        return level and execution.backend.releases_skipped_rows and one_search

    def _search_then_lock(self, execution: Execution, spec: CaptureSpec, options: Sequence[Any]) -> Keys:
        """Search without locks, then lock by primary key those rows that are still candidates.

        On InnoDB, a search with locks would lock more than the captured rows. Above READ COMMITTED it locks gaps, and
        others wait for them. It also locks all rows of several merged searches, and on MariaDB the rows that it skips.
        """
        limit: int = execution.values[LIMIT]
        searching = _select(execution, spec, options, locks=False)
        keys: Keys = []
        tried: set[tuple[Any, ...]] = set()
        most = 2 * limit
        while True:
            candidates = _keys(execution, spec, searching, {**execution.values, LIMIT: most})
            # compared by value, not by position: the rows before them may have changed since the last search
            new = [key for key in candidates if key not in tried]
            while new and len(keys) < limit and not (keys and self.fewer and most > 2 * limit):
                size = min(limit - len(keys), MAX_KEYS)
                batch, new = new[:size], new[size:]
                tried.update(batch)
                locked = {tuple(row) for row in execution.execute(lock_candidates(spec, batch, options))}
                keys += [key for key in batch if key in locked]
            if len(keys) >= limit or len(candidates) < most or (keys and self.fewer):
                places = {key: number for number, key in enumerate(candidates)}
                return sorted(keys, key=lambda key: places.get(key, -1))
            most *= 4

    def _read(self, execution: Execution, spec: CaptureSpec, keys: Keys) -> Any:
        """Return the rows as they are now, in the order of the keys."""
        entities = _gives_entities(execution, spec)
        if not keys:
            names = [spec.entity.__name__] if entities else [str(column.key) for column in spec.table.c]
            return IteratorResult(SimpleResultMetaData(names), iter(()))
        if (execution.context, entities) not in self._reading:
            # on a connection, the columns of the table, as on the engines that return changed rows
            columns = [spec.entity] if entities else spec.read(spec.table.c)
            reading: Any = select(*columns).where(where_keys(spec.table))
            self._reading[execution.context, entities] = reading.execution_options(populate_existing=True)
        reading = self._reading[execution.context, entities]
        if entities:
            reading = reading.options(*loading(execution.loader_options, spec))
        rows: list[tuple[Any, ...]] = []
        for batch in execution.batches(keys):
            values = {**execution.values, **key_parameters(spec.table, batch)}
            if entities:
                frozen = execute_in_session(execution, reading, values).freeze()
            else:
                frozen = execution.execute(reading, values).freeze()
            rows += frozen_rows(frozen)
        if not entities:
            return _sorted(execution, spec, frozen.with_new_rows(rows)(), keys)  # type: ignore[arg-type]
        # a joined load returns a row for each related one
        rows = list({inspect(entity): (entity,) for (entity,) in rows}.values())
        if len(rows) != len(keys):
            raise LockLost(f"{self.name} has captured {len(keys)} rows and can read {len(rows)}: roll back")
        return _sorted(execution, spec, frozen.with_new_rows(rows)(), keys)  # type: ignore[arg-type]

    def route(self) -> dict[str, Any]:
        raise NotImplementedError


def capture_operation(impl: CaptureImpl, target: MappedTable | None, values: Mapping[str, Any]) -> RowsOperation[Any]:
    """Return the operation of one capture, whose rows a session returns as entities of a mapped class."""
    operation: RowsOperation[Any] = RowsOperation(impl, values)
    if target is not None and target.mapper is not None:
        operation._entity_is(target.entity)
    return operation


def _gives_entities(execution: Execution, spec: CaptureSpec) -> bool:
    return spec.mapper is not None and execution.session is not None


def _select(execution: Execution, spec: CaptureSpec, options: Sequence[Any], *, locks: bool) -> Any:
    return select_candidates(spec, options, locks=locks, merges=not execution.backend.partial_indexes)


def _keys(execution: Execution, spec: CaptureSpec, statement: Any, values: Mapping[str, Any] | None = None) -> Keys:
    """Return the primary keys that a search finds; a merged search has further columns."""
    return [tuple(row)[: len(spec.keys)] for row in execution.execute(statement, values)]


def _place_in(keys: Keys) -> Callable[[tuple[Any, ...]], int]:
    """Return a sort key. Unknown primary keys come last: they may be of rows that tie with the last known one."""
    places = {key: number for number, key in enumerate(keys)}
    return lambda key: places.get(key, len(keys))


def _sorted(execution: Execution, spec: CaptureSpec, result: Result[Any], keys: Keys) -> Result[Any]:
    """Return the same rows, or entities, in the order of the keys."""
    place, frozen = _place_in(keys), result.freeze()
    if _gives_entities(execution, spec):
        target = spec.target
        assert target is not None
        names = [str(target.key_of(column)) for column in spec.table.primary_key]
        rows = sorted(frozen_rows(frozen), key=lambda row: place(tuple(getattr(row[0], name) for name in names)))
    else:
        columns = list(spec.table.c)
        positions = [columns.index(column) for column in spec.table.primary_key]
        rows = sorted(frozen_rows(frozen), key=lambda row: place(tuple(row[n] for n in positions)))
    return frozen.with_new_rows(rows)()  # type: ignore[arg-type]


def _read_committed(execution: Execution, name: str) -> bool:
    level: Any = execution.execute(select(READ_COMMITTED, PLAIN_READS), {}).one()
    committed, plain = level
    if not plain:
        raise Unsupported(
            f"{name} is refused under SERIALIZABLE on {execution.backend.name}, where every row that it reads is "
            "locked, and other sessions wait: use READ COMMITTED, or Locks, which sets it"
        )
    return bool(committed)


def _changing(spec: CaptureSpec) -> Any:
    if spec.deletes:
        return delete(spec.table)
    return by_key(update(spec.table).values(spec.changed))

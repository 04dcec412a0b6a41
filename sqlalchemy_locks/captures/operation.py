"""Capture: rows that nobody else holds are chosen, changed and handed over, and never to two at once.

The pattern: ``SELECT ... FOR UPDATE SKIP LOCKED`` and the UPDATE of what was found, as one act. Promised: never more
rows than ``limit``, never one that another session holds, and no waiting for one (SQLite apart, where whoever
writes waits for whoever writes); rows come in ``order_by`` order.

- *PostgreSQL, YugabyteDB*: one statement. What was locked is a CTE that carries the limit, because a subquery may be
  executed again for each row, and then captures more than it was told.
- *MySQL, MariaDB*: the locking SELECT, then an UPDATE by primary key alone, then a look at what is there now.
- *SQLite*: one UPDATE, under the database's write lock; with an order that the UPDATE itself changes, or that Python
  can't repeat, the same steps as on MySQL.

Any pattern that captures makes a :class:`CaptureSpec` of what it wants; the rest is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sqlalchemy import select, update
from sqlalchemy.engine import Dialect, IteratorResult, Result
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql import Executable

from sqlalchemy_locks.captures.claims import store_proof
from sqlalchemy_locks.captures.ordering import directions, in_order, rearranged
from sqlalchemy_locks.captures.statements import (
    LIMIT,
    CaptureSpec,
    among,
    by_key,
    counting,
    criteria,
    give,
    keys_as_or,
    keys_of,
    loading,
    ordered,
    select_candidates,
    still_there,
    updating,
)
from sqlalchemy_locks.core.operation import BuildContext, Execution, OperationImpl, execute_in_session
from sqlalchemy_locks.errors import LockLost, Unsupported
from sqlalchemy_locks.sql.elements import DeleteByKey, PlainReads, ReadCommitted


class CaptureImpl(OperationImpl):
    """Captures rows; made once for each pattern, or once for each :func:`capture`."""

    #: how many there were is all that is asked
    counts: ClassVar[bool] = False
    #: fewer than there are will do, where others are after the same rows
    fewer: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._taken: dict[BuildContext, CaptureSpec] = {}
        self._loading: dict[BuildContext, Any] = {}
        self._steps: dict[BuildContext, tuple[Any, Any, Any]] = {}

    def taken(self, context: BuildContext) -> CaptureSpec:
        """What is to be captured there."""
        raise NotImplementedError

    def taking(self, context: BuildContext) -> CaptureSpec:
        if context not in self._taken:
            self._taken[context] = self.taken(context)
        return self._taken[context]

    def build(self, context: BuildContext) -> Executable | None:
        return self._statement(context, self.taking(context))

    def shown(self, context: BuildContext, dialect: Dialect, values: Mapping[str, Any]) -> Executable | None:
        # made anew, and its parameters given their values: a CTE is not looked into where an UPDATE refers to it
        statement: Any = self._statement(context, self.taken(context))
        if statement is not None:
            give(statement, dialect, values)
        return statement  # type: ignore[no-any-return]

    def _statement(self, context: BuildContext, taking: CaptureSpec) -> Executable | None:
        match context.backend.locking:
            case "functions":
                return counting(taking) if self.counts else ordered(taking)
            case "file":
                if self.counts:
                    return None if taking.deletes else updating(taking, returning=False)
                return None if directions(taking) is None else updating(taking)
            case "rows":
                return None

    def because(self, context: BuildContext) -> str:
        if context.backend.locking == "file":
            return "where rows in an order that the update changes are looked for first"
        return "which can't give back the rows that it updates"

    def check_connection(self, execution: Execution) -> None:
        super().check_connection(execution)
        if execution.backend.locking == "rows" and execution.backend.autocommit(execution.connection):
            raise execution.backend.refuse_autocommit(self.name)

    def run(self, execution: Execution) -> Any:
        captured = self._file(execution) if execution.backend.locking == "file" else self._captured(execution)
        taking = self.taking(execution.context)
        if self.counts or not taking.proof or taking.mapper is None or execution.session is None:
            return captured
        return store_proof(captured, taking)

    def _file(self, execution: Execution) -> Any:
        """Under the write lock, which a statement that begins with WITH doesn't take by itself."""
        with execution.waiting(), execution.backend.judging(execution.connection):
            if not execution.backend.began(execution.connection):
                execution.take_file(self.taking(execution.context).table)
                if self.statement(execution.context) is None and not execution.backend.began(execution.connection):
                    raise execution.backend.refuse_autocommit(self.name)
            return self._captured(execution)

    def _captured(self, execution: Execution) -> Any:
        taking = self.taking(execution.context)
        statement: Any = self.statement(execution.context)
        if self.counts:
            if statement is None:
                return len(self._in_steps(execution, taking))
            found = execution.execute(statement).scalars().all()
            return len(found) if execution.backend.locking == "file" else found[0]
        if statement is None:
            return self._read(execution, taking, self._in_steps(execution, taking))
        if taking.joined and execution.session is not None:
            positions = taking.positions
            rows = [tuple(row[n] for n in positions) for row in execution.execute(statement)]
            return self._read(execution, taking, rows)
        if taking.mapper is None or execution.session is None:
            result: Result[Any] = execution.execute(statement)
        else:
            if execution.context not in self._loading:
                shape: Any = select(taking.entity).from_statement(statement)
                self._loading[execution.context] = shape.execution_options(populate_existing=True)
            prepared = self._loading[execution.context].options(*execution.operation._with_options)
            result = execute_in_session(execution, prepared, execution.values)
        return in_order(result, taking, execution) if execution.backend.locking == "file" else result

    def _in_steps(self, execution: Execution, taking: CaptureSpec) -> list[tuple[Any, ...]]:
        """Lock, then update: the locks of the first make the second theirs alone. The keys, in order."""
        locking, changing, _ = self._made(execution, taking)
        options = criteria(execution.operation._with_options)
        if execution.backend.locking == "rows" and not self._can_search_with_locks(execution, taking):
            keys = self._search_then_lock(execution, taking, options)
        else:
            if options:
                locking = select_candidates(taking, execution.backend.locking, options)
            keys = [tuple(row)[: len(taking.keys)] for row in execution.execute(locking)]
        if keys:
            if len(taking.table.primary_key) > 1:
                changing = keys_as_or(_changing(taking), taking.table, keys)
            changed = execution.execute(changing, {**execution.values, **keys_of(taking.table, keys)})
            if changed.rowcount != len(keys):
                raise LockLost(f"{self.name} has locked {len(keys)} rows and changed {changed.rowcount}: roll back")
        return keys

    def _can_search_with_locks(self, execution: Execution, taking: CaptureSpec) -> bool:
        """InnoDB: whether the search locks what it takes, and nothing else."""
        level = execution.read_committed or _read_committed(execution, self.name)
        return level and execution.backend.frees_passed and (taking.one_of is None or len(taking.one_of[1]) == 1)

    def _search_then_lock(
        self, execution: Execution, taking: CaptureSpec, options: Sequence[Any]
    ) -> list[tuple[Any, ...]]:
        """InnoDB, where to search with locks would lock more than is taken.

        That is so above READ COMMITTED, where the gaps are locked, too, and others wait for them; where several
        indexed searches are merged; and on MariaDB, which keeps what it has passed by. So the search is without locks,
        and what it finds is locked by primary key, as far as it can still be taken.
        """
        limit: int = execution.values[LIMIT]
        looking = select_candidates(taking, execution.backend.locking, options, locks=False)
        keys: list[tuple[Any, ...]] = []
        tried: set[tuple[Any, ...]] = set()
        asked = 2 * limit
        while True:
            found = [
                tuple(row)[: len(taking.keys)] for row in execution.execute(looking, {**execution.values, LIMIT: asked})
            ]
            # by what they are, not by their number: what comes before them may have changed since the last look
            new = [key for key in found if key not in tried]
            while new and len(keys) < limit and not (keys and self.fewer and asked > 2 * limit):
                these, new = new[: limit - len(keys)], new[limit - len(keys) :]
                tried.update(these)
                mine = {tuple(row) for row in execution.execute(still_there(taking, these, options))}
                keys += [key for key in these if key in mine]
            if len(keys) >= limit or len(found) < asked or (keys and self.fewer):
                context = {key: number for number, key in enumerate(found)}
                return sorted(keys, key=lambda key: context.get(key, -1))
            asked *= 4

    def _made(self, execution: Execution, taking: CaptureSpec) -> tuple[Any, Any, Any]:
        """The steps: what locks, what changes, what reads; made once for each place."""
        if execution.context not in self._steps:
            mine = among(taking.table)
            reading: Any = select(taking.entity).where(mine).execution_options(populate_existing=True)
            self._steps[execution.context] = (
                select_candidates(taking, execution.backend.locking),
                _changing(taking).where(mine),
                reading,
            )
        return self._steps[execution.context]

    def _read(self, execution: Execution, taking: CaptureSpec, keys: Sequence[tuple[Any, ...]]) -> Any:
        """What the rows are now, in the order of the keys."""
        entities = taking.mapper is not None and execution.session is not None
        if not keys:
            names = [taking.entity.__name__] if entities else [str(column.key) for column in taking.table.c]
            return IteratorResult(SimpleResultMetaData(names), iter(()))
        context = {key: number for number, key in enumerate(keys)}
        reading = self._made(execution, taking)[2]
        values = {**execution.values, **keys_of(taking.table, keys)}
        if not entities:
            positions = taking.positions
            found = execution.execute(reading, values).freeze()
            return rearranged(found, lambda row: context[tuple(row[n] for n in positions)])
        target = taking.target
        assert target is not None
        result = execute_in_session(
            execution, reading.options(*loading(execution.operation._with_options, taking)), values
        )
        attributes = [str(target.key_of(column)) for column in taking.table.primary_key]
        found = result.unique().freeze()
        if len(found.data) != len(keys):
            raise LockLost(f"{self.name} has taken {len(keys)} rows and can read {len(found.data)}: roll back")
        return rearranged(found, lambda row: context[tuple(getattr(row[0], name) for name in attributes)])

    def route(self) -> dict[str, Any]:
        raise NotImplementedError


def _read_committed(execution: Execution, name: str) -> bool:
    level: Any = execution.execute(select(ReadCommitted(), PlainReads()), {}).one()
    committed, plain = level
    if not plain:
        raise Unsupported(
            f"{name} is refused under SERIALIZABLE on {execution.backend.name}, where all it reads is locked others "
            "wait for it: use READ COMMITTED, or Locks, which sees to that"
        )
    return bool(committed)


def _changing(taking: CaptureSpec) -> Any:
    if taking.deletes:
        return DeleteByKey(taking.table)
    return by_key(update(taking.table).values(taking.changed))

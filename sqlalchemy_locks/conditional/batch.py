"""Acquire several rows at once: one conditional UPDATE of free rows that no other transaction has locked.

The rows are chosen with SKIP LOCKED in a CTE: a planner may execute an ``IN (SELECT ... LIMIT)`` more than once, and
would then acquire more rows than the limit.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Integer, Result, Select, Update, and_, bindparam, select, tuple_, update
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.conditional_update import ConditionalAcquire
from sqlalchemy_locks.core.operation import BuildContext, Execution, OperationImpl
from sqlalchemy_locks.core.roles import QUEUE_PARAM, RoleColumns, param_name, role_param

_LIMIT = bindparam(param_name("limit"), type_=Integer())


class BatchAcquire(OperationImpl):
    """Acquire up to a limit of free rows, each as ``single`` acquires one; returns their ids in order."""

    def __init__(self, name: str, single: ConditionalAcquire) -> None:
        super().__init__()
        self.name, self.single, self.mapping = name, single, single.mapping
        self.needs_installation = single.needs_installation

    def build(self, context: BuildContext) -> Executable | None:
        if not context.backend.returning:
            return None
        columns = self.mapping.columns(context)
        free = self._where_free(columns).cte("locks_free")
        chosen = [column == free.c[column.key] for column in columns.table.primary_key]
        return self._update(columns).where(*chosen).returning(columns["id"])

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "whose UPDATE can't return the rows it changed"

    def _where_free(self, columns: RoleColumns) -> Select[Any]:
        conditions = [*self.single.condition(columns), *self.mapping.class_condition()]
        if "queue" in columns:
            conditions.append(columns["queue"] == role_param(columns["queue"], "queue"))
        # ordered by the primary key without the queue, which is given: to sort them, InnoDB would lock all rows
        order = [key for key in columns.table.primary_key if "queue" not in columns or key is not columns["queue"]]
        free = select(*columns.table.primary_key).where(and_(*conditions)).order_by(*order).limit(_LIMIT)
        return free.with_for_update(skip_locked=True, key_share=True)

    def _update(self, columns: RoleColumns) -> Update:
        return update(columns.table).values(self.single.all_changes(columns))

    def route(self) -> dict[str, Any]:
        return self.mapping.route()

    def check_connection(self, execution: Execution) -> None:
        if self.statement(execution.context) is None and execution.backend.autocommit(execution.connection):
            raise execution.refused_autocommit()

    def run(self, execution: Execution) -> Result[Any]:
        columns = self.mapping.columns(execution.context)
        values = {**execution.values, **self.single.call_values(execution)}
        if not execution.backend.transaction_begun(execution.connection):
            execution.take_write_lock(columns.table)
        statement = self.statement(execution.context)
        if statement is not None:
            ids = [row[0] for row in execution.execute(statement, values)]
        else:
            ids = self._select_then_update(execution, columns, values)
        target = self.mapping.target
        if target is not None and execution.session is not None:
            queue = {columns["queue"]: execution.values[QUEUE_PARAM]} if "queue" in columns else {}
            for id in ids:
                target.refresh(execution.session, self.single.changes(columns), {columns["id"]: id, **queue})
        rows = iter([(id,) for id in _sorted(ids)])  # RETURNING has no order
        return IteratorResult(SimpleResultMetaData(["id"]), rows)

    def _select_then_update(self, execution: Execution, columns: RoleColumns, values: dict[str, Any]) -> list[Any]:
        key = list(columns.table.primary_key)
        rows = execution.execute(self._where_free(columns).add_columns(columns["id"].label("_id")), values).all()
        if rows:
            # the SELECT has locked the rows, so their primary keys are condition enough
            locked = tuple_(*key).in_([tuple(row)[: len(key)] for row in rows])
            execution.execute(self._update(columns).where(locked), values)
        return [row[-1] for row in rows]


def _sorted(ids: list[Any]) -> list[Any]:
    try:
        return sorted(ids)
    except TypeError:  # members of an Enum have no order
        return sorted(ids, key=str)

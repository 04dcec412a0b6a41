"""Several rows at once, whichever are free: one conditional UPDATE over rows that nobody else is changing.

The rows are chosen with SKIP LOCKED inside a CTE: the planner may run an ``IN (SELECT ... LIMIT)`` more than once, and
then it takes more than the limit.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Integer, Result, Select, Update, and_, bindparam, select, tuple_, update
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.conditional_update import ConditionalAcquire
from sqlalchemy_locks.core.operation import BuildContext, Execution, OperationImpl
from sqlalchemy_locks.core.roles import RoleColumns, param_name, role_param

_LIMIT = bindparam(param_name("limit"), type_=Integer())


class BatchAcquire(OperationImpl):
    """As many free rows as asked for, acquired as ``each`` would acquire one; gives their ids in order."""

    def __init__(self, name: str, each: ConditionalAcquire) -> None:
        super().__init__()
        self.name, self.each, self.rows = name, each, each.rows
        self.needs_installation = each.needs_installation

    def build(self, context: BuildContext) -> Executable | None:
        if not context.backend.update_returning:
            return None
        at = self.rows.at(context)
        free = self._free(at).cte("locks_free")
        pairs = [column == free.c[column.key] for column in at.table.primary_key]
        return self._taking(at).where(*pairs).returning(at["id"])

    def because(self, context: BuildContext) -> str:
        return "whose UPDATE can't say which rows it changed"

    def _free(self, at: RoleColumns) -> Select[Any]:
        conditions = [*self.each.condition(at), *self.rows.own_rows()]
        if "queue" in at:
            conditions.append(at["queue"] == role_param(at["queue"], "queue"))
        # by the key that the rows are kept in, without the part that is given: to sort them, InnoDB locks them all
        order = [column for column in at.table.primary_key if "queue" not in at or column is not at["queue"]]
        found = select(*at.table.primary_key).where(and_(*conditions)).order_by(*order).limit(_LIMIT)
        return found.with_for_update(skip_locked=True, key_share=True)

    def _taking(self, at: RoleColumns) -> Update:
        return update(at.table).values(self.each.changes(at) | self.rows.bumped())

    def route(self) -> dict[str, Any]:
        return self.rows.route()

    def check_connection(self, execution: Execution) -> None:
        if self.statement(execution.context) is None and execution.backend.autocommit(execution.connection):
            raise execution.backend.refuse_autocommit(self.name)

    def run(self, execution: Execution) -> Result[Any]:
        at = self.rows.at(execution.context)
        values = {**execution.values, **self.each.given(execution)}
        if execution.backend.locking == "file" and not execution.backend.transaction_begun(execution.connection):
            execution.take_file(at.table)
        statement = self.statement(execution.context)
        if statement is not None:
            ids = [row[0] for row in execution.execute(statement, values)]
        else:
            ids = self._found_then_taken(execution, at, values)
        target = self.rows.target
        if target is not None and execution.session is not None:
            for id in ids:
                meant = {at["id"]: id} | ({at["queue"]: execution.values[param_name("queue")]} if "queue" in at else {})
                target.refresh(execution.session, self.each.changes(at), meant)
        rows = iter([(id,) for id in _sorted(ids)])  # RETURNING has no order
        return IteratorResult(SimpleResultMetaData(["id"]), rows)

    def _found_then_taken(self, execution: Execution, at: RoleColumns, values: dict[str, Any]) -> list[Any]:
        key = list(at.table.primary_key)
        found = execution.execute(self._free(at).add_columns(at["id"].label("_id")), values).all()
        if found:
            # by the primary key alone: the rows are locked
            mine = tuple_(*key).in_([tuple(row)[: len(key)] for row in found])
            execution.execute(self._taking(at).where(mine), values)
        return [row[-1] for row in found]


def _sorted(ids: list[Any]) -> list[Any]:
    try:
        return sorted(ids)
    except TypeError:  # an Enum's members have no order
        return sorted(ids, key=str)

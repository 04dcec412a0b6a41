"""Create the rows of mutexes, timeouts and state transitions, and set their retries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Insert, Integer, Select, bindparam, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import valid_int
from sqlalchemy_locks.core.conditional_update import ConditionalUpdate
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl
from sqlalchemy_locks.core.roles import ID_PARAM, RoleColumns, RoleMapping, param_name, role_param
from sqlalchemy_locks.sql.elements import InsertAbsent

_IDS_PARAM = param_name("ids")


class CreateRows(OperationImpl):
    """Insert the rows that are absent; returns how many were inserted.

    :param initial: returns the initial values of a row, by role.
    :param retries: the caller gives the number of retries; otherwise the column's default applies.
    """

    wait_limit = "setting"

    def __init__(
        self, mapping: RoleMapping, name: str, initial: Callable[[RoleColumns], dict[str, Any]], *, retries: bool
    ) -> None:
        super().__init__()
        self.mapping, self.name, self.initial, self.retries = mapping, name, initial, retries
        self.needs_installation = mapping.target is None

    @classmethod
    def variants(cls, *args: Any) -> dict[bool, CreateRows]:
        """Return the operation, by whether the number of retries is given."""
        return {retries: cls(*args, retries=retries) for retries in (False, True)}

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True

    def build(self, context: BuildContext) -> Executable | None:
        return self._insert(context, InsertAbsent) if context.backend.returning else None

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "whose INSERT IGNORE would ignore every other error too"

    def _insert(self, context: BuildContext, insert_type: Callable[[Any], Insert]) -> Insert:
        columns = self.mapping.columns(context)
        values = {columns[role]: value for role, value in self.initial(columns).items() if role in columns}
        roles = ("queue", "id", "retries") if self.retries else ("queue", "id")
        values |= {columns[role]: role_param(columns[role], role) for role in roles if role in columns}
        if "fence" in columns:
            values[columns["fence"]] = 0
        defaults = self.mapping.target.insert_defaults() if self.mapping.target else {}
        # inline: don't fetch a primary key that the server generates
        statement = insert_type(columns.table).values(values | defaults).inline()
        return statement.execution_options(preserve_rowcount=True)

    def route(self) -> dict[str, Any]:
        return self.mapping.route()

    def run(self, execution: Execution) -> int:
        others = dict(execution.values)
        ids = others.pop(_IDS_PARAM)
        statement = self.statement(execution.context)
        if statement is None:
            return self._insert_absent(execution, ids, others)
        return sum(execution.execute(statement, {**others, ID_PARAM: id}).rowcount for id in ids)

    def _insert_absent(self, execution: Execution, ids: Sequence[Any], others: dict[str, Any]) -> int:
        """Insert the absent rows one by one, on an engine whose INSERT can't ignore duplicates and nothing else."""
        present: set[Any] = set()
        for batch in execution.batches(ids):
            values = {**others, _IDS_PARAM: batch}
            present.update(execution.execute(self._present(execution.context), values).scalars())
        statement, count = self._insert(execution.context, insert), 0
        for id in ids:
            if id in present:
                continue
            try:
                execution.execute(statement, {**others, ID_PARAM: id})
                count += 1
            except IntegrityError as error:
                if execution.backend.meaning(error) != "duplicate":
                    raise
        return count

    def _present(self, context: BuildContext) -> Select[Any]:
        columns = self.mapping.columns(context)
        ids = bindparam(_IDS_PARAM, type_=columns["id"].type, expanding=True)
        present = select(columns["id"]).where(columns["id"].in_(ids))
        if "queue" in columns:
            present = present.where(columns["queue"] == role_param(columns["queue"], "queue"))
        return present


class SetRetries(ConditionalUpdate):
    """Set how many acquisitions a row allows. Not repeatable, since some may have been spent between two tries."""

    def condition(self, columns: RoleColumns) -> list[Any]:
        return []

    def changes(self, columns: RoleColumns) -> dict[Any, Any]:
        return {columns["retries"]: bindparam(param_name("retries"), type_=Integer())}


def ids(mapping: RoleMapping, name: str, names: Sequence[Any], queue: Any) -> dict[str, Any]:
    """Return the values of ``create``: ids sorted, so that two callers with the same ids can't deadlock."""
    if not names:
        raise ValueError(f"{name} needs at least one id")
    unique = {mapping.identity(id, queue)[ID_PARAM]: None for id in names}
    return {_IDS_PARAM: sorted(unique, key=str), **mapping.queue(queue)}


def retries(mapping: RoleMapping, number: Any, *, required: bool = False) -> dict[str, Any]:
    """Return the value of ``retries=``; empty if it isn't given and the column's default applies."""
    if number is None and not required:
        return {}
    mapping.require("retries", "retries")
    return {param_name("retries"): None if number is None else valid_int(number, "retries", 0)}


def limit(number: Any) -> dict[str, Any]:
    """Return the value of ``limit``."""
    return {param_name("limit"): valid_int(number, "limit")}

"""The rows of mutexes and timeouts: making them, and giving them retries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Insert, Integer, Select, bindparam, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import positive_int
from sqlalchemy_locks.core.conditional_update import ConditionalUpdate
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl
from sqlalchemy_locks.core.roles import RoleColumns, RoleMapping, param_name, role_param
from sqlalchemy_locks.sql.elements import InsertAbsent


class CreateRows(OperationImpl):
    """Insert those of some rows that are absent; how many that were."""

    def __init__(
        self, rows: RoleMapping, name: str, initial: Callable[[RoleColumns], dict[str, Any]], *, retries: bool
    ) -> None:
        super().__init__()
        self.rows, self.name, self.initial, self.retries = rows, name, initial, retries
        self.needs_installation = rows.target is None

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True

    def build(self, context: BuildContext) -> Executable | None:
        if context.backend.locking == "rows":
            return None
        return self._insert(context, InsertAbsent)

    def because(self, context: BuildContext) -> str:
        return "whose INSERT IGNORE would pass over every other error too"

    def _insert(self, context: BuildContext, kind: Callable[[Any], Insert]) -> Insert:
        at = self.rows.at(context)
        values = {at[role]: value for role, value in self.initial(at).items() if role in at}
        given = ("queue", "id", "retries") if self.retries else ("queue", "id")
        values |= {at[role]: role_param(at[role], role) for role in given if role in at}
        if "fence" in at:
            values[at["fence"]] = 0
        first = self.rows.target.first() if self.rows.target else {}
        # inline: a key that the server makes is not asked for
        return kind(at.table).values(values | first).inline().execution_options(preserve_rowcount=True)

    def route(self) -> dict[str, Any]:
        return self.rows.route()

    def run(self, execution: Execution) -> int:
        ids, others = (
            execution.values[param_name("ids")],
            {k: v for k, v in execution.values.items() if k != param_name("ids")},
        )
        with execution.waiting():
            return self._made(execution, ids, others)

    def _made(self, execution: Execution, ids: Sequence[Any], others: dict[str, Any]) -> int:
        statement = self.statement(execution.context)
        if statement is not None:
            return sum(execution.execute(statement, {**others, param_name("id"): id}).rowcount for id in ids)
        return self._absent(execution, ids, others)

    def _absent(self, execution: Execution, ids: Sequence[Any], others: dict[str, Any]) -> int:
        """InnoDB: without IGNORE, so that no other error is passed over."""
        known = set(execution.execute(self._known(execution.context), {**others, param_name("ids"): ids}).scalars())
        statement, made = self._insert(execution.context, insert), 0
        for id in ids:
            if id in known:
                continue
            try:
                execution.execute(statement, {**others, param_name("id"): id})
                made += 1
            except IntegrityError as error:
                if not execution.backend.duplicate(error):
                    raise
        return made

    def _known(self, context: BuildContext) -> Select[Any]:
        at = self.rows.at(context)
        ids = bindparam(param_name("ids"), type_=at["id"].type, expanding=True)
        known = select(at["id"]).where(at["id"].in_(ids))
        return known.where(at["queue"] == role_param(at["queue"], "queue")) if "queue" in at else known


class SetRetries(ConditionalUpdate):
    """How many acquisitions a row allows from now on; not repeatable, since some may have been had in between."""

    def condition(self, at: RoleColumns) -> list[Any]:
        return []

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return {at["retries"]: bindparam(param_name("retries"), type_=Integer())}


def ids(rows: RoleMapping, name: str, given: Sequence[Any], queue: Any) -> dict[str, Any]:
    """The values of ``create``: in one order for everybody, so that two who make the same rows can't deadlock."""
    if not given:
        raise ValueError(f"{name} needs at least one id")
    found = {rows.identity(id, queue)[param_name("id")]: None for id in given}
    return {param_name("ids"): sorted(found, key=str), **rows.queue(queue)}


def retries(rows: RoleMapping, given: Any, *, required: bool = False) -> dict[str, Any]:
    """The value of ``retries=``; without one, the column's own default is left to it."""
    if given is None and not required:
        return {}
    rows.require("retries", "retries")
    if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
        raise TypeError(f"{rows.what}: retries is a number or None, not {given!r}")
    if given is not None and not 0 <= given < 2**31:
        raise ValueError(f"{rows.what}: retries must be at least 0 and fit into an integer, not {given}")
    return {param_name("retries"): given}


def limit(given: Any) -> dict[str, Any]:
    """The value of ``limit``."""
    return {param_name("limit"): positive_int(given, "limit")}

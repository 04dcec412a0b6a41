"""A conditional UPDATE of one row: the base of mutexes, timeouts and status changes.

The caller whose UPDATE finds the condition true succeeds: the database changes a row for one transaction at a time, and
the next UPDATE finds the condition false. This holds at every isolation level, since an UPDATE tests the row's current
version. The rows are those of a shipped table or the user's own; ``RoleMapping`` knows which column plays which role.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import Select, Update, and_, func, or_, select, update
from sqlalchemy.engine import CursorResult
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core import roles
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl
from sqlalchemy_locks.errors import LockTimeout, OutcomeUnknown, UnknownTask
from sqlalchemy_locks.sql.elements import skip_locked

if TYPE_CHECKING:
    from sqlalchemy.orm import Session
    from typing_extensions import Self


class ConditionalUpdate(OperationImpl):
    """One conditional UPDATE of one row; returns whether it changed the row."""

    wait_limit = "setting"
    subject = roles.ID_PARAM

    def __init__(self, mapping: roles.RoleMapping, name: str) -> None:
        super().__init__()
        self.mapping, self.name = mapping, name
        self.needs_installation = mapping.target is None
        #: the UPDATE, and the SELECT of the same row; built once per context
        self.update_statement: Callable[[BuildContext], Executable] = cache(self.build_update)
        self._probe_statement: Callable[[BuildContext], Select[Any]] = cache(self._build_probe)

    def condition(self, columns: roles.RoleColumns) -> list[Any]:
        """Return the conditions that the row must meet."""
        raise NotImplementedError

    def changes(self, columns: roles.RoleColumns) -> dict[Any, Any]:
        """Return the values that the UPDATE sets, by column."""
        raise NotImplementedError

    def build(self, context: BuildContext) -> Executable | None:
        return self.update_statement(context)

    def build_update(self, context: BuildContext) -> Executable:
        """Return the UPDATE of the row."""
        return self.update_of(context, self.mapping.columns(context))

    def update_of(self, context: BuildContext, columns: roles.RoleColumns) -> Update:
        conditions = [*self.mapping.row_condition(columns), *self.condition(columns)]
        return update(columns.table).where(and_(*conditions)).values(self.all_changes(columns))

    def all_changes(self, columns: roles.RoleColumns) -> dict[Any, Any]:
        """Return the values that the UPDATE sets, including the version of a mapped class."""
        return self.changes(columns) | self.mapping.version_bump()

    def route(self) -> dict[str, Any]:
        return self.mapping.route()

    def run(self, execution: Execution) -> Any:
        answer = self.update(execution)
        if not answer:
            # where a waiting UPDATE misses a row that was deleted and inserted again, the answer is a refusal
            return self.refusal(execution, self.probe(execution))
        if execution.session is not None:
            self._refresh(execution, execution.session)
        return answer

    def update(self, execution: Execution) -> Any:
        """Execute the UPDATE and return its answer, falsy if no row was changed."""
        return execution.execute(self.update_statement(execution.context)).rowcount > 0

    def _refresh(self, execution: Execution, session: Session) -> None:
        """Show the row's new values in the session's loaded objects."""
        target = self.mapping.target
        if target is not None:
            columns = self.mapping.columns(execution.context)
            identity = {
                columns[role]: execution.values[roles.param_name(role)] for role in ("queue", "id") if role in columns
            }
            target.refresh(session, self.changes(columns), identity)

    def probe(self, execution: Execution) -> Any:
        """Read the row that was not changed: its flag, its fence, and whether it carries the call's nonce.

        :return: the row, or ``None`` if the transaction's snapshot doesn't show it.
        :raises UnknownTask: if there is no such row.
        """
        statement = self._probe_statement(execution.context)
        row = execution.execute(statement, {roles.NONCE_PARAM: None, **execution.values}).first()
        if row is None and not (execution.backend.stale_reads and self._is_hidden(execution)):
            values = execution.values
            where = f" in the queue {values[roles.QUEUE_PARAM]!r}" if roles.QUEUE_PARAM in values else ""
            raise UnknownTask(f"{self.name}: there is no {values[roles.ID_PARAM]!r}{where}; make it by create() first")
        return row

    def _build_probe(self, context: BuildContext) -> Select[Any]:
        columns = self.mapping.columns(context)
        selected: list[Any] = [columns[role].label(role) for role in ("id", "fence", "acquired") if role in columns]
        if "token" in columns:
            # compared by the server, whatever type the column has
            selected.append((columns["token"] == roles.role_param(columns["token"], "nonce")).label("has_nonce"))
        # cast, since select() is typed differently from ten columns on
        probe: Select[Any] = cast(Any, select(*selected).where(*self.mapping.row_condition(columns)))
        return probe

    def _is_hidden(self, execution: Execution) -> bool:
        """Return whether the row exists although the transaction's snapshot doesn't show it."""
        if execution.is_read_committed():
            return False
        probe = self._probe_statement(execution.context)
        values = {roles.NONCE_PARAM: None, **execution.values}
        if execution.execute(probe.with_for_update(read=True, skip_locked=True), values).first() is not None:
            return True
        try:
            return execution.execute(probe.with_for_update(read=True, nowait=True), values).first() is not None
        except LockTimeout:
            return True  # another transaction has locked it, so it exists

    def refusal(self, execution: Execution, row: Any) -> Any:
        """Return the answer when the condition was false.

        :param row: the row that ``probe`` has read.
        """
        return False


class ConditionalAcquire(ConditionalUpdate):
    """An acquisition: it spends a retry, stores the call's nonce and increments the fence.

    :param returns_token: the answer is the fencing token, or ``None``; otherwise whether it was acquired.
    :param patient: for the impatient variant, which doesn't wait for a locked row: the variant that waits.
    """

    def __init__(
        self, mapping: roles.RoleMapping, name: str, *, returns_token: bool, patient: ConditionalAcquire | None = None
    ) -> None:
        super().__init__(mapping, name)
        self.returns_token = returns_token
        self.patient = patient
        self.impatient = patient is not None
        self.refused = None if returns_token else False
        self._stores_nonce = mapping.has("token")

    @classmethod
    def variants(cls, *args: Any, returns_token: bool) -> dict[bool, Self]:
        """Return both variants by ``nowait``: ``True`` for the one that doesn't wait for a locked row."""
        patient = cls(*args, returns_token=returns_token)
        return {False: patient, True: cls(*args, returns_token=returns_token, patient=patient)}

    def repeatable(self, operation: Operation[Any]) -> bool:
        return self._stores_nonce

    def is_free(self, columns: roles.RoleColumns) -> list[Any]:
        """Return the conditions of a free row."""
        raise NotImplementedError

    def condition(self, columns: roles.RoleColumns) -> list[Any]:
        return [*self.is_free(columns), *self.may_acquire(columns)]

    def may_acquire(self, columns: roles.RoleColumns) -> list[Any]:
        """Return the conditions of every acquisition besides those of a free row."""
        conditions = roles.retries_left(columns)
        if "token" in columns:
            # a first try whose connection died must not take effect after the second try
            token = columns["token"]
            conditions.append(or_(token.is_(None), token != roles.role_param(token, "nonce")))
        return conditions

    def acquisition_changes(self, columns: roles.RoleColumns) -> dict[Any, Any]:
        """Return the values that every acquisition sets, by column."""
        changes: dict[Any, Any] = {}
        if "retries" in columns:
            changes[columns["retries"]] = columns["retries"] - roles.ONE
        if "token" in columns:
            changes[columns["token"]] = roles.role_param(columns["token"], "nonce")
        if "fence" in columns:
            changes[columns["fence"]] = roles.incremented(columns["fence"])
        return changes

    def build(self, context: BuildContext) -> Executable | None:
        if self.patient is not None and not context.backend.writable_ctes:
            return None
        return super().build(context)

    def multi_statement_reason(self, context: BuildContext) -> str:
        if not context.backend.single_writer:
            return "where the row is locked first, unless another transaction has locked it"
        return "where it runs with a busy timeout of 0"

    def build_update(self, context: BuildContext) -> Executable:
        columns = self.mapping.columns(context)
        statement = self.update_of(context, columns)
        if not self.returns_token:
            return statement
        if context.backend.returning:
            return statement.returning(columns["fence"])
        return statement.values({columns["fence"]: func.last_insert_id(roles.incremented(columns["fence"]))})

    def update_of(self, context: BuildContext, columns: roles.RoleColumns) -> Update:
        # the impatient variant updates the row only if no other transaction has locked it
        statement = super().update_of(context, columns)
        if self.patient is None:
            return statement
        free = self._skip_locked(columns).cte("locks_free")
        return statement.where(*(column == free.c[column.key] for column in columns.table.primary_key))

    def _skip_locked(self, columns: roles.RoleColumns) -> Select[Any]:
        # key_share: transactions that reference the row by a foreign key don't count as holders
        row = select(*columns.table.primary_key).where(*self.mapping.row_condition(columns))
        return skip_locked(row, key_share=True)  # type: ignore[no-any-return]

    def call_values(self, execution: Execution) -> dict[str, Any]:
        """Return the values that differ between two calls of the same operation."""
        return {roles.NONCE_PARAM: self.mapping.nonce_type(execution.nonce)} if self._stores_nonce else {}

    def update(self, execution: Execution) -> Any:
        execution.values = {**execution.values, **self.call_values(execution)}
        # an earlier try, whose answer was lost, may be about to commit: wait for it to end
        if self.patient is not None and not execution.is_retry:
            return self._update_unless_locked(execution, self.patient)
        result = execution.execute((self.patient or self).update_statement(execution.context))
        return self._answer(execution, result)

    def _update_unless_locked(self, execution: Execution, patient: ConditionalAcquire) -> Any:
        backend = execution.backend
        if backend.writable_ctes:
            return self._answer(execution, execution.execute(self.update_statement(execution.context)))
        if not backend.single_writer:
            execution.require_transaction()  # the row's lock would end before the UPDATE
            row = execution.execute(self._skip_locked(self.mapping.columns(execution.context))).first()
            if row is None:
                return False
            return self._answer(execution, execution.execute(patient.update_statement(execution.context)))
        try:
            with backend.bounded(execution.connection, 0):
                return self._answer(execution, execution.execute(patient.update_statement(execution.context)))
        except LockTimeout:
            return False

    def _answer(self, execution: Execution, result: CursorResult[Any]) -> Any:
        if not self.returns_token:
            return result.rowcount > 0
        if execution.backend.returning:
            return result.scalar()
        return result.lastrowid if result.rowcount else None

    def refusal(self, execution: Execution, row: Any) -> Any:
        if row is not None and "has_nonce" in row._fields and row.has_nonce:
            # an earlier try of this call has acquired it
            if "acquired" in row._fields and not row.acquired:
                raise OutcomeUnknown(f"{self.name}: acquired, but the reply was lost and it has since been released")
            return row.fence if self.returns_token else True
        return self.refused

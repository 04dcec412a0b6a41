"""One row, one conditional UPDATE: what mutexes and timeouts are made of.

Whoever's UPDATE finds the condition true has it: the database changes a row for one at a time, and the next one
finds the condition false. That holds at every isolation level, since an UPDATE reads the row as it is.

Rows are those of a shipped table, or of a user's own: ``RoleMapping`` knows which column plays which role.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Literal

from sqlalchemy import Select, Update, and_, func, or_, select, true, update
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl
from sqlalchemy_locks.core.roles import (
    ONE,
    RoleColumns,
    RoleMapping,
    nonce_of,
    one,
    param_name,
    raised,
    retries_left,
    role_param,
)
from sqlalchemy_locks.errors import LockTimeout, OutcomeUnknown, UnknownTask, Unsupported
from sqlalchemy_locks.sql.elements import ReadCommitted

Answer = Literal["whether", "token"]
_AS_IT_IS = contextlib.nullcontext()


class ConditionalUpdate(OperationImpl):
    """One conditional UPDATE of one row; whether it changed anything is the answer."""

    #: ask a row again that was replaced while it was waited for: its condition can't be met by another's acquisition
    insists = True

    def __init__(self, rows: RoleMapping, name: str) -> None:
        super().__init__()
        self.rows, self.name = rows, name
        self.needs_installation = rows.target is None
        self._ones: dict[BuildContext, Executable] = {}
        self._probes: dict[BuildContext, Select[Any]] = {}

    def condition(self, at: RoleColumns) -> list[Any]:
        """What must be true of the row, besides being that row."""
        raise NotImplementedError

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        """What the UPDATE sets."""
        raise NotImplementedError

    def build(self, context: BuildContext) -> Executable | None:
        return self.one(context) if self.rows.unique else None

    def one(self, context: BuildContext) -> Executable:
        """The UPDATE, made once for each place."""
        if context not in self._ones:
            self._ones[context] = self.made(context)
        return self._ones[context]

    def made(self, context: BuildContext) -> Executable:
        """The UPDATE, with what it gives back."""
        return self.chosen(context, self.rows.at(context))

    def because(self, context: BuildContext) -> str:
        return "where no unique constraint says that one id is one row, and that is looked at afterwards"

    def check_connection(self, execution: Execution) -> None:
        if not self.rows.unique and execution.backend.autocommit(execution.connection):
            raise execution.backend.refuse_autocommit(self.name)

    def chosen(self, context: BuildContext, at: RoleColumns) -> Update:
        """The UPDATE of the row."""
        conditions = [*one(self.rows, at), *self.condition(at)]
        return update(at.table).where(and_(*conditions)).values(self.changes(at) | self.rows.bumped())

    def route(self) -> dict[str, Any]:
        return self.rows.route()

    def run(self, execution: Execution) -> Any:
        row: Any = None
        for _ in execution.tries():
            answer = self.update(execution)
            if not self.rows.unique:
                self._refuse_several(execution)
            if answer:
                self.refresh(execution)
                return answer
            row = self.probe(execution)
            if not (self.insists and execution.backend.misses_replaced and row.meant):
                break
        return self.otherwise(execution, row)

    def update(self, execution: Execution) -> Any:
        """Run the UPDATE; what it tells of itself, falsy when no row was changed."""
        with self.waiting(execution):
            return self.sent(execution, self.one(execution.context)) > 0

    def waiting(self, execution: Execution) -> contextlib.AbstractContextManager[None]:
        """Around the UPDATE: its wait is bounded, and what ends it is told apart, where that has to be asked for."""
        return _AS_IT_IS if execution.wait is None and execution.backend.locking != "file" else self._watched(execution)

    @contextlib.contextmanager
    def _watched(self, execution: Execution) -> Iterator[None]:
        with contextlib.ExitStack() as around:
            if execution.wait is not None:
                around.enter_context(execution.backend.bounded(execution.connection, execution.wait))
            if execution.backend.locking == "file":
                around.enter_context(execution.backend.classify_timeouts(execution.connection))
            yield

    def sent(self, execution: Execution, statement: Executable) -> int:
        changed: int = execution.by_cursor(
            statement, execution.values, attrgetter("rowcount"), plain=self.rows.target is None
        )
        return changed

    def refresh(self, execution: Execution) -> None:
        target = self.rows.target
        if target is not None and execution.session is not None:
            at = self.rows.at(execution.context)
            meant = {at[role]: execution.values[param_name(role)] for role in ("queue", "id") if role in at}
            target.refresh(execution.session, self.changes(at), meant)

    def probe(self, execution: Execution) -> Any:
        """The row that was not changed: its nonce and its flag, where there are such.

        :raises UnknownTask: when there is no such row.
        """
        at = self.rows.at(execution.context)
        row = execution.execute(self._probe(execution.context), {param_name("nonce"): None, **execution.values}).first()
        if row is None and not (execution.backend.locking == "rows" and self._hidden(execution, at)):
            raise UnknownTask(self.unknown(execution))
        return row

    def _probe(self, context: BuildContext) -> Select[Any]:
        if context not in self._probes:
            at = self.rows.at(context)
            told: Any = [at[role].label(role) for role in ("id", "fence", "acquired") if role in at]
            if "token" in at:
                # compared where the type is the column's own
                told.append((at["token"] == role_param(at["token"], "nonce")).label("mine"))
            if self.insists and context.backend.misses_replaced:
                told.append(and_(true(), *self.condition(at)).label("meant"))
            probe: Any = select(*told).where(*one(self.rows, at))
            self._probes[context] = probe
        return self._probes[context]

    def _hidden(self, execution: Execution, at: RoleColumns) -> bool:
        """Whether the row is there, though an old snapshot doesn't show it (InnoDB above READ COMMITTED)."""
        if execution.read_committed or execution.execute(select(ReadCommitted()), {}).scalar():
            return False
        probe = self._probe(execution.context)
        values = {param_name("nonce"): None, **execution.values}
        if execution.execute(probe.with_for_update(read=True, skip_locked=True), values).first() is not None:
            return True
        try:
            return execution.execute(probe.with_for_update(read=True, nowait=True), values).first() is not None
        except LockTimeout:
            return True  # somebody holds it, so it is there

    def otherwise(self, execution: Execution, row: Any) -> Any:
        """The answer when the condition was false."""
        return False

    def unknown(self, execution: Execution) -> str:
        where = (
            f" in the queue {execution.values[param_name('queue')]!r}"
            if param_name("queue") in execution.values
            else ""
        )
        return f"{self.name}: there is no {execution.values[param_name('id')]!r}{where}; make it by create() first"

    def _refuse_several(self, execution: Execution) -> None:
        """Two rows of one id would be two locks of one name: where the model doesn't rule that out, look."""
        at = self.rows.at(execution.context)
        found = execution.execute(select(at["id"]).where(*one(self.rows, at)).limit(2)).all()
        if len(found) > 1:
            raise Unsupported(
                f"{self.name}: several rows of {at.table} have the id {execution.values[param_name('id')]!r}, and each "
                "would be a lock of its own: give the column a unique constraint"
            )


class ConditionalAcquire(ConditionalUpdate):
    """An acquisition: it may cost a retry, leaves its nonce, and raises the fence."""

    def __init__(
        self, rows: RoleMapping, name: str, answer: Answer, *, patient: ConditionalAcquire | None = None
    ) -> None:
        super().__init__(rows, name)
        self.answer = answer
        #: the same, waiting, for one that doesn't
        self.patient = patient
        self.impatient = patient is not None
        # whoever doesn't wait is refused by what a look still shows as free
        self.insists = patient is None
        self.refused = False if answer == "whether" else None

    def repeatable(self, operation: Operation[Any]) -> bool:
        return self.rows.has("token")

    def free(self, at: RoleColumns) -> list[Any]:
        """What makes the row free to be acquired."""
        raise NotImplementedError

    def condition(self, at: RoleColumns) -> list[Any]:
        return [*self.free(at), *self.allowed(at)]

    def allowed(self, at: RoleColumns) -> list[Any]:
        """What every acquisition needs besides a free row."""
        conditions = retries_left(at)
        if "token" in at:
            # a first try whose connection died must not come into effect after the second has
            conditions.append(or_(at["token"].is_(None), at["token"] != role_param(at["token"], "nonce")))
        return conditions

    def spent(self, at: RoleColumns) -> dict[Any, Any]:
        """What every acquisition sets."""
        changes: dict[Any, Any] = {}
        if "retries" in at:
            changes[at["retries"]] = at["retries"] - ONE
        if "token" in at:
            changes[at["token"]] = role_param(at["token"], "nonce")
        if "fence" in at:
            changes[at["fence"]] = raised(at["fence"])
        return changes

    def build(self, context: BuildContext) -> Executable | None:
        if self.patient is not None and context.backend.locking != "functions":
            return None
        return super().build(context)

    def made(self, context: BuildContext) -> Executable:
        at = self.rows.at(context)
        statement = self.chosen(context, at)
        if self.answer == "whether":
            return statement
        if context.backend.update_returning:
            return statement.returning(at["fence"])
        return statement.values({at["fence"]: func.last_insert_id(raised(at["fence"]))})

    def chosen(self, context: BuildContext, at: RoleColumns) -> Update:
        """The UPDATE of the row; where that can be said in it, of a row that nobody else is changing."""
        statement = super().chosen(context, at)
        if self.patient is None:
            return statement
        free = self._skipping(at).cte("locks_free")
        return statement.where(*(column == free.c[column.key] for column in at.table.primary_key))

    def given(self, execution: Execution) -> dict[str, Any]:
        """The values that each run brings anew."""
        return {param_name("nonce"): nonce_of(self.rows, execution.nonce)} if self.rows.has("token") else {}

    def because(self, context: BuildContext) -> str:
        if not self.rows.unique:
            return super().because(context)
        if context.backend.locking == "file":
            return "where the busy timeout is none while it runs"
        return "where the row is locked first, unless somebody else has it"

    def _skipping(self, at: RoleColumns) -> Select[Any]:
        # not FOR UPDATE: a row that others refer to by a foreign key isn't taken
        found = select(*at.table.primary_key).where(*one(self.rows, at))
        return found.with_for_update(skip_locked=True, key_share=True)

    def update(self, execution: Execution) -> Any:
        execution.values = {**execution.values, **self.given(execution)}
        # an earlier try, whose answer was lost, may be about to commit: its end is waited for
        if self.patient is not None and not execution.again:
            return self._now(execution, self.patient)
        with self.waiting(execution):
            return self._answer(execution, (self.patient or self).one(execution.context))

    def _now(self, execution: Execution, patient: ConditionalAcquire) -> Any:
        match execution.backend.locking:
            case "functions":
                return self._answer(execution, self.one(execution.context))
            case "rows":
                if execution.execute(self._skipping(self.rows.at(execution.context))).first() is None:
                    return False
                return self._answer(execution, patient.one(execution.context))
            case "file":
                try:
                    with execution.backend.bounded(execution.connection, 0):
                        return self._answer(execution, patient.one(execution.context))
                except LockTimeout:
                    return False

    def _answer(self, execution: Execution, statement: Executable) -> Any:
        if self.answer == "whether":
            return self.sent(execution, statement) > 0
        plain = self.rows.target is None
        if execution.backend.update_returning:
            row = execution.by_cursor(statement, execution.values, _first, plain=plain)
            return None if row is None else row[0]
        changed, token = execution.by_cursor(
            statement, execution.values, attrgetter("rowcount", "lastrowid"), plain=plain
        )
        return token if changed else None

    def otherwise(self, execution: Execution, row: Any) -> Any:
        if row is not None and "mine" in row._fields and row.mine:
            if "acquired" in row._fields and not row.acquired:
                raise OutcomeUnknown(f"{self.name}: it was acquired, its answer was lost, and somebody has released it")
            return True if self.answer == "whether" else row.fence
        return self.refused


def _first(cursor: Any) -> Any:
    return cursor.fetchone()

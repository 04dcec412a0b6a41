"""What operators and apps do to a queue from outside: look at a job, cancel or reschedule it, pause queues.

A paused queue is a row of a small table, which each capture reads as a condition of its own statement.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, bindparam, case, delete, literal, select, update
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import MAX_KEYS, BuildContext, Execution, OperationImpl, execute_in_session
from sqlalchemy_locks.core.roles import RoleColumns, RoleMapping
from sqlalchemy_locks.queue.jobs import NO_CLAIM, JobOperation
from sqlalchemy_locks.sql.clock import Instant, Now, PlusSeconds

#: the ``error`` of a cancelled job; a completed job has none
CANCELLED = "cancelled"


def _chosen(at: RoleColumns) -> Any:
    return at.external_id == bindparam("locks_chosen", type_=at.external_id.type)


class GetJob(JobOperation):
    """Reads one job in any state: a row, or in a session an entity of a mapped class; ``None`` if it doesn't exist."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        return select(at.table).where(_chosen(at), *self.jobs.class_condition())

    def run(self, execution: Execution) -> Any:
        target = self.jobs.target
        if target is None or target.mapper is None or execution.session is None:
            return super().run(execution).one_or_none()
        reading: Any = select(target.entity).where(_chosen(self.jobs.at(execution.context)))
        reading = reading.options(*execution.loader_options)
        return execute_in_session(execution, reading, execution.values).unique().scalar_one_or_none()


class UpdateWaitingJob(JobOperation):
    """Changes one waiting job, and returns whether there was one. It waits for a transaction that is capturing it."""

    wait_limit = "setting"

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        """Return the columns that the UPDATE sets, and their values."""
        raise NotImplementedError

    def build(self, context: BuildContext) -> Executable | None:
        at, target = self.jobs.at(context), self.jobs.target
        changes = {**self.changes(at), **(target.version_bump() if target else {})}
        waiting = (_chosen(at), at.started_at.is_(None), *self.jobs.class_condition())
        return update(at.table).where(*waiting).values(changes)

    def run(self, execution: Execution) -> bool:
        changed = bool(super().run(execution).rowcount)
        if changed and self.jobs.target is not None:
            at = self.jobs.at(execution.context)
            chosen = {at.external_id: execution.values["locks_chosen"]}
            self.jobs.target.refresh(execution.session, self.changes(at), chosen)
        return changed


class CancelJob(UpdateWaitingJob):
    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        ended = {at.started_at: Now(), at.completed_at: Now(), at.error: literal(CANCELLED, at.error.type)}
        # NO_CLAIM matches no worker: job.lost becomes true in a handler that still runs
        return {**ended, **self.jobs.free_key(at), at.claim: NO_CLAIM}


class RescheduleJob(UpdateWaitingJob):
    """Sets the instant that is bound, or the number of seconds from now."""

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        instant = bindparam("locks_run_at", type_=Instant())
        seconds = bindparam("locks_run_in", type_=Float())
        return {at.run_at: case((instant.is_not(None), instant), else_=PlusSeconds(Now(), seconds))}


class ResumeQueues(OperationImpl):
    """Deletes the rows of paused queues, and counts them."""

    name = "Queue.resume"
    wait_limit = "setting"

    def __init__(self, paused: RoleMapping) -> None:
        super().__init__()
        self.paused = paused
        self.needs_installation = paused.target is None

    def repeatable(self, operation: Any) -> bool:
        return True

    def build(self, context: BuildContext) -> Executable | None:
        at = self.paused.columns(context)
        return delete(at.table).where(at["id"].in_(bindparam("locks_ids", type_=at["id"].type, expanding=True)))

    def route(self) -> dict[str, Any]:
        return self.paused.route()

    def run(self, execution: Execution) -> int:
        statement = self.statement(execution.context)
        assert statement is not None
        table = self.paused.columns(execution.context).table
        batches = execution.batches(execution.values["locks_ids"], table)
        return sum(execution.execute(statement, {"locks_ids": ids}).rowcount for ids in batches)

    def is_one_statement(self, execution: Execution) -> bool:
        return super().is_one_statement(execution) and len(execution.values["locks_ids"]) <= MAX_KEYS

"""Maintenance of a queue: revive dead jobs, delete old ones, count them; ``liveness.py`` requeues stalled ones."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Float,
    Integer,
    and_,
    bindparam,
    case,
    cast,
    func,
    literal_column,
    null,
    select,
    union_all,
)
from sqlalchemy.sql import Executable

from sqlalchemy_locks.captures.statements import CaptureSpec
from sqlalchemy_locks.core.operation import BuildContext, Operation
from sqlalchemy_locks.core.roles import ONE, RoleColumns
from sqlalchemy_locks.queue.jobs import JobCapture, JobOperation, Jobs
from sqlalchemy_locks.sql.clock import Instant, Now, SecondsAgo, StatementStart

#: no limit in effect, but one that makes the engine evaluate a subquery by itself
EVERY: Any = literal_column("1000000000", Integer())


class Sweep(JobCapture):
    """A capture that only counts its rows.

    :param by: the role of a column whose value restricts it, bound as ``locks_chosen``; ``None``: all jobs.
    """

    counts = True

    def __init__(self, jobs: Jobs, name: str, by: str | None) -> None:
        super().__init__(jobs, name)
        self.by = by

    def chosen(self, at: RoleColumns) -> list[Any]:
        if self.by is None:
            return []
        column = at.roles[self.by]
        return [column == bindparam("locks_chosen", type_=column.type)]


class Revive(Sweep):
    """Returns dead jobs to the queue with all their attempts."""

    def __init__(self, jobs: Jobs, by: str | None) -> None:
        super().__init__(jobs, "Queue.revive", by)

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        at = self.jobs.at(context)
        changes = {at.attempts: literal_column("0"), at.run_at: Now(), at.started_at: null(), at.failed_at: null()}
        conditions = (at.failed_at.is_not(None), *self.chosen(at))
        return CaptureSpec(at.table, conditions, changes, (at.failed_at,), self.jobs.target)


class DeleteJobs(Sweep):
    """Deletes jobs that were completed, or died, long ago.

    :param role: the timestamp that is compared, ``completed_at`` or ``failed_at``.
    """

    def __init__(self, jobs: Jobs, role: str, by: str | None) -> None:
        super().__init__(jobs, "Queue.delete_finished", by)
        self.role = role

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True  # a second execution finds nothing that the first one has deleted

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        at = self.jobs.at(context)
        ended = at.roles[self.role]
        conditions = (ended <= SecondsAgo(bindparam("locks_older", type_=Float())), *self.chosen(at))
        return CaptureSpec(at.table, conditions, {}, (ended,), self.jobs.target)


class Stats(JobOperation):
    """Counts the jobs of each queue by state, each state from the index that only its jobs are in."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        nothing: Any = literal_column("0")
        ours = self.jobs.class_condition()
        instant = cast(null(), Instant())
        now = StatementStart()

        def part(conditions: tuple[Any, ...], *counts: Any) -> Any:
            # a subquery with a limit: SQLite would otherwise scan all jobs in the order of the GROUP BY
            chosen = select(at.queue_id.label("queue_id")).where(*conditions).limit(EVERY).subquery()
            return select(chosen.c.queue_id, *counts).group_by(chosen.c.queue_id)

        def when(condition: Any) -> Any:
            return func.sum(case((condition, 1), else_=0))

        count = func.count()
        due = at.run_at <= now
        parts = [
            _waiting(context, at, ours).add_columns(
                when(due).label("waiting"),
                when(at.run_at > now).label("scheduled"),
                nothing.label("running"),
                nothing.label("dead"),
                func.min(case((due, at.run_at))).label("oldest"),
                nothing.label("paused"),
            ),
            part(self.jobs.running(at), nothing, nothing, count, nothing, instant, nothing),
            part((at.failed_at.is_not(None), *ours), nothing, nothing, nothing, count, instant, nothing),
        ]
        for name in self.jobs.paused_names(context):
            parts.append(select(name, nothing, nothing, nothing, nothing, instant, ONE))
        every = union_all(*parts).subquery("parts")
        names = ("waiting", "scheduled", "running", "dead")
        totals = [cast(func.sum(every.c[name]), Integer()).label(name) for name in names]
        oldest = func.min(every.c.oldest, type_=Instant()).label("oldest")
        paused = (func.max(every.c.paused) == ONE).label("paused")
        found = select(every.c.queue_id, *totals, oldest, paused)
        return found.group_by(every.c.queue_id).order_by(every.c.queue_id)


def _waiting(context: BuildContext, at: Any, ours: list[Any]) -> Any:
    """Select the waiting jobs by queue, from the index that starts with the queue."""
    waiting = and_(at.started_at.is_(None), *ours)
    if context.backend.partial_ready_index:
        return select(at.queue_id.label("queue_id")).where(waiting).group_by(at.queue_id)
    # there is no index that only waiting jobs are in: find the queues first, then the part of the index of each
    names = select(at.queue_id.label("queue_id")).distinct().subquery("names")
    joined = names.join(at.table, and_(at.queue_id == names.c.queue_id, waiting))
    return select(names.c.queue_id.label("queue_id")).select_from(joined).group_by(names.c.queue_id)

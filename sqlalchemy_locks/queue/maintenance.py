"""What goes through all jobs, whoever has them: stalled ones back, old ones away, how many of each there are."""

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
    literal,
    literal_column,
    null,
    select,
    union_all,
)
from sqlalchemy.sql import Executable

from sqlalchemy_locks.captures.operation import CaptureImpl
from sqlalchemy_locks.captures.statements import CaptureSpec
from sqlalchemy_locks.core.operation import BuildContext, Operation
from sqlalchemy_locks.core.roles import RoleColumns
from sqlalchemy_locks.queue.acknowledge import failed
from sqlalchemy_locks.queue.jobs import Jobs, OnJobs
from sqlalchemy_locks.sql.clock import Ago, Began, Instant

#: no limit, but one that has a part of a statement worked out by itself
EVERY: Any = literal_column("1000000000", Integer())


class Requeue(CaptureImpl):
    """Gives jobs back whose worker is not heard of any more; how many.

    :param one: those of one queue, which is bound; otherwise of all.
    """

    counts = True

    def __init__(self, jobs: Jobs, *, one: bool) -> None:
        super().__init__("Queue.requeue_stalled")
        self.jobs, self.one = jobs, one
        self.needs_installation = jobs.target is None

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True  # the first time leaves nothing for a second one

    def taken(self, context: BuildContext) -> CaptureSpec:
        at = self.jobs.at(context)
        dead = at.attempts >= at.max_attempts
        error = func.coalesce(at.error, literal("stalled: its worker gave no sign of life"))
        silent: Any = at.heartbeat_at < Ago(bindparam("locks_older", type_=Float()))
        return CaptureSpec(
            at.table,
            (silent, *_named(at, self.one)),
            {**failed(at, dead), at.error: case((dead, error), else_=at.error)},
            (at.heartbeat_at,),
            self.jobs.target,
        )

    def route(self) -> dict[str, Any]:
        return self.jobs.route()


class DeleteJobs(CaptureImpl):
    """Deletes jobs that ended long ago, so many at once; how many.

    :param one: those of one queue, which is bound; otherwise of all.
    """

    counts = True

    def __init__(self, jobs: Jobs, role: str, *, one: bool) -> None:
        super().__init__("Queue.delete_finished")
        self.jobs, self.role, self.one = jobs, role, one
        self.needs_installation = jobs.target is None

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True  # the first time leaves nothing for a second one

    def taken(self, context: BuildContext) -> CaptureSpec:
        at = self.jobs.at(context)
        ended = at.roles[self.role]
        older = ended <= Ago(bindparam("locks_older", type_=Float()))
        return CaptureSpec(at.table, (older, *_named(at, self.one)), {}, (ended,), self.jobs.target)

    def route(self) -> dict[str, Any]:
        return self.jobs.route()


def _named(at: RoleColumns, one: bool) -> tuple[Any, ...]:
    return (at.queue_id == bindparam("locks_queue", type_=at.queue_id.type),) if one else ()


class Stats(OnJobs):
    """What there is, queue by queue: each part from an index that has these jobs alone."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        nothing: Any = literal_column("0")
        instant = cast(null(), Instant())
        now = Began()

        def part(condition: Any, *counts: Any) -> Any:
            # chosen first: SQLite would go through every job in the order that it groups them by
            chosen = select(at.queue_id.label("queue_id")).where(condition).limit(EVERY).subquery()
            return select(chosen.c.queue_id, *counts).group_by(chosen.c.queue_id)

        def when(condition: Any) -> Any:
            return func.sum(case((condition, 1), else_=0))

        count = func.count()
        due = at.run_at <= now
        parts = union_all(
            _waiting(context, at).add_columns(
                when(due).label("waiting"),
                when(at.run_at > now).label("scheduled"),
                nothing.label("running"),
                nothing.label("dead"),
                func.min(case((due, at.run_at))).label("oldest"),
            ),
            part(at.heartbeat_at.is_not(None), nothing, nothing, count, nothing, instant),
            part(at.failed_at.is_not(None), nothing, nothing, nothing, count, instant),
        ).subquery("parts")
        names = ("waiting", "scheduled", "running", "dead")
        totals = [cast(func.sum(parts.c[name]), Integer()).label(name) for name in names]
        oldest = func.min(parts.c.oldest, type_=Instant()).label("oldest")
        return select(parts.c.queue_id, *totals, oldest).group_by(parts.c.queue_id).order_by(parts.c.queue_id)


def _waiting(context: BuildContext, at: Any) -> Any:
    """What waits, queue by queue, out of the index that begins with them."""
    waiting = at.started_at.is_(None)
    if context.backend.schemas:
        return select(at.queue_id.label("queue_id")).where(waiting).group_by(at.queue_id)
    # an index on these jobs alone is not to be had here: each queue is looked for, and then its part of the index
    names = select(at.queue_id.label("queue_id")).distinct().subquery("names")
    joined = names.join(at.table, and_(at.queue_id == names.c.queue_id, waiting))
    return select(names.c.queue_id.label("queue_id")).select_from(joined).group_by(names.c.queue_id)

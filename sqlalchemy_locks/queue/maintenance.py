"""Maintenance of a queue: revive dead jobs, delete old ones; ``liveness.py`` requeues stalled ones."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, bindparam, literal_column, null

from sqlalchemy_locks.captures.statements import CaptureSpec
from sqlalchemy_locks.core.operation import BuildContext, Operation
from sqlalchemy_locks.core.roles import RoleColumns
from sqlalchemy_locks.queue.jobs import JobCapture, Jobs
from sqlalchemy_locks.sql.clock import Now, SecondsAgo


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

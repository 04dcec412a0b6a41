"""Maintenance of a queue: revive dead jobs, delete old ones; ``liveness.py`` requeues stalled ones."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, bindparam, literal_column, null, or_

from sqlalchemy_locks.captures.statements import CaptureSpec
from sqlalchemy_locks.core.operation import BuildContext, Operation
from sqlalchemy_locks.queue.jobs import QUEUE_NAME, JobCapture, Jobs
from sqlalchemy_locks.sql.clock import Now, SecondsAgo


class JobSweep(JobCapture):
    """A capture that only counts its rows, in the queue bound as ``locks_queue``; ``None``: in all queues."""

    counts = True

    def chosen(self, column: Any, name: str = QUEUE_NAME) -> Any:
        """Return the condition that a column has the bound value; any value if ``None`` is bound."""
        value = bindparam(name, type_=column.type)
        return or_(value.is_(None), column == value)


class Revive(JobSweep):
    """Returns dead jobs to the queue with all their attempts."""

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        at = self.jobs.at(context)
        changes = {at.attempts: literal_column("0"), at.run_at: Now(), at.started_at: null(), at.failed_at: null()}
        chosen = self.chosen(at.queue_id), self.chosen(at.external_id, "locks_chosen")
        return CaptureSpec(at.table, (at.failed_at.is_not(None), *chosen), changes, (at.failed_at,), self.jobs.target)


class DeleteJobs(JobSweep):
    """Deletes jobs that were completed, or died, long ago.

    :param role: the timestamp that is compared, ``completed_at`` or ``failed_at``.
    """

    def __init__(self, jobs: Jobs, role: str) -> None:
        super().__init__(jobs, "Queue.delete_finished")
        self.role = role

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True  # a second execution finds nothing that the first one has deleted

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        at = self.jobs.at(context)
        ended = at.roles[self.role]
        old = ended <= SecondsAgo(bindparam("locks_older", type_=Float()))
        return CaptureSpec(at.table, (old, self.chosen(at.queue_id)), {}, (ended,), self.jobs.target)

"""Dead jobs given back, for when what they died of is mended."""

from __future__ import annotations

from typing import Any

from sqlalchemy import bindparam, literal_column, null

from sqlalchemy_locks.captures.operation import CaptureImpl
from sqlalchemy_locks.captures.statements import CaptureSpec
from sqlalchemy_locks.core.operation import BuildContext
from sqlalchemy_locks.queue.jobs import Jobs
from sqlalchemy_locks.sql.clock import Now


class Revive(CaptureImpl):
    """Gives dead jobs back, as if they had never been tried; how many.

    :param by: one job (``external_id``), those of one queue (``queue_id``), or all of them.
    """

    counts = True

    def __init__(self, jobs: Jobs, by: str | None) -> None:
        super().__init__("Queue.revive")
        self.jobs, self.by = jobs, by
        self.needs_installation = jobs.target is None

    def taken(self, context: BuildContext) -> CaptureSpec:
        at = self.jobs.at(context)
        conditions = [at.failed_at.is_not(None)]
        if self.by is not None:
            column = at.roles[self.by]
            conditions.append(column == bindparam("locks_chosen", type_=column.type))
        changes = {at.attempts: literal_column("0"), at.run_at: Now(), at.started_at: null(), at.failed_at: null()}
        return CaptureSpec(at.table, tuple(conditions), changes, (at.failed_at,), self.jobs.target)

    def route(self) -> dict[str, Any]:
        return self.jobs.route()

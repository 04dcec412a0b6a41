"""Recently completed and stalled jobs of a queue, for dashboards; the cost doesn't grow with the table.

Completed jobs are counted from the newest backwards, along the index on ``completed_at``, up to a limit.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Float, Integer, bindparam, cast, func, literal_column, select
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import bounded_seconds, positive_int
from sqlalchemy_locks.core.operation import BuildContext, RowsOperation
from sqlalchemy_locks.queue.jobs import JobOperation, Jobs
from sqlalchemy_locks.queue.maintenance import EVERY
from sqlalchemy_locks.sql.clock import Ago, Elapsed

_SINCE: Any = Ago(bindparam("locks_older", type_=Float()))
_LIMIT = bindparam("locks_limit", type_=Integer())
#: seconds, as a literal: the expressions in SELECT and GROUP BY must be the same
_MINUTE: Any = literal_column("60", Integer())


class _Completed(JobOperation):
    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        minute = (cast(Elapsed(at.completed_at), BigInteger()) // _MINUTE).label("minute")
        chosen = select(at.queue_id.label("queue_id"), minute).where(at.completed_at >= _SINCE)
        for engine in ("mysql", "mariadb"):
            # they would otherwise scan and sort the whole table once the rows in question are a tenth of it
            chosen = chosen.with_hint(at.table, f"FORCE INDEX ({context.prefix}job_completed)", engine)
        newest = chosen.order_by(at.completed_at.desc()).limit(_LIMIT).subquery("newest")
        columns = newest.c.queue_id, newest.c.minute
        return select(*columns, func.count().label("completed")).group_by(*columns)


class _Stalled(JobOperation):
    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        overdue = select(at.queue_id.label("queue_id")).where(at.heartbeat_at < _SINCE, *self.jobs.class_condition())
        chosen = overdue.limit(EVERY).subquery("chosen")
        return select(chosen.c.queue_id, func.count().label("stalled")).group_by(chosen.c.queue_id)


_SHIPPED = Jobs(None, {})
_COMPLETED = _Completed(_SHIPPED, "Queue.completed")


def completed(within: float, limit: int) -> RowsOperation[Any]:
    """Count the jobs completed recently: rows of ``queue_id, minute, completed``, ``minute`` being minutes ago.

    :param within: how far to look back, in seconds.
    :param limit: the most jobs that are counted, the newest first; if the counts add up to it, there were more.
    """
    return RowsOperation(
        _COMPLETED, {"locks_older": bounded_seconds(within, "within"), "locks_limit": positive_int(limit, "limit")}
    )


def stalled(older_than: float, jobs: Jobs = _SHIPPED) -> RowsOperation[Any]:
    """Count the running jobs without a recent heartbeat: rows of ``queue_id, stalled``.

    :param older_than: the age of the last heartbeat, in seconds.
    :param jobs: the jobs of a queue in a user's own table.
    """
    return RowsOperation(_Stalled(jobs, "Queue.stalled"), {"locks_older": bounded_seconds(older_than, "older_than")})

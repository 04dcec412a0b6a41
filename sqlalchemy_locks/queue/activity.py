"""What a queue has done lately, and what has stalled: for people, and cheap however many jobs have ended.

Completed jobs are counted from the newest back, along the index on ``completed_at``, and so many at most: a table of
millions of them costs what its last hour does, and a busy hour costs no more than the limit.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Float, Integer, bindparam, cast, func, literal_column, select
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import bounded_seconds, positive_int
from sqlalchemy_locks.core.operation import BuildContext, RowsOperation
from sqlalchemy_locks.queue.jobs import Jobs, OnJobs
from sqlalchemy_locks.queue.maintenance import EVERY
from sqlalchemy_locks.sql.clock import Ago, Elapsed

_SINCE: Any = Ago(bindparam("locks_older", type_=Float()))
_LIMIT = bindparam("locks_limit", type_=Integer())
#: seconds, in the statement itself: what is grouped by must be the very same expression
_MINUTE: Any = literal_column("60", Integer())


class _Completed(OnJobs):
    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        minute = (cast(Elapsed(at.completed_at), BigInteger()) // _MINUTE).label("minute")
        chosen = select(at.queue_id.label("queue_id"), minute).where(at.completed_at >= _SINCE)
        for engine in ("mysql", "mariadb"):
            # which would go through all of the table, and sort it, for a tenth of it
            chosen = chosen.with_hint(at.table, f"FORCE INDEX ({context.prefix}job_completed)", engine)
        newest = chosen.order_by(at.completed_at.desc()).limit(_LIMIT).subquery("newest")
        columns = newest.c.queue_id, newest.c.minute
        return select(*columns, func.count().label("completed")).group_by(*columns)


class _Stalled(OnJobs):
    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        chosen = select(at.queue_id.label("queue_id")).where(at.heartbeat_at < _SINCE).limit(EVERY).subquery("chosen")
        return select(chosen.c.queue_id, func.count().label("stalled")).group_by(chosen.c.queue_id)


_SHIPPED = Jobs(None, {})
_COMPLETED = _Completed(_SHIPPED, "Queue.completed")


def completed(within: float, limit: int) -> RowsOperation[Any]:
    """How many jobs were completed lately: rows of ``queue_id, minute, completed``, ``minute`` so many minutes ago.

    :param within: how far to look back, in seconds.
    :param limit: how many are counted, the newest first. When the counts come to as many, there were more.
    """
    return RowsOperation(
        _COMPLETED, {"locks_older": bounded_seconds(within, "within"), "locks_limit": positive_int(limit, "limit")}
    )


def stalled(older_than: float, jobs: Jobs = _SHIPPED) -> RowsOperation[Any]:
    """How many running jobs nothing was heard of: rows of ``queue_id, stalled``.

    :param older_than: for how long, in seconds.
    :param jobs: of a queue in a table of one's own.
    """
    return RowsOperation(_Stalled(jobs, "Queue.stalled"), {"locks_older": bounded_seconds(older_than, "older_than")})

"""The activity of a queue: its jobs by state, recently completed jobs, dead jobs, and its workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Float,
    Integer,
    and_,
    bindparam,
    case,
    cast,
    func,
    literal_column,
    null,
    or_,
    select,
    type_coerce,
    union_all,
)
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import bounded_seconds, valid_int, valid_name
from sqlalchemy_locks.core.operation import BuildContext, RowsOperation
from sqlalchemy_locks.core.roles import ONE, RoleColumns
from sqlalchemy_locks.queue.jobs import ORDER, QUEUE_NAME, JobOperation, Jobs
from sqlalchemy_locks.sql.clock import UTC, Elapsed, Instant, SecondsAgo, StatementStart
from sqlalchemy_locks.sql.elements import force_index

_SINCE: Any = SecondsAgo(bindparam("locks_older", type_=Float()))
STATES = ("waiting", "scheduled", "running", "dead", "stalled")
#: seconds, as a literal: the expressions in SELECT and GROUP BY must be the same
_MINUTE: Any = literal_column("60", Integer())
_DEAD = ("external_id", "queue_id", "attempts", "max_attempts", "error")
#: the parameters that name the queues whose jobs one statement counts
HEADS = tuple(f"locks_queue_{number}" for number in range(50))
_LIMIT, _COUNTED = (bindparam(name, type_=Integer()) for name in ("locks_limit", "locks_counted"))


class Stats(JobOperation):
    """Counts the jobs of each queue by state, each state by the index for its jobs."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        parts = union_all(
            *self._waiting(context, at),
            self._running(context, at),
            self._dead(context, at),
            *(select(name, *_columns(paused=ONE)) for name in self.jobs.paused_names(context)),
        ).subquery("parts")
        totals = [cast(func.sum(parts.c[name]), Integer()).label(name) for name in STATES]
        oldest = func.min(parts.c.oldest, type_=Instant()).label("oldest")
        paused = (func.max(parts.c.paused) == ONE).label("paused")
        return select(parts.c.queue_id, *totals, oldest, paused).group_by(parts.c.queue_id).order_by(parts.c.queue_id)

    def _waiting(self, context: BuildContext, at: RoleColumns) -> list[Any]:
        waiting = self._counted(context, _waiting_jobs(context, at).where(*self.jobs.class_condition())).subquery(
            "waits"
        )
        return [select(waiting.c.queue_id, *_waits(waiting.c.run_at)).group_by(waiting.c.queue_id)]

    def _dead(self, context: BuildContext, at: RoleColumns) -> Any:
        dead = select(at.queue_id.label("queue_id")).where(at.failed_at.is_not(None), *self.jobs.class_condition())
        died = self._counted(context, dead, at.failed_at.desc()).subquery("died")
        return select(died.c.queue_id, *_columns(dead=func.count())).group_by(died.c.queue_id)

    def _running(self, context: BuildContext, at: RoleColumns) -> Any:
        """Count running jobs, and stalled ones: their worker is silent, or has no row and captured them as long ago."""
        columns = [at.queue_id.label("queue_id"), at.started_at.label("at"), at.processing_host.label("host")]
        running = select(*columns).where(*self.jobs.running(at))
        runs: Any = self._counted(context, running, at.started_at).subquery("runs")
        last, jobs = runs.c.at, runs
        if self.jobs.workers is not None:
            workers = self.jobs.workers.columns(context)
            last = func.coalesce(workers["heartbeat_at"], runs.c.at)
            jobs = runs.outerjoin(workers.table, workers["host"] == runs.c.host)
        counts = _columns(running=func.count(), stalled=func.count(case((last < _SINCE, ONE))))
        return select(runs.c.queue_id, *counts).select_from(jobs).group_by(runs.c.queue_id)

    def _counted(self, context: BuildContext, jobs: Any, *order: Any) -> Any:
        """Return the query of the jobs that are counted: all of them."""
        # SQLite would scan all jobs in the order of the outer GROUP BY; a query with a limit is evaluated separately
        return jobs.limit(1_000_000_000) if context.backend.single_writer else jobs


class LimitedStats(Stats):
    """Counts like ``Stats``, but at most ``locks_counted`` jobs of each state.

    These are the jobs that have been running longest, and those that died last. :class:`Heads` counts waiting jobs.
    """

    def _waiting(self, context: BuildContext, at: RoleColumns) -> list[Any]:
        return []

    def _counted(self, context: BuildContext, jobs: Any, *order: Any) -> Any:
        return jobs.order_by(*order).limit(_COUNTED)


class NextJobs(JobOperation):
    """Reads one waiting job of each queue, by one or two look-ups in the index of waiting jobs.

    The index begins with the job that is captured next.
    """

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        waiting = at.started_at.is_(None)
        names: Any = select(at.queue_id.label("queue_id")).distinct().subquery("names")
        if context.backend.partial_ready_index:
            names = select(func.min(at.queue_id).label("queue_id")).where(waiting).cte("names", recursive=True)
            following = select(func.min(at.queue_id)).where(waiting, at.queue_id > names.c.queue_id).correlate(names)
            names = names.union_all(select(following.scalar_subquery()).where(names.c.queue_id.is_not(None)))
        # without ORDER BY, for which MySQL and MariaDB would sort: the rows come in the order of the index
        of_queue = select(at.run_at).where(at.queue_id == names.c.queue_id, waiting, *self.jobs.class_condition())
        jobs = select(names.c.queue_id, of_queue.limit(1).correlate(names).scalar_subquery().label("run_at")).subquery()
        is_due = jobs.c.run_at <= StatementStart()
        due = case((is_due, ONE), else_=literal_column("0"))
        counts = _columns(waiting=due, scheduled=ONE - due, oldest=case((is_due, jobs.c.run_at)))
        rows = select(jobs.c.queue_id, *counts).where(jobs.c.run_at.is_not(None))
        return rows.order_by(jobs.c.run_at, jobs.c.queue_id).limit(_LIMIT)


class Heads(JobOperation):
    """Counts at most ``locks_counted`` waiting jobs in each of the bound queues: those that are captured next."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at, counts = self.jobs.at(context), []
        waiting = (at.started_at.is_(None), *self.jobs.class_condition())
        for place, name in enumerate(HEADS):
            in_queue = at.queue_id == bindparam(name, type_=at.queue_id.type)
            jobs = select(at.run_at.label("run_at")).where(in_queue, *waiting)
            head = jobs.order_by(*(at[role] for role in ORDER)).limit(_COUNTED).subquery()
            counts.append(select(literal_column(str(place), Integer()).label("place"), *_waits(head.c.run_at)))
        return union_all(*counts).order_by(literal_column("place"))


class Completed(JobOperation):
    """Counts the jobs that were completed lately, by queue and minute."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        minute = (cast(Elapsed(at.completed_at), BigInteger()) // _MINUTE).label("minute")
        jobs = select(at.queue_id.label("queue_id"), minute).where(at.completed_at >= _SINCE)
        # without the hint, InnoDB scans and sorts the whole table once these rows are a tenth of it
        jobs = force_index(jobs, f"{context.prefix}job_completed", at.table)
        newest = jobs.order_by(at.completed_at.desc()).limit(_LIMIT).subquery("newest")
        columns = newest.c.queue_id, newest.c.minute
        return select(*columns, func.count().label("completed")).group_by(*columns)


class DeadJobs(JobOperation):
    """Reads dead jobs, the last ones first."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        queue = bindparam(QUEUE_NAME, type_=at.queue_id.type)
        columns = [at.roles[role].label(role) for role in _DEAD]
        ended = type_coerce(at.failed_at, UTC()).label("failed_at")
        # in the order of an index, so that no more is read than the limit
        dead = select(*columns, ended).where(at.failed_at.is_not(None), or_(queue.is_(None), at.queue_id == queue))
        return dead.where(*self.jobs.class_condition()).order_by(at.failed_at.desc()).limit(_LIMIT)


class Workers(JobOperation):
    """Reads the workers, and how many jobs each runs; the worker that is silent for longest comes first."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at, workers = self.jobs.at(context), self.jobs.require_workers().columns(context)
        running = (
            select(at.processing_host.label("host")).where(*self.jobs.running(at)).limit(_COUNTED).subquery("runs")
        )
        jobs = select(running.c.host, func.count().label("jobs")).group_by(running.c.host).subquery("jobs")
        columns = (
            workers["host"].label("host"),
            func.coalesce(jobs.c.jobs, 0).label("running"),
            Elapsed(workers["heartbeat_at"]).label("silent"),
            Elapsed(workers["started_at"]).label("age"),
        )
        rows = select(*columns).select_from(workers.table.outerjoin(jobs, jobs.c.host == workers["host"]))
        return rows.order_by(workers["heartbeat_at"], workers["host"]).limit(_LIMIT)


def _waiting_jobs(context: BuildContext, at: RoleColumns) -> Any:
    """Select the waiting jobs, from the index that starts with the queue."""
    waiting = at.started_at.is_(None)
    columns = at.queue_id.label("queue_id"), at.run_at.label("run_at")
    if context.backend.partial_ready_index:
        return select(*columns).where(waiting)
    # there is no index that only waiting jobs are in: find the queues first, then the part of the index of each
    names = select(at.queue_id.label("queue_id")).distinct().subquery("names")
    return select(*columns).select_from(names.join(at.table, and_(at.queue_id == names.c.queue_id, waiting)))


def _waits(run_at: Any) -> list[Any]:
    """Return the columns of waiting jobs by when they are due."""
    now, first = StatementStart(), func.min(run_at, type_=Instant())
    due = func.count(case((run_at <= now, ONE)))
    return _columns(waiting=due, scheduled=func.count() - due, oldest=case((first <= now, first)))


def _columns(**counts: Any) -> list[Any]:
    """Return the columns of one part of the counts: 0 for every state that isn't given."""
    nothing: Any = literal_column("0")
    columns = [counts.get(state, nothing).label(state) for state in (*STATES, "paused")]
    return [*columns, counts.get("oldest", cast(null(), Instant())).label("oldest")]


_COMPLETED = Completed(Jobs(), "Queue.completed")


def completed(within: float, limit: int) -> RowsOperation[Any]:
    """Count the jobs completed recently: rows of ``queue_id, minute, completed``, ``minute`` being minutes ago.

    :param within: how far to look back, in seconds.
    :param limit: the most jobs that are counted, the newest first; if the counts add up to it, there were more.
    """
    return RowsOperation(
        _COMPLETED, {"locks_older": bounded_seconds(within, "within"), "locks_limit": valid_int(limit, "limit")}
    )


@lru_cache(maxsize=64)
def _of(kind: type[JobOperation], jobs: Jobs | None) -> JobOperation:
    return kind(jobs or Jobs(), f"Queue.{kind.__name__}")


def limited_stats(counted: int, stalled_after: float, jobs: Jobs | None = None) -> RowsOperation[Any]:
    """Count running and dead jobs as ``Queue.stats`` does, up to a number of each.

    :param jobs: the jobs in a table of the app's own.
    """
    return RowsOperation(_of(LimitedStats, jobs), {"locks_older": stalled_after, "locks_counted": counted})


def next_jobs(limit: int, jobs: Jobs | None = None) -> RowsOperation[Any]:
    """Return the queues that have waiting jobs, with the counts of one job each; the most overdue job comes first.

    :param limit: the most queues. :param jobs: as above.
    """
    return RowsOperation(_of(NextJobs, jobs), {"locks_limit": limit})


def heads(queues: Sequence[str], counted: int, jobs: Jobs | None = None) -> RowsOperation[Any]:
    """Count at most ``counted`` waiting jobs of each queue: those that are captured next. It gives a row per queue.

    :param queues: their names, at most as many as ``HEADS``. :param jobs: as above.
    """
    names = dict(itertools.zip_longest(HEADS, queues))
    return RowsOperation(_of(Heads, jobs), {**names, "locks_counted": counted})


def dead(limit: int, queue: str | None = None, jobs: Jobs | None = None) -> RowsOperation[Any]:
    """Return dead jobs: ``external_id, queue_id, attempts, max_attempts, error, failed_at``, the last ones first.

    :param queue: only those of this queue. :param jobs: in a table of the app's own.
    """
    name = None if queue is None else valid_name(queue, "a queue")
    return RowsOperation(_of(DeadJobs, jobs), {QUEUE_NAME: name, "locks_limit": valid_int(limit, "limit")})


def workers(limit: int, counted: int, jobs: Jobs | None = None) -> RowsOperation[Any]:
    """Return the workers: ``host, running, silent, age``. The worker that is silent for longest comes first.

    ``running`` is the number of its jobs; ``silent`` and ``age`` are the seconds since its last heartbeat and start.

    :param counted: the most running jobs that are counted, of all workers; if the numbers add up to it, there are more.
    :param jobs: in a table of the app's own.
    :raises ValueError: for a table of jobs without one of workers.
    """
    return RowsOperation(_of(Workers, jobs), {"locks_limit": valid_int(limit, "limit"), "locks_counted": counted})

"""How busy a queue is, for dashboards: counts of its jobs up to a limit, so that the cost doesn't grow with the table.

``Queue.stats`` counts all jobs exactly. Here each state is counted along its index and up to a limit: completed jobs
from the newest backwards, running ones from the oldest, so that stalled ones are counted first.
"""

from __future__ import annotations

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
    select,
    union_all,
)
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import bounded_seconds, valid_int
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, RowsOperation
from sqlalchemy_locks.core.roles import ONE, RoleColumns
from sqlalchemy_locks.queue.jobs import JobOperation, Jobs
from sqlalchemy_locks.sql.clock import Elapsed, Instant, SecondsAgo, StatementStart
from sqlalchemy_locks.sql.elements import force_index

#: the maximum number of queues whose jobs are counted one by one when not all jobs that wait are counted
QUEUES = 50

_SINCE: Any = SecondsAgo(bindparam("locks_older", type_=Float()))
_LIMIT = bindparam("locks_limit", type_=Integer())
_LIMIT_EACH = bindparam("locks_limit_each", type_=Integer())
_LIMIT_QUEUES = bindparam("locks_limit_queues", type_=Integer())
_STATES = ("waiting", "scheduled", "running", "stalled", "dead")
#: seconds, as a literal: the expressions in SELECT and GROUP BY must be the same
_MINUTE: Any = literal_column("60", Integer())


class _Completed(JobOperation):
    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        minute = (cast(Elapsed(at.completed_at), BigInteger()) // _MINUTE).label("minute")
        chosen = select(at.queue_id.label("queue_id"), minute).where(at.completed_at >= _SINCE)
        # InnoDB would otherwise scan and sort the whole table once the rows in question are a tenth of it
        chosen = force_index(chosen, f"{context.prefix}job_completed", at.table)
        newest = chosen.order_by(at.completed_at.desc()).limit(_LIMIT).subquery("newest")
        columns = newest.c.queue_id, newest.c.minute
        return select(*columns, func.count().label("completed")).group_by(*columns)


class _StateCounts(JobOperation):
    """Counts up to ``locks_limit`` jobs of each state, by queue."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at, ours = self.jobs.at(context), self.jobs.class_condition()
        waiting = _waiting(context, at).where(*ours).limit(_LIMIT).subquery("waits")
        columns = [at.queue_id.label("queue_id"), at.started_at.label("at"), at.processing_host.label("host")]
        running = select(*columns).where(*self.jobs.running(at))
        dead = select(at.queue_id.label("queue_id")).where(at.failed_at.is_not(None), *ours)
        runs = running.order_by(at.started_at).limit(_LIMIT).subquery("runs")
        died = dead.order_by(at.failed_at.desc()).limit(_LIMIT).subquery("died")
        parts = union_all(
            select(waiting.c.queue_id, *_columns(**_due(waiting.c.run_at))).group_by(waiting.c.queue_id),
            self._running(context, runs),
            select(died.c.queue_id, *_columns(dead=func.count())).group_by(died.c.queue_id),
            *(select(name, *_columns(paused=ONE)) for name in self.jobs.paused_names(context)),
        ).subquery("parts")
        totals = [cast(func.sum(parts.c[name]), Integer()).label(name) for name in _STATES]
        oldest = func.min(parts.c.oldest, type_=Instant()).label("oldest")
        paused = (func.max(parts.c.paused) == ONE).label("paused")
        return select(parts.c.queue_id, *totals, oldest, paused).group_by(parts.c.queue_id)

    def _running(self, context: BuildContext, runs: Any) -> Any:
        """Count running jobs, and those whose worker is silent, or has no row and captured them as long ago."""
        last, jobs = runs.c.at, runs
        if self.jobs.workers is not None:
            workers = self.jobs.workers.columns(context)
            last = func.coalesce(workers["heartbeat_at"], runs.c.at)
            jobs = runs.outerjoin(workers.table, workers["host"] == runs.c.host)
        counts = _columns(running=func.count(), stalled=_count_if(last < _SINCE))
        return select(runs.c.queue_id, *counts).select_from(jobs).group_by(runs.c.queue_id)


class _QueueNames(JobOperation):
    """Lists the first queues that have waiting jobs, without reading these jobs."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        names = _names(context, self.jobs.at(context), self.jobs.class_condition()).subquery("names")
        listed = select(names.c.queue_id).where(names.c.queue_id.is_not(None))
        return listed.order_by(names.c.queue_id).limit(_LIMIT_QUEUES)


class _WaitingEach(JobOperation):
    """Counts up to ``locks_limit_each`` jobs that wait in each of ``QUEUES`` queues."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)

        def part(number: int) -> Any:
            name = bindparam(f"locks_queue_{number}", type_=at.queue_id.type)
            waiting = (at.queue_id == name, at.started_at.is_(None), *self.jobs.class_condition())
            chosen = select(at.run_at.label("run_at")).where(*waiting)
            # the order of the index, in which the jobs are captured
            head = chosen.order_by(at.priority, at.run_at, at.internal_id).limit(_LIMIT_EACH).subquery()
            place = literal_column(str(number), Integer()).label("place")
            return select(place, *(count.label(state) for state, count in _due(head.c.run_at).items()))

        return union_all(*map(part, range(QUEUES)))


class QueueCounts(JobOperation):
    """Counts the jobs of each queue by state; where more than the limit wait, up to a part of it in each queue."""

    writes = False

    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs, "Queue.counts")
        self._states = _StateCounts(jobs, self.name)
        self._names = _QueueNames(jobs, self.name)
        self._each = _WaitingEach(jobs, self.name)

    def build(self, context: BuildContext) -> Executable | None:
        return None

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "which counts the jobs of each queue only if many wait"

    def run(self, execution: Execution) -> dict[str, Any]:
        limit: int = execution.values["locks_limit"]

        def rows(impl: JobOperation, **values: Any) -> list[Any]:
            statement = impl.statement(execution.context)
            assert statement is not None
            return list(execution.execute(statement, {**execution.values, "locks_limit": limit + 1, **values}))

        found = {row.queue_id: {**row._mapping, "at_least": set[str]()} for row in rows(self._states)}
        totals = {state: sum(row[state] for row in found.values()) for state in _STATES}
        at_least = {state for state in ("running", "stalled", "dead") if totals[state] > limit}
        queues = set(found)
        if totals["waiting"] + totals["scheduled"] > limit:
            at_least |= {"waiting", "scheduled"}
            names = [row.queue_id for row in rows(self._names, locks_limit_queues=limit)]
            queues.update(names)
            self._count_each(found, names, rows, max(1, limit // 20))
        for row in found.values():
            row["at_least"] |= at_least - {"waiting", "scheduled"}
        for state in at_least:
            totals[state] = min(limit, max(totals[state], sum(row[state] for row in found.values())))
        return {"rows": list(found.values()), "counts": {"queues": len(queues), **totals}, "at_least": at_least}

    def _count_each(self, found: dict[str, Any], names: list[str], rows: Any, limit: int) -> None:
        """Replace the counts of waiting jobs, which are of the first queues only, by counts of each queue."""
        for name, row in found.items():
            row.update(waiting=0, scheduled=0, oldest=None)
            if name in names[QUEUES:]:
                row["at_least"] |= {"waiting", "scheduled"}
        shown = names[:QUEUES]
        chosen = {f"locks_queue_{n}": shown[n] if n < len(shown) else None for n in range(QUEUES)}
        for counted in rows(self._each, locks_limit_each=limit + 1, **chosen)[: len(shown)]:
            name = shown[counted.place]
            none: dict[str, Any] = {"queue_id": name, **dict.fromkeys(_STATES, 0), "paused": False}
            row = found.setdefault(name, {**none, "at_least": set[str]()})
            waiting, scheduled = int(counted.waiting or 0), int(counted.scheduled or 0)
            row.update(waiting=min(waiting, limit), scheduled=min(scheduled, limit), oldest=counted.oldest)
            if waiting + scheduled > limit:
                row["at_least"] |= {"waiting", "scheduled"}


def _waiting(context: BuildContext, at: RoleColumns) -> Any:
    """Select the waiting jobs, from the index that starts with the queue."""
    waiting = at.started_at.is_(None)
    columns = at.queue_id.label("queue_id"), at.run_at.label("run_at")
    if context.backend.partial_ready_index:
        return select(*columns).where(waiting)
    # there is no index that only waiting jobs are in: find the queues first, then the part of the index of each
    names = select(at.queue_id.label("queue_id")).distinct().subquery("names")
    return select(*columns).select_from(names.join(at.table, and_(at.queue_id == names.c.queue_id, waiting)))


def _names(context: BuildContext, at: RoleColumns, ours: list[Any]) -> Any:
    """Select the names of the queues, by one look into an index for each."""
    if not context.backend.partial_ready_index:
        return select(at.queue_id.label("queue_id")).distinct().where(*ours)
    waiting = and_(at.started_at.is_(None), *ours)
    first = select(func.min(at.queue_id).label("queue_id")).where(waiting).cte("found", recursive=True)
    following = select(func.min(at.queue_id)).where(waiting, at.queue_id > first.c.queue_id).correlate(first)
    found = first.union_all(select(following.scalar_subquery()).where(first.c.queue_id.is_not(None)))
    return select(found.c.queue_id)


def _due(run_at: Any) -> dict[str, Any]:
    now, first = StatementStart(), func.min(run_at, type_=Instant())
    waiting = func.count(case((run_at <= now, ONE)))
    return {
        "waiting": waiting,
        "scheduled": func.count() - waiting,
        "oldest": case((first <= now, first)),
    }


def _count_if(condition: Any) -> Any:
    return func.sum(case((condition, 1), else_=0))


def _columns(**counts: Any) -> list[Any]:
    """Return the columns of one part of the counts: 0 for every state that isn't given."""
    nothing: Any = literal_column("0")
    columns = [counts.get(state, nothing).label(state) for state in (*_STATES, "paused")]
    return [*columns, counts.get("oldest", cast(null(), Instant())).label("oldest")]


_SHIPPED = Jobs(None, {})
_COMPLETED = _Completed(_SHIPPED, "Queue.completed")
_COUNTS = QueueCounts(_SHIPPED)


def completed(within: float, limit: int) -> RowsOperation[Any]:
    """Count the jobs completed recently: rows of ``queue_id, minute, completed``, ``minute`` being minutes ago.

    :param within: how far to look back, in seconds.
    :param limit: the most jobs that are counted, the newest first; if the counts add up to it, there were more.
    """
    return RowsOperation(
        _COMPLETED, {"locks_older": bounded_seconds(within, "within"), "locks_limit": valid_int(limit, "limit")}
    )


def counts(limit: int, stalled_after: float, jobs: Jobs | None = None) -> Operation[Any]:
    """Count the jobs of each queue by state, up to a limit.

    :param limit: the most jobs of a state that are counted. Where more wait, up to a twentieth of it are counted in
        each of the first 50 queues.
    :param stalled_after: a running job is stalled when its worker's last heartbeat is older, in seconds.
    :param jobs: the jobs of a queue in a user's own table.
    :return: a mapping: ``rows``, each with ``queue_id``, ``waiting``, ``scheduled``, ``running``, ``stalled``,
        ``dead``, ``oldest`` (the first due time of a waiting job), ``paused``, and ``at_least``, the names of counts
        that may be greater; ``counts``, the totals of these, and of ``queues``; and ``at_least``, the names of such
        totals.
    """
    values = {
        "locks_limit": valid_int(limit, "limit"),
        "locks_older": bounded_seconds(stalled_after, "stalled_after"),
    }
    return Operation(_COUNTS if jobs is None else QueueCounts(jobs), values)

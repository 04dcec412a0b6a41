"""The rows of workers, and the jobs of those that are silent.

Each worker has a row, and a heartbeat is one UPDATE of it. A running job is stalled when its worker is silent. A job
whose worker has no row (it was captured without a worker, or the row was deleted) is stalled when it was captured as
long ago.

A reclaim locks the row of a silent worker first, reads it again, and deletes it in the transaction that takes its jobs.
A late heartbeat comes before the lock, and the worker keeps its jobs; or it matches no row, and the worker knows that
it has lost them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Float, and_, bindparam, delete, func, or_, select, update
from sqlalchemy.sql import Executable

from sqlalchemy_locks.captures.statements import LIMIT, CaptureSpec
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl
from sqlalchemy_locks.queue.acknowledge import requeue
from sqlalchemy_locks.queue.jobs import HOST, Jobs, WorkerRows
from sqlalchemy_locks.queue.maintenance import JobSweep
from sqlalchemy_locks.sql.clock import Instant, Now, SecondsAgo

#: after how many seconds without a heartbeat the jobs of a worker are stalled, by default
STALLED_AFTER = 300
#: how long a worker without jobs has to be silent before its row is deleted, in seconds
FORGET_AFTER = 86400.0
#: the most rows of silent workers, with or without jobs, that one transaction deletes
_FORGET = 100


class WorkerRow(OperationImpl):
    """An operation on the row of one worker."""

    def __init__(self, rows: WorkerRows, name: str) -> None:
        super().__init__()
        self.rows, self.name = rows, name
        self.needs_installation = rows.target is None

    def route(self) -> dict[str, Any]:
        return self.rows.route()

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True

    def host(self, context: BuildContext) -> Any:
        """Return the condition that a row is the worker's."""
        column = self.rows.columns(context)["host"]
        return column == bindparam(HOST, type_=column.type)

    def run(self, execution: Execution) -> Any:
        return super().run(execution).rowcount


class AddWorker(WorkerRow):
    """Inserts the row of a worker, unless it is there."""

    def build(self, context: BuildContext) -> Executable | None:
        at = self.rows.columns(context)
        values = {
            at["host"]: bindparam(HOST, type_=at["host"].type),
            at["heartbeat_at"]: Now(),
            at["started_at"]: Now(),
        }
        defaults = self.rows.target.insert_defaults() if self.rows.target else {}
        adding: Any = context.backend.insert_unless_present(at.table, at["host"])
        statement: Executable = adding.values({**values, **defaults}).inline()
        return statement


class SendHeartbeat(WorkerRow):
    """Updates the row of a worker, and returns whether it is there."""

    def build(self, context: BuildContext) -> Executable | None:
        at = self.rows.columns(context)
        return update(at.table).where(self.host(context)).values({at["heartbeat_at"]: Now()})

    def run(self, execution: Execution) -> bool:
        return bool(super().run(execution))


class ReadHeartbeat(WorkerRow):
    """Reads the instant of a worker's last heartbeat."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        return select(self.rows.columns(context)["heartbeat_at"]).where(self.host(context))

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        assert statement is not None
        return execution.execute(statement).scalar()


class RemoveWorker(WorkerRow):
    """Deletes the row of a worker that ends."""

    def build(self, context: BuildContext) -> Executable | None:
        return delete(self.rows.columns(context).table).where(self.host(context))


class Requeue(JobSweep):
    """Returns stalled jobs to the queue, or marks them as dead after their last attempt; deletes silent workers.

    :param since: an instant is bound besides the seconds, and a worker is silent if its last heartbeat is older than
        both. The instant alone isn't enough: when the server's clock is set back, later heartbeats are stamped before
        it. By default only seconds are bound.
    """

    def __init__(self, jobs: Jobs, *, since: bool = False) -> None:
        super().__init__(jobs, "Queue.requeue_stalled")
        kind: Any = Instant() if since else Float()
        forgotten = bindparam("locks_forgotten", type_=kind)
        self._forgotten_at: Any = forgotten if since else SecondsAgo(forgotten)
        self._silent_at: list[Any] = [SecondsAgo(bindparam("locks_silent", type_=Float()))]
        if since:
            self._silent_at.append(bindparam("locks_since", type_=Instant()))
        self._taking = cache(lambda context: self._statement(context, self.spec(context)))

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True  # a second execution finds nothing that the first one has changed

    def build(self, context: BuildContext) -> Executable | None:
        return None

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "which deletes silent workers and takes their jobs, one after the other"

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        at = self.jobs.at(context)
        old = and_(*(at.started_at < instant for instant in self._silent_at))
        stalled = old
        if self.jobs.workers is not None:
            workers = self.jobs.workers.columns(context)
            present = select(workers["host"]).where(workers["host"] == at.processing_host).exists()
            taken = at.processing_host.in_(bindparam("locks_hosts", type_=at.processing_host.type, expanding=True))
            stalled = or_(taken, and_(old, ~present))
        conditions = (*self.jobs.running(at), stalled, self.chosen(at.queue_id))
        return CaptureSpec(at.table, conditions, requeue(at), (at.started_at,), self.jobs.target)

    def _run(self, execution: Execution, spec: CaptureSpec) -> Any:
        if execution.backend.autocommit(execution.connection):
            raise execution.refused_autocommit()
        if self.jobs.workers is not None:
            hosts, jobs = self._delete_silent(execution, self.jobs.workers)
            limit = max(execution.values[LIMIT], jobs)
            execution.values = {**execution.values, "locks_hosts": hosts, LIMIT: limit}
        statement = self._taking(execution.context)
        if statement is None:
            return len(self._in_steps(execution, spec))
        numbers = execution.execute(statement).scalars().all()
        return numbers[0] if execution.backend.writable_ctes else len(numbers)

    def _delete_silent(self, execution: Execution, workers: WorkerRows) -> tuple[list[str], int]:
        """Delete workers that are silent, and return their hosts and how many jobs they have.

        As many as the limit of jobs allows, and at least one: the jobs of one worker are taken together.
        """
        at = workers.columns(execution.context)
        values, limit = execution.values, execution.values[LIMIT]
        hosts: list[str] = []
        number = 0
        workers_jobs: Any = execution.execute(self._silent(execution.context), values).all()
        for host, jobs in workers_jobs:
            if (not jobs or not number or number + jobs <= limit) and self._delete(execution, at, host):
                hosts.append(host)
                number += jobs
        return hosts, number

    def _silent(self, context: BuildContext) -> Any:
        """Return the SELECT of silent workers and their number of jobs; without jobs, only of those long gone."""
        at = self.jobs.at(context)
        assert self.jobs.workers is not None
        workers = self.jobs.workers.columns(context)
        heartbeat_at = workers["heartbeat_at"]
        running = select(at.processing_host.label("host"), func.count().label("jobs"))
        jobs = (
            running.where(*self.jobs.running(at), self.chosen(at.queue_id))
            .group_by(at.processing_host)
            .subquery("jobs")
        )
        silent = select(workers["host"], func.coalesce(jobs.c.jobs, 0))
        silent = silent.outerjoin_from(workers.table, jobs, jobs.c.host == workers["host"])
        silent = silent.where(*(heartbeat_at < instant for instant in self._silent_at))
        silent = silent.where(or_(jobs.c.jobs > 0, heartbeat_at < self._forgotten_at))
        return silent.order_by(heartbeat_at).limit(_FORGET)

    def _delete(self, execution: Execution, at: Any, host: str) -> bool:
        """Lock the row of a silent worker, check it again, and delete it; return whether the worker was silent.

        A locked row is skipped: its worker is sending a heartbeat, or its jobs are being taken.
        """
        values = {**execution.values, HOST: host}
        own = at["host"] == bindparam(HOST, type_=at["host"].type)
        silent = (at["heartbeat_at"] < instant for instant in self._silent_at)
        locking = select(at["host"]).where(own, *silent).with_for_update(skip_locked=True)
        if execution.execute(locking, values).first() is None:
            return False
        return bool(execution.execute(delete(at.table).where(own), {HOST: host}).rowcount)

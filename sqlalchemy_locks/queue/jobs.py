"""Jobs: which column of which table plays which role, and which jobs a caller means; ``queue.py`` has the operations.

A job's state is in its timestamps. Waiting: no ``started_at``. Completed: ``completed_at``. Dead: ``failed_at``.
Running: ``started_at`` and neither of these. The owner of a running job is identified by ``(internal_id, claim)``: each
capture draws a random ``claim``, and each statement that ends a job compares both.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from functools import cache, cached_property
from typing import Any

from sqlalchemy import Index, Integer, Row, Table, TypeDecorator, bindparam, literal_column, null, select, update
from sqlalchemy.engine import Dialect

from sqlalchemy_locks.captures.capture import CaptureImpl
from sqlalchemy_locks.captures.claims import draw_claim, stored_proof
from sqlalchemy_locks.core.entities import MappedTable
from sqlalchemy_locks.core.operation import BuildContext, Execution, OperationImpl
from sqlalchemy_locks.core.roles import ONE, RoleColumns, RoleMapping
from sqlalchemy_locks.sql.tables import DEFAULT_SCHEMA, tables

#: the claim of a job that no worker has: ``draw_job_claim`` never returns it
NO_CLAIM: Any = literal_column("0")
#: the last three bits of a claim: the attempt was counted, since a handler has begun or is about to; the job was taken
#: from its owner; the attempt was counted before the handler could begin. So the owner still recognizes its claim when
#: the reply to such a change was lost.
BEGUN, TAKEN, COUNTED_AHEAD = 1, 2, 4
ROLES = (
    "internal_id",
    "external_id",
    "queue_id",
    "payload",
    "priority",
    "run_at",
    "claim",
    "attempts",
    "max_attempts",
    "processing_host",
    "created_at",
    "started_at",
    "completed_at",
    "failed_at",
    "error",
)
#: the role of a column that a table of the user's own may lack
UNIQUE_KEY = "unique_key"
#: columns of the shipped table that a worker doesn't read: it knows their values for each job that it captures
_CAPTURED = ("queue_id", "processing_host", "completed_at", "failed_at", UNIQUE_KEY)
#: the order in which jobs are captured
ORDER = ("priority", "run_at", "internal_id")
#: the parameters that identify owned jobs: pairs, and the same as two lists for engines that bind arrays
PAIRS, IDS, CLAIMS = "locks_pairs", "locks_ids", "locks_claims"
#: the parameters that name a queue, and a worker
QUEUE_NAME, HOST = "locks_queue", "locks_host"

_WORKER_ROLES = ("host", "heartbeat_at", "started_at")
_TIMESTAMPS = ("run_at", "started_at", "completed_at", "failed_at")


class Jobs:
    """The table of the jobs, and which column plays which role there.

    :param entity: the user's own class or table; ``None``: the shipped table.
    :param workers: the user's own class or table of workers.
    """

    def __init__(self, entity: Any = None, workers: Any = None) -> None:
        if entity is None and workers is not None:
            raise TypeError("Queue: workers= is for a class or table of your own, and none was given")
        self.target = None if entity is None else MappedTable(entity, "Queue")
        #: the columns of the user's own table
        self.own: RoleColumns | None = None
        #: the paused queues; ``None`` for a table of the user's own, whose queues can't be paused
        self.paused: RoleMapping | None = None
        if self.target is None:
            self.paused = RoleMapping("Queue", lambda tables: tables.paused_queue, ("id",))
        else:
            roles = (*ROLES, UNIQUE_KEY) if UNIQUE_KEY in self.target.table.c else ROLES
            own = {role: self.target.column(role, role) for role in roles}
            for role, column in own.items():
                if column.key != role:
                    raise ValueError(f"Queue: the column {column} must have the name {role}")
            if self.target.primary_key != (own["internal_id"],):
                raise ValueError(
                    f"Queue: the primary key of {self.target.name} must be its internal_id, and that alone"
                )
            if not self.target.is_unique([own["external_id"]]):
                raise ValueError(f"Queue: {self.target.name} must have a unique constraint on its external_id")
            self.own = RoleColumns(self.target.table, own)
        #: the rows of workers; ``None`` where there are none, and jobs are captured without a worker only
        self.workers: WorkerRows | None = None
        if entity is None or workers is not None:
            self.workers = WorkerRows(workers, self.target)

    def require_workers(self) -> WorkerRows:
        """:raises ValueError: for a table of jobs without one of workers."""
        if self.workers is None:
            raise ValueError(
                "a worker of a table of your own needs a table of workers beside it: Queue(..., workers=MailWorker), "
                "with the mixin sl.WorkerColumns"
            )
        return self.workers

    def in_queue(self, context: BuildContext) -> list[Any]:
        """Return the conditions that a job is in the queue bound as ``locks_queue``, and that this isn't paused."""
        column = self.at(context).queue_id
        queue: Any = bindparam(QUEUE_NAME, type_=column.type)
        if self.paused is None:
            return [column == queue]
        at = self.paused.columns(context)
        paused = select(ONE).where(at["id"] == bindparam(QUEUE_NAME, type_=at["id"].type)).exists()
        if not context.backend.single_writer:
            return [column == queue, ~paused]
        return [column == select(queue).where(~paused).scalar_subquery()]

    def paused_names(self, context: BuildContext) -> list[Any]:
        """Return the column of the paused queues' names, if there is one."""
        return [] if self.paused is None else [self.paused.columns(context)["id"]]

    def require_paused(self) -> RoleMapping:
        """:raises ValueError: for a table of the user's own."""
        if self.paused is None:
            raise ValueError("Queue: only queues of the shipped table of jobs can be paused")
        return self.paused

    def require_unique(self) -> None:
        """:raises ValueError: for a table of the user's own without unique keys, or without their unique index."""
        if self.target is None or self.own is None:
            return
        if UNIQUE_KEY not in self.own:
            raise ValueError(f"Queue: unique= needs a column {UNIQUE_KEY} in {self.target.name}")
        if unique_index(self.own) is None:
            raise ValueError(
                f"Queue: unique= needs a unique index on {self.own.queue_id}, {self.own.unique_key}: Queue.indexes() "
                "has it"
            )

    def free_key(self, at: RoleColumns) -> dict[Any, Any]:
        """Return the column that an UPDATE sets to free the unique key of a job that no longer waits."""
        return {at.unique_key: null()} if UNIQUE_KEY in at else {}

    def at(self, context: BuildContext) -> RoleColumns:
        """Return the columns by role; refuse own timestamp columns that lose the time zone."""
        if self.own is None:
            return _shipped(context.tables.job)
        context.backend.require_time_zone("Queue", [self.own.roles[role] for role in _TIMESTAMPS])
        return self.own

    @cached_property
    def columns(self) -> RoleColumns:
        """The columns by role, whatever the engine: their types and their order."""
        return self.own or _shipped(tables(DEFAULT_SCHEMA, "").job)

    def expire(self, execution: Execution, changes: Iterable[Any]) -> None:
        """Expire the changed attributes of the jobs in ``IDS``, as far as they are loaded in the session."""
        if self.target is not None and execution.session is not None:
            self.target.expire(execution.session, changes, execution.values[IDS])

    def class_condition(self) -> list[Any]:
        """Return the condition that excludes jobs of sibling classes in the same table."""
        return [] if self.target is None else self.target.class_condition()

    def running(self, at: RoleColumns) -> tuple[Any, ...]:
        """Return the conditions that a job is running: those of the index of running jobs."""
        return (at.started_at.is_not(None), at.completed_at.is_(None), at.failed_at.is_(None), *self.class_condition())

    def route(self) -> dict[str, Any]:
        if self.target is not None:
            return self.target.route()
        return {"clause": _routed(tables(DEFAULT_SCHEMA, "").job)}

    def topic(self, queue: str) -> str:
        """Return the payload of the notification that a queue has new jobs."""
        table = "job" if self.target is None else self.target.table.name
        return f"{table}:{queue}"

    def owned(self, jobs: Any) -> dict[str, Any]:
        """Return the parameters that identify jobs by id and claim.

        :param jobs: one or several captured rows, entities, or ``(internal_id, claim)`` pairs.
        """
        pair = _id_and_claim(jobs)
        if pair is None and not isinstance(jobs, Iterable):
            raise _not_captured(jobs)
        pairs = set()
        for job in jobs if pair is None else [pair]:
            if (each := _id_and_claim(job)) is None:
                raise _not_captured(job)
            pairs.add(each)
        return self.owned_pairs(pairs)

    def owned_pairs(self, jobs: Iterable[Any]) -> dict[str, Any]:
        """Return the same for pairs of id and claim."""
        pairs = sorted(jobs)
        return {PAIRS: pairs, IDS: [id_ for id_, _ in pairs], CLAIMS: [claim for _, claim in pairs]}

    @cached_property
    def fetched(self) -> tuple[str, ...]:
        """The keys of the columns that a worker reads of a job that it captures."""
        keys = map(str, self.columns.table.c.keys())
        return tuple(key for key in keys if self.target is not None or key not in _CAPTURED)

    def captured(self, queue: str, host: str) -> tuple[Any, ...]:
        """Return the values of the columns that a worker doesn't read."""
        return () if self.target is not None else (queue, host, None, None, None)

    @cached_property
    def keys(self) -> dict[str, int]:
        """The index of each column among the values of a captured job, by its key."""
        keys = self.fetched if self.target is not None else (*self.fetched, *_CAPTURED)
        return {key: index for index, key in enumerate(keys)}

    @cached_property
    def integer_arrays(self) -> list[str]:
        """Those of ``IDS`` and ``CLAIMS`` that are integers."""
        columns = ((IDS, self.columns.internal_id), (CLAIMS, self.columns.claim))
        return [name for name, column in columns if isinstance(column.type, Integer)]


def json_as_text(dialect: Dialect) -> Dialect:
    """Return a copy of a dialect whose JSON types convert texts, where its driver would convert JSON by itself."""
    text: Any = copy(dialect)
    text.supports_native_json_serialization = text.supports_native_json_deserialization = False
    return text  # type: ignore[no-any-return]


def stored_type(type_: Any) -> Any:
    """Return the type that a column has in the database."""
    while isinstance(type_, TypeDecorator):
        type_ = type_.impl_instance
    return type_


def draw_job_claim(column: Any, *, begun: bool) -> int:
    """Draw the claim of a capture. :param begun: the attempt counts from the capture on: its last bit is set."""
    return ((draw_claim(column) & ~(BEGUN | TAKEN | COUNTED_AHEAD)) or 8) | (BEGUN if begun else 0)


def is_begun(at: RoleColumns) -> Any:
    """Return the number 1 where the attempt of a captured job was counted, else 0."""
    return at.claim % literal_column("2")


def is_ahead(at: RoleColumns) -> Any:
    """Return the condition that the attempt was counted before the handler could begin."""
    return at.claim.bitwise_and(literal_column(str(COUNTED_AHEAD))) != literal_column("0")


def unique_index(at: RoleColumns) -> Index | None:
    """Return the index of a queue's unique keys."""
    columns = {at.queue_id, at.unique_key}
    return next((index for index in at.table.indexes if index.unique and set(index.columns) == columns), None)


class WorkerRows:
    """The table of the workers of one table of jobs, and its columns.

    :param entity: the user's own class or table; ``None``: the shipped table. :param jobs: that of the jobs.
    """

    def __init__(self, entity: Any, jobs: MappedTable | None) -> None:
        self.target = None if entity is None else MappedTable(entity, "Queue")
        self._own: RoleColumns | None = None
        if self.target is None or jobs is None:
            return
        columns = {role: self.target.column(role, role) for role in _WORKER_ROLES}
        if self.target.primary_key != (columns["host"],):
            raise ValueError("Queue: the primary key of workers= must be its host, and that alone")
        if self.target.table.schema != jobs.table.schema:
            raise ValueError(
                f"Queue: {self.target.table} must be in the schema of {jobs.table}: a worker's row and its jobs are "
                "changed in one transaction"
            )
        self._own = RoleColumns(self.target.table, columns)

    def columns(self, context: BuildContext) -> RoleColumns:
        """Return the columns by role; refuse own timestamp columns that lose the time zone."""
        if self._own is None:
            return _shipped_worker(context.tables.worker)
        context.backend.require_time_zone("Queue", [self._own.roles[role] for role in _WORKER_ROLES[1:]])
        return self._own

    def route(self) -> dict[str, Any]:
        if self.target is not None:
            return self.target.route()
        return {"clause": _routed(tables(DEFAULT_SCHEMA, "").worker)}


class JobOperation(OperationImpl):
    """An operation on jobs that is not a capture."""

    uses_nonce = False

    def __init__(self, jobs: Jobs, name: str) -> None:
        super().__init__()
        self.jobs, self.name = jobs, name
        self.needs_installation = jobs.target is None

    def route(self) -> dict[str, Any]:
        return self.jobs.route()


class JobCapture(CaptureImpl):
    """A capture of jobs."""

    uses_nonce = False

    def __init__(self, jobs: Jobs, name: str) -> None:
        super().__init__(name)
        self.jobs = jobs
        self.needs_installation = jobs.target is None

    def route(self) -> dict[str, Any]:
        return self.jobs.route()


def _not_captured(job: Any) -> TypeError:
    return TypeError(f"Queue: {job!r} is not a captured job: pass what capture() returned, or (internal_id, claim)")


@cache
def _shipped(table: Table) -> RoleColumns:
    return RoleColumns(table, {role: table.c[role] for role in (*ROLES, UNIQUE_KEY)})


@cache
def _shipped_worker(table: Table) -> RoleColumns:
    return RoleColumns(table, {role: table.c[role] for role in _WORKER_ROLES})


@cache
def _routed(table: Table) -> Any:
    return update(table)


def _id_and_claim(job: Any) -> tuple[Any, int] | None:
    """Return id and claim of a captured job; ``None`` for anything else.

    :raises ValueError: for an entity that was loaded rather than captured.
    """
    if isinstance(job, Row) and len(job) == 1:
        job = job[0]  # an entity, as Session.execute() returns it
    if isinstance(job, (tuple, list)) and len(job) == 2 and type(job[1]) is int:
        return job[0], job[1]
    proof = None if isinstance(job, (Row, tuple, list)) else stored_proof(job)
    if proof == ():
        raise ValueError(
            f"Queue: {job!r} was not captured in its session, and its claim may be another owner's: pass what "
            "capture() returned, or (internal_id, claim)"
        )
    if proof is not None:
        return proof[0], proof[1]
    row: Any = job
    return (row.internal_id, row.claim) if hasattr(row, "internal_id") and hasattr(row, "claim") else None

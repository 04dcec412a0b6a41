"""Jobs: the rows of a queue, shipped or a user's own, and the statements that work on them; ``queue.py`` has the names.

A job's state is in its instants. Waiting: no ``started_at``. Running: a ``heartbeat_at``, which nothing else has.
Done: ``completed_at``. Dead: ``failed_at``. Who owns a running job is ``(internal_id, claim)``: ``claim`` rises with
each capture and never falls, and every statement that ends a job asks for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from sqlalchemy import Column, Row, Table, update

from sqlalchemy_locks.captures.claims import stored_proof
from sqlalchemy_locks.core.entities import MappedTable
from sqlalchemy_locks.core.operation import BuildContext, OperationImpl
from sqlalchemy_locks.core.roles import RoleColumns
from sqlalchemy_locks.sql.tables import DEFAULT_SCHEMA, tables

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
    "heartbeat_at",
    "created_at",
    "started_at",
    "completed_at",
    "failed_at",
    "error",
)
#: what is captured first
ORDER = ("priority", "run_at", "internal_id")
_ABSENT: Any = object()
_INSTANTS = ("run_at", "heartbeat_at", "started_at", "completed_at", "failed_at")


class Jobs:
    """Where jobs are, and which column plays which role there.

    :param entity: the user's own class or table; ``None``: the shipped one.
    :param given: its columns for roles that it has under another name.
    """

    def __init__(self, entity: Any, given: Mapping[str, Any]) -> None:
        if unknown := set(given) - set(ROLES):
            raise TypeError(f"Queue: there is no role {sorted(unknown)[0]!r}; the roles are {', '.join(ROLES)}")
        if entity is None and given:
            raise TypeError(f"Queue: {', '.join(given)} name columns of a class or table, and none was given")
        self.target = None if entity is None else MappedTable(entity, "Queue")
        self._own: dict[str, Column[Any]] | None = None
        if self.target is not None:
            self._own = {role: self.target.column(given.get(role, role), role) for role in ROLES}
            if self.target.primary_key != (self._own["internal_id"],):
                raise ValueError(
                    f"Queue: the primary key of {self.target.name} must be its internal_id, and that alone"
                )
            if not self.target.is_unique([self._own["external_id"]]):
                raise ValueError(f"Queue: {self.target.name} must have a unique constraint on its external_id")

    def at(self, context: BuildContext) -> RoleColumns:
        if self.own is None:
            return _shipped(context.tables.job)
        context.backend.refuse_zoneless("Queue", [self.own.roles[role] for role in _INSTANTS])
        return self.own

    @property
    def own(self) -> RoleColumns | None:
        return None if self._own is None or self.target is None else RoleColumns(self.target.table, self._own)

    def route(self) -> dict[str, Any]:
        if self.target is not None:
            return self.target.route()
        return {"clause": _routed(tables(DEFAULT_SCHEMA, "").job)}

    def topic(self, queue: str) -> str:
        table = "job" if self.target is None else self.target.table.name
        return f"{table}:{queue}"

    def owned(self, jobs: Any) -> dict[str, Any]:
        """Who is meant, and by which claim: of rows, entities, mappings, or ``(internal_id, claim)`` pairs."""
        return _values(sorted({self._pair(job) for job in self._each(jobs)}))

    def _each(self, jobs: Any) -> Iterable[Any]:
        if isinstance(jobs, list) and not _is_pair(jobs):
            return jobs
        if isinstance(jobs, (Mapping, Row)) or stored_proof(jobs) or _is_pair(jobs) or self._named(jobs) is not None:
            return [jobs]
        if not isinstance(jobs, Iterable):
            self._told(jobs, None)
        return list(jobs)

    def _pair(self, job: Any) -> tuple[Any, int]:
        if isinstance(job, Row):
            if len(job) > 2:
                try:
                    mapping = job._mapping
                    return mapping[self._names["internal_id"][0]], mapping[self._names["claim"][0]]
                except KeyError:
                    return self._told(job, self._named(job))
            if len(job) == 1:
                job = job[0]  # an entity, as Session.execute() gives it
        if (proof := stored_proof(job)) is not None:
            if not proof:
                raise ValueError(
                    f"Queue: {job!r} was not captured in its session, and its claim may be somebody else's: give what "
                    "capture() gave, or (internal_id, claim)"
                )
            return proof[0], proof[1]
        return self._told(job, tuple(job) if _is_pair(job) else self._named(job))

    def _told(self, job: Any, pair: tuple[Any, ...] | None) -> tuple[Any, int]:
        if pair is None:
            raise TypeError(f"Queue: {job!r} is not a captured job: give what capture() gave, or (internal_id, claim)")
        return pair[0], pair[1]

    def _named(self, job: Any) -> tuple[Any, Any] | None:
        """What a row, a mapping or an object has under the columns' names, or under those of the class."""
        found = [self._value(job, role) for role in ("internal_id", "claim")]
        return None if _ABSENT in found else (found[0], found[1])

    def position(self, job: Row[Any]) -> tuple[Any, ...]:
        """Where a captured row was in the order of the queue."""
        return tuple(job[context] for context in self._places[2:])

    def finished(self, jobs: Sequence[Any]) -> dict[str, Any]:
        """As :meth:`owned`, of what an exchange gave or takes: whole rows, or pairs."""
        by_id, by_claim = self._places[:2]
        return _values(sorted([(job[by_id], job[by_claim]) if len(job) > 2 else tuple(job) for job in jobs]))

    @cached_property
    def _places(self) -> list[int]:
        """Where a whole row has its id, its claim, and what it is ordered by."""
        at = self.own or _shipped(tables(DEFAULT_SCHEMA, "").job)
        columns = list(at.table.c)
        return [columns.index(at.roles[role]) for role in ("internal_id", "claim", *ORDER)]

    def _value(self, job: Any, role: str) -> Any:
        if isinstance(job, Row):
            job = job._mapping
        mapping = isinstance(job, Mapping)
        for name in self._names[role]:
            if mapping and name in job:
                return job[name]
            if not mapping and hasattr(job, name):
                return getattr(job, name)
        return _ABSENT

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        """What each column may be called in what is given."""
        own, target = self._own, self.target
        if own is None or target is None:
            return {role: [role] for role in ROLES}
        names = {role: [str(column.key), str(column.name)] for role, column in own.items()}
        if target.mapper is not None:
            for role, column in own.items():
                names[role].append(str(target.key_of(column)))
        return names


def _values(pairs: list[tuple[Any, ...]]) -> dict[str, Any]:
    return {
        "locks_pairs": pairs,
        "locks_ids": [internal_id for internal_id, _ in pairs],
        "locks_claims": [claim for _, claim in pairs],
    }


@cache
def _shipped(table: Table) -> RoleColumns:
    return RoleColumns(table, {role: table.c[role] for role in ROLES})


@cache
def _routed(table: Table) -> Any:
    return update(table)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and type(value[1]) is int


class OnJobs(OperationImpl):
    def __init__(self, jobs: Jobs, name: str) -> None:
        super().__init__()
        self.jobs, self.name = jobs, name
        self.needs_installation = jobs.target is None

    def route(self) -> dict[str, Any]:
        return self.jobs.route()

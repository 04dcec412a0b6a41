"""Jobs: the rows of a queue, shipped or a user's own, and the statements that work on them; ``queue.py`` has the names.

A job's state is in its instants. Waiting: no ``started_at``. Running: a ``heartbeat_at``, which nothing else has.
Done: ``completed_at``. Dead: ``failed_at``. Who owns a running job is ``(internal_id, claim)``: ``claim`` rises with
each capture and never falls, and every statement that ends a job asks for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    ARRAY,
    Column,
    Float,
    Integer,
    Row,
    Table,
    bindparam,
    case,
    cast,
    func,
    literal,
    literal_column,
    null,
    select,
    true,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.sql import Executable

from .capture import Capture
from .clock import Ago, Hence, Instant, Now
from .columns import Target
from .operation import Body, Place, Run
from .roles import ONE
from .schema import DEFAULT_SCHEMA, tables
from .taking import Taking, by_key, captured

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
_INSTANTS = ("run_at", "heartbeat_at", "started_at", "completed_at", "failed_at")
#: the first pause before another attempt, in seconds; each further one is twice as long, and an hour at most
FIRST_PAUSE, LONGEST_PAUSE, DOUBLINGS = 5, 3600, 9


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
        self.target = None if entity is None else Target(entity, "Queue")
        self._own: dict[str, Column[Any]] | None = None
        if self.target is not None:
            self._own = {role: self.target.column(given.get(role, role), role) for role in ROLES}
            if self.target.primary_key != (self._own["internal_id"],):
                raise ValueError(
                    f"Queue: the primary key of {self.target.name} must be its internal_id, and that alone"
                )
            if not self.target.is_unique([self._own["external_id"]]):
                raise ValueError(f"Queue: {self.target.name} must have a unique constraint on its external_id")

    def at(self, place: Place) -> At:
        if self.own is None:
            return _shipped(place.tables.job)
        place.engine.refuse_zoneless("Queue", [self.own.roles[role] for role in _INSTANTS])
        return self.own

    @property
    def own(self) -> At | None:
        return None if self._own is None or self.target is None else At(self.target.table, self._own)

    def route(self) -> dict[str, Any]:
        if self.target is not None:
            return self.target.route()
        return {"clause": _routed(tables(DEFAULT_SCHEMA, "").job)}

    def topic(self, queue: str) -> str:
        table = "job" if self.target is None else self.target.table.name
        return f"{table}:{queue}"

    def owned(self, jobs: Any) -> dict[str, Any]:
        """Who is meant, and by which claim: of rows, entities, mappings, or ``(internal_id, claim)`` pairs."""
        pairs = sorted({self._pair(job) for job in self._each(jobs)})
        return {
            "locks_pairs": pairs,
            "locks_ids": [internal_id for internal_id, _ in pairs],
            "locks_claims": [claim for _, claim in pairs],
        }

    def _each(self, jobs: Any) -> Iterable[Any]:
        if isinstance(jobs, (Mapping, Row)) or captured(jobs) or _is_pair(jobs) or self._named(jobs) is not None:
            return [jobs]
        if not isinstance(jobs, Iterable):
            raise _no_job(jobs)
        return list(jobs)

    def _pair(self, job: Any) -> tuple[Any, int]:
        if isinstance(job, Row) and len(job) == 1:
            job = job[0]  # an entity, as Session.execute() gives it
        if (proof := captured(job)) is not None:
            if not proof:
                raise ValueError(
                    f"Queue: {job!r} was not captured in its session, and its claim may be somebody else's: give what "
                    "capture() gave, or (internal_id, claim)"
                )
            return proof[0], proof[1]
        pair = tuple(job) if _is_pair(job) else self._named(job)
        if pair is None:
            raise _no_job(job)
        return pair[0], pair[1]

    def _named(self, job: Any) -> tuple[Any, Any] | None:
        """What a row, a mapping or an object has under the columns' names, or under those of the class."""
        found: list[Any] = []
        if isinstance(job, Row):
            job = job._mapping
        for role in ("internal_id", "claim"):
            for name in self._names(role):
                if isinstance(job, Mapping) and name in job:
                    found.append(job[name])
                elif not isinstance(job, Mapping) and hasattr(job, name):
                    found.append(getattr(job, name))
                else:
                    continue
                break
        return (found[0], found[1]) if len(found) == 2 else None

    def _names(self, role: str) -> list[str]:
        if self._own is None or self.target is None:
            return [role]
        column = self._own[role]
        names = [str(column.key), str(column.name)]
        return names if self.target.mapper is None else [*names, str(self.target.key_of(column))]


def _no_job(given: Any) -> TypeError:
    return TypeError(f"Queue: {given!r} is not a captured job: give what capture() gave, or (internal_id, claim)")


class At(NamedTuple):
    """The jobs of one place."""

    table: Table
    roles: Mapping[str, Column[Any]]

    def __getattr__(self, role: str) -> Any:
        try:
            return self.roles[role]
        except KeyError:
            raise AttributeError(role) from None


@cache
def _shipped(table: Table) -> At:
    return At(table, {role: table.c[role] for role in ROLES})


@cache
def _routed(table: Table) -> Any:
    return update(table)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and type(value[1]) is int


class OnJobs(Body):
    def __init__(self, jobs: Jobs, name: str) -> None:
        super().__init__()
        self.jobs, self.name = jobs, name
        self.needs_installation = jobs.target is None

    def route(self) -> dict[str, Any]:
        return self.jobs.route()


class Take(Capture):
    """Captures jobs that are due."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__("Queue.capture")
        self.jobs = jobs
        self.needs_installation = jobs.target is None

    def taken(self, place: Place) -> Taking:
        at = self.jobs.at(place)
        return Taking(
            at.table,
            (
                at.queue_id == bindparam("locks_queue", type_=at.queue_id.type),
                at.started_at.is_(None),
                at.run_at <= Ago(literal_column("0")),
            ),
            {
                at.claim: at.claim + ONE,
                at.attempts: at.attempts + ONE,
                at.started_at: Now(),
                at.heartbeat_at: Now(),
                at.processing_host: bindparam("locks_host", type_=at.processing_host.type),
            },
            (at.priority, at.run_at, at.internal_id),
            self.jobs.target,
            proof=(at.internal_id, at.claim),
        )

    def route(self) -> dict[str, Any]:
        return self.jobs.route()


class Settle(OnJobs):
    """Changes running jobs that are still the caller's; how many were."""

    def changes(self, at: At) -> dict[Any, Any]:
        raise NotImplementedError

    def build(self, place: Place) -> Executable | None:
        return self.changing(place)

    def changing(self, place: Place) -> Executable:
        """The UPDATE."""
        at = self.jobs.at(place)
        target = self.jobs.target
        statement = update(at.table).values({**self.changes(at), **(target.bumped() if target else {})})
        changed: Executable = _theirs(by_key(statement), at, place)
        return changed

    def run(self, run: Run) -> Any:
        statement = self.statement(run.place)
        assert statement is not None
        with run.engine.judging(run.connection):
            return run.execute(statement, _needed(run)).rowcount


def _theirs(statement: Any, at: At, place: Place) -> Any:
    """The same for the running jobs whose ids and claims are bound."""
    statement = statement.where(at.heartbeat_at.is_not(None))
    if place.engine.locking == "functions":
        ids = ARRAY(at.internal_id.type)
        claims = ARRAY(at.claim.type)
        mine: Any = func.unnest(
            cast(bindparam("locks_ids", type_=ids), ids), cast(bindparam("locks_claims", type_=claims), claims)
        )
        mine = mine.table_valued("id", "claim").render_derived(name="mine")
        return statement.where(at.internal_id == mine.c.id, at.claim == mine.c.claim)
    return statement.where(
        # by itself: not every engine finds the primary key in a pair
        at.internal_id.in_(bindparam("locks_ids", expanding=True)),
        tuple_(at.internal_id, at.claim).in_(bindparam("locks_pairs", expanding=True)),
    )


def _needed(run: Run) -> dict[str, Any]:
    """The values that this engine's statements have parameters for."""
    other = "locks_pairs" if run.engine.locking == "functions" else "locks_claims"
    return {name: value for name, value in run.values.items() if name != other}


class Complete(Settle):
    def changes(self, at: At) -> dict[Any, Any]:
        return {at.completed_at: Now(), at.heartbeat_at: null(), at.error: null()}


class Heartbeat(Settle):
    """Passes over those that somebody holds, a handler that completes its job in its own transaction among them.

    They count as the caller's, as far as can be seen: to wait for them would keep all the others from being told of.
    """

    def __init__(self, jobs: Jobs, name: str) -> None:
        super().__init__(jobs, name)
        self._steps: dict[Place, tuple[Any, Any, Any]] = {}

    def changes(self, at: At) -> dict[Any, Any]:
        return {at.heartbeat_at: Now()}

    def build(self, place: Place) -> Executable | None:
        if place.engine.locking == "rows":
            return None
        if place.engine.locking == "file":
            return super().build(place)
        at, target = self.jobs.at(place), self.jobs.target
        free = _theirs(select(at.internal_id), at, place).with_for_update(skip_locked=True, key_share=True, of=at.table)
        chosen: Any = free.cte("free").prefix_with("MATERIALIZED")
        beat = update(at.table).values({**self.changes(at), **(target.bumped() if target else {})})
        beat = beat.where(at.internal_id == chosen.c[0])
        ours: Executable = _theirs(select(func.count()).select_from(at.table), at, place).add_cte(beat.cte("beat"))
        return ours

    def because(self, place: Place) -> str:
        return "whose UPDATE can't pass over rows that somebody holds"

    def run(self, run: Run) -> Any:
        if run.engine.locking == "file":
            return super().run(run)
        statement = self.statement(run.place)
        return self._in_steps(run) if statement is None else run.execute(statement, _needed(run)).scalar()

    def _in_steps(self, run: Run) -> int:
        """InnoDB: what is free is looked at as it is now; what isn't, as far as one can see."""
        if run.place not in self._steps:
            at = self.jobs.at(run.place)
            looking: Any = select(at.internal_id, at.claim).where(
                at.internal_id.in_(bindparam("locks_ids", expanding=True))
            )
            for dialect in ("mysql", "mariadb"):
                looking = looking.with_hint(at.table, "FORCE INDEX (PRIMARY)", dialect)
            looking = looking.with_for_update(skip_locked=True)
            held = _theirs(select(func.count()).select_from(at.table), at, run.place)
            self._steps[run.place] = looking, self.changing(run.place), held
        looking, changing, held = self._steps[run.place]
        pairs: list[Any] = run.values["locks_pairs"]
        if not pairs:
            return int(run.execute(select(literal_column("0")), {}).scalar_one())
        found: Any = run.execute(looking, {"locks_ids": run.values["locks_ids"]})
        free: dict[Any, int] = dict(found.all())
        ours = [pair for pair in pairs if free.get(pair[0]) == pair[1]]
        others = [pair for pair in pairs if pair[0] not in free]
        number = 0
        if ours:
            number += run.execute(changing, _several(ours)).rowcount
        if others:
            number += int(run.execute(held, _several(others)).scalar_one())
        return number


def _several(pairs: list[Any]) -> dict[str, Any]:
    return {"locks_ids": [internal_id for internal_id, _ in pairs], "locks_pairs": pairs}


class Release(Settle):
    def changes(self, at: At) -> dict[Any, Any]:
        return {at.started_at: null(), at.heartbeat_at: null(), at.attempts: at.attempts - ONE}


class Fail(Settle):
    """Back to the queue after a pause, or dead.

    :param pause: ``given`` in seconds, ``doubling`` with the attempts, or ``never`` again.
    """

    def __init__(self, jobs: Jobs, pause: str) -> None:
        super().__init__(jobs, "Queue.fail")
        self.pause = pause

    def changes(self, at: At) -> dict[Any, Any]:
        pause: Any = bindparam("locks_pause", type_=Float())
        if self.pause != "given":
            pause = case(
                (at.attempts > DOUBLINGS + 1, LONGEST_PAUSE),
                else_=literal(FIRST_PAUSE).op("<<", return_type=Integer())(at.attempts - ONE),
            )
        dead = true() if self.pause == "never" else at.attempts >= at.max_attempts
        error = bindparam("locks_error", type_=at.error.type)
        return {**_failed(at, dead), at.run_at: case((dead, at.run_at), else_=Hence(pause)), at.error: error}


def _failed(at: At, dead: Any) -> dict[Any, Any]:
    # of columns that change, none is asked for: MySQL and MariaDB would see it changed
    return {
        at.started_at: case((dead, at.started_at)),
        at.failed_at: case((dead, Now())),
        at.heartbeat_at: null(),
    }


class Requeue(Capture):
    """Gives jobs back whose worker is not heard of any more; how many.

    :param one: those of one queue, which is bound; otherwise of all.
    """

    counts = True

    def __init__(self, jobs: Jobs, *, one: bool) -> None:
        super().__init__("Queue.requeue_stalled")
        self.jobs, self.one = jobs, one
        self.needs_installation = jobs.target is None

    def taken(self, place: Place) -> Taking:
        at = self.jobs.at(place)
        dead = at.attempts >= at.max_attempts
        error = func.coalesce(at.error, literal("stalled: its worker gave no sign of life"))
        silent: Any = at.heartbeat_at < Ago(bindparam("locks_older", type_=Float()))
        named = (at.queue_id == bindparam("locks_queue", type_=at.queue_id.type),) if self.one else ()
        return Taking(
            at.table,
            (silent, *named),
            {**_failed(at, dead), at.error: case((dead, error), else_=at.error)},
            (at.heartbeat_at,),
            self.jobs.target,
        )

    def route(self) -> dict[str, Any]:
        return self.jobs.route()


class Delete(Capture):
    """Deletes jobs that ended long ago, so many at once; how many."""

    counts = True

    def __init__(self, jobs: Jobs, role: str) -> None:
        super().__init__("Queue.delete_finished")
        self.jobs, self.role = jobs, role
        self.needs_installation = jobs.target is None

    def taken(self, place: Place) -> Taking:
        at = self.jobs.at(place)
        ended = at.roles[self.role]
        older = ended < Ago(bindparam("locks_older", type_=Float()))
        return Taking(at.table, (older,), {}, (ended,), self.jobs.target)

    def route(self) -> dict[str, Any]:
        return self.jobs.route()


class Stats(OnJobs):
    """What there is, queue by queue: each part from an index that has these jobs alone."""

    def build(self, place: Place) -> Executable | None:
        at = self.jobs.at(place)
        nothing: Any = literal_column("0")
        instant = cast(null(), Instant())
        now = Ago(nothing)

        def part(condition: Any, *counts: Any) -> Any:
            return select(at.queue_id.label("queue_id"), *counts).where(condition).group_by(at.queue_id)

        def when(condition: Any) -> Any:
            return func.sum(case((condition, 1), else_=0))

        count = func.count()
        waiting, due = at.started_at.is_(None), at.run_at <= now
        parts = union_all(
            part(
                waiting,
                when(due).label("waiting"),
                when(at.run_at > now).label("scheduled"),
                nothing.label("running"),
                nothing.label("dead"),
                func.min(case((due, at.run_at))).label("oldest"),
            ),
            part(at.heartbeat_at.is_not(None), nothing, nothing, count, nothing, instant),
            part(at.failed_at.is_not(None), nothing, nothing, nothing, count, instant),
        ).subquery("parts")
        names = ("waiting", "scheduled", "running", "dead")
        totals = [cast(func.sum(parts.c[name]), Integer()).label(name) for name in names]
        oldest = func.min(parts.c.oldest, type_=Instant()).label("oldest")
        return select(parts.c.queue_id, *totals, oldest).group_by(parts.c.queue_id).order_by(parts.c.queue_id)

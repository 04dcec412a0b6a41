"""What is said of running jobs by whoever has them: done, failed, given back, still alive; ``queue.py`` has the names.

Every statement asks for both, ``(internal_id, claim)``: what is somebody else's by now is left alone, and not counted.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    ARRAY,
    Float,
    Integer,
    Update,
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
    update,
)
from sqlalchemy.sql import Executable

from .clock import Hence, Now
from .jobs import Jobs, OnJobs
from .operation import Place, Run
from .roles import ONE, At
from .taking import by_key

#: the first pause before another attempt, in seconds; each further one is twice as long, and an hour at most
FIRST_PAUSE, LONGEST_PAUSE, DOUBLINGS = 5, 3600, 9


class Settle(OnJobs):
    """Changes running jobs that are still the caller's; how many were."""

    def changes(self, at: At) -> dict[Any, Any]:
        raise NotImplementedError

    def build(self, place: Place) -> Executable | None:
        return self.changing(place)

    def changing(self, place: Place) -> Update:
        """The UPDATE."""
        at = self.jobs.at(place)
        target = self.jobs.target
        statement = update(at.table).values({**self.changes(at), **(target.bumped() if target else {})})
        changed: Update = theirs(by_key(statement), at, place)
        return changed

    def run(self, run: Run) -> Any:
        statement = self.statement(run.place)
        assert statement is not None
        with run.engine.judging(run.connection):
            return run.execute(statement, needed(run)).rowcount


def theirs(statement: Any, at: At, place: Place) -> Any:
    """The same for the running jobs whose ids and claims are bound."""
    # not by heartbeat_at, which nothing else has: PostgreSQL would go through the index that running jobs alone are in,
    # and through what it keeps of those that were, while the primary key finds these at once
    statement = statement.where(at.started_at.is_not(None), at.completed_at.is_(None), at.failed_at.is_(None))
    if place.engine.locking == "functions":
        ids = ARRAY(at.internal_id.type)
        claims = ARRAY(at.claim.type)
        mine: Any = func.unnest(
            cast(bindparam("locks_ids", type_=ids), ids), cast(bindparam("locks_claims", type_=claims), claims)
        )
        mine = mine.table_valued("id", "claim").render_derived(name="locks_mine")
        return statement.where(at.internal_id == mine.c.id, at.claim == mine.c.claim)
    return statement.where(
        # by itself: not every engine finds the primary key in a pair
        at.internal_id.in_(bindparam("locks_ids", expanding=True)),
        tuple_(at.internal_id, at.claim).in_(bindparam("locks_pairs", expanding=True)),
    )


def needed(run: Run) -> dict[str, Any]:
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
        free = theirs(select(at.internal_id), at, place).with_for_update(skip_locked=True, key_share=True, of=at.table)
        chosen: Any = free.cte("locks_free").prefix_with("MATERIALIZED")
        beat = update(at.table).values({**self.changes(at), **(target.bumped() if target else {})})
        beat = beat.where(at.internal_id == chosen.c[0])
        ours: Executable = theirs(select(func.count()).select_from(at.table), at, place).add_cte(beat.cte("locks_beat"))
        return ours

    def because(self, place: Place) -> str:
        return "whose UPDATE can't pass over rows that somebody holds"

    def run(self, run: Run) -> Any:
        if run.engine.locking == "file":
            return super().run(run)
        statement = self.statement(run.place)
        return self._in_steps(run) if statement is None else run.execute(statement, needed(run)).scalar()

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
            held = theirs(select(func.count()).select_from(at.table), at, run.place)
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
        return {**failed(at, dead), at.run_at: case((dead, at.run_at), else_=Hence(pause)), at.error: error}


def failed(at: At, dead: Any) -> dict[Any, Any]:
    # of columns that change, none is asked for: MySQL and MariaDB would see it changed
    return {
        at.started_at: case((dead, at.started_at)),
        at.failed_at: case((dead, Now())),
        at.heartbeat_at: null(),
    }

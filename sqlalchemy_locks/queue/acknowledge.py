"""What is said of running jobs by whoever has them: done, failed, given back, still alive; ``queue.py`` has the names.

Every statement asks for both, ``(internal_id, claim)``: what is somebody else's by now is left alone, and not counted.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    ARRAY,
    Float,
    Integer,
    Text,
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

from sqlalchemy_locks.captures.statements import by_key, few, one_of
from sqlalchemy_locks.core.operation import Operation, Place, Run
from sqlalchemy_locks.core.roles import ONE, At
from sqlalchemy_locks.queue.jobs import Jobs, OnJobs
from sqlalchemy_locks.sql.clock import Later, Now

if TYPE_CHECKING:
    from typing_extensions import Self

#: the first pause before another attempt, in seconds; each further one is twice as long, and an hour at most
FIRST_PAUSE, LONGEST_PAUSE, DOUBLINGS = 5, 3600, 9
#: what every engine's column for errors can hold, its end being what matters
LONGEST_ERROR = 16000


class Settle(OnJobs):
    """Changes running jobs that are still the caller's; how many were."""

    #: those that somebody holds are passed over, and not counted; otherwise they are waited for
    passes = False

    def __init__(self, jobs: Jobs, name: str) -> None:
        super().__init__(jobs, name)
        self._steps: dict[Place, tuple[Any, Any, Any]] = {}

    @cached_property
    def passing(self) -> Self:
        """The same, but that it waits for nobody."""
        twin = copy(self)
        twin.passes, twin._built, twin._steps = True, {}, {}
        return twin

    def changes(self, at: At) -> dict[Any, Any]:
        raise NotImplementedError

    def build(self, place: Place) -> Executable | None:
        return None if self.passes and place.engine.locking == "rows" else self.changing(place)

    def changing(self, place: Place) -> Update:
        """The UPDATE."""
        at = self.jobs.at(place)
        target = self.jobs.target
        statement = update(at.table).values({**self.changes(at), **(target.bumped() if target else {})})
        if self.passes and place.engine.locking == "functions":
            return statement.where(one_of(at.internal_id, free(at)))
        changed: Update = theirs(by_key(statement), at, place)
        return changed

    def because(self, place: Place) -> str:
        return "whose UPDATE can't pass over rows that somebody holds"

    def run(self, run: Run) -> Any:
        statement = self.statement(run.place)
        if statement is None:
            return self._of_the_free(run)[0]
        with run.engine.judging(run.connection):
            return run.execute(statement, needed(run, self.jobs.at(run.place))).rowcount

    def _of_the_free(self, run: Run) -> tuple[int, list[Any]]:
        """InnoDB: what is free is looked at as it is now. How many were changed, and the pairs that somebody holds."""
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
        looking, changing, _ = self._steps[run.place]
        pairs: list[Any] = run.values["locks_pairs"]
        if not pairs:
            return int(run.execute(select(literal_column("0")), {}).scalar_one()), []
        known = {"locks_pairs", "locks_ids", "locks_claims"}
        others = {name: value for name, value in run.values.items() if name not in known}
        found: Any = run.execute(looking, {"locks_ids": run.values["locks_ids"]})
        unheld: dict[Any, int] = dict(found.all())
        ours = [pair for pair in pairs if unheld.get(pair[0]) == pair[1]]
        number = run.execute(changing, {**others, **_several(ours)}).rowcount if ours else 0
        return number, [pair for pair in pairs if pair[0] not in unheld]


def passing(operation: Operation[Any]) -> Operation[Any]:
    """The same operation on what nobody else holds."""
    return Operation(operation._body.passing, operation._values)  # type: ignore[attr-defined]


def theirs(statement: Any, at: At, place: Place) -> Any:
    """The same for the running jobs whose ids and claims are bound."""
    statement = statement.where(*_running(at))
    if place.engine.locking == "functions":
        mine = _mine(at)
        return statement.where(at.internal_id == mine.c.id, at.claim == mine.c.claim, few(mine.c.number))
    return statement.where(
        # by itself: not every engine finds the primary key in a pair
        at.internal_id.in_(bindparam("locks_ids", expanding=True)),
        tuple_(at.internal_id, at.claim).in_(bindparam("locks_pairs", expanding=True)),
    )


def free(at: At) -> Any:
    """PostgreSQL: those of them that nobody else holds, as a CTE; locked, one by one by the primary key."""
    mine = _mine(at)
    same = (at.internal_id == mine.c.id, at.claim == mine.c.claim)
    one: Any = select(at.internal_id).where(*_running(at), *same)
    one = one.with_for_update(skip_locked=True, key_share=True).correlate(mine).lateral("locks_one")
    found = select(one.c[0]).select_from(mine.join(one, true())).where(few(mine.c.number))
    return found.cte("locks_free")


def _running(at: At) -> tuple[Any, ...]:
    # not by heartbeat_at, which nothing else has: PostgreSQL would go through the index that running jobs alone are in,
    # and through what it keeps of those that were, while the primary key finds these at once
    return at.started_at.is_not(None), at.completed_at.is_(None), at.failed_at.is_(None)


def _mine(at: At) -> Any:
    given = []
    for name, type_ in (("locks_ids", at.internal_id.type), ("locks_claims", at.claim.type)):
        array = ARRAY(type_)
        given.append(cast(bindparam(name, type_=Text() if _whole(type_) else array), array))
    mine: Any = func.unnest(*given).table_valued("id", "claim", with_ordinality="number")
    return mine.render_derived(name="locks_mine")


def _whole(type_: Any) -> bool:
    """Whether these are numbers, whose array we write ourselves: drivers take longer for it than for the statement."""
    return isinstance(type_, Integer)


def needed(run: Run, at: At) -> dict[str, Any]:
    """The values that this engine's statements have parameters for, as they have them."""
    if run.engine.locking != "functions":
        return {name: value for name, value in run.values.items() if name != "locks_claims"}
    values = {name: value for name, value in run.values.items() if name != "locks_pairs"}
    for name, type_ in (("locks_ids", at.internal_id.type), ("locks_claims", at.claim.type)):
        if _whole(type_):
            values[name] = f"{{{','.join(map(str, values[name]))}}}"
    return values


class Complete(Settle):
    def changes(self, at: At) -> dict[Any, Any]:
        return {at.completed_at: Now(), at.heartbeat_at: null(), at.error: null()}


class Heartbeat(Settle):
    """Passes over those that somebody holds, a handler that completes its job in its own transaction among them.

    They count as the caller's, as far as can be seen: to wait for them would keep all the others from being told of.
    """

    passes = True

    def changes(self, at: At) -> dict[Any, Any]:
        return {at.heartbeat_at: Now()}

    def build(self, place: Place) -> Executable | None:
        if place.engine.locking != "functions":
            return super().build(place)
        at = self.jobs.at(place)
        ours: Executable = theirs(select(func.count()).select_from(at.table), at, place).add_cte(
            self.changing(place).cte("locks_beat")
        )
        return ours

    def run(self, run: Run) -> Any:
        if run.engine.locking == "functions":
            statement = self.statement(run.place)
            assert statement is not None
            return run.execute(statement, needed(run, self.jobs.at(run.place))).scalar()
        if run.engine.locking == "file":
            return super().run(run)
        number, others = self._of_the_free(run)
        if others:
            # as far as one can see
            number += int(run.execute(self._steps[run.place][2], _several(others)).scalar_one())
        return number


class Ours(OnJobs):
    """Those that are still the caller's, as far as can be seen: their ids and claims."""

    writes = False

    def build(self, place: Place) -> Executable | None:
        at = self.jobs.at(place)
        ours: Executable = theirs(select(at.internal_id, at.claim), at, place)
        return ours

    def run(self, run: Run) -> Any:
        statement = self.statement(run.place)
        assert statement is not None
        return run.execute(statement, needed(run, self.jobs.at(run.place)))


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
        return {**failed(at, dead), at.run_at: case((dead, at.run_at), else_=Later(Now(), pause)), at.error: error}


def failed(at: At, dead: Any) -> dict[Any, Any]:
    # of columns that change, none is asked for: MySQL and MariaDB would see it changed
    return {
        at.started_at: case((dead, at.started_at)),
        at.failed_at: case((dead, Now())),
        at.heartbeat_at: null(),
    }


def storable(error: str) -> str:
    """As much of an error as every engine's column can hold."""
    # neither NULs nor halves of characters can be stored everywhere
    stored = error[-LONGEST_ERROR:].replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
    return stored[-LONGEST_ERROR:]  # what was replaced has become longer

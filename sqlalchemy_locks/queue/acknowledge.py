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
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation
from sqlalchemy_locks.core.roles import ONE, RoleColumns
from sqlalchemy_locks.queue.jobs import Jobs, OnJobs
from sqlalchemy_locks.sql.clock import Later, Now

if TYPE_CHECKING:
    from typing_extensions import Self

#: the first pause before another attempt, in seconds; each further one is twice as long, and an hour at most
FIRST_PAUSE, LONGEST_PAUSE, DOUBLINGS = 5, 3600, 9
#: what every engine's column for errors can hold, its end being what matters
LONGEST_ERROR = 16000


class UpdateOwnedJobs(OnJobs):
    """Changes running jobs that are still the caller's; how many were."""

    #: those that somebody holds are passed over, and not counted; otherwise they are waited for
    passes = False

    def __init__(self, jobs: Jobs, name: str) -> None:
        super().__init__(jobs, name)
        self._steps: dict[BuildContext, tuple[Any, Any, Any]] = {}

    @cached_property
    def skip_locked(self) -> Self:
        """The same, but that it waits for nobody."""
        twin = copy(self)
        twin.passes, twin._built, twin._steps = True, {}, {}
        return twin

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        raise NotImplementedError

    def build(self, context: BuildContext) -> Executable | None:
        return None if self.passes and context.backend.locking == "rows" else self.changing(context)

    def changing(self, context: BuildContext) -> Update:
        """The UPDATE."""
        at = self.jobs.at(context)
        target = self.jobs.target
        statement = update(at.table).values({**self.changes(at), **(target.version_bump() if target else {})})
        if self.passes and context.backend.locking == "functions":
            return statement.where(one_of(at.internal_id, free(at)))
        changed: Update = where_owned(by_key(statement), at, context)
        return changed

    def because(self, context: BuildContext) -> str:
        return "whose UPDATE can't pass over rows that somebody holds"

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        if statement is None:
            return self._of_the_free(execution)[0]
        with execution.backend.judging(execution.connection):
            return execution.execute(statement, needed(execution, self.jobs.at(execution.context))).rowcount

    def _of_the_free(self, execution: Execution) -> tuple[int, list[Any]]:
        """InnoDB: what is free is looked at as it is now. How many were changed, and the pairs that somebody holds."""
        if execution.context not in self._steps:
            at = self.jobs.at(execution.context)
            looking: Any = select(at.internal_id, at.claim).where(
                at.internal_id.in_(bindparam("locks_ids", expanding=True))
            )
            for dialect in ("mysql", "mariadb"):
                looking = looking.with_hint(at.table, "FORCE INDEX (PRIMARY)", dialect)
            looking = looking.with_for_update(skip_locked=True)
            held = where_owned(select(func.count()).select_from(at.table), at, execution.context)
            self._steps[execution.context] = looking, self.changing(execution.context), held
        looking, changing, _ = self._steps[execution.context]
        pairs: list[Any] = execution.values["locks_pairs"]
        if not pairs:
            return int(execution.execute(select(literal_column("0")), {}).scalar_one()), []
        known = {"locks_pairs", "locks_ids", "locks_claims"}
        others = {name: value for name, value in execution.values.items() if name not in known}
        found: Any = execution.execute(looking, {"locks_ids": execution.values["locks_ids"]})
        unheld: dict[Any, int] = dict(found.all())
        ours = [pair for pair in pairs if unheld.get(pair[0]) == pair[1]]
        number = execution.execute(changing, {**others, **_several(ours)}).rowcount if ours else 0
        return number, [pair for pair in pairs if pair[0] not in unheld]


def skip_locked(operation: Operation[Any]) -> Operation[Any]:
    """The same operation on what nobody else holds."""
    return Operation(operation._body.skip_locked, operation._values)  # type: ignore[attr-defined]


def where_owned(statement: Any, at: RoleColumns, context: BuildContext) -> Any:
    """The same for the running jobs whose ids and claims are bound."""
    statement = statement.where(*_running(at))
    if context.backend.locking == "functions":
        mine = _mine(at)
        return statement.where(at.internal_id == mine.c.id, at.claim == mine.c.claim, few(mine.c.number))
    return statement.where(
        # by itself: not every engine finds the primary key in a pair
        at.internal_id.in_(bindparam("locks_ids", expanding=True)),
        tuple_(at.internal_id, at.claim).in_(bindparam("locks_pairs", expanding=True)),
    )


def free(at: RoleColumns) -> Any:
    """PostgreSQL: those of them that nobody else holds, as a CTE; locked, one by one by the primary key."""
    mine = _mine(at)
    same = (at.internal_id == mine.c.id, at.claim == mine.c.claim)
    one: Any = select(at.internal_id).where(*_running(at), *same)
    one = one.with_for_update(skip_locked=True, key_share=True).correlate(mine).lateral("locks_one")
    found = select(one.c[0]).select_from(mine.join(one, true())).where(few(mine.c.number))
    return found.cte("locks_free")


def _running(at: RoleColumns) -> tuple[Any, ...]:
    # not by heartbeat_at, which nothing else has: PostgreSQL would go through the index that running jobs alone are in,
    # and through what it keeps of those that were, while the primary key finds these at once
    return at.started_at.is_not(None), at.completed_at.is_(None), at.failed_at.is_(None)


def _mine(at: RoleColumns) -> Any:
    given = []
    for name, type_ in (("locks_ids", at.internal_id.type), ("locks_claims", at.claim.type)):
        array = ARRAY(type_)
        given.append(cast(bindparam(name, type_=Text() if _whole(type_) else array), array))
    mine: Any = func.unnest(*given).table_valued("id", "claim", with_ordinality="number")
    return mine.render_derived(name="locks_mine")


def _whole(type_: Any) -> bool:
    """Whether these are numbers, whose array we write ourselves: drivers take longer for it than for the statement."""
    return isinstance(type_, Integer)


def needed(execution: Execution, at: RoleColumns) -> dict[str, Any]:
    """The values that this engine's statements have parameters for, as they have them."""
    if execution.backend.locking != "functions":
        return {name: value for name, value in execution.values.items() if name != "locks_claims"}
    values = {name: value for name, value in execution.values.items() if name != "locks_pairs"}
    for name, type_ in (("locks_ids", at.internal_id.type), ("locks_claims", at.claim.type)):
        if _whole(type_):
            values[name] = f"{{{','.join(map(str, values[name]))}}}"
    return values


class Complete(UpdateOwnedJobs):
    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return {at.completed_at: Now(), at.heartbeat_at: null(), at.error: null()}


class Heartbeat(UpdateOwnedJobs):
    """Passes over those that somebody holds, a handler that completes its job in its own transaction among them.

    They count as the caller's, as far as can be seen: to wait for them would keep all the others from being told of.
    """

    passes = True

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return {at.heartbeat_at: Now()}

    def build(self, context: BuildContext) -> Executable | None:
        if context.backend.locking != "functions":
            return super().build(context)
        at = self.jobs.at(context)
        ours: Executable = where_owned(select(func.count()).select_from(at.table), at, context).add_cte(
            self.changing(context).cte("locks_beat")
        )
        return ours

    def run(self, execution: Execution) -> Any:
        if execution.backend.locking == "functions":
            statement = self.statement(execution.context)
            assert statement is not None
            return execution.execute(statement, needed(execution, self.jobs.at(execution.context))).scalar()
        if execution.backend.locking == "file":
            return super().run(execution)
        number, others = self._of_the_free(execution)
        if others:
            # as far as one can see
            number += int(execution.execute(self._steps[execution.context][2], _several(others)).scalar_one())
        return number


class Ours(OnJobs):
    """Those that are still the caller's, as far as can be seen: their ids and claims."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        ours: Executable = where_owned(select(at.internal_id, at.claim), at, context)
        return ours

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        assert statement is not None
        return execution.execute(statement, needed(execution, self.jobs.at(execution.context)))


def _several(pairs: list[Any]) -> dict[str, Any]:
    return {"locks_ids": [internal_id for internal_id, _ in pairs], "locks_pairs": pairs}


class ReleaseJobs(UpdateOwnedJobs):
    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return {at.started_at: null(), at.heartbeat_at: null(), at.attempts: at.attempts - ONE}


class Fail(UpdateOwnedJobs):
    """Back to the queue after a pause, or dead.

    :param pause: ``given`` in seconds, ``doubling`` with the attempts, or ``never`` again.
    """

    def __init__(self, jobs: Jobs, pause: str) -> None:
        super().__init__(jobs, "Queue.fail")
        self.pause = pause

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        pause: Any = bindparam("locks_pause", type_=Float())
        if self.pause != "given":
            pause = case(
                (at.attempts > DOUBLINGS + 1, LONGEST_PAUSE),
                else_=literal(FIRST_PAUSE).op("<<", return_type=Integer())(at.attempts - ONE),
            )
        dead = true() if self.pause == "never" else at.attempts >= at.max_attempts
        error = bindparam("locks_error", type_=at.error.type)
        return {**failed(at, dead), at.run_at: case((dead, at.run_at), else_=Later(Now(), pause)), at.error: error}


def failed(at: RoleColumns, dead: Any) -> dict[Any, Any]:
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

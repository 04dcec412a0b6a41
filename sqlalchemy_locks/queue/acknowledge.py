"""What the owner of running jobs reports: completed, failed, released, still running; ``queue.py`` has the operations.

Each statement compares ``(internal_id, claim)``: a job that has another owner by now is neither changed nor counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    ARRAY,
    Float,
    Integer,
    Table,
    Text,
    Update,
    and_,
    bindparam,
    case,
    cast,
    func,
    literal,
    null,
    or_,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql import Executable

from sqlalchemy_locks.captures.statements import by_key, selective_condition
from sqlalchemy_locks.core.operation import MAX_KEYS, BuildContext, Execution, Operation
from sqlalchemy_locks.core.roles import ONE, RoleColumns
from sqlalchemy_locks.queue.jobs import (
    BEGUN,
    CLAIMS,
    COUNTED_AHEAD,
    IDS,
    PAIRS,
    TAKEN,
    JobOperation,
    Jobs,
    is_ahead,
    is_begun,
)
from sqlalchemy_locks.sql.clock import Now, PlusSeconds
from sqlalchemy_locks.sql.elements import force_index

if TYPE_CHECKING:
    from typing_extensions import Self

#: the first pause before another attempt, in seconds; each further one is twice as long, up to an hour
FIRST_PAUSE, LONGEST_RETRY_PAUSE, DOUBLINGS = 5, 3600, 9
#: the error of a job whose last attempt ended with its worker: such a job runs alone in its process
STALLED = "stalled: its worker sent no heartbeat"
#: the states of a job that was begun
RUNNING, COMPLETED, DEAD = "running", "completed", "dead"
#: how many characters of an error are stored, from its end: so many fit into every engine's column
LONGEST_ERROR = 16000


class UpdateOwnedJobs(JobOperation):
    """Changes running jobs that the caller still owns, and counts them."""

    wait_limit = "setting"
    #: rows that another session has locked are skipped and not counted; otherwise the UPDATE waits for them
    skips_locked = False

    def __init__(self, jobs: Jobs, name: str) -> None:
        super().__init__(jobs, name)
        self._steps: dict[BuildContext, tuple[Any, Any]] = {}

    @cached_property
    def skip_locked(self) -> Self:
        """The same operation, skipping locked rows."""
        twin = copy(self)
        twin.skips_locked, twin.statement, twin._steps = True, cache(twin.build), {}
        return twin

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        """Return the columns that the UPDATE sets, and their values."""
        raise NotImplementedError

    def build(self, context: BuildContext) -> Executable | None:
        backend = context.backend
        several = self.skips_locked and not (backend.single_writer or backend.writable_ctes)
        return None if several else self.update(context)

    def update(self, context: BuildContext) -> Update:
        """Return the UPDATE; without writable CTEs it doesn't skip locked rows by itself."""
        at = self.jobs.at(context)
        target = self.jobs.target
        statement = update(at.table).values({**self.changes(at), **(target.version_bump() if target else {})})
        if self.skips_locked and context.backend.writable_ctes:
            unlocked = _unlocked(at)
            return statement.where(at.internal_id == unlocked.c.id, selective_condition(unlocked.c.number))
        owned: Update = _where_claimed(by_key(statement).where(*_unfinished(at)), at, context)
        return owned

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "whose UPDATE has no SKIP LOCKED"

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        if statement is not None and execution.backend.writable_ctes:
            number = execution.execute(statement, owned_parameters(execution, self.jobs)).rowcount
        else:
            table = self.jobs.at(execution.context).table
            number = sum(
                self._update_unlocked(execution, values)
                if statement is None
                else execution.execute(statement, values).rowcount
                for values in owned_batches(execution, self.jobs, table)
            )
        if self.jobs.target is not None:
            self.jobs.expire(execution, self.changes(self.jobs.columns))
        return number

    def is_one_statement(self, execution: Execution) -> bool:
        several = len(execution.values[PAIRS]) > MAX_KEYS and not execution.backend.writable_ctes
        return self.statement(execution.context) is not None and not several

    def _update_unlocked(self, execution: Execution, values: dict[str, Any]) -> int:
        """InnoDB: lock the rows that are free, then update the rows that are owned; return their number."""
        if execution.context not in self._steps:
            at = self.jobs.at(execution.context)
            locking: Any = select(at.internal_id, at.claim).where(at.internal_id.in_(bindparam(IDS, expanding=True)))
            locking = force_index(locking, "PRIMARY", at.table).with_for_update(skip_locked=True)
            self._steps[execution.context] = locking, self.update(execution.context)
        locking, updating = self._steps[execution.context]
        rows: Any = execution.execute(locking, {IDS: values[IDS]})
        claims: dict[Any, int] = dict(rows.all())
        owned = [pair for pair in values[PAIRS] if claims.get(pair[0]) == pair[1]]
        if not owned:
            return 0
        return execution.execute(updating, {**values, PAIRS: owned, IDS: [id_ for id_, _ in owned]}).rowcount


def skip_locked_rows(operation: Operation[Any]) -> Operation[Any]:
    """Return the same operation, skipping rows that another session has locked."""
    return Operation(operation._impl.skip_locked, operation._values)  # type: ignore[attr-defined]


def _where_claimed(statement: Any, at: RoleColumns, context: BuildContext) -> Any:
    """Restrict a statement to the jobs whose ids and claims are bound."""
    if context.backend.writable_ctes:
        owned = _bound_pairs(at)
        return statement.where(
            at.internal_id == owned.c.id, at.claim == owned.c.claim, selective_condition(owned.c.number)
        )
    return statement.where(
        # by itself: not every engine uses the primary key for a comparison of pairs
        at.internal_id.in_(bindparam(IDS, expanding=True)),
        tuple_(at.internal_id, at.claim).in_(bindparam(PAIRS, expanding=True)),
    )


def _unlocked(at: RoleColumns) -> Any:
    """PostgreSQL: a CTE of the owned jobs that no other session has locked, locked one by one by the primary key."""
    owned = _bound_pairs(at)
    same = (at.internal_id == owned.c.id, at.claim == owned.c.claim)
    one: Any = select(at.internal_id).where(*_unfinished(at), *same)
    one = one.with_for_update(skip_locked=True, key_share=True).correlate(owned).lateral("locks_one")
    rows = select(one.c[0].label("id"), owned.c.number).select_from(owned.join(one, true()))
    # materialized, as the numbers of captured_cte() are
    return rows.where(selective_condition(owned.c.number)).cte("locks_unlocked").prefix_with("MATERIALIZED")


def _unfinished(at: RoleColumns) -> tuple[Any, ...]:
    # Not written like the condition of the index of running jobs: PostgreSQL would scan that index with its dead
    # entries, although the primary key finds these rows directly.
    return at.started_at.is_not(None), func.coalesce(at.completed_at, at.failed_at).is_(None)


def _bound_pairs(at: RoleColumns) -> Any:
    """PostgreSQL: the bound ids and claims as rows."""
    given = []
    for name, type_ in ((IDS, at.internal_id.type), (CLAIMS, at.claim.type)):
        array = ARRAY(type_)
        # integers are bound as the text of an array: drivers take longer to adapt a list than the statement takes
        given.append(cast(bindparam(name, type_=Text() if isinstance(type_, Integer) else array), array))
    pairs: Any = func.unnest(*given).table_valued("id", "claim", with_ordinality="number")
    return pairs.render_derived(name="locks_owned")


def owned_parameters(execution: Execution, jobs: Jobs) -> dict[str, Any]:
    """Return the parameters of a statement with writable CTEs, which binds ids and claims as arrays."""
    values = execution.values.copy()
    del values[PAIRS]
    for name in jobs.integer_arrays:
        values[name] = f"{{{','.join(map(str, values[name]))}}}"
    return values


def owned_batches(execution: Execution, jobs: Jobs, table: Table | None = None) -> Iterator[dict[str, Any]]:
    """Yield the parameters for each execution of a statement that binds ids and claims.

    :param table: the table that the statement changes.
    """
    if execution.backend.writable_ctes:  # as arrays, which are one parameter each
        yield owned_parameters(execution, jobs)
        return
    values = {name: value for name, value in execution.values.items() if name != CLAIMS}
    # always in one order: otherwise two batches with the same jobs could deadlock
    for pairs in execution.batches(sorted(values[PAIRS]), table):
        yield {**values, PAIRS: pairs, IDS: [id_ for id_, _ in pairs]}


class Complete(UpdateOwnedJobs):
    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return {at.completed_at: Now(), at.error: null()}


class BeginJobs(UpdateOwnedJobs):
    """Counts the attempts of captured jobs whose handlers are about to begin; skips rows that are locked.

    :param ahead: the handlers begin later, unless the worker dies first.
    """

    skips_locked = True

    def __init__(self, jobs: Jobs, name: str, *, ahead: bool) -> None:
        super().__init__(jobs, name)
        self._bits = BEGUN | COUNTED_AHEAD if ahead else BEGUN

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return {at.claim: at.claim + self._bits, at.attempts: at.attempts + ONE}


class ClaimedJobs(JobOperation):
    """Reads ids and claims of jobs that run, or ended, under these claims, and their states."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        ended = (at.failed_at.is_not(None), DEAD), (at.completed_at.is_not(None), COMPLETED)
        reading = select(at.internal_id, at.claim, case(*ended, else_=RUNNING)).where(at.started_at.is_not(None))
        claimed: Executable = _where_claimed(reading, at, context)
        return claimed

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        assert statement is not None
        rows = [row for values in owned_batches(execution, self.jobs) for row in execution.execute(statement, values)]
        return IteratorResult(SimpleResultMetaData(["id", "claim", "state"]), map(tuple, rows))


class ReleaseJobs(UpdateOwnedJobs):
    """Returns jobs to the queue; an attempt that was counted is subtracted again."""

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return {at.started_at: null(), at.attempts: at.attempts - is_begun(at)}


class Fail(UpdateOwnedJobs):
    """Returns jobs to the queue after a pause, which doubles with each attempt if none is bound, or marks them dead."""

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        doubled = case(
            (at.attempts > DOUBLINGS + 1, LONGEST_RETRY_PAUSE),
            else_=literal(FIRST_PAUSE).op("<<", return_type=Integer())(at.attempts - ONE),
        )
        pause: Any = func.coalesce(bindparam("locks_pause", type_=Float()), doubled, type_=Float())
        dead = or_(bindparam("locks_retry", type_=Integer()) == 0, at.attempts >= at.max_attempts)
        return {
            **end_attempt(at, dead),
            at.run_at: case((dead, at.run_at), else_=PlusSeconds(Now(), pause)),
            at.error: bindparam("locks_error", type_=at.error.type),
        }


def requeue(at: RoleColumns) -> dict[Any, Any]:
    """Return the columns that an UPDATE sets on a job whose worker is silent, and their values."""
    dead = and_(is_begun(at) == ONE, at.attempts >= at.max_attempts)
    # the claim matches no worker any more: job.lost becomes true in a handler that still runs
    return {
        **end_attempt(at, dead),
        at.error: case((is_begun(at) == ONE, literal(STALLED, at.error.type)), else_=at.error),
        at.claim: at.claim + TAKEN,
        # An attempt counted ahead is subtracted: it was not the last one, and whether its handler began is unknown.
        at.attempts: case((is_ahead(at), at.attempts - ONE), else_=at.attempts),
    }


def end_attempt(at: RoleColumns, dead: Any) -> dict[Any, Any]:
    """Return the same for a job whose attempt has failed; ``dead`` is the condition that it was the last attempt."""
    # MySQL and MariaDB read the new value of a column that the same UPDATE has changed. So no changed column is read,
    # with two exceptions: the bits of a claim that this UPDATE doesn't change, and an attempt that is subtracted, which
    # was not the last one.
    return {at.started_at: case((dead, at.started_at)), at.failed_at: case((dead, Now()))}


def storable(error: str) -> str:
    """Return the end of an error's text as every engine can store it."""
    # not every engine stores NUL characters or lone surrogates
    stored = error[-LONGEST_ERROR:].replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
    return stored[-LONGEST_ERROR:]  # the replacements have made it longer

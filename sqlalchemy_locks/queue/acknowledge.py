"""What the owner of running jobs reports: completed, failed, released, still running; ``queue.py`` has the operations.

Each statement compares ``(internal_id, claim)``: a job that has another owner by now is neither changed nor counted.
"""

from __future__ import annotations

from copy import copy
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    ARRAY,
    Float,
    Integer,
    Text,
    Update,
    and_,
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

from sqlalchemy_locks.captures.statements import LIMIT, by_key, selective_condition
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation
from sqlalchemy_locks.core.roles import ONE, RoleColumns
from sqlalchemy_locks.queue.jobs import CLAIMS, IDS, NO_CLAIM, PAIRS, JobOperation, Jobs, owned_values
from sqlalchemy_locks.sql.clock import Instant, Now, PlusSeconds
from sqlalchemy_locks.sql.elements import force_index

if TYPE_CHECKING:
    from typing_extensions import Self

#: the first pause before another attempt, in seconds; each further one is twice as long, up to an hour
FIRST_PAUSE, LONGEST_RETRY_PAUSE, DOUBLINGS = 5, 3600, 9
#: the characters of an error that are kept, from its end: what fits into every engine's column
LONGEST_ERROR = 16000


class UpdateOwnedJobs(JobOperation):
    """Changes running jobs that the caller still owns, and counts them."""

    #: rows that another session has locked are skipped and not counted; otherwise the UPDATE waits for them
    skips_locked = False
    #: the table is locked as for an UPDATE even where there is no job to change
    always_locks = False

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
        """Return what the UPDATE sets."""
        raise NotImplementedError

    def build(self, context: BuildContext) -> Executable | None:
        backend = context.backend
        return None if self.skips_locked and backend.row_locks and not backend.writable_ctes else self.update(context)

    def update(self, context: BuildContext) -> Update:
        """Return the UPDATE; without writable CTEs it doesn't skip locked rows by itself."""
        at = self.jobs.at(context)
        target = self.jobs.target
        statement = update(at.table).values({**self.changes(at), **(target.version_bump() if target else {})})
        if self.skips_locked and context.backend.writable_ctes:
            unlocked = _unlocked(at)
            return statement.where(at.internal_id == unlocked.c.id, selective_condition(unlocked.c.number))
        owned: Update = where_owned(by_key(statement), at, context)
        return owned

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "whose UPDATE has no SKIP LOCKED"

    def run(self, execution: Execution) -> Any:
        number = self.count(execution)
        self.jobs.expire(execution, self.changes(self.jobs.columns))
        return number

    def count(self, execution: Execution) -> Any:
        """Change the jobs, and return how many."""
        statement = self.statement(execution.context)
        with execution.waiting(), execution.backend.classify_timeouts(execution.connection):
            if statement is None:
                return self._update_unlocked(execution)[0]
            return execution.execute(statement, owned_parameters(execution, self.jobs)).rowcount

    def _update_unlocked(self, execution: Execution) -> tuple[int, list[Any]]:
        """InnoDB: lock the rows that are free, then update those that are owned.

        :return: how many were changed, and the pairs whose rows another session has locked.
        """
        if execution.context not in self._steps:
            at = self.jobs.at(execution.context)
            self._steps[execution.context] = unlocked_by_key(at), self.update(execution.context)
        locking, updating = self._steps[execution.context]
        pairs: list[Any] = execution.values[PAIRS]
        if not pairs and not self.always_locks:
            return int(execution.execute(select(literal_column("0")), {}).scalar_one()), []
        others = {name: value for name, value in execution.values.items() if name not in (PAIRS, IDS, CLAIMS)}
        found: Any = execution.execute(locking, {IDS: execution.values[IDS]})
        unlocked: dict[Any, int] = dict(found.all())
        owned = [pair for pair in pairs if unlocked.get(pair[0]) == pair[1]]
        number = execution.execute(updating, {**others, **_expanded(owned)}).rowcount if owned else 0
        return number, [pair for pair in pairs if pair[0] not in unlocked]


def unlocked_by_key(at: RoleColumns) -> Any:
    """InnoDB: the SELECT that locks those rows of the ids that no other session has locked, and reads their claims."""
    locking: Any = select(at.internal_id, at.claim).where(at.internal_id.in_(bindparam(IDS, expanding=True)))
    return force_index(locking, "PRIMARY", at.table).with_for_update(skip_locked=True)


def skip_locked(operation: Operation[Any]) -> Operation[Any]:
    """Return the same operation, skipping rows that another session has locked."""
    return Operation(operation._impl.skip_locked, operation._values)  # type: ignore[attr-defined]


def where_owned(statement: Any, at: RoleColumns, context: BuildContext) -> Any:
    """Restrict a statement to the running jobs whose ids and claims are bound."""
    return _where_claimed(statement.where(*_running(at)), at, context)


def _where_claimed(statement: Any, at: RoleColumns, context: BuildContext) -> Any:
    """Restrict a statement to the jobs whose ids and claims are bound."""
    if context.backend.arrays:
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
    one: Any = select(at.internal_id).where(*_running(at), *same)
    one = one.with_for_update(skip_locked=True, key_share=True).correlate(owned).lateral("locks_one")
    found = select(one.c[0].label("id"), owned.c.number).select_from(owned.join(one, true()))
    # materialized, as the numbers of captured_cte() are
    return found.where(selective_condition(owned.c.number)).cte("locks_unlocked").prefix_with("MATERIALIZED")


def _running(at: RoleColumns) -> tuple[Any, ...]:
    # not by heartbeat_at, which only running jobs have: PostgreSQL would scan the partial index on it, dead entries
    # included, where the primary key finds these rows directly
    return at.started_at.is_not(None), at.completed_at.is_(None), at.failed_at.is_(None)


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
    """Return the values of an execution as its statement binds ids and claims."""
    values = execution.values.copy()
    if execution.backend.arrays:
        del values[PAIRS]
        for name in jobs.integer_arrays:
            values[name] = f"{{{','.join(map(str, values[name]))}}}"
    else:
        del values[CLAIMS]
    return values


def _expanded(pairs: list[Any]) -> dict[str, Any]:
    values = owned_values(pairs)
    del values[CLAIMS]
    return values


class Complete(UpdateOwnedJobs):
    #: the number of further batches whose rows are locked first, even where a look at ``xmax`` would do
    locking_batches = 0

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return {at.completed_at: Now(), at.heartbeat_at: null(), at.error: null()}


class Heartbeat(UpdateOwnedJobs):
    """Updates ``heartbeat_at``; skips locked rows, and counts them as far as they are seen to be owned.

    A handler that completes its job in its own transaction locks its row: waiting for it would delay the heartbeat of
    all other jobs.
    """

    skips_locked = True
    # a worker without jobs sends it, too: what delays it delays the heartbeats of all others
    always_locks = True

    def __init__(self, jobs: Jobs, name: str) -> None:
        super().__init__(jobs, name)
        self._claimed = ClaimedJobs(jobs, name)

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return {at.heartbeat_at: Now()}

    def build(self, context: BuildContext) -> Executable | None:
        if not context.backend.writable_ctes:
            return super().build(context)
        at = self.jobs.at(context)
        written = self.update(context).returning(at.internal_id.label("id")).cte("locks_heartbeat")
        is_written = at.internal_id.in_(select(written.c.id)).label("written")
        owned: Executable = where_owned(select(at.internal_id, at.claim, is_written), at, context)
        return owned

    def count(self, execution: Execution) -> int:
        return self.report(execution)[0]

    def report(self, execution: Execution) -> tuple[int, list[Any]]:
        """Send it; return how many of the jobs are owned, and the pairs of those whose rows were locked."""
        statement = self.statement(execution.context)
        if statement is None:
            number, locked = self._update_unlocked(execution)
            claimed = self._claimed.statement(execution.context)
            found: Any = execution.execute(claimed, _expanded(locked)) if claimed is not None and locked else ()
            locked = [(id_, claim) for id_, claim, running in found if running]
            return number + len(locked), locked
        if not execution.backend.writable_ctes:
            return super().count(execution), []
        rows = execution.execute(statement, owned_parameters(execution, self.jobs)).all()
        return len(rows), [tuple(row[:2]) for row in rows if not row[-1]]


class WorkerHeartbeat(Heartbeat):
    """As a worker sends it: its value is what ``report`` returns."""

    def run(self, execution: Execution) -> tuple[int, list[Any]]:
        return self.report(execution)


class ReadByClaim(JobOperation):
    """Reads jobs by their claims."""

    writes = False

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        assert statement is not None
        return execution.execute(statement, owned_parameters(execution, self.jobs))


class ClaimedJobs(ReadByClaim):
    """Reads ids and claims of jobs that run, or ended, under these claims, and whether they run."""

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        running = and_(at.completed_at.is_(None), at.failed_at.is_(None)).label("running")
        claimed: Executable = _where_claimed(
            select(at.internal_id, at.claim, running).where(at.started_at.is_not(None)), at, context
        )
        return claimed


class ReleaseJobs(UpdateOwnedJobs):
    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return {at.started_at: null(), at.heartbeat_at: null(), at.attempts: at.attempts - ONE}


class Fail(UpdateOwnedJobs):
    """Returns jobs to the queue after a pause, or marks them as dead.

    :param pause: ``given`` in seconds, ``doubling`` with each attempt, or ``never`` to be tried again.
    """

    def __init__(self, jobs: Jobs, pause: str) -> None:
        super().__init__(jobs, "Queue.fail")
        self.pause = pause

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        pause: Any = bindparam("locks_pause", type_=Float())
        if self.pause != "given":
            pause = case(
                (at.attempts > DOUBLINGS + 1, LONGEST_RETRY_PAUSE),
                else_=literal(FIRST_PAUSE).op("<<", return_type=Integer())(at.attempts - ONE),
            )
        dead = true() if self.pause == "never" else at.attempts >= at.max_attempts
        error = bindparam("locks_error", type_=at.error.type)
        return {
            **end_attempt(at, dead),
            at.run_at: case((dead, at.run_at), else_=PlusSeconds(Now(), pause)),
            at.error: error,
        }


class RequeueSilent(UpdateOwnedJobs):
    """Requeues jobs, unless a heartbeat has come since the instant that is bound as ``locks_silent_since``."""

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return requeue(at)

    def update(self, context: BuildContext) -> Update:
        heartbeat_at = self.jobs.at(context).heartbeat_at
        return super().update(context).where(heartbeat_at < bindparam("locks_silent_since", type_=Instant()))


class SilentJobs(JobOperation):
    """Reads ids and claims of the running jobs without a heartbeat since an instant, the oldest first.

    :param unlocked: only those whose rows no session has locked. It locks them for a moment itself.
    """

    def __init__(self, jobs: Jobs, name: str, *, unlocked: bool = True) -> None:
        super().__init__(jobs, name)
        self._unlocked = unlocked

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        silent = (
            select(at.internal_id, at.claim)
            .where(
                at.queue_id == bindparam("locks_queue", type_=at.queue_id.type),
                at.heartbeat_at < bindparam("locks_silent_since", type_=Instant()),
                *self.jobs.class_condition(),
            )
            .order_by(at.heartbeat_at)
            .limit(bindparam(LIMIT, type_=Integer(), literal_execute=True))
        )
        locks = self._unlocked and context.backend.writable_ctes
        return silent.with_for_update(skip_locked=True, key_share=True) if locks else silent

    def run(self, execution: Execution) -> list[tuple[Any, Any]]:
        statement = self.statement(execution.context)
        assert statement is not None
        found = [tuple(pair) for pair in execution.execute(statement)]
        backend = execution.backend
        if not found or not self._unlocked or backend.writable_ctes or not backend.row_locks:
            return found
        # a search that locks would lock gaps
        locking = unlocked_by_key(self.jobs.at(execution.context))
        unlocked = {tuple(pair) for pair in execution.execute(locking, {IDS: [id_ for id_, _ in found]})}
        return [pair for pair in found if pair in unlocked]


def requeue(at: RoleColumns) -> dict[Any, Any]:
    """Return what an UPDATE sets on a job whose worker has sent no heartbeat."""
    dead = at.attempts >= at.max_attempts
    error = func.coalesce(at.error, literal("stalled: its worker sent no heartbeat"))
    # NO_CLAIM matches no worker: job.lost becomes true in a handler that still runs
    return {**end_attempt(at, dead), at.error: case((dead, error), else_=at.error), at.claim: NO_CLAIM}


def end_attempt(at: RoleColumns, dead: Any) -> dict[Any, Any]:
    """Return what an UPDATE sets on a job whose attempt has failed; ``dead`` is the condition that it was the last."""
    # no column is read that the same UPDATE changes: MySQL and MariaDB would read its new value
    return {
        at.started_at: case((dead, at.started_at)),
        at.failed_at: case((dead, Now())),
        at.heartbeat_at: null(),
    }


def storable(error: str) -> str:
    """Return the end of an error's text as every engine can store it."""
    # not every engine stores NUL characters or lone surrogates
    stored = error[-LONGEST_ERROR:].replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
    return stored[-LONGEST_ERROR:]  # the replacements are longer than what they replace

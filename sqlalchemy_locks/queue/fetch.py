"""Capturing jobs, and what a worker does for each batch: complete the last one and capture the next.

- *PostgreSQL, YugabyteDB*: one statement, and so one round trip for each batch. The rows that it completes and the rows
  that it captures are disjoint, whatever other sessions do: it captures what was waiting when the statement began, and
  completes what was running. It skips completed rows that another session has locked.
- *MySQL, MariaDB, SQLite*, and a table of the app's with an ``onupdate`` that Python computes: the statements of both,
  in one transaction.

Either both take effect or neither does; if the second statement fails, its jobs stay to be completed. If the reply is
lost, a second execution completes nothing twice (the jobs have a ``completed_at``) and captures other jobs; the worker
finds those that the lost reply named by its host name.

A worker decodes the payload of a job, and columns of the app's own, in the slot that runs it: one that can't be decoded
fails that job alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    JSON,
    Integer,
    Text,
    Update,
    bindparam,
    case,
    cast,
    func,
    literal_column,
    select,
    tuple_,
    type_coerce,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import Executable
from sqlalchemy.types import NullType, TypeDecorator

from sqlalchemy_locks.captures.statements import CaptureSpec, captured_cte, where_keys
from sqlalchemy_locks.core.operation import BuildContext, Execution
from sqlalchemy_locks.core.roles import ONE
from sqlalchemy_locks.queue.acknowledge import Complete, ReadByClaim, owned_parameters, where_owned
from sqlalchemy_locks.queue.jobs import (
    CLAIMS,
    IDS,
    ORDER,
    PAIRS,
    JobCapture,
    JobOperation,
    Jobs,
    draw_job_claim,
    json_as_text,
    stored_type,
)
from sqlalchemy_locks.sql.clock import Now, StatementStart

_OWNED = (PAIRS, IDS, CLAIMS)
_AFTER = tuple(f"locks_after_{role}" for role in ORDER)
#: how many jobs are counted as begun when they are captured: 1 or 0 of each first attempt
AHEAD = "locks_ahead"


class FetchJobs(JobCapture):
    """Captures jobs that are due.

    :param after: capture only jobs after a position in the order, which is bound. Where an index keeps entries of
        captured jobs until no snapshot needs them, the search doesn't read those before that position again.
    """

    def __init__(self, jobs: Jobs, name: str = "Queue.capture", *, after: bool = False) -> None:
        super().__init__(jobs, name)
        self.after = after

    def attempt(self, context: BuildContext) -> dict[Any, Any]:
        """Return what a capture sets of the claim and of the attempts: the attempt counts."""
        at = self.jobs.at(context)
        drawn = bindparam("locks_drawn", type_=at.claim.type, callable_=lambda: draw_job_claim(at.claim, begun=True))
        return {at.claim: drawn, at.attempts: at.attempts + ONE}

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        at = self.jobs.at(context)
        order = [at[role] for role in ORDER]
        after = [bindparam(name, type_=column.type) for name, column in zip(_AFTER, order, strict=True)]
        return CaptureSpec(
            at.table,
            (
                *self.jobs.in_queue(context),
                at.started_at.is_(None),
                at.run_at <= StatementStart(),
                *([tuple_(*order) > tuple_(*after)] if self.after else []),
            ),
            {
                **self.attempt(context),
                at.started_at: Now(),
                at.processing_host: bindparam("locks_host", type_=at.processing_host.type),
                **self.jobs.free_key(at),
            },
            tuple(order),
            self.jobs.target,
            proof=(at.internal_id, at.claim),
        )


def after_values(position: tuple[Any, ...]) -> dict[str, Any]:
    """Return the parameters of a position in the order."""
    return dict(zip(_AFTER, position, strict=True))


class JobsOfHost(JobOperation):
    """Reads the ids and claims of the running jobs that one worker has captured."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        return select(at.internal_id, at.claim).where(
            at.queue_id == bindparam("locks_queue", type_=at.queue_id.type),
            at.processing_host == bindparam("locks_host", type_=at.processing_host.type),
            *self.jobs.running(at),
        )


class ReadOwned(ReadByClaim):
    """Reads the undecoded rows of running jobs that the caller still owns."""

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        columns = undecoded(self.jobs, context, at.table.c)
        reading: Executable = where_owned(select(*columns), at, context)
        return reading


class Fetched(NamedTuple):
    """The result of a fetch."""

    #: the undecoded rows of the jobs that were captured
    jobs: list[Sequence[Any]]
    #: how many of the jobs that were passed to be completed were still owned, not locked, and are completed now
    completed: int


class Fetch(FetchJobs):
    """Completes jobs, skipping rows that another session has locked, and captures others: :class:`Fetched`.

    An attempt counts when its handler begins, and so not by the capture, unless it is told to count first attempts
    that begin at once. The last attempt of a job never counts ahead.
    """

    # MariaDB keeps locks on the rows that a search passes until the transaction ends, and those are other workers' jobs
    fewer = True

    def __init__(self, jobs: Jobs, complete: Complete, *, after: bool = False) -> None:
        super().__init__(jobs, "Queue.fetch", after=after)
        self._complete = complete
        self._capture = cache(lambda context: self._one_statement(context, self.spec(context), None))
        self._read_keys = cache(self._reading_keys)

    def attempt(self, context: BuildContext) -> dict[Any, Any]:
        at = self.jobs.at(context)
        drawn = bindparam("locks_drawn", type_=at.claim.type, callable_=lambda: draw_job_claim(at.claim, begun=False))
        if not context.backend.writable_ctes:
            return {at.claim: drawn}
        first = (at.attempts == literal_column("0")) & (at.max_attempts > ONE)
        ahead = case((first, bindparam(AHEAD, type_=Integer())), else_=literal_column("0"))
        return {at.claim: drawn + ahead, at.attempts: at.attempts + ahead}

    def _statement(self, context: BuildContext, spec: CaptureSpec) -> Executable | None:
        target = self.jobs.target
        # of two UPDATEs in one statement SQLAlchemy computes such values for one
        if not context.backend.writable_ctes or (target is not None and target.draws_updates()):
            return None
        return self._one_statement(context, spec, self._complete.skip_locked.update(context))

    def _one_statement(self, context: BuildContext, spec: CaptureSpec, complete: Update | None) -> Executable:
        captured, order = captured_cte(spec)
        columns = undecoded(self.jobs, context, [captured.c[column.key] for column in spec.table.c])
        if complete is None:
            return select(*columns).order_by(*order)
        completing = complete.returning(ONE.label("one")).cte("locks_completed")
        # always one row, however many jobs are completed or captured
        count = select(func.count().label("completed")).select_from(completing).cte("locks_count")
        rows = select(*columns, count.c.completed)
        return rows.select_from(count.outerjoin(captured, literal_column("true"))).order_by(*order)

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "which completes jobs and captures others one after the other"

    def run(self, execution: Execution) -> Fetched:
        statement = self.statement(execution.context)
        if statement is not None:
            rows = execution.execute(statement, owned_parameters(execution, self.jobs)).all()
            completed: int = rows[0][-1]
            return Fetched([] if rows[0][self.jobs.indexes["internal_id"]] is None else list(rows), completed)
        if execution.backend.autocommit(execution.connection):
            raise execution.refused_autocommit()
        values, completed = execution.values, 0
        if values[IDS]:
            execution.values = {name: values[name] for name in _OWNED}
            completed = self._complete.skip_locked.count(execution)
        execution.values = {name: value for name, value in values.items() if name not in _OWNED}
        if execution.backend.writable_ctes:
            return Fetched(list(execution.execute(self._capture(execution.context))), completed)
        return Fetched(list(super().run(execution)), completed)

    def _run(self, execution: Execution, spec: CaptureSpec) -> Any:
        keys = self._in_steps(execution, spec)
        if not keys:
            return []
        places = {key: number for number, (key,) in enumerate(keys)}
        rows = execution.execute(self._read_keys(execution.context), {"locks_keys": list(places)}).all()
        index = self.jobs.indexes["internal_id"]
        return sorted(rows, key=lambda row: places[row[index]])

    def _reading_keys(self, context: BuildContext) -> Any:
        table = self.jobs.at(context).table
        return select(*undecoded(self.jobs, context, table.c)).where(where_keys(table))


def undecoded(jobs: Jobs, context: BuildContext, columns: Any) -> list[Any]:
    """Return the columns of a table of jobs, those that a slot decodes as the driver gives them."""
    table = jobs.at(context).table
    decoded = _decoded_later(jobs)
    read = []
    for own, column in zip(table.c, columns, strict=True):
        if own.key not in decoded:
            read.append(column)
        elif isinstance(stored_type(own.type), JSON):
            # PostgreSQL's drivers would decode it
            text = cast(column, Text()) if context.backend.writable_ctes else type_coerce(column, Text())
            read.append(text.label(own.key))
        else:
            read.append(type_coerce(column, NullType()).label(own.key))
    return read


def decoders(jobs: Jobs, dialect: Dialect) -> list[tuple[int, Callable[[Any], Any]]]:
    """Return the index and the decoder of each column that a slot decodes."""
    later = _decoded_later(jobs)
    made = [
        (index, _decoder(column.type, dialect))
        for index, column in enumerate(jobs.columns.table.c)
        if column.key in later
    ]
    return [(index, decode) for index, decode in made if decode is not None]


def _decoded_later(jobs: Jobs) -> set[str]:
    """Return the keys of the payload and of the app's own columns."""
    at = jobs.columns
    used = {column.key for role, column in at.roles.items() if role != "payload"}
    # an expression of the server's is part of the SELECT
    return {
        column.key for column in at.table.c if column.key not in used and column.type.column_expression(column) is None
    }


def _decoder(type_: Any, dialect: Dialect) -> Callable[[Any], Any] | None:
    layers = []
    while isinstance(type_, TypeDecorator):
        layers.append(type_)
        type_ = type_.impl_instance
    decode: Callable[[Any], Any] | None = type_.dialect_impl(dialect).result_processor(json_as_text(dialect), None)
    if decode is None and isinstance(type_, JSON):
        # the driver decodes it, unless it is read as a text
        decode = JSON().result_processor(json_as_text(dialect), None)
    if not layers:
        return decode

    def decoded(value: Any) -> Any:
        value = value if decode is None else decode(value)
        for layer in reversed(layers):
            value = layer.process_result_value(value, dialect)
        return value

    return decoded

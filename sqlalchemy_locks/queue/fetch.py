"""Capturing jobs, by an app or by a worker.

A worker decodes the payload of a job, and columns of the app's own, in the slot that runs it: one that can't be decoded
fails that job alone. If the reply to its capture is lost, it finds the captured jobs by its host name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import (
    JSON,
    Integer,
    Text,
    and_,
    bindparam,
    case,
    cast,
    func,
    literal_column,
    select,
    true,
    tuple_,
    type_coerce,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import Executable
from sqlalchemy.types import NullType, TypeDecorator

from sqlalchemy_locks.captures.statements import NUMBER, CaptureSpec, captured_cte
from sqlalchemy_locks.core.operation import BuildContext, Execution
from sqlalchemy_locks.core.roles import ONE
from sqlalchemy_locks.queue.acknowledge import STALLED, Complete, owned_parameters
from sqlalchemy_locks.queue.jobs import (
    BEGUN,
    COUNTED_AHEAD,
    HOST,
    ORDER,
    QUEUE_NAME,
    JobCapture,
    JobOperation,
    Jobs,
    draw_job_claim,
    json_as_text,
    stored_type,
)
from sqlalchemy_locks.sql.clock import Now, StatementStart

#: whether attempts are counted ahead: 1 or 0
AHEAD = "locks_ahead"
_COUNTED: Any = literal_column(str(BEGUN | COUNTED_AHEAD))
_STALLED = f"'{STALLED}'"
#: the position to search from: that of a job in the order
AFTER = tuple(f"locks_after_{role}" for role in ORDER)


class CaptureJobs(JobCapture):
    """Captures jobs that are due; the attempt counts."""

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        return self.capture(context, begun=True, counted=ONE)

    def position(self, context: BuildContext) -> list[Any]:
        """Return the condition that a job comes after a position, or nothing."""
        return []

    def capture(self, context: BuildContext, *, begun: bool, counted: Any = None, **options: Any) -> CaptureSpec:
        """Return what is captured.

        :param begun: the attempt of each job counts, and its claim says so.
        :param counted: 1 for a job whose attempt counts, else 0; ``None``: of no job.
        """
        at = self.jobs.at(context)
        claim: Any = bindparam(
            "locks_drawn", type_=at.claim.type, callable_=partial(draw_job_claim, at.claim, begun=begun)
        )
        return CaptureSpec(
            at.table,
            (
                *self.jobs.in_queue(context),
                at.started_at.is_(None),
                at.run_at <= StatementStart(),
                *self.position(context),
            ),
            {
                **({} if counted is None else {at.attempts: at.attempts + counted}),
                at.claim: claim if counted is None or begun else claim + counted * _COUNTED,
                at.started_at: Now(),
                at.processing_host: bindparam(HOST, type_=at.processing_host.type),
                **self.jobs.free_key(at),
            },
            tuple(at[role] for role in ORDER),
            self.jobs.target,
            proof=(at.internal_id, at.claim),
            **options,
        )


class FetchJobs(CaptureJobs):
    """Captures jobs for a worker, and returns undecoded rows. An attempt counts when its handler begins."""

    # MariaDB keeps locks on the rows that a search passes until the transaction ends, and those are other workers' jobs
    fewer = True

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        read = partial(undecoded, self.jobs, context)
        return self.capture(context, begun=False, counted=self.counted(context), read=read)

    def counted(self, context: BuildContext) -> Any:
        """Return 1 for a job whose attempt counts with its capture, else 0; ``None``: of no job."""
        return None


class CompleteAndFetch(FetchJobs):
    """Completes jobs, skipping rows that another session has locked, and captures others, in one statement.

    With ``writable_ctes``, and for the shipped table. Attempts of handlers that begin at once may be counted with it,
    except last ones, and those that follow the death of a worker.

    :param limit: how many it captures at most; by default that is bound.
    :param after: capture only jobs after a position, which is bound. The index keeps entries of captured jobs while
        another session has an old snapshot, and this search doesn't read those before the position.
    """

    def __init__(self, jobs: Jobs, name: str, complete: Complete, limit: int | None, *, after: bool) -> None:
        super().__init__(jobs, name)
        self._complete, self._limit, self._after = complete.skip_locked, limit, after

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        return replace(super().build_spec(context), limit=self._limit)

    def position(self, context: BuildContext) -> list[Any]:
        at = self.jobs.at(context)
        after = tuple_(*(bindparam(name, type_=at[role].type) for name, role in zip(AFTER, ORDER, strict=True)))
        return [tuple_(*(at[role] for role in ORDER)) > after] if self._after else []

    def counted(self, context: BuildContext) -> Any:
        at = self.jobs.at(context)
        harmless = and_(at.attempts + ONE < at.max_attempts, at.error.is_distinct_from(literal_column(_STALLED)))
        return case((harmless, bindparam(AHEAD, type_=Integer())), else_=literal_column("0"))

    def _statement(self, context: BuildContext, spec: CaptureSpec, /) -> Executable:
        captured = captured_cte(spec)
        completed = self._complete.update(context).returning(ONE.label("one")).cte("locks_completed")
        # always one row, however many jobs are completed or captured
        count = select(func.count().label("completed")).select_from(completed).cte("locks_count")
        columns = spec.read([captured.c[column.name] for column in spec.table.c])
        rows = select(*columns, count.c.completed).select_from(count.outerjoin(captured, true()))
        return rows.order_by(captured.c[NUMBER])

    def run(self, execution: Execution) -> tuple[list[Any], int]:
        """Return the captured rows, and how many jobs were completed."""
        statement = self.statement(execution.context)
        assert statement is not None
        rows: Any = execution.execute(statement, owned_parameters(execution)).all()
        number = rows[0][-1]
        return ([] if rows[0][self.jobs.keys["internal_id"]] is None else rows), number


class JobsOfHost(JobOperation):
    """Reads the ids and claims of the running jobs that one worker has captured."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        return select(at.internal_id, at.claim).where(
            at.queue_id == bindparam(QUEUE_NAME, type_=at.queue_id.type),
            at.processing_host == bindparam(HOST, type_=at.processing_host.type),
            *self.jobs.running(at),
        )


def undecoded(jobs: Jobs, context: BuildContext, columns: Any) -> list[Any]:
    """Return the columns that a worker reads, those that a slot decodes as the driver gives them."""
    table = jobs.at(context).table
    decoded = _decoded_later(jobs)
    read = []
    for own, column in zip(table.c, columns, strict=True):
        if own.key not in jobs.fetched:
            continue
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
        (index, _decoder(jobs.columns.table.c[key].type, dialect)) for key, index in jobs.keys.items() if key in later
    ]
    return [(index, decode) for index, decode in made if decode is not None]


def _decoded_later(jobs: Jobs) -> set[str]:
    """Return the keys of the payload and of the app's own columns."""
    at = jobs.columns
    used = set(at.roles) - {"payload"}
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
        json_type: Any = JSON()
        decode = json_type.result_processor(json_as_text(dialect), None)
    if not layers:
        return decode

    def decoded(value: Any) -> Any:
        value = value if decode is None else decode(value)
        for layer in reversed(layers):
            value = layer.process_result_value(value, dialect)
        return value

    return decoded

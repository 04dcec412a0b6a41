"""Capturing jobs, by an app or by a worker.

A worker decodes the payload of a job, and columns of the app's own, in the slot that runs the job: a value that can't
be decoded fails that job alone. If the reply to a capture is lost, the worker finds the captured jobs by its host name.
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
        """Return the description of the capture.

        :param begun: the attempt of each job counts, and its claim says so.
        :param counted: 1 for a job whose attempt counts, else 0; ``None``: no attempt counts.
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

    # Another search would lock more jobs of other workers: MariaDB keeps all rows that a search passes locked until the
    # transaction ends.
    fewer = True

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        read = partial(undecoded, self.jobs, context)
        return self.capture(context, begun=False, counted=self.counted(context), read=read)

    def counted(self, context: BuildContext) -> Any:
        """Return 1 for a job whose attempt counts with its capture, else 0; ``None``: no attempt counts."""
        return None


class CompleteAndFetch(FetchJobs):
    """Completes jobs, skipping rows that another session has locked, and captures others, in one statement.

    Only with ``writable_ctes``, and for the shipped table. The statement may also count the attempts of handlers that
    begin at once, but neither last attempts nor those that follow the death of a worker.

    :param limit: how many jobs are captured at most; ``None``: the bound number.
    :param after: capture only jobs after a bound position. While another session has an old snapshot, the index keeps
        the entries of captured jobs; this search doesn't read those before the position.
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
        rows: Any = execution.execute(statement, owned_parameters(execution, self.jobs)).all()
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
    """Return the columns that a worker reads. Those that a slot decodes are read as the driver returns them."""
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
    keys = _decoded_later(jobs)
    pairs = [
        (index, _decoder(jobs.columns.table.c[key].type, dialect)) for key, index in jobs.keys.items() if key in keys
    ]
    return [(index, decode) for index, decode in pairs if decode is not None]


def _decoded_later(jobs: Jobs) -> set[str]:
    """Return the keys of the payload and of the app's own columns."""
    at = jobs.columns
    used = set(at.roles) - {"payload"}
    # the server converts a column whose type has a column_expression
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
        # the type leaves that to the driver, which decodes nothing here: the column is read as text
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

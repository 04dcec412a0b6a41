"""Capturing jobs, and what a worker does for each batch: complete the last one and capture the next.

- *PostgreSQL, YugabyteDB*: one statement, and so one round trip for each batch. The rows that it completes and the rows
  that it captures are disjoint, whatever other sessions do: it captures what was waiting when the statement began, and
  completes what was running. It skips completed rows that another session has locked. On PostgreSQL it skips those that
  seem to be, and completes them by a second statement: locking each row to find out takes 7 % of a batch of 100.
- *MySQL, MariaDB, SQLite*, and a table of the app's with an ``onupdate`` that Python computes: the statements of both,
  in one transaction.

Either both take effect or neither does; if the second statement fails, its jobs stay to be completed. If the reply is
lost, a second execution completes nothing twice (the jobs have a ``completed_at``) and captures other jobs; those that
the lost reply named stall, unless the worker finds them by its host name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import JSON, Column, Row, Text, Update, bindparam, cast, func, literal_column, select, tuple_
from sqlalchemy.engine import Dialect, IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql import Executable

from sqlalchemy_locks.captures.claims import draw_claim, drawn_claim
from sqlalchemy_locks.captures.statements import LIMIT, CaptureSpec, captured_cte
from sqlalchemy_locks.core.operation import BuildContext, Execution
from sqlalchemy_locks.core.roles import ONE
from sqlalchemy_locks.queue.acknowledge import Complete, ReadByClaim, owned_parameters, where_owned
from sqlalchemy_locks.queue.jobs import CLAIMS, IDS, ORDER, PAIRS, JobCapture, JobOperation, Jobs
from sqlalchemy_locks.sql.clock import Now, StatementStart

_OWNED = (PAIRS, IDS, CLAIMS)
_AFTER = tuple(f"locks_after_{role}" for role in ORDER)


class FetchJobs(JobCapture):
    """Captures jobs that are due.

    :param after: capture only jobs after a position in the order, which is bound. Where an index keeps entries of
        captured jobs until no snapshot needs them, the search doesn't read those before that position again.
    """

    def __init__(self, jobs: Jobs, name: str = "Queue.capture", *, after: bool = False) -> None:
        super().__init__(jobs, name)
        self.after = after

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
                at.claim: drawn_claim(at.claim),
                at.attempts: at.attempts + ONE,
                at.started_at: Now(),
                at.heartbeat_at: Now(),
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


class CountingCapture(FetchJobs):
    """Captures jobs and returns only how many, for a worker that can't decode one of them; :class:`JobsOfHost` finds
    them.
    """

    counts = True


class JobsOfHost(JobOperation):
    """Reads the ids and claims of the running jobs that one worker has captured."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        return select(at.internal_id, at.claim).where(
            at.queue_id == bindparam("locks_queue", type_=at.queue_id.type),
            at.processing_host == bindparam("locks_host", type_=at.processing_host.type),
            at.heartbeat_at.is_not(None),
            *self.jobs.class_condition(),
        )


class ReadOwned(ReadByClaim):
    """Reads the rows of running jobs that the caller still owns."""

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        reading: Executable = where_owned(select(*at.table.c), at, context)
        return reading


class Fetched(NamedTuple):
    """The result of a fetch."""

    #: rows of the jobs that were captured
    jobs: list[Row[Any]]
    #: how many of the jobs that were passed to be completed were still owned, not locked, and are completed now
    completed: int


# xmax is the last transaction that locked this version of the row, or a number of several, and stays when they have
# ended; a statement that locks and then changes a row is also the xmin of the new version. A lock that is taken in the
# microsecond between this look and the UPDATE is waited for; a row that was changed meanwhile isn't completed, since
# PostgreSQL looks again at the new version, which it has locked.
_NEVER_LOCKED: Any = literal_column("(xmax = '0' OR xmax = xmin)")
#: how many batches lock their rows after one that had some it couldn't complete so: where handlers insert rows that
#: refer to their job by a foreign key, or complete it themselves, those of the next batches will be the same
_LOCKING_BATCHES = 100


class _DirectFetch(NamedTuple):
    """A fetch by the driver's own cursor: its statement, and how the rows of jobs are made of what it returns."""

    #: returns the id first, and then the payload and the number of completed jobs last
    statement: Executable
    #: puts what was read, and what is known, in the order of the table's columns
    arrange: Callable[[Any], tuple[Any, ...]]
    #: the columns that are empty in a job that is captured
    nulls: tuple[None, ...]
    metadata: SimpleResultMetaData


class Fetch(FetchJobs):
    """Completes jobs, skipping rows that another session has locked, and captures others: :class:`Fetched`."""

    # MariaDB keeps locks on the rows that a search passes until the transaction ends, and those are other workers' jobs
    fewer = True

    def __init__(self, jobs: Jobs, complete: Complete, *, after: bool = False) -> None:
        super().__init__(jobs, "Queue.fetch", after=after)
        self._complete = complete
        self._native: WeakKeyDictionary[Dialect, bool] = WeakKeyDictionary()
        self._direct: dict[tuple[BuildContext, int, bool], _DirectFetch] = {}
        self._capture = cache(lambda context: self.single_statement(self.spec(context)))

    def _statement(self, context: BuildContext, spec: CaptureSpec) -> Executable | None:
        target = self.jobs.target
        # of two UPDATEs in one statement SQLAlchemy computes such values for one
        if not context.backend.writable_ctes or (target is not None and target.draws_updates()):
            return None
        return self._one_statement(spec, list(spec.table.c), self._complete.skip_locked.update(context))

    def _one_statement(
        self, spec: CaptureSpec, read: Sequence[Column[Any]], complete: Update, as_text: Column[Any] | None = None
    ) -> Executable:
        completing = complete.returning(ONE.label("one")).cte("locks_completed")
        # always one row, however many jobs are completed or captured
        count = select(func.count().label("completed")).select_from(completing).cte("locks_count")
        captured, order = captured_cte(spec, read)
        rows = select(
            *(cast(captured.c[each.key], Text) if each is as_text else captured.c[each.key] for each in read),
            count.c.completed,
        )
        return rows.select_from(count.outerjoin(captured, literal_column("true"))).order_by(*order)

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "which completes jobs and captures others one after the other"

    def run(self, execution: Execution) -> Fetched:
        statement = self.statement(execution.context)
        if statement is None:
            if execution.backend.autocommit(execution.connection):
                raise execution.backend.refuse_autocommit(self.name)
            return self._in_two_steps(execution)
        if self._reads_natively(execution.context, execution.connection.dialect):
            return self._by_cursor(execution)
        columns = list(self.jobs.columns.table.c)
        found = execution.execute(statement, owned_parameters(execution, self.jobs)).freeze()
        first = found.data[0]
        if first[columns.index(self.jobs.columns.internal_id)] is None:
            return Fetched([], first[-1])
        return Fetched(list(found().columns(*range(len(columns)))), first[-1])

    def _reads_natively(self, context: BuildContext, dialect: Dialect) -> bool:
        """Whether SQLAlchemy would change nothing of what the driver takes and returns, except the payload."""
        if dialect not in self._native:
            at = self.jobs.at(context)
            bound = [at.roles[role].type for role in ("internal_id", "claim", "queue_id", "processing_host", *ORDER)]
            read = [column.type for column in at.table.c if column is not at.payload]
            # the condition on a subclass is a list, which SQLAlchemy writes out at each execution
            self._native[dialect] = isinstance(at.payload.type, JSON) and not (
                self.jobs.class_condition()
                or any(type_.dialect_impl(dialect).bind_processor(dialect) for type_ in bound)
                or any(type_.dialect_impl(dialect).result_processor(dialect, None) for type_ in read)
            )
        return self._native[dialect]

    def _by_cursor(self, execution: Execution) -> Fetched:
        """Run it by the driver's own cursor, and parse all payloads together: reading rows is most of the cost."""
        values = {**owned_parameters(execution, self.jobs), "locks_drawn": draw_claim(self.jobs.columns.claim)}
        limit = values.pop(LIMIT)
        complete = self._complete
        looks = execution.backend.shows_row_locks(execution.connection) and not complete.locking_batches
        complete.locking_batches = max(0, complete.locking_batches - 1)
        direct = self._direct_fetch(execution.context, limit, looks)
        found = execution.by_cursor(direct.statement, values, _fetch_all)
        completed = found[0][-1]
        if looks and completed < len(execution.values[IDS]):
            completed += self._complete_unlocked(execution)
            complete.locking_batches = _LOCKING_BATCHES
        if found[0][0] is None:
            return Fetched([], completed)
        known = (values["locks_queue"], values["locks_host"], *direct.nulls)
        payloads = _parsed([row[-2] for row in found], execution.connection.dialect)
        arrange = direct.arrange
        jobs = [arrange((*row[:-2], payload, *known)) for row, payload in zip(found, payloads, strict=True)]
        return Fetched(list(IteratorResult(direct.metadata, iter(jobs))), completed)

    def _complete_unlocked(self, execution: Execution) -> int:
        execution.values = {name: execution.values[name] for name in _OWNED}
        number: int = self._complete.skip_locked.count(execution)
        return number

    def _direct_fetch(self, context: BuildContext, limit: int, looks: bool) -> _DirectFetch:
        """Return a statement; ``looks``: it completes no row that seems to be locked, instead of locking them first."""
        if (made := self._direct.get((context, limit, looks))) is not None:
            return made
        spec, at = replace(self.build_spec(context), limit=limit), self.jobs.at(context)
        if looks:
            complete = self._complete.update(context).where(_NEVER_LOCKED)
        else:
            complete = self._complete.skip_locked.update(context)
        columns = list(spec.table.c)
        # what is known of a job that is captured isn't read: that is a tenth of a batch's time
        nulls = [at.roles[role] for role in ("completed_at", "failed_at", "unique_key") if role in at]
        known = [at.queue_id, at.processing_host, *nulls]
        others = [each for each in columns if each not in {at.internal_id, at.payload, at.heartbeat_at, *known}]
        read = [at.internal_id, *others, at.payload]
        arranged = [*read, *known]
        # the first heartbeat is the capture itself
        place = {each: number for number, each in enumerate(arranged)}
        place[at.heartbeat_at] = place[at.started_at]
        made = self._direct[context, limit, looks] = _DirectFetch(
            self._one_statement(spec, read, complete, at.payload),
            itemgetter(*(place[each] for each in columns)),
            (None,) * len(nulls),
            SimpleResultMetaData([str(column.key) for column in columns]),
        )
        return made

    def _in_two_steps(self, execution: Execution) -> Fetched:
        given, completed = execution.values, 0
        if given[IDS]:
            completed = self._complete_unlocked(execution)
        execution.values = {name: value for name, value in given.items() if name not in _OWNED}
        if execution.backend.writable_ctes:
            return Fetched(list(execution.execute(self._capture(execution.context))), completed)
        return Fetched(list(super().run(execution)), completed)


def _fetch_all(cursor: Any) -> list[Any]:
    rows = list(cursor.fetchall())
    cursor.close()  # one that is kept for the next statement would keep the payloads
    return rows


def _parsed(texts: list[str | None], dialect: Any) -> list[Any]:
    """Parse JSON texts, or NULL: as one document, unless the engine was given a function of its own."""
    loads = getattr(dialect, "_json_deserializer", None)
    if loads is not None:
        return [None if each is None else loads(each) for each in texts]
    parsed: list[Any] = json.loads(f"[{','.join('null' if each is None else each for each in texts)}]")
    return parsed

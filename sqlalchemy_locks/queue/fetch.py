"""Taking jobs, and what a worker does each time: it says what is done, and takes others, as one act.

- *PostgreSQL, YugabyteDB*: one statement, and so one round trip for each batch. What it ends and what it takes are
  different rows, whatever others do meanwhile: what it takes was waiting when the statement began, what it ends ran.
- *MySQL, MariaDB, SQLite*: the statements of both, in one transaction.

Either both have come into effect or neither has. If the answer is lost, the same again ends nothing a second time (the
claims' instants say so), and takes other jobs: those that nobody was told of stall, and come back.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import JSON, Column, Row, Text, bindparam, cast, func, literal_column, select, tuple_
from sqlalchemy.engine import Dialect, IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql import Executable

from sqlalchemy_locks.captures.operation import CaptureImpl
from sqlalchemy_locks.captures.statements import LIMIT, CaptureSpec, captured_cte
from sqlalchemy_locks.core.operation import BuildContext, Execution
from sqlalchemy_locks.core.roles import ONE
from sqlalchemy_locks.queue.acknowledge import Complete, needed
from sqlalchemy_locks.queue.jobs import ORDER, Jobs, OnJobs
from sqlalchemy_locks.sql.clock import Began, Now

_SETTLED = ("locks_pairs", "locks_ids", "locks_claims")
_AFTER = tuple(f"locks_after_{role}" for role in ORDER)


class FetchJobs(CaptureImpl):
    """Captures jobs that are due.

    :param goes_on: only those that come after a place in the order, which is bound. Where an index keeps entries of
        what is waiting no more, until no snapshot needs them, those before that place are not gone through again.
    """

    def __init__(self, jobs: Jobs, name: str = "Queue.capture", *, goes_on: bool = False) -> None:
        super().__init__(name)
        self.jobs, self.goes_on = jobs, goes_on
        self.needs_installation = jobs.target is None

    def taken(self, context: BuildContext) -> CaptureSpec:
        at = self.jobs.at(context)
        order = [at[role] for role in ORDER]
        after = [bindparam(name, type_=column.type) for name, column in zip(_AFTER, order, strict=True)]
        return CaptureSpec(
            at.table,
            (
                at.queue_id == bindparam("locks_queue", type_=at.queue_id.type),
                at.started_at.is_(None),
                at.run_at <= Began(),
                *([tuple_(*order) > tuple_(*after)] if self.goes_on else []),
            ),
            {
                at.claim: at.claim + ONE,
                at.attempts: at.attempts + ONE,
                at.started_at: Now(),
                at.heartbeat_at: Now(),
                at.processing_host: bindparam("locks_host", type_=at.processing_host.type),
            },
            tuple(order),
            self.jobs.target,
            proof=(at.internal_id, at.claim),
            steady=True,
        )

    def route(self) -> dict[str, Any]:
        return self.jobs.route()


def position(given: tuple[Any, ...]) -> dict[str, Any]:
    """The values that tell a place in the order."""
    return dict(zip(_AFTER, given, strict=True))


class HeldJobs(OnJobs):
    """The running jobs that one worker has captured."""

    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        return select(at.table).where(
            at.queue_id == bindparam("locks_queue", type_=at.queue_id.type),
            at.processing_host == bindparam("locks_host", type_=at.processing_host.type),
            at.heartbeat_at.is_not(None),
        )


class Fetched(NamedTuple):
    """What a worker is told."""

    #: rows of the jobs that it has now
    jobs: list[Row[Any]]
    #: how many of those that it said were done were still its own
    ended: int


class Fetch(FetchJobs):
    """Completes jobs, as far as nobody else holds them, and captures others: :class:`Fetched`."""

    # MariaDB keeps the locks of what it has passed by until the transaction ends, and those are jobs of other workers
    fewer = True

    def __init__(self, jobs: Jobs, complete: Complete, *, goes_on: bool = False) -> None:
        super().__init__(jobs, "Queue.exchange", goes_on=goes_on)
        self._complete = complete
        self._known: WeakKeyDictionary[Dialect, bool] = WeakKeyDictionary()
        self._direct: dict[tuple[BuildContext, int], tuple[Executable, int, SimpleResultMetaData]] = {}

    def _statement(self, context: BuildContext, taking: CaptureSpec) -> Executable | None:
        if context.backend.locking != "functions":
            return None
        return self._both_at_once(context, taking)

    def _both_at_once(self, context: BuildContext, taking: CaptureSpec, spelt: Column[Any] | None = None) -> Executable:
        done = self._complete.changing(context).returning(ONE.label("one")).cte("locks_done")
        # one row, whatever was ended and whatever is taken
        told = select(func.count().label("ended")).select_from(done).cte("locks_told")
        taken, order = captured_cte(taking)
        rows = select(
            *(cast(taken.c[each.key], Text) if each is spelt else taken.c[each.key] for each in taking.table.c),
            told.c.ended,
        )
        return rows.select_from(told.outerjoin(taken, literal_column("true"))).order_by(*order)

    def because(self, context: BuildContext) -> str:
        return "which ends jobs and takes others one after the other"

    def run(self, execution: Execution) -> Fetched:
        statement = self.statement(execution.context)
        return self._both(execution) if statement is None else self._fused(execution, statement)

    def _fused(self, execution: Execution, statement: Executable) -> Fetched:
        if self._plain(execution.context, execution.connection.dialect):
            return self._by_cursor(execution)
        at = self.jobs.at(execution.context)
        columns = list(at.table.c)
        found = execution.execute(statement, needed(execution, at)).freeze()
        first = found.data[0]
        if first[columns.index(at.internal_id)] is None:
            return Fetched([], first[-1])
        return Fetched(list(found().columns(*range(len(columns)))), first[-1])

    def _plain(self, context: BuildContext, dialect: Dialect) -> bool:
        """Whether what the driver takes and gives is what SQLAlchemy would make of it, but for the payload."""
        if dialect not in self._known:
            at = self.jobs.at(context)
            given = [at.roles[role].type for role in ("internal_id", "claim", "queue_id", "processing_host", *ORDER)]
            read = [column.type for column in at.table.c if column is not at.payload]
            self._known[dialect] = isinstance(at.payload.type, JSON) and not (
                any(_impl(type_, dialect).bind_processor(dialect) for type_ in given)
                or any(_impl(type_, dialect).result_processor(dialect, None) for type_ in read)
            )
        return self._known[dialect]

    def _by_cursor(self, execution: Execution) -> Fetched:
        """By the driver's own cursor, and all payloads at once: to read a job is most of what it costs here."""
        limit = execution.values[LIMIT]
        if (execution.context, limit) not in self._direct:
            taking = replace(self.taken(execution.context), limit=limit)
            payload = self.jobs.at(execution.context).payload
            columns = list(taking.table.c)
            statement = self._both_at_once(execution.context, taking, payload)
            shape = SimpleResultMetaData([str(column.key) for column in columns])
            self._direct[execution.context, limit] = statement, columns.index(payload), shape
        statement, context, shape = self._direct[execution.context, limit]
        values = {
            name: value for name, value in needed(execution, self.jobs.at(execution.context)).items() if name != LIMIT
        }
        found = execution.by_cursor(statement, values, _all)
        *_, ended = found[0]
        if found[0][context] is None:
            return Fetched([], ended)
        payloads = _loaded([row[context] for row in found], execution.connection.dialect)
        after = context + 1
        jobs = [(*row[:context], payload, *row[after:-1]) for row, payload in zip(found, payloads, strict=True)]
        return Fetched(list(IteratorResult(shape, iter(jobs))), ended)

    def _both(self, execution: Execution) -> Fetched:
        given, ended = execution.values, 0
        if given["locks_ids"]:
            execution.values = {name: given[name] for name in _SETTLED}
            ended = self._complete.run(execution)
        execution.values = {name: value for name, value in given.items() if name not in _SETTLED}
        return Fetched(list(super().run(execution)), ended)


def _impl(type_: Any, dialect: Dialect) -> Any:
    return type_.dialect_impl(dialect)


def _all(cursor: Any) -> list[Any]:
    return list(cursor.fetchall())


def _loaded(texts: list[str], dialect: Any) -> list[Any]:
    """What JSON texts say: at once, unless the engine has a function of its own for that."""
    loads = getattr(dialect, "_json_deserializer", None)
    if loads is not None:
        return [loads(each) for each in texts]
    loaded: list[Any] = json.loads(f"[{','.join(texts)}]")
    return loaded

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

from sqlalchemy_locks.captures.operation import Capture
from sqlalchemy_locks.captures.statements import LIMIT, Taking, captured_cte
from sqlalchemy_locks.core.operation import Place, Run
from sqlalchemy_locks.core.roles import ONE
from sqlalchemy_locks.queue.acknowledge import Complete, needed
from sqlalchemy_locks.queue.jobs import ORDER, Jobs, OnJobs
from sqlalchemy_locks.sql.clock import Began, Now

_SETTLED = ("locks_pairs", "locks_ids", "locks_claims")
_AFTER = tuple(f"locks_after_{role}" for role in ORDER)


class Take(Capture):
    """Captures jobs that are due.

    :param goes_on: only those that come after a place in the order, which is bound. Where an index keeps entries of
        what is waiting no more, until no snapshot needs them, those before that place are not gone through again.
    """

    def __init__(self, jobs: Jobs, name: str = "Queue.capture", *, goes_on: bool = False) -> None:
        super().__init__(name)
        self.jobs, self.goes_on = jobs, goes_on
        self.needs_installation = jobs.target is None

    def taken(self, place: Place) -> Taking:
        at = self.jobs.at(place)
        order = [at[role] for role in ORDER]
        after = [bindparam(name, type_=column.type) for name, column in zip(_AFTER, order, strict=True)]
        return Taking(
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


class Held(OnJobs):
    """The running jobs that one worker has captured."""

    writes = False

    def build(self, place: Place) -> Executable | None:
        at = self.jobs.at(place)
        return select(at.table).where(
            at.queue_id == bindparam("locks_queue", type_=at.queue_id.type),
            at.processing_host == bindparam("locks_host", type_=at.processing_host.type),
            at.heartbeat_at.is_not(None),
        )


class Exchanged(NamedTuple):
    """What a worker is told."""

    #: rows of the jobs that it has now
    jobs: list[Row[Any]]
    #: how many of those that it said were done were still its own
    ended: int


class Exchange(Take):
    """Completes jobs, as far as nobody else holds them, and captures others: :class:`Exchanged`."""

    # MariaDB keeps the locks of what it has passed by until the transaction ends, and those are jobs of other workers
    fewer = True

    def __init__(self, jobs: Jobs, complete: Complete, *, goes_on: bool = False) -> None:
        super().__init__(jobs, "Queue.exchange", goes_on=goes_on)
        self._complete = complete
        self._known: WeakKeyDictionary[Dialect, bool] = WeakKeyDictionary()
        self._direct: dict[tuple[Place, int], tuple[Executable, int, SimpleResultMetaData]] = {}

    def _statement(self, place: Place, taking: Taking) -> Executable | None:
        if place.engine.locking != "functions":
            return None
        return self._both_at_once(place, taking)

    def _both_at_once(self, place: Place, taking: Taking, spelt: Column[Any] | None = None) -> Executable:
        done = self._complete.changing(place).returning(ONE.label("one")).cte("locks_done")
        # one row, whatever was ended and whatever is taken
        told = select(func.count().label("ended")).select_from(done).cte("locks_told")
        taken, order = captured_cte(taking)
        rows = select(
            *(cast(taken.c[each.key], Text) if each is spelt else taken.c[each.key] for each in taking.table.c),
            told.c.ended,
        )
        return rows.select_from(told.outerjoin(taken, literal_column("true"))).order_by(*order)

    def because(self, place: Place) -> str:
        return "which ends jobs and takes others one after the other"

    def run(self, run: Run) -> Exchanged:
        statement = self.statement(run.place)
        return self._both(run) if statement is None else self._fused(run, statement)

    def _fused(self, run: Run, statement: Executable) -> Exchanged:
        if self._plain(run.place, run.connection.dialect):
            return self._by_cursor(run)
        at = self.jobs.at(run.place)
        columns = list(at.table.c)
        found = run.execute(statement, needed(run, at)).freeze()
        first = found.data[0]
        if first[columns.index(at.internal_id)] is None:
            return Exchanged([], first[-1])
        return Exchanged(list(found().columns(*range(len(columns)))), first[-1])

    def _plain(self, place: Place, dialect: Dialect) -> bool:
        """Whether what the driver takes and gives is what SQLAlchemy would make of it, but for the payload."""
        if dialect not in self._known:
            at = self.jobs.at(place)
            given = [at.roles[role].type for role in ("internal_id", "claim", "queue_id", "processing_host", *ORDER)]
            read = [column.type for column in at.table.c if column is not at.payload]
            self._known[dialect] = isinstance(at.payload.type, JSON) and not (
                any(_impl(type_, dialect).bind_processor(dialect) for type_ in given)
                or any(_impl(type_, dialect).result_processor(dialect, None) for type_ in read)
            )
        return self._known[dialect]

    def _by_cursor(self, run: Run) -> Exchanged:
        """By the driver's own cursor, and all payloads at once: to read a job is most of what it costs here."""
        limit = run.values[LIMIT]
        if (run.place, limit) not in self._direct:
            taking = replace(self.taken(run.place), limit=limit)
            payload = self.jobs.at(run.place).payload
            columns = list(taking.table.c)
            statement = self._both_at_once(run.place, taking, payload)
            shape = SimpleResultMetaData([str(column.key) for column in columns])
            self._direct[run.place, limit] = statement, columns.index(payload), shape
        statement, place, shape = self._direct[run.place, limit]
        values = {name: value for name, value in needed(run, self.jobs.at(run.place)).items() if name != LIMIT}
        found = run.by_cursor(statement, values, _all)
        *_, ended = found[0]
        if found[0][place] is None:
            return Exchanged([], ended)
        payloads = _loaded([row[place] for row in found], run.connection.dialect)
        after = place + 1
        jobs = [(*row[:place], payload, *row[after:-1]) for row, payload in zip(found, payloads, strict=True)]
        return Exchanged(list(IteratorResult(shape, iter(jobs))), ended)

    def _both(self, run: Run) -> Exchanged:
        given, ended = run.values, 0
        if given["locks_ids"]:
            run.values = {name: given[name] for name in _SETTLED}
            ended = self._complete.run(run)
        run.values = {name: value for name, value in given.items() if name not in _SETTLED}
        return Exchanged(list(super().run(run)), ended)


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

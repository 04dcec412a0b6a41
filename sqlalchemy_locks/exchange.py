"""Taking jobs, and what a worker does each time: it says what is done, and takes others, as one act.

- *PostgreSQL, YugabyteDB*: one statement, and so one round trip for each batch. What it ends and what it takes are
  different rows, whatever others do meanwhile: what it takes was waiting when the statement began, what it ends ran.
- *MySQL, MariaDB, SQLite*: the statements of both, in one transaction.

Either both have come into effect or neither has. If the answer is lost, the same again ends nothing a second time (the
claims' instants say so), and takes other jobs: those that nobody was told of stall, and come back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import Row, bindparam, func, literal_column, select, tuple_
from sqlalchemy.sql import Executable

from .capturing import Capture
from .clock import Ago, Now
from .jobs import ORDER, Jobs, OnJobs
from .operation import Place, Run
from .roles import ONE
from .settling import Complete, needed
from .taking import NUMBER, Taking, captured_cte

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
                at.run_at <= Ago(literal_column("0")),
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
        )

    def route(self) -> dict[str, Any]:
        return self.jobs.route()


def position(given: tuple[Any, ...]) -> dict[str, Any]:
    """The values that tell a place in the order."""
    return dict(zip(_AFTER, given, strict=True))


class Held(OnJobs):
    """The running jobs that one worker has captured."""

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
    """Completes jobs and captures others: :class:`Exchanged`."""

    def __init__(self, jobs: Jobs, complete: Complete, *, goes_on: bool = False) -> None:
        super().__init__(jobs, "Queue.exchange", goes_on=goes_on)
        self._complete = complete

    def _statement(self, place: Place, taking: Taking) -> Executable | None:
        if place.engine.locking != "functions":
            return None
        done = self._complete.changing(place).returning(ONE.label("one")).cte("locks_done")
        # one row, whatever was ended and whatever is taken
        told = select(func.count().label("ended")).select_from(done).cte("locks_told")
        taken = captured_cte(taking)
        rows = select(*(taken.c[column.key] for column in taking.table.c), told.c.ended)
        return rows.select_from(told.outerjoin(taken, literal_column("true"))).order_by(taken.c[NUMBER])

    def because(self, place: Place) -> str:
        return "which ends jobs and takes others one after the other"

    def run(self, run: Run) -> Exchanged:
        statement = self.statement(run.place)
        return self._both(run) if statement is None else self._fused(run, statement)

    def _fused(self, run: Run, statement: Executable) -> Exchanged:
        at = self.jobs.at(run.place)
        columns = list(at.table.c)
        found = run.execute(statement, needed(run)).freeze()
        first = found.data[0]
        if first[columns.index(at.internal_id)] is None:
            return Exchanged([], first[-1])
        return Exchanged(list(found().columns(*range(len(columns)))), first[-1])

    def _both(self, run: Run) -> Exchanged:
        given, ended = run.values, 0
        if given["locks_ids"]:
            run.values = {name: given[name] for name in _SETTLED}
            ended = self._complete.run(run)
        run.values = {name: value for name, value in given.items() if name not in _SETTLED}
        return Exchanged(list(super().run(run)), ended)

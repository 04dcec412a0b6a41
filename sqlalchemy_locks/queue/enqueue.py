"""Putting jobs: a batch in one statement, each job once, in the caller's transaction; ``queue.py`` has the name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

from sqlalchemy import (
    CTE,
    Float,
    bindparam,
    cast,
    column,
    func,
    literal,
    literal_column,
    select,
)
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import bounded_seconds, int32, positive_int, valid_name
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation
from sqlalchemy_locks.core.roles import RoleColumns
from sqlalchemy_locks.queue.jobs import Jobs, OnJobs
from sqlalchemy_locks.sql.clock import Instant, Later, Now
from sqlalchemy_locks.sql.elements import Notify, TakeRow
from sqlalchemy_locks.sql.tables import Payload


class Enqueue(OnJobs):
    """Inserts a batch; what has an ``external_id`` that is there already is left out.

    :param known: some ``external_id`` may be there already. They are looked for first: an INSERT alone would wait for
        whoever is working on that job, to learn that it is there.
    :param at: where ``run_at`` comes from: ``now``, an instant that is bound (``at``) or seconds (``in``).
    """

    def __init__(self, jobs: Jobs, at: str, *, known: bool, notify: bool) -> None:
        super().__init__(jobs, "Queue.put")
        self.when, self.known, self.notify = at, known, notify
        self._rows: dict[BuildContext, Any] = {}

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True

    def build(self, context: BuildContext) -> Executable | None:
        if context.backend.locking != "functions":
            return None
        at = self.jobs.at(context)
        given: Any = func.jsonb_array_elements(cast(bindparam("locks_jobs", type_=Payload()), Payload()))
        each = given.table_valued(column("job", Payload()), with_ordinality="number").render_derived(name="locks_jobs")
        external_id = cast(each.c.job.op("->>")(literal_column("'id'")), at.external_id.type)
        first = self.jobs.target.first() if self.jobs.target else {}
        rows = select(
            external_id,
            cast(each.c.job.op("->")(literal_column("'payload'")), at.payload.type),
            *(cast(value, column.type) for column, value in self._same(at).items()),
            *(literal(value, column.type) for column, value in first.items()),
        )
        if self.known:
            there = at.table.alias("locks_there")
            rows = rows.where(
                ~select(there.c[at.external_id.key]).where(there.c[at.external_id.key] == external_id).exists()
            )
        rows = rows.order_by(each.c.number)
        columns = [at.external_id, at.payload, *self._same(at), *first]
        from sqlalchemy.dialects.postgresql import insert as insert_

        inserted = insert_(at.table).from_select([column.name for column in columns], rows)
        inserted = inserted.on_conflict_do_nothing(index_elements=[at.external_id])
        put: CTE = inserted.returning(literal_column("1").label("one")).cte("locks_put")
        if not self.notify:
            return select(func.count()).select_from(put)
        told = Notify(literal(CHANNEL), bindparam("locks_topic"))
        return select(told).where(select(put.c.one).exists())

    def because(self, context: BuildContext) -> str:
        return "where the driver gives it one row after another"

    def _same(self, at: RoleColumns) -> dict[Any, Any]:
        """What all jobs of one batch have in common."""
        run_at: Any = {
            "now": Now(),
            "at": bindparam("locks_run_at", type_=Instant()),
            "in": Later(Now(), bindparam("locks_run_in", type_=Float())),
        }[self.when]
        return {
            at.queue_id: bindparam("locks_queue", type_=at.queue_id.type),
            at.priority: bindparam("locks_priority", type_=at.priority.type),
            at.max_attempts: bindparam("locks_max_attempts", type_=at.max_attempts.type),
            at.run_at: run_at,
        }

    def run(self, execution: Execution) -> Any:
        ids: Sequence[UUID] = execution.values["locks_ids"] or _drawn(
            execution.nonce, len(execution.values["locks_payloads"])
        )
        payloads: Sequence[Any] = execution.values["locks_payloads"]
        batch = list(zip(ids, payloads, strict=True))
        if self.known:
            # in one order for everybody: two batches with the same ids would deadlock
            batch.sort(key=lambda job: job[0].bytes)
        common = {name: value for name, value in execution.values.items() if name not in _NOT_BOUND}
        statement = self.statement(execution.context)
        if statement is not None:
            jobs = [{"id": str(id), "payload": payload} for id, payload in batch]
            topic = self.jobs.topic(execution.values["locks_queue"])
            execution.execute(statement, {**common, "locks_jobs": jobs, "locks_topic": topic})
        else:
            self._one_by_one(execution, common, batch)
        return IteratorResult(SimpleResultMetaData(["external_id"]), iter([(id,) for id in ids]))

    def _one_by_one(self, execution: Execution, common: dict[str, Any], batch: Sequence[tuple[UUID, Any]]) -> None:
        """By the driver's executemany, which makes one INSERT of all rows where everything in them is a value."""
        with execution.backend.judging(execution.connection):
            there = self._there(execution, [id for id, _ in batch])
            if self.when == "in":
                seconds = {"locks_run_in": common.pop("locks_run_in")}
                common["locks_run_at"] = execution.execute(_IN, seconds).scalar()
            rows = [{**common, "locks_id": id, "locks_payload": payload} for id, payload in batch if id not in there]
            if rows:
                execution.execute(self._inserting(execution.context), rows)

    def _there(self, execution: Execution, ids: Sequence[UUID]) -> set[UUID]:
        """What is there already; the other engines see to it in the one statement, or have no waiting of that kind."""
        if execution.backend.locking != "rows" or not self.known:
            return set()
        column = self.jobs.at(execution.context).external_id
        found = execution.execute(
            select(column).where(column.in_(bindparam("locks_ids", expanding=True))), {"locks_ids": ids}
        )
        return set(found.scalars())

    def _inserting(self, context: BuildContext) -> Executable:
        if context not in self._rows:
            at = self.jobs.at(context)
            values = {
                at.external_id: bindparam("locks_id", type_=at.external_id.type),
                at.payload: bindparam("locks_payload", type_=at.payload.type),
                **self._same(at),
                **(self.jobs.target.first() if self.jobs.target else {}),
            }
            if self.when == "in":
                values[at.run_at] = bindparam("locks_run_at", type_=Instant())
            elif self.when == "now" and at.run_at.server_default is not None:
                del values[at.run_at]
            if context.backend.locking == "rows":
                self._rows[context] = TakeRow(at.table).values(values)
            else:
                from sqlalchemy.dialects.sqlite import insert as insert_

                inserted = insert_(at.table).values(values)
                self._rows[context] = inserted.on_conflict_do_nothing(index_elements=[at.external_id])
        made: Executable = self._rows[context]
        return made


def _drawn(nonce: str, number: int) -> list[UUID]:
    """Random ids: others each time that jobs are put, and the same where one and the same call is tried again."""
    digests = (hashlib.sha256(f"{nonce}:{each}".encode()).digest() for each in range(number))
    return [UUID(bytes=digest[:16], version=4) for digest in digests]


_NOT_BOUND = ("locks_ids", "locks_payloads")
_IN = select(Later(Now(), bindparam("locks_run_in", type_=Float())))
#: what workers on PostgreSQL listen to
CHANNEL = "sqlalchemy_locks_job"


def batch(payloads: Sequence[Any], queue: str, external_id: Any, priority: int, max_attempts: int) -> dict[str, Any]:
    """The values of a batch, apart from when it is due."""
    if not payloads:
        raise ValueError("Queue.put needs at least one payload")
    return {
        "locks_payloads": list(payloads),
        "locks_ids": _external_ids(external_id, len(payloads)),
        "locks_queue": valid_name(queue, "a queue"),
        "locks_priority": int32(priority, "priority"),
        "locks_max_attempts": positive_int(max_attempts, "max_attempts"),
    }


def due_at(run_at: datetime | None, run_in: float | timedelta | None) -> tuple[str, dict[str, Any]]:
    """Where ``run_at`` comes from, as :class:`Enqueue` calls it, and the value for that."""
    if run_at is not None and run_in is not None:
        raise ValueError("Queue.put: give run_at or run_in, not both")
    if run_at is not None:
        return "at", {"locks_run_at": _instant(run_at)}
    if run_in is not None:
        return "in", {"locks_run_in": bounded_seconds(run_in, "run_in")}
    return "now", {}


def _external_ids(given: Any, number: int) -> list[UUID] | None:
    """Those that were given; the others are drawn when the jobs are put, since an operation may be executed again."""
    if given is None:
        return None
    several = [given] if isinstance(given, (str, UUID)) else list(given)
    if len(several) != number:
        raise ValueError(f"Queue.put: {number} payloads need {number} external ids, and {len(several)} were given")
    ids = [as_uuid(each) for each in several]
    if len(set(ids)) < number:
        raise ValueError("Queue.put: two payloads have the same external_id, and only one job of them would be put")
    return ids


def as_uuid(given: Any) -> UUID:
    """An ``external_id`` that somebody gave."""
    if isinstance(given, UUID):
        return given
    if not isinstance(given, str):
        raise TypeError(f"an external_id is a UUID, not {given!r}")
    try:
        return UUID(given)
    except ValueError:
        raise ValueError(
            f"an external_id is a UUID, and {given!r} is none: uuid.uuid5(namespace, name) makes one of any name"
        ) from None


def _instant(given: Any) -> datetime:
    if not isinstance(given, datetime):
        raise TypeError(f"run_at is a datetime, not {given!r}")
    if given.tzinfo is None or given.utcoffset() is None:
        raise ValueError(f"run_at needs a time zone: {given!r} is another instant on another machine")
    return given.astimezone(timezone.utc)

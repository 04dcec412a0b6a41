"""Putting jobs: a batch in one statement, each job once, in the caller's transaction (see ``queue.py``)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import (
    CTE,
    JSON,
    Enum,
    Float,
    String,
    Text,
    Uuid,
    bindparam,
    cast,
    column,
    func,
    insert,
    literal,
    literal_column,
    select,
)
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.captures.statements import selective_condition
from sqlalchemy_locks.core.entities import MappedTable, changes_bound_values
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation
from sqlalchemy_locks.core.roles import RoleColumns
from sqlalchemy_locks.queue.jobs import IDS, JobOperation, Jobs, json_as_text, stored_type
from sqlalchemy_locks.sql.clock import Instant, Now, PlusSeconds
from sqlalchemy_locks.sql.elements import Notify
from sqlalchemy_locks.sql.tables import Payload

T = TypeVar("T")

#: the channel that workers on PostgreSQL listen to
CHANNEL = "sqlalchemy_locks_job"
#: in JSON's ASCII form, after an even number of backslashes: NUL, a low surrogate that follows no high one, or a high
#: one that no low one follows
_UNSTORABLE = re.compile(
    r"(?<!\\)(?:\\\\)*\\u(?:0000|d[89ab]..(?!\\ud[c-f])|d[c-f]..(?<!\\ud[89ab]..\\u....))", re.IGNORECASE
)
#: the same halves where the serializer doesn't escape them
_HALF = re.compile("[\ud800-\udfff]")
_SERVER_RUN_AT = select(PlusSeconds(Now(), bindparam("locks_run_in", type_=Float())))


class Enqueue(JobOperation):
    """Inserts a batch of jobs, except those whose ``external_id`` exists, or whose unique key a waiting job has.

    :param when: where ``run_at`` comes from: ``now``, a bound instant (``at``) or a bound number of seconds (``in``).
    :param known: some ``external_id`` may exist. They are looked up first where an INSERT would wait for the
        transaction that is working on that job before it finds out.
    :param unique: each job has a unique key. A waiting job that has it is locked, so that it begins after the caller's
        commit. The call waits for an uncommitted capture of it, so that no job that has begun replaces the new one.
    """

    def __init__(self, jobs: Jobs, when: str, *, known: bool, unique: bool, notify: bool) -> None:
        super().__init__(jobs, "Queue.put")
        self.when, self.known, self.unique, self.notify = when, known, unique, notify
        self._inserts: dict[BuildContext, Any] = {}
        self._keyed: dict[BuildContext, Any] = {}

    @property
    def _own(self) -> MappedTable | None:
        return self.jobs.target

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True

    def build(self, context: BuildContext) -> Executable | None:
        at = self.jobs.at(context)
        # such a default would be computed once for all rows
        if not context.backend.writable_ctes or (self._own and self._own.draws_defaults(self._values(context))):
            return None
        common = self._common(at)
        given: Any = func.jsonb_array_elements(cast(bindparam("locks_jobs", type_=Text()), Payload()))
        each = given.table_valued(column("job", Payload()), with_ordinality="number").render_derived(name="locks_jobs")
        cast_to = cast if self._own is None else _cast_untruncated
        external_id = cast_to(each.c.job.op("->>")(literal_column("'id'")), at.external_id.type)
        payload = each.c.job.op("->" if isinstance(stored_type(at.payload.type), JSON) else "->>")(
            literal_column("'payload'")
        )
        first = self._own.insert_defaults() if self._own else {}
        keys = {at.unique_key: each.c.job.op("->>")(literal_column("'key'"))} if self.unique else {}
        rows = select(
            external_id,
            cast_to(payload, at.payload.type),
            *(cast_to(value, column.type) for column, value in keys.items()),
            *(cast_to(value, column.type) for column, value in common.items()),
            *(literal(value, column.type) for column, value in first.items()),
        )
        if self.known or self.unique:
            existing = at.table.alias("locks_existing")
            same = existing.c[at.external_id.key] == external_id
            rows = rows.where(
                ~select(existing.c[at.external_id.key]).where(same).exists(), selective_condition(each.c.number)
            )
        rows = rows.order_by(each.c.number)
        columns = [at.external_id, at.payload, *keys, *common, *first]
        inserting = self._inserting(context, at).from_select([column.name for column in columns], rows)
        notifying = Notify(literal(CHANNEL), bindparam("locks_topic"))
        if self.unique:
            found: CTE = inserting.returning(at.unique_key, at.external_id).cte("locks_put")
            return select(*found.c, *([notifying] if self.notify else []))
        put: CTE = inserting.returning(literal_column("1").label("one")).cte("locks_put")
        if not self.notify:
            return select(func.count()).select_from(put)
        return select(notifying).where(select(put.c.one).exists())

    def _inserting(self, context: BuildContext, at: RoleColumns) -> Any:
        if self.unique:
            return context.backend.insert_or_lock(at.table, (at.queue_id, at.unique_key))
        return context.backend.insert_unless_present(at.table, at.external_id)

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "where the driver is passed one row after another"

    def _common(self, at: RoleColumns) -> dict[Any, Any]:
        """Return the columns whose value all jobs of a batch share."""
        run_at: Any = {
            "now": Now(),
            "at": bindparam("locks_run_at", type_=Instant()),
            "in": PlusSeconds(Now(), bindparam("locks_run_in", type_=Float())),
        }[self.when]
        return {
            at.queue_id: bindparam("locks_queue", type_=at.queue_id.type),
            at.priority: bindparam("locks_priority", type_=at.priority.type),
            at.max_attempts: bindparam("locks_max_attempts", type_=at.max_attempts.type),
            at.run_at: run_at,
        }

    def run(self, execution: Execution) -> Any:
        common = execution.values.copy()
        statement = self.statement(execution.context)
        payloads = self._serialized(execution, common.pop("locks_payloads"), in_rows=statement is None)
        # random ids: others at each execution, and the same ones where one and the same call is retried
        ids: Sequence[UUID] = common.pop(IDS) or [
            UUID(bytes=hashlib.sha256(f"{execution.nonce}:{number}".encode()).digest()[:16], version=4)
            for number in range(len(payloads))
        ]
        keys: Sequence[str] = common.pop("locks_unique", None) or [""] * len(payloads)
        jobs = list(zip(ids, payloads, keys, strict=True))
        # always in the same order: two batches with the same ids, or keys, would deadlock
        if self.known:
            jobs.sort(key=lambda job: job[0].bytes)
        elif self.unique:
            jobs.sort(key=lambda job: job[2])
        with execution.waiting() if self.unique else contextlib.nullcontext():
            if statement is None:
                # drivers split a large batch into several statements
                if self.unique or execution.backend.writable_ctes or len(jobs) > 1:
                    self._begin(execution)
                found = self._insert_rows(execution, common, jobs)
            else:
                # as a column that isn't the server's own uuid stores it
                hexadecimal = isinstance(self.jobs.at(execution.context).external_id.type, Uuid)
                parts = [
                    f'{{"id":"{id.hex if hexadecimal else id}","payload":{payload}'
                    + (f',"key":{json.dumps(key)}}}' if self.unique else "}")
                    for id, payload, key in jobs
                ]
                common["locks_jobs"] = f"[{','.join(parts)}]"
                common["locks_topic"] = self.jobs.topic(common["locks_queue"])
                result: Any = execution.execute(statement, common)
                found = {key: id for key, id, *_ in result} if self.unique else {}
        # a key that wasn't found is of a job that an earlier attempt at this call has put, and that was captured since
        named = [(found.get(key, id),) for id, key in zip(ids, keys, strict=True)]
        return IteratorResult(SimpleResultMetaData(["external_id"]), iter(named))

    def _begin(self, execution: Execution) -> None:
        """Begin SQLite's transaction by taking its write lock, and refuse a connection in autocommit."""
        what = "Queue.put(unique=)" if self.unique else "Queue.put of several jobs"
        execution.require_transaction(self.jobs.at(execution.context).table, what)

    def _serialized(self, execution: Execution, payloads: Sequence[Any], *, in_rows: bool) -> Sequence[Any]:
        """Return the payloads as the texts that are sent.

        A payload is serialized here and not by SQLAlchemy, since its text is checked before any SQL; only for a column
        that isn't JSON, where each row has its own parameter, it is left to the column's type.

        :raises ValueError: for what is no JSON, or what a server's JSON type can't keep.
        """
        dialect = execution.connection.dialect
        # as the engine's json_serializer, if it has one, does it
        plain: Any = JSON()
        serialize: Any = plain.bind_processor(json_as_text(dialect))
        of_column: Any = self.jobs.at(execution.context).payload.type
        if in_rows:
            if not isinstance(of_column, JSON):
                return payloads
            # psycopg's gives an object; there the text is cast
            if not execution.backend.writable_ctes:
                serialize = of_column.dialect_impl(dialect).bind_processor(dialect) or serialize
        elif changes_bound_values(of_column):
            # SQLAlchemy would apply it to a parameter of its own, and all payloads are one
            payloads = [of_column.process_bind_param(payload, dialect) for payload in payloads]
            if not isinstance(stored_type(of_column), JSON) and not all(isinstance(each, str) for each in payloads):
                raise TypeError(
                    f"Queue.put: on {execution.backend.name} the payload's own type must give JSON or a str"
                )
        return [_checked(payload, serialize) for payload in payloads]

    def _insert_rows(
        self, execution: Execution, common: dict[str, Any], jobs: Sequence[tuple[UUID, Any, str]]
    ) -> dict[str, UUID]:
        """Insert by the driver's executemany, which makes one INSERT of all rows where every value is bound.

        :return: with unique keys, the ``external_id`` of the waiting job of each.
        """
        existing: set[UUID] = set()
        external_id = self.jobs.at(execution.context).external_id
        if self.known and not execution.backend.single_writer:
            lookup = select(external_id).where(external_id.in_(bindparam(IDS, expanding=True)))
            existing.update(_found(execution, lookup, external_id, [id for id, *_ in jobs]))
        if self.when == "in":
            seconds = {"locks_run_in": common.pop("locks_run_in")}
            common["locks_run_at"] = execution.execute(_SERVER_RUN_AT, seconds).scalar()
        rows = [
            {**common, "locks_id": _as_stored(external_id, id), "locks_payload": payload}
            | ({"locks_unique": key} if self.unique else {})
            for id, payload, key in jobs
            if id not in existing
        ]
        if rows:
            execution.execute(self._insert(execution.context), rows)
            if self.notify and execution.backend.writable_ctes:
                topic = {"locks_topic": self.jobs.topic(common["locks_queue"])}
                execution.execute(select(Notify(literal(CHANNEL), bindparam("locks_topic"))), topic)
        found: dict[str, UUID] = {}
        if self.unique:
            given = {"locks_queue": common["locks_queue"], "locks_unique": [key for *_, key in jobs]}
            waiting: Any = execution.execute(self._waiting_by_key(execution.context), given)
            found = dict(waiting.all())
        if rows and self._may_swallow(execution.context):
            self._insert_again(execution, [row for row in rows if row.get("locks_unique") not in found])
        return found

    def _may_swallow(self, context: BuildContext) -> bool:
        """Return whether the INSERT also ignores rows whose other unique columns have the values of another job."""
        if self._own is None or context.backend.returning:
            return False
        at = self.jobs.at(context)
        ours = [{at.internal_id.name}, {at.external_id.name}]
        if "unique_key" in at:
            ours.append({at.queue_id.name, at.unique_key.name})
        return any(key not in ours for key in self._own.unique_keys())

    def _insert_again(self, execution: Execution, rows: list[dict[str, Any]]) -> None:
        """Insert those rows that aren't there: the database refuses them with its own error."""
        external_id = self.jobs.at(execution.context).external_id
        # locked by the first INSERT; and not from an old snapshot
        there = select(external_id).where(external_id.in_(bindparam(IDS, expanding=True))).with_for_update()
        found = _found(execution, there, external_id, [row["locks_id"] for row in rows]) if rows else set()
        if absent := [row for row in rows if as_uuid(row["locks_id"]) not in found]:
            execution.execute(
                insert(self.jobs.at(execution.context).table).values(self._values(execution.context)), absent
            )

    def _waiting_by_key(self, context: BuildContext) -> Any:
        """Return the SELECT of the waiting jobs of unique keys, which the INSERT has locked."""
        if context not in self._keyed:
            at = self.jobs.at(context)
            reading = select(at.unique_key, at.external_id).where(
                at.queue_id == bindparam("locks_queue", type_=at.queue_id.type),
                at.unique_key.in_(bindparam("locks_unique", expanding=True)),
            )
            # not from an old snapshot
            self._keyed[context] = reading.with_for_update() if not context.backend.single_writer else reading
        return self._keyed[context]

    def _insert(self, context: BuildContext) -> Executable:
        if context not in self._inserts:
            inserting = self._inserting(context, self.jobs.at(context))
            self._inserts[context] = inserting.values(self._values(context))
        made: Executable = self._inserts[context]
        return made

    def _values(self, context: BuildContext) -> dict[Any, Any]:
        """Return what an INSERT of one row sets."""
        at = self.jobs.at(context)
        payload: Any = bindparam("locks_payload", type_=at.payload.type)
        if isinstance(at.payload.type, JSON):
            payload = bindparam("locks_payload", type_=String())
            if context.backend.writable_ctes:
                payload = cast(payload, at.payload.type)
        values = {
            at.external_id: bindparam("locks_id", type_=at.external_id.type),
            at.payload: payload,
            **({at.unique_key: bindparam("locks_unique", type_=at.unique_key.type)} if self.unique else {}),
            **self._common(at),
            **(self._own.insert_defaults() if self._own else {}),
        }
        if self.when == "in":
            values[at.run_at] = bindparam("locks_run_at", type_=Instant())
        elif self.when == "now" and at.run_at.server_default is not None:
            del values[at.run_at]
        return values


def _as_stored(column: Any, id: Any) -> Any:
    """Return an id as a value of its column, which may be a text."""
    return str(id) if isinstance(column.type, String) else id


def _found(execution: Execution, lookup: Any, column: Any, ids: list[Any]) -> set[UUID]:
    """Return which of the ids a look-up finds."""
    given = [_as_stored(column, id) for id in ids]
    return set(map(as_uuid, execution.execute(lookup, {IDS: given}).scalars()))


def _cast_untruncated(value: Any, type_: Any) -> Any:
    """Return a cast that leaves what is too long for a column to its INSERT, which refuses it."""
    stored = stored_type(type_)
    if isinstance(stored, String) and not isinstance(stored, Enum):
        return cast(value, Text())
    return cast(value, type_)


def _checked(payload: Any, serialize: Callable[[Any], Any]) -> Any:
    """Serialize a payload, and refuse what is no JSON, or what a server's JSON type can't keep.

    :raises ValueError: for NaN and the infinities, NUL, and half of a surrogate pair.
    :raises TypeError: for what the engine's serializer doesn't know.
    """
    try:
        text = serialize(payload)
        text = text.decode() if isinstance(text, bytes) else text
        if not isinstance(text, str):
            return text
        if "NaN" in text or "Infinity" in text:  # perhaps in a string; what only the engine's serializer knows is null
            json.dumps(payload, allow_nan=False, skipkeys=True, default=lambda _: None)
    except ValueError as error:
        raise ValueError(f"a payload is JSON, and this isn't ({error}): {payload!r}") from error
    except TypeError as error:
        raise TypeError(
            f"a payload is JSON, and this isn't ({error}): convert it, or pass json_serializer= to create_engine: "
            f"{payload!r}"
        ) from error
    if ("\\u" in text and _UNSTORABLE.search(text)) or not (text.isascii() or _HALF.search(text) is None):
        raise ValueError(f"a payload's text has no NUL and no half of a surrogate pair: {payload!r}")
    return text


def external_ids(given: Any, number: int) -> list[UUID]:
    """Return the ``external_id`` of each payload, as passed to ``Queue.put``."""
    several = [given] if isinstance(given, (str, UUID)) else list(given)
    return _check_one_per_payload([as_uuid(each) for each in several], number, "external_id")


def unique_keys(given: Any, number: int) -> list[str]:
    """Return the unique key of each payload, as passed to ``Queue.put``."""
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    return _check_one_per_payload([valid_name(each, "a unique key") for each in several], number, "unique key")


def _check_one_per_payload(given: list[T], number: int, what: str) -> list[T]:
    if len(given) != number:
        raise ValueError(f"Queue.put: {number} payloads need {number} {what}s, and {len(given)} were given")
    if len(set(given)) < number:
        raise ValueError(f"Queue.put: two payloads have the same {what}, and only one job of them would be put")
    return given


def as_uuid(given: Any) -> UUID:
    """Return an ``external_id`` that is given as a UUID or as its text."""
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


def utc_instant(given: Any) -> datetime:
    """Return a ``run_at`` in UTC. :raises ValueError: without a time zone."""
    if not isinstance(given, datetime):
        raise TypeError(f"run_at is a datetime, not {given!r}")
    if given.tzinfo is None or given.utcoffset() is None:
        raise ValueError(f"run_at needs a time zone: {given!r} is another instant on another machine")
    return given.astimezone(timezone.utc)

"""Putting jobs: a batch in one statement, each job once, in the caller's transaction (see ``queue.py``)."""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from decimal import Decimal
from functools import cache, partial
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import CTE, JSON, Float, String, Text, bindparam, cast, column, func, literal, literal_column, select
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.captures.statements import selective_condition
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation
from sqlalchemy_locks.core.roles import RoleColumns
from sqlalchemy_locks.errors import Unsupported
from sqlalchemy_locks.queue.jobs import IDS, QUEUE_NAME, UNIQUE_KEY, JobOperation, Jobs, json_as_text, unique_index
from sqlalchemy_locks.sql.clock import Instant, Now, PlusSeconds
from sqlalchemy_locks.sql.elements import Notify, force_index
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
#: numbers that an engine may refuse or change
_LARGE = re.compile(r"\d{16}|\d[eE]")
#: a string, with the colon that makes it a key; a number; a bracket
_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|-?\d[\d.eE+-]*|[\[\]{}]')
#: MariaDB's limit of nested lists and objects; MySQL's is 100
_MOST_LEVELS = 31
#: MySQL's limit of a key in an object, in bytes
_LONGEST_KEY = 65535
KEYS = "locks_keys"
_SERVER_RUN_AT = select(PlusSeconds(Now(), bindparam("locks_run_in", type_=Float())))


class Enqueue(JobOperation):
    """Inserts a batch of jobs, except those whose ``external_id`` exists, or whose unique key a waiting job has.

    :param when: where ``run_at`` comes from: ``now``, a bound instant (``at``) or a bound number of seconds (``in``).
    :param known: some ``external_id`` may exist already. They are looked up first where the INSERT would wait for a
        transaction that is working on such a job.
    :param unique: each job has a unique key. A waiting job with the same key is locked, so that it begins after the
        caller's commit. The call waits for an uncommitted capture of that job, so that a job that has begun never
        replaces the new one.
    """

    uses_nonce = True

    def __init__(self, jobs: Jobs, when: str, *, known: bool, unique: bool, notify: bool) -> None:
        super().__init__(jobs, "Queue.put")
        self.when, self.known, self.unique, self.notify = when, known, unique, notify
        self.wait_limit = "setting" if unique else None
        self._insert = cache(lambda context: self._inserting(context).values(self._values(context)))
        self._select_waiting = cache(self._waiting_by_key)

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True

    def build(self, context: BuildContext) -> Executable | None:
        # a table of the app's may have types and defaults of Python's, which SQLAlchemy applies row by row
        if not context.backend.writable_ctes or self.jobs.target is not None:
            return None
        at = self.jobs.at(context)
        common = self._common(at)
        documents: Any = func.jsonb_array_elements(cast(bindparam("locks_jobs", type_=Text()), Payload()))
        each = documents.table_valued(column("job", Payload()), with_ordinality="number").render_derived(
            name="locks_jobs"
        )
        values = {
            at.external_id: each.c.job.op("->>")(literal_column("'id'")),
            at.payload: each.c.job.op("->")(literal_column("'payload'")),
        }
        if self.unique:
            values[at.unique_key] = each.c.job.op("->>")(literal_column("'key'"))
        values.update(common)
        converted = [cast(value, column.type) for column, value in values.items()]
        rows = select(*converted)
        if self.known or self.unique:
            existing = at.table.alias("locks_existing")
            same = existing.c.external_id == converted[0]
            rows = rows.where(~select(existing.c.external_id).where(same).exists(), selective_condition(each.c.number))
        rows = rows.order_by(each.c.number)
        inserting = self._inserting(context).from_select([column.name for column in values], rows)
        notifying = Notify(literal(CHANNEL), bindparam("locks_topic"))
        if self.unique:
            returned = (at.unique_key.label("unique_key"), at.external_id.label("external_id"))
            waiting: CTE = inserting.returning(*returned).cte("locks_put")
            return select(*waiting.c, *([notifying] if self.notify else []))
        put: CTE = inserting.returning(literal_column("1").label("one")).cte("locks_put")
        if not self.notify:
            return select(func.count()).select_from(put)
        return select(notifying).where(select(put.c.one).exists())

    def _inserting(self, context: BuildContext) -> Any:
        at = self.jobs.at(context)
        if self.unique:
            touched = at.run_at if context.cluster else None
            return context.backend.insert_or_lock(at.table, (at.queue_id, at.unique_key), touched)
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
            at.queue_id: bindparam(QUEUE_NAME, type_=at.queue_id.type),
            at.priority: bindparam("locks_priority", type_=at.priority.type),
            at.max_attempts: bindparam("locks_max_attempts", type_=at.max_attempts.type),
            at.run_at: run_at,
        }

    def run(self, execution: Execution) -> Any:
        common = execution.values.copy()
        statement = self.statement(execution.context)
        payloads: Sequence[Any] = common.pop("locks_payloads")
        of_column: Any = self.jobs.columns.payload.type
        if isinstance(of_column, JSON):
            # not by SQLAlchemy, because the text is checked here; the engine's json_serializer is used if it has one
            dialect = execution.connection.dialect
            plain: Any = JSON()
            serialize: Any = plain.bind_processor(json_as_text(dialect))
            # psycopg's processor returns an object: on PostgreSQL the plain text is cast instead
            if not execution.backend.writable_ctes:
                serialize = of_column.dialect_impl(dialect).bind_processor(dialect) or serialize
            payloads = list(map(partial(_checked, serialize=serialize), payloads))
        # random ids: each execution draws others, and a retry of the same call draws the same ones
        ids: Sequence[UUID] = common.pop(IDS) or [
            UUID(bytes=hashlib.sha256(f"{execution.nonce}:{number}".encode()).digest()[:16], version=4)
            for number in range(len(payloads))
        ]
        keys: Sequence[Any] = common.pop(KEYS, ids)
        jobs = list(zip(ids, payloads, keys, strict=True))
        if self.known or self.unique:
            # always in the same order: otherwise two batches with the same ids or keys could deadlock
            jobs.sort(key=lambda job: str(job[2]))
        if self.unique and execution.context.cluster is not None:
            self._require_microseconds(execution)
        if statement is None:
            # drivers split a large batch into several statements
            if self.unique or execution.backend.writable_ctes or len(jobs) > 1:
                self._begin(execution)
            waiting = self._insert_rows(execution, common, jobs)
        else:
            documents = [
                f'{{"id":"{id}","payload":{payload}' + (f',"key":{json.dumps(key)}}}' if self.unique else "}")
                for id, payload, key in jobs
            ]
            common["locks_jobs"] = f"[{','.join(documents)}]"
            common["locks_topic"] = self.jobs.topic(common[QUEUE_NAME])
            rows: Any = execution.execute(statement, common)
            waiting = {key: id for key, id, *_ in rows} if self.unique else {}
        # If no waiting job has a key, an earlier attempt of this call has put the job, and it was captured since.
        external_ids = map(waiting.get, keys, ids)
        return IteratorResult(SimpleResultMetaData(["external_id"]), zip(external_ids))

    def _begin(self, execution: Execution) -> None:
        """Begin SQLite's transaction by taking its write lock, and refuse a connection in autocommit."""
        what = "Queue.put(unique=)" if self.unique else "Queue.put of several jobs"
        execution.require_transaction(self.jobs.at(execution.context).table, what)

    def _insert_rows(
        self, execution: Execution, common: dict[str, Any], jobs: Sequence[tuple[UUID, Any, Any]]
    ) -> dict[Any, UUID]:
        """Insert by the driver's executemany, which makes one INSERT of all rows where every value is bound.

        :return: with unique keys, the id of the waiting job of each.
        """
        existing: set[UUID] = set()
        external_id = self.jobs.at(execution.context).external_id
        self._refuse_other_keys(execution.context)
        looks_up = self.known and not execution.backend.single_writer
        if self.unique:
            # PostgreSQL's INSERT would refuse an id that an earlier attempt of this call has put
            looks_up = execution.backend.writable_ctes
        if looks_up:
            lookup = select(external_id).where(external_id.in_(bindparam(IDS, expanding=True)))
            ids = [_as_stored(external_id, id) for id, *_ in jobs]
            existing.update(as_uuid(id) for (id,) in _look_up(execution, lookup, {}, IDS, ids))
        if self.when == "in":
            seconds = {"locks_run_in": common.pop("locks_run_in")}
            common["locks_run_at"] = execution.execute(_SERVER_RUN_AT, seconds).scalar()
        rows = [
            {**common, "locks_id": _as_stored(external_id, id), "locks_payload": payload}
            | ({"locks_key": key} if self.unique else {})
            for id, payload, key in jobs
            if id not in existing
        ]
        if rows:
            execution.execute(self._insert(execution.context), rows)
            if self.notify and execution.backend.writable_ctes:
                topic = {"locks_topic": self.jobs.topic(common[QUEUE_NAME])}
                execution.execute(select(Notify(literal(CHANNEL), bindparam("locks_topic"))), topic)
        if not self.unique:
            return {}
        reading = self._select_waiting(execution.context)
        queue = {QUEUE_NAME: common[QUEUE_NAME]}
        waiting = _look_up(execution, reading, queue, KEYS, [key for *_, key in jobs])
        return {key: as_uuid(id) for key, id in waiting}

    def _waiting_by_key(self, context: BuildContext) -> Any:
        """Return the SELECT of the waiting jobs of unique keys, which the INSERT has locked."""
        at = self.jobs.at(context)
        reading = select(at.unique_key, at.external_id).where(
            at.queue_id == bindparam(QUEUE_NAME, type_=at.queue_id.type),
            at.unique_key.in_(bindparam(KEYS, expanding=True)),
        )
        if context.backend.single_writer:
            return reading
        index = unique_index(at)
        assert index is not None
        # FOR UPDATE, since the snapshot may be old; by the index, since MySQL may lock every row that a scan passes
        return force_index(reading, f"`{index.name}`", at.table).with_for_update()

    def _require_microseconds(self, execution: Execution) -> None:
        """:raises Unsupported: where ``run_at`` has no microseconds, so that adding one would change nothing."""
        run_at = self.jobs.at(execution.context).run_at
        if not run_at.type.compile(dialect=execution.connection.dialect).endswith("(6)"):
            raise Unsupported(
                f"Queue.put with unique= in {execution.context.cluster} changes the row of a waiting job, so that it "
                f"can't begin on another node before this transaction commits: make {run_at} a DATETIME(6)"
            )

    def _refuse_other_keys(self, context: BuildContext) -> None:
        """:raises Unsupported: where the INSERT would also ignore jobs for a unique column of the app's."""
        at, own = self.jobs.at(context), self.jobs.target
        if own is None or context.backend.returning:
            return
        ours = [{at.internal_id.name}, {at.external_id.name}]
        if UNIQUE_KEY in at:
            ours.append({at.queue_id.name, at.unique_key.name})
        for key in own.unique_keys():
            if key not in ours:
                raise Unsupported(
                    f"Queue.put on {context.backend.name} would ignore a job whose {', '.join(sorted(key))} another "
                    "one has: put it by session.add(), or drop the unique constraint"
                )

    def _values(self, context: BuildContext) -> dict[Any, Any]:
        """Return the columns that an INSERT of one row sets, and their values."""
        at, own = self.jobs.at(context), self.jobs.target
        payload: Any = bindparam("locks_payload", type_=at.payload.type)
        if isinstance(at.payload.type, JSON):
            payload = bindparam("locks_payload", type_=String())
            if context.backend.writable_ctes:
                payload = cast(payload, at.payload.type)
        values = {
            at.external_id: bindparam("locks_id", type_=at.external_id.type),
            at.payload: payload,
            **self._common(at),
            **(own.insert_defaults() if own else {}),
        }
        if self.unique:
            values[at.unique_key] = bindparam("locks_key", type_=at.unique_key.type)
        if self.when == "in":
            values[at.run_at] = bindparam("locks_run_at", type_=Instant())
        elif self.when == "now" and at.run_at.server_default is not None:
            del values[at.run_at]
        return values


def _as_stored(column: Any, id: Any) -> Any:
    """Return an id as a value of its column, which may be a text."""
    return str(id) if isinstance(column.type, String) else id


def _look_up(
    execution: Execution, statement: Any, values: dict[str, Any], name: str, several: Sequence[Any]
) -> Iterator[Any]:
    """Read the rows of several ids or keys, bound as ``name``."""
    for batch in execution.batches(several):
        yield from execution.execute(statement, {**values, name: batch})


def _checked(payload: Any, serialize: Callable[[Any], Any]) -> Any:
    """Serialize a payload; refuse one that is no JSON, or that the JSON type of some server can't keep.

    :raises ValueError: for NaN and the infinities, NUL, half of a surrogate pair; and because one of the engines
        refuses or changes it, for a number of more than 64 bits, more than 31 levels, a key of more than 65,535 bytes.
    :raises TypeError: for a value that the engine's serializer doesn't know.
    """
    try:
        text = serialize(payload)
        text = text.decode() if isinstance(text, bytes) else text
        if not isinstance(text, str):
            return text
        if "NaN" in text or "Infinity" in text:
            # json.dumps ignores these words inside a string; a value that only the engine's serializer knows is null
            json.dumps(payload, allow_nan=False, skipkeys=True, default=lambda _: None)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise ValueError(f"a payload is JSON, and this isn't ({error}): {reprlib.repr(payload)}") from error
    except TypeError as error:
        raise TypeError(
            f"a payload is JSON, and this isn't ({error}): convert it, or pass json_serializer= to create_engine: "
            f"{reprlib.repr(payload)}"
        ) from error
    if ("\\u" in text and _UNSTORABLE.search(text)) or not (text.isascii() or _HALF.search(text) is None):
        raise ValueError(f"a payload's text has no NUL and no half of a surrogate pair: {reprlib.repr(payload)}")
    if text.count("[") + text.count("{") > _MOST_LEVELS or len(text) > _LONGEST_KEY // 4 or _LARGE.search(text):
        return _portable(text)
    return text


def _portable(text: str) -> str:
    """Return JSON that every engine keeps unchanged.

    :raises ValueError: when one of them would refuse or change it.
    """
    level = 0

    def portable(match: re.Match[str]) -> str:
        nonlocal level
        token = match[0]
        if match[1]:
            if match[2] and len(match[1].encode()) - 2 > _LONGEST_KEY:
                raise ValueError(f"a key of a payload has at most {_LONGEST_KEY} bytes: {token[:50]}...")
        elif token in "[{":
            level += 1
            if level > _MOST_LEVELS:
                raise _too_deep()
        elif token in "]}":
            level -= 1
        elif set(".eE").isdisjoint(token):
            # the length first: Python refuses to convert thousands of digits
            if len(token) > 20 or not -(2**63) <= int(token) < 2**63:
                raise ValueError(
                    f"an integer of a payload has at most 64 bits, a larger one is sent as a string: {token}"
                )
        else:
            digits, number = re.sub(r"[eE].*|\D", "", token).strip("0"), float(token)
            if not math.isfinite(number) or len(digits) > 17 or (digits and not number):
                raise ValueError(f"a float of a payload has at most 64 bits, another one is sent as a string: {token}")
            if "e" in token.lower() and "-" not in token[1:]:
                # with a fraction, or PostgreSQL makes an integer of 1e23
                return re.sub(r"^([^.]*)$", r"\1.0", format(Decimal(token), "f"))
        return token

    return _TOKEN.sub(portable, text)


def _too_deep() -> ValueError:
    return ValueError(
        f"a payload has at most {_MOST_LEVELS} levels of lists and objects: send a deeper one as a string"
    )


def external_ids(ids: Any, number: int) -> list[UUID]:
    """Return the ``external_id`` of each payload, as passed to ``Queue.put``."""
    several = [as_uuid(each) for each in ([ids] if isinstance(ids, (str, UUID)) else ids)]
    return _one_for_each(several, number, "external_id")


def unique_keys(keys: Any, number: int) -> list[str]:
    """Return the unique key of each payload, as passed to ``Queue.put``."""
    several = keys if isinstance(keys, (list, tuple)) else [keys]
    return _one_for_each([valid_name(each, "a unique key") for each in several], number, "unique key")


def _one_for_each(values: list[T], number: int, what: str) -> list[T]:
    if len(values) != number:
        raise ValueError(f"Queue.put: {number} payloads need {number} {what}s, and {len(values)} were given")
    if len(set(values)) < number:
        raise ValueError(f"Queue.put: two payloads have the same {what}, and only one job of them would be put")
    return values


def as_uuid(value: Any) -> UUID:
    """Return an ``external_id``, a UUID or the text of one, as a UUID."""
    if isinstance(value, UUID):
        return value
    if not isinstance(value, str):
        raise TypeError(f"an external_id is a UUID, not {value!r}")
    try:
        return UUID(value)
    except ValueError:
        raise ValueError(
            f"an external_id is a UUID, and {value!r} is none: uuid.uuid5(namespace, name) makes one of any name"
        ) from None


def utc_instant(run_at: Any) -> datetime:
    """Return a ``run_at`` in UTC. :raises ValueError: without a time zone."""
    if not isinstance(run_at, datetime):
        raise TypeError(f"run_at is a datetime, not {run_at!r}")
    if run_at.tzinfo is None or run_at.utcoffset() is None:
        raise ValueError(f"run_at needs a time zone: {run_at!r} is another instant on another machine")
    return run_at.astimezone(timezone.utc)

"""acquire: permits of one or more semaphores, all of them or none.

The order of work: the request's row, the guard for all that ask with its id; the semaphores' rows, by name; then, in a
later statement, the sum of what is held, with the rows' fences. Where that is too much, what has expired is released,
and it is summed again. A grant raises the fences, so that a snapshot from before it fails instead of over-granting. A
denial leaves no trace.

The row has a bound: no more permits are held. A grant raises it; no release lowers it, since that would wait for the
row. Where it leaves room nothing needs to be summed; where it leaves none, the sum decides, and becomes the bound.
"""

from __future__ import annotations

import math
import time
import typing
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any
from uuid import uuid4

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Float,
    Integer,
    Text,
    bindparam,
    cast,
    literal,
    literal_column,
    null,
    select,
    true,
)
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.sql import Executable
from sqlalchemy.types import NullType

from sqlalchemy_locks._validation import bounded_seconds, valid_int, valid_name
from sqlalchemy_locks.core.operation import Execution, Operation
from sqlalchemy_locks.core.typing import shaped
from sqlalchemy_locks.errors import IdempotencyConflict, LockTimeout, UnknownSemaphore
from sqlalchemy_locks.semaphore.base import (
    LOCK_WAIT,
    LockedUsage,
    SemaphoreImpl,
    delete_request,
    external_id_of,
    lock_request,
    lock_request_shared,
    lock_semaphore,
    mark_changed,
    may_have_room,
    read_current_usage,
    read_usage,
    reads_snapshot,
)
from sqlalchemy_locks.semaphore.statements import ACQUIRED, CONFLICT, DENIED, EXPIRED, UNKNOWN
from sqlalchemy_locks.sql.clock import utc
from sqlalchemy_locks.sql.elements import LockFunction
from sqlalchemy_locks.values import Grant

#: attempts at a request that others insert and clean up
_ROUNDS = 100
_ANSWER = ("state", "replayed", "token", "expires_at", "fences", "exhausted", "capacities")
_ARGUMENTS = (
    cast(bindparam("names", type_=Text()), ARRAY(Text())),
    cast(bindparam("counts", type_=Text()), ARRAY(Integer())),
    bindparam("external_id", type_=Text()),
    bindparam("owner", type_=Text()),
    bindparam("ttl_seconds", type_=Float()),
    LOCK_WAIT,
    bindparam("nonce", type_=Text()),
    bindparam("replaces_expired", type_=Boolean()),
)


class AcquirePermits(SemaphoreImpl):
    name = "semaphore.acquire"
    uses_nonce = True

    def call(self) -> LockFunction:
        return LockFunction("semaphore_acquire", *_ARGUMENTS, type_=NullType())

    def select_call(self, call: LockFunction) -> Executable:
        # called in the SELECT list of a subquery: in FROM, the server would store the row, and read it again
        called = select(call.label("answer")).subquery("called")
        answer: list[Any] = [literal_column(f"(called.answer).{name}") for name in _ANSWER]
        return select(*answer).select_from(called)

    def answer(self, execution: Execution, row: Any) -> Grant:
        state, replayed, token, expires_at, fences, exhausted, capacities = row
        if state in (UNKNOWN, CONFLICT):
            raise _refused(execution, state, exhausted)
        return _grant(execution, state, token, expires_at, fences or (), exhausted or (), replayed, capacities or ())

    def run_statements(self, execution: Execution, sql: Any) -> Grant:
        replaces_expired = execution.values["replaces_expired"]
        for attempt in range(_ROUNDS):
            if replaces_expired:
                self._delete_expired(execution, sql)
            request = self._insert_request(execution, sql, attempt == 0)
            if request is not None:
                try:
                    return self._decide(execution, sql, request)
                except (LockTimeout, DBAPIError) as error:
                    # InnoDB undoes only the statement: a caller that continues and commits would keep half a request
                    if isinstance(error, LockTimeout) or execution.backend.statement_interrupted(error):
                        delete_request(execution, sql, request)
                    raise
            known = self._replay(execution, sql)
            if known is not None and not (replaces_expired and known.state == EXPIRED):
                return known
        ident = execution.values["external_id"]
        raise LockTimeout(f"the request {ident!r} was inserted and deleted by others at each attempt", kind="semaphore")

    def _delete_expired(self, execution: Execution, sql: Any) -> None:
        """Delete an earlier request of this id, if its time ran out before it was released.

        Before the INSERT: one that meets a duplicate locks it, shared, and of two such callers none could delete it.
        """
        # it waits for a guarded write of that request, after which this one may begin
        request = lock_request(execution, sql)
        if request is not None and execution.execute(sql.expired_at_end, {"which": request.id}).scalar():
            delete_request(execution, sql, request.id)

    def _insert_request(self, execution: Execution, sql: Any, first: bool) -> int | None:
        """Return the row id of the new request; ``None`` where there is one with its external id."""
        values = {name: execution.values[name] for name in ("external_id", "owner", "ttl_seconds")}
        # An INSERT that meets a duplicate locks a gap above READ COMMITTED. Once only: a snapshot still shows
        # what was cleaned up since.
        single_writer = execution.backend.single_writer
        looks = single_writer or (first and not execution.read_committed)
        if looks and execution.execute(sql.request, {"called": values["external_id"]}).first():
            return None
        try:
            result = execution.execute(sql.ask, {**values, "state": ACQUIRED, "token": execution.nonce})
        except IntegrityError as error:
            # a single writer has looked before, under its lock: this is no duplicate
            if single_writer or not execution.backend.duplicate(error):
                raise
            return None
        key: Any = result.inserted_primary_key
        return int(key[0])

    def _replay(self, execution: Execution, sql: Any) -> Grant | None:
        """Return the grant of the existing request; ``None`` when it was deleted meanwhile."""
        # shared, so that two that ask again don't wait for each other
        request = lock_request_shared(execution, sql)
        if request is None:
            return None
        # with a lock, which is on the gaps as well, only where a snapshot from before them doesn't show them
        permits = execution.execute(sql.permits, {"which": request.id}).all()
        permits = permits or execution.execute(sql.permits_shared, {"which": request.id}).all()
        rows = execution.execute(sql.names, {"ids": [permit.semaphore_id for permit in permits]})
        names = {row.id: row.name for row in rows}
        found = {names.get(permit.semaphore_id): permit for permit in permits}
        asked = execution.values["permits"]
        if {name: permit.count for name, permit in found.items()} != asked:
            raise _refused(execution, CONFLICT, ())
        state = EXPIRED if request.state == ACQUIRED and request.expired else request.state
        fences = [found[name].fence for name in asked]
        return _grant(execution, state, request.token, request.until, fences, (), True)

    def _decide(self, execution: Execution, sql: Any, request: int) -> Grant:
        permits = execution.values["permits"]
        rows = [lock_semaphore(execution, sql, name) for name in permits]
        unknown = [name for name, row in zip(permits, rows, strict=True) if row is None]
        if unknown:
            execution.execute(sql.forget, {"which": request})
            raise _refused(execution, UNKNOWN, unknown)
        ttl, until = execution.values["ttl_seconds"], None
        before = time.monotonic()
        # a release lowers no bound: one that leaves no room says nothing
        bounds = {row.id: math.inf if row.used_at_most is None else row.used_at_most for row in rows}
        fit = all(bounds[row.id] + count <= row.capacity for row, count in zip(rows, permits.values(), strict=True))
        if fit and ttl is None:
            sums, now, began = LockedUsage(bounds, None, None)
        else:
            sums, now, began = read_usage(execution, sql, rows, request)
            if reads_snapshot(execution):
                # no other caller relies on it: a sum of READ UNCOMMITTED, which may be hidden, is too low
                sums = {semaphore: min(used, bounds[semaphore]) for semaphore, used in sums.items()}
            else:
                bounds = dict(sums)
        exhausted = []
        for (name, count), row in zip(permits.items(), rows, strict=True):
            if sums[row.id] + count > row.capacity and may_have_room(execution, sql, row.id, row.capacity - count):
                bounds[row.id], now = read_current_usage(execution, sql, row)
                sums[row.id] = bounds[row.id]
            if sums[row.id] + count > row.capacity:
                exhausted.append(name)
        if exhausted:
            execution.execute(sql.forget, {"which": request})
            return _denied(execution, exhausted)
        for row, count in zip(rows, permits.values(), strict=True):
            bound = bounds[row.id] + count
            execution.execute(sql.bump, {"which": row.id, "used": None if bound == math.inf else int(bound)})
            mark_changed(execution, row.id)
            permit = {"semaphore_id": row.id, "permit_request_id": request, "count": count}
            execution.execute(sql.grant, {**permit, "fence": row.fence + 1, "state": ACQUIRED})
        if ttl is not None:
            if now is None or time.monotonic() - before > min(1, max(0.01, ttl / 100)):
                # the statement that read the clock, or one after it, has waited
                now = execution.execute(sql.clock, {}).scalar_one()
            if began is None or now - began > timedelta(seconds=min(0.01, ttl / 100)):
                # the lease starts now, not before the waits
                execution.execute(sql.stamp, {"which": request, "now": now})
                began = now
            until = began + timedelta(seconds=ttl)
        fences, capacities = [row.fence + 1 for row in rows], [row.capacity for row in rows]
        return _grant(execution, ACQUIRED, execution.nonce, until, fences, (), False, capacities)


class AcquireInTurn(AcquirePermits):
    """As ``AcquirePermits``; denied while others queue for one of the semaphores."""

    def run(self, execution: Execution) -> Any:
        # the first attempt of a retry may be about to be granted: a denial by the queue would hide that
        return _ACQUIRE.run(execution) if execution.is_retry else super().run(execution)

    def call(self) -> LockFunction:
        keys = cast(bindparam("queue_keys", type_=Text()), ARRAY(BigInteger()))
        return LockFunction("semaphore_acquire", *_ARGUMENTS, keys, type_=NullType())

    def run_statements(self, execution: Execution, sql: Any) -> Grant:
        keys = execution.values["keys"].items() if execution.backend.server_queues else ()
        busy = [name for name, key in keys if not execution.backend.queue_is_free(execution.connection, key)]
        # what was granted already must not queue behind those that wait for it
        if busy and execution.execute(sql.request, {"called": execution.values["external_id"]}).first() is None:
            return _denied(execution, busy)
        return super().run_statements(execution, sql)


class AcquireIfRoom(AcquirePermits):
    """As ``AcquirePermits``; where a read without locks finds no room, that denies it, and nothing is written."""

    def call(self) -> LockFunction:
        no_keys = cast(null(), ARRAY(BigInteger()))
        return LockFunction("semaphore_acquire", *_ARGUMENTS, no_keys, true(), type_=NullType())


def _array(items: Iterable[str]) -> str:
    """Return an array as PostgreSQL reads it: drivers take several times as long over a list."""
    return f"{{{','.join(items)}}}"


def _quoted(name: str) -> str:
    """Return a name as an element of an array."""
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _refused(execution: Execution, state: str, names: Any) -> Exception:
    if state == UNKNOWN:
        called = ", ".join(repr(name) for name in names)
        return UnknownSemaphore(f"there is no semaphore {called}: make it with semaphore.create")
    return IdempotencyConflict(
        f"the request {execution.values['external_id']!r} was for other semaphores or other counts: "
        "one id stands for one request"
    )


def _grant(
    execution: Execution,
    state: str,
    token: str | None,
    until: Any,
    fences: Any,
    exhausted: Any,
    replayed: bool,
    capacities: Iterable[int] = (),
) -> Grant:
    permits = execution.values["permits"]
    # granted to an earlier attempt at this call, whose reply was lost
    own = state == ACQUIRED and token == execution.nonce
    return Grant(
        external_id=execution.values["external_id"],
        acquired=state == ACQUIRED,
        state=state,
        permits=permits,
        fence=dict(zip(permits, fences, strict=False)),
        exhausted=tuple(exhausted),
        replayed=replayed and not own,
        expires_at=utc(until) if state in (ACQUIRED, EXPIRED) else None,
        token=token,
        capacities=tuple(capacities),
    )


def _denied(execution: Execution, exhausted: Iterable[str]) -> Grant:
    return _grant(execution, DENIED, None, None, (), exhausted, False)


_ACQUIRE, _IN_TURN, _IF_ROOM = AcquirePermits(), AcquireInTurn(), AcquireIfRoom()


def _checked_permits(items: tuple[tuple[str, int], ...]) -> tuple[Mapping[str, int], str, str]:
    """Return the permits of a request, validated and in order, and their names and counts as arrays."""
    counts = {valid_name(name, "a semaphore's name"): valid_int(count, "a count of permits") for name, count in items}
    # in one order everywhere, so that two requests can't deadlock
    asked = dict(sorted(counts.items()))
    return asked, _array([_quoted(name) for name in asked]), _array(map(str, asked.values()))


#: most callers ask for the same few permits each time
_kept_permits = lru_cache(1024)(_checked_permits)
_MOST_KEPT = 4


@shaped(select(literal(typing.cast("Grant", None))))
def acquire(
    permits: Mapping[str, int],
    *,
    external_id: str | None = None,
    owner: str | None = None,
    ttl: float | timedelta | None = None,
) -> Operation[Any]:
    """Acquire permits of one or more semaphores: all of them, or none.

    :param permits: how many of each semaphore, at least 1; in any order.
    :param external_id: the id of this request, to be given again by a retry: it is granted once. Without one, the
        operation generates one, and identifies one request however often it is executed.
    :param owner: the name that is stored as their holder, for ``holders`` and for the sweep of dead owners.
    :param ttl: how long they are held without being renewed, in seconds or as a ``timedelta``; ``None``: until
        they are released.
    :return: a :class:`~sqlalchemy_locks.Grant`. ``grant.acquired`` is ``False`` when any of the semaphores had no
        room: nothing was acquired then, and ``grant.exhausted`` names them. For an id that was asked for before:
        while it is held, ``True`` with the original fences (it isn't renewed by that, and keeps its owner);
        afterwards ``False``, with its state. A request that was released or has expired is never granted again by
        this operation.
    :raises UnknownSemaphore: when one of them was never created. Nothing was acquired.
    :raises IdempotencyConflict: when the id was used for other semaphores or other counts.
    :raises LockTimeout: when another transaction kept one of them locked for longer than the wait that the database,
        or the option ``locks_wait`` (seconds), allows.

    In a session of yours other acquirers of these semaphores wait until you commit: commit before you work. On MySQL,
    MariaDB and SQLite, a denied request keeps its locks until then, too. Under REPEATABLE READ and SERIALIZABLE
    the answer is right, or it is the engine's serialization or deadlock error: roll back and begin again. On MySQL and
    MariaDB, never begin with ``SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED``, which can't be detected: it
    over-grants.

    The pattern: "Distributed Counting Semaphore with MySQL", the complete acquire.

    >>> grant = session.scalar(sl.semaphore.acquire({"backup-slots": 1}, external_id="job-1", ttl=3600))
    """
    if not isinstance(permits, Mapping):
        raise TypeError(f"semaphore.acquire takes how many of each semaphore, as in {{'name': 1}}, not {permits!r}")
    if not permits:
        raise ValueError("semaphore.acquire needs at least one semaphore")
    items = tuple(permits.items())
    plain = len(items) <= _MOST_KEPT and all(type(name) is str and type(count) is int for name, count in items)
    asked, names, counts = (_kept_permits if plain else _checked_permits)(items)
    held_for = None if ttl is None else bounded_seconds(ttl, "ttl", zero=False)
    if held_for is not None and held_for < 0.001:
        raise ValueError(f"ttl is at least 0.001 seconds, not {ttl!r}")
    values = {
        "permits": dict(asked),
        "names": names,
        "counts": counts,
        "external_id": uuid4().hex if external_id is None else external_id_of(external_id),
        "owner": None if owner is None else valid_name(owner, "an owner"),
        "ttl_seconds": held_for,
        "replaces_expired": False,
    }
    return Operation(_ACQUIRE, values)


def for_block(request: Operation[Any], owner: str, *, new_id: bool) -> Operation[Any]:
    """Return the request of a block, which takes the place of one of its id whose time ran out before its release.

    :param request: validated before; each use of the block has a request of its own.
    :param new_id: under another external id.
    """
    values = {**request._values, "owner": owner, "replaces_expired": not new_id}
    if new_id:
        values["external_id"] = uuid4().hex
    return Operation(_ACQUIRE, values)


def acquire_in_turn(request: Operation[Any], keys: Mapping[str, int]) -> Operation[Any]:
    """Return the same request, denied while others queue for one of the semaphores.

    :param keys: of each semaphore's queue, in the order of the request's permits.
    """
    return Operation(_IN_TURN, {**request._values, "keys": keys, "queue_keys": _array(map(str, keys.values()))})


def acquire_if_room(request: Operation[Any]) -> Operation[Any]:
    """Return the same request, for a waiter that polls where there are functions: it writes only where there is room.

    A denial has the capacities, too.
    """
    return Operation(_IF_ROOM, request._values)

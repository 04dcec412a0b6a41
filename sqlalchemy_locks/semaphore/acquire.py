"""acquire: permits of one or more semaphores, all of them or none.

The steps of an acquire:

1. Insert the request's row. It serializes the calls with the same id.
2. Lock the semaphores' rows, in the order of their names.
3. In a later statement, sum the held permits, and read the fences. If the sum leaves no room, release expired requests
   and sum again.
4. Insert the permits and raise the fences. A transaction with an older snapshot then fails or reads again, instead of
   granting too many permits. A denial deletes the request, and leaves no trace.

Each semaphore's row stores an upper bound of its held permits. A grant raises the bound. A release doesn't lower it,
since it would have to wait for the row. If the bound leaves room, no sum is needed. If it leaves none, the sum decides,
and becomes the new bound.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta, timezone
from typing import Any
from uuid import uuid4

from sqlalchemy import Row, bindparam, cast, literal, literal_column, select
from sqlalchemy.sql import Executable
from sqlalchemy.types import ARRAY, BigInteger, Boolean, Float, Integer, NullType, Text

from sqlalchemy_locks._validation import bounded_seconds, valid_int, valid_name
from sqlalchemy_locks.core.operation import Execution, Operation
from sqlalchemy_locks.core.typing import shaped
from sqlalchemy_locks.errors import IdempotencyConflict, LockTimeout
from sqlalchemy_locks.semaphore import base, permit_sums
from sqlalchemy_locks.semaphore.statements import ACQUIRED, CONFLICT, DENIED, EXPIRED, UNKNOWN, Statements
from sqlalchemy_locks.sql.clock import utc
from sqlalchemy_locks.sql.elements import WAIT_MS, LockFunction
from sqlalchemy_locks.values import Grant

#: the maximum number of attempts while others insert and delete the same request
_ROUNDS = 100
_ANSWER = ("state", "replayed", "token", "expires_at", "fences", "exhausted", "capacities")


class AcquirePermits(base.SemaphoreImpl):
    name = "semaphore.acquire"
    subject = "names"
    uses_nonce = True

    def call(self) -> LockFunction:
        return LockFunction(
            "semaphore_acquire",
            bindparam("names", type_=ARRAY(Text())),
            # integers are bound as the text of an array: a driver takes 10 µs to adapt a list
            cast(bindparam("counts", type_=Text()), ARRAY(Integer())),
            bindparam("external_id", type_=Text()),
            bindparam("owner", type_=Text()),
            bindparam("ttl_seconds", type_=Float()),
            WAIT_MS,
            bindparam("nonce", None, Text()),
            bindparam("replaces_expired", type_=Boolean()),
            cast(bindparam("queue_keys", type_=Text()), ARRAY(BigInteger())),
            type_=NullType(),
        )

    def select_call(self, call: LockFunction) -> Executable:
        # called in the SELECT list of a subquery: in FROM, the server would store the row, and read it again
        subquery = select(call.label("answer")).subquery("called")
        answer: list[Any] = [literal_column(f"(called.answer).{name}") for name in _ANSWER]
        return select(*answer).select_from(subquery)

    def arguments(self, execution: Execution) -> dict[str, Any]:
        # at a retry, the first attempt may still be granted: a denial because of the queue would hide the grant
        keys = None if execution.is_retry else execution.values["queue_keys"]
        text = {"counts": _array(execution.values["counts"]), "queue_keys": keys and _array(keys)}
        return {**super().arguments(execution), "nonce": execution.nonce, **text}

    def answer(self, execution: Execution, row: Row[Any]) -> Grant:
        state, replayed, token, expires_at, fences, exhausted, capacities = tuple(row)
        if state == UNKNOWN:
            raise base.unknown_semaphore(*exhausted)
        if state == CONFLICT:
            raise _conflict(execution)
        until = expires_at and expires_at.astimezone(timezone.utc)
        arrays = {"fences": fences or (), "exhausted": exhausted or (), "capacities": capacities or ()}
        return _grant(execution, state, token=token, until=until, replayed=replayed, **arrays)

    def run_statements(self, execution: Execution, sql: Statements) -> Grant:
        occupied = self._occupied_queues(execution, sql)
        if occupied:
            return _grant(execution, DENIED, exhausted=occupied)
        replaces_expired = execution.values["replaces_expired"]
        for attempt in range(_ROUNDS):
            if replaces_expired:
                # Delete an earlier request of this id that expired before its release. This comes before the INSERT,
                # since an INSERT that meets a duplicate locks it in shared mode: of two such callers, neither could
                # delete it. The lock waits for a guarded write of the earlier request.
                earlier = base.lock_request(execution, sql)
                if earlier is not None and execution.execute(sql.read_expired_at_end, {"row_id": earlier.id}).scalar():
                    base.delete_request(execution, sql, earlier.id)
            request = self._insert_request(execution, sql, attempt == 0)
            if request is not None:
                try:
                    return self._decide(execution, sql, request)
                except LockTimeout:
                    # InnoDB undoes only this statement: a caller that continues and commits would keep half a request
                    base.delete_request(execution, sql, request)
                    raise
            replay = self._replay(execution, sql)
            if replay is not None and not (replaces_expired and replay.state == EXPIRED):
                return replay
        raise LockTimeout("others insert and delete the request again and again", kind="semaphore")

    def _occupied_queues(self, execution: Execution, sql: Statements) -> list[str]:
        """Return the semaphores for which others queue; none if this request exists already."""
        backend, keys = execution.backend, execution.values["queue_keys"]
        # at a retry, the first attempt may still be granted: a denial because of the queue would hide the grant
        if execution.is_retry or not keys or backend.server_queues is None:
            return []
        queues = zip(execution.values["names"], keys, strict=True)
        occupied = [name for name, key in queues if not backend.queue_is_free(execution.connection, key)]
        ident = execution.values["external_id"]
        if occupied and execution.execute(sql.find_request, {"by_external_id": ident}).first():
            return []
        return occupied

    def _insert_request(self, execution: Execution, sql: Statements, first: bool) -> int | None:
        """Insert the request and return its row id; ``None`` if a request with its external id exists."""
        values = {name: execution.values[name] for name in ("external_id", "owner", "ttl_seconds")}
        # Search first: above READ COMMITTED an INSERT that meets a duplicate locks a gap. Only at the first attempt: a
        # snapshot still shows a request that was deleted since.
        searches = execution.backend.single_writer or (first and not execution.begun_by_locks)
        if searches and execution.execute(sql.find_request, {"by_external_id": values["external_id"]}).first():
            return None
        values |= {"state": ACQUIRED, "token": execution.nonce}
        return base.insert_unless_present(execution, sql.insert_request, values)

    def _replay(self, execution: Execution, sql: Statements) -> Grant | None:
        """Return the grant of the existing request; ``None`` if it was deleted meanwhile."""
        # a shared lock, so that two calls that repeat the request don't wait for each other
        request = base.share_request(execution, sql)
        if request is None:
            return None
        # the SELECT with locks also locks gaps, so it is used only if an older snapshot hides the permits
        permits = execution.execute(sql.read_permits, {"row_id": request.id}).all()
        permits = permits or execution.execute(sql.share_permits, {"row_id": request.id}).all()
        rows = execution.execute(sql.read_names, {"row_ids": [permit.semaphore_id for permit in permits]})
        names = {row.id: row.name for row in rows}
        by_name = {names.get(permit.semaphore_id): permit for permit in permits}
        counts = execution.values["permits"]
        if {name: permit.count for name, permit in by_name.items()} != counts:
            raise _conflict(execution)
        state = EXPIRED if request.state == ACQUIRED and request.expired else request.state
        fences = [by_name[name].fence for name in counts]
        return _grant(execution, state, token=request.token, until=utc(request.until), fences=fences, replayed=True)

    def _decide(self, execution: Execution, sql: Statements, request: int) -> Grant:
        permits, ttl = execution.values["permits"], execution.values["ttl_seconds"]
        row_by_name = {name: base.lock_semaphore(execution, sql, name) for name in permits}
        unknown_names = [name for name, row in row_by_name.items() if row is None]
        if unknown_names:
            execution.execute(sql.delete_request, {"row_id": request})
            raise base.unknown_semaphore(*unknown_names)
        rows = [row for row in row_by_name.values() if row is not None]
        counts = {row.id: count for row, count in zip(rows, permits.values(), strict=True)}
        # a release lowers no bound, so there may be room although a bound leaves none
        bounds: dict[int, float] = {row.id: math.inf if row.used_at_most is None else row.used_at_most for row in rows}
        if ttl is None and all(bounds[row.id] + counts[row.id] <= row.capacity for row in rows):
            sums, now, began = permit_sums.Usage(bounds, None, None)
        else:
            sums, now, began = permit_sums.read_usage(execution, sql, rows, request)
            if base.reads_snapshot(execution):
                # The sum isn't stored as the bound, since others rely on the bound. At READ UNCOMMITTED, which can't
                # always be detected, the sum may be too low.
                sums = {semaphore: min(used, bounds[semaphore]) for semaphore, used in sums.items()}
            else:
                bounds = dict(sums)
        exhausted = []
        for name, row in zip(permits, rows, strict=True):
            most = row.capacity - counts[row.id]
            if sums[row.id] > most and (current := permit_sums.sum_again(execution, sql, row, most)) is not None:
                sums[row.id], now = current
                bounds[row.id] = sums[row.id]
            if sums[row.id] > most:
                exhausted.append(name)
        if exhausted:
            execution.execute(sql.delete_request, {"row_id": request})
            return _grant(execution, DENIED, exhausted=exhausted)
        for row in rows:
            bound = bounds[row.id] + counts[row.id]
            execution.execute(sql.raise_fence, {"row_id": row.id, "bound": None if bound == math.inf else int(bound)})
            permit_sums.mark_changed(execution, row.id)
            permit = {"semaphore_id": row.id, "permit_request_id": request, "count": counts[row.id]}
            execution.execute(sql.insert_permit, {**permit, "fence": row.fence + 1, "state": ACQUIRED})
        until = None if ttl is None else self._start_lease(execution, sql, request, ttl, now, began)
        fences, capacities = [row.fence + 1 for row in rows], [row.capacity for row in rows]
        return _grant(execution, ACQUIRED, token=execution.nonce, until=until, fences=fences, capacities=capacities)

    def _start_lease(
        self, execution: Execution, sql: Statements, request: int, ttl: float, now: Any, began: Any
    ) -> Any:
        """Return the end of the time to live, which begins after the waits for locks, not at the INSERT before them."""
        if now is None or base.reads_snapshot(execution):
            # at SERIALIZABLE the sum, too, may have waited after it read the clock
            now = execution.execute(sql.read_clock, {}).scalar_one()
        if began is None or now - began > timedelta(seconds=min(0.01, ttl / 100)):
            execution.execute(sql.start_lease, {"row_id": request, "now": now})
            began = now
        return utc(began + timedelta(seconds=ttl))


def _array(integers: Sequence[int]) -> str:
    return f"{{{','.join(map(str, integers))}}}"


def _conflict(execution: Execution) -> IdempotencyConflict:
    return IdempotencyConflict(
        f"the request {execution.values['external_id']!r} was for other semaphores or other counts: "
        "one id stands for one request"
    )


def _grant(
    execution: Execution,
    state: str,
    *,
    token: str | None = None,
    until: Any = None,
    fences: Iterable[int] = (),
    exhausted: Iterable[str] = (),
    replayed: bool = False,
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
        expires_at=until if state in (ACQUIRED, EXPIRED) else None,
        token=token,
        capacities=tuple(capacities),
    )


_ACQUIRE = AcquirePermits()


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
        room: nothing was acquired then, and ``grant.exhausted`` names them. If the id was used before, the answer is
        ``True`` with the original fences while that request is held, which keeps its owner and isn't renewed.
        Afterwards it is ``False``, with the request's state: this operation never grants a released or expired
        request again.
    :raises UnknownSemaphore: when one of them was never created. Nothing was acquired.
    :raises IdempotencyConflict: when the id was used for other semaphores or other counts.
    :raises LockTimeout: when another transaction kept one of them locked for longer than the wait that the database,
        or the option ``locks_wait`` (seconds), allows.

    In your own session, other acquirers of these semaphores wait until you commit: commit before you do the work. On
    MySQL, MariaDB and SQLite, a denied request keeps its locks until then, too. Under REPEATABLE READ and SERIALIZABLE
    the answer is right, or the engine raises its serialization or deadlock error: then roll back and begin again. On
    MySQL and MariaDB, never begin with ``SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED``: it can't be detected, and
    more permits than the capacity may be granted.

    >>> grant = session.scalar(sl.semaphore.acquire({"backup-slots": 1}, external_id="job-1", ttl=3600))
    """
    if not isinstance(permits, Mapping):
        raise TypeError(f"semaphore.acquire takes how many of each semaphore, as in {{'name': 1}}, not {permits!r}")
    if not permits:
        raise ValueError("semaphore.acquire needs at least one semaphore")
    counts = {
        valid_name(name, "a semaphore's name"): valid_int(count, "a count of permits")
        for name, count in permits.items()
    }
    # in one order everywhere, so that two requests can't deadlock
    counts = dict(sorted(counts.items()))
    ttl_seconds = None if ttl is None else bounded_seconds(ttl, "ttl", zero=False)
    if ttl_seconds is not None and ttl_seconds < 0.001:
        raise ValueError(f"ttl is at least 0.001 seconds, not {ttl!r}")
    values = {
        "permits": counts,
        "names": list(counts),
        "counts": list(counts.values()),
        "external_id": uuid4().hex if external_id is None else valid_name(external_id, base.EXTERNAL_ID),
        "owner": None if owner is None else valid_name(owner, "an owner"),
        "ttl_seconds": ttl_seconds,
        "replaces_expired": False,
        "queue_keys": None,
    }
    return Operation(_ACQUIRE, values)


def for_block(request: Operation[Any], owner: str, *, new_id: bool) -> Operation[Any]:
    """Return the request for one use of a block. It replaces an earlier one of its id that expired before its release.

    :param request: the block's request, validated already.
    :param new_id: give it an external id of its own; then it replaces none.
    """
    values = {**request._values, "owner": owner, "replaces_expired": not new_id}
    if new_id:
        values["external_id"] = uuid4().hex
    return Operation(_ACQUIRE, values)


def in_turn(request: Operation[Any], queue_keys: Sequence[int]) -> Operation[Any]:
    """Return the same request, denied while others queue for one of the semaphores.

    :param queue_keys: the key of each semaphore's queue, in the order of the request's permits.
    """
    return Operation(_ACQUIRE, {**request._values, "queue_keys": queue_keys})

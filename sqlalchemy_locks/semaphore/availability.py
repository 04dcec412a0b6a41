"""What ``Locks`` asks while somebody waits for room: whether there is some, whose turn it is, what is held still.

These look, and lock nothing: who waits must not be in the way of who releases, nor leave dead rows behind by the
hundred. They only tell when a try is worth it; whether there is room is for :func:`acquire` to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ARRAY, BigInteger, Float, Integer, String, Text, bindparam, cast, exists, func, or_, select
from sqlalchemy.sql import Executable
from sqlalchemy.types import NullType

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, RowsOperation
from sqlalchemy_locks.semaphore.acquire import AcquirePermits, denied
from sqlalchemy_locks.semaphore.queries import Read
from sqlalchemy_locks.semaphore.statements import HELD_STATE, until
from sqlalchemy_locks.sql.clock import Now
from sqlalchemy_locks.sql.elements import LockFunction
from sqlalchemy_locks.sql.tables import Tables
from sqlalchemy_locks.values import Grant

_CALLED = bindparam("external_id", type_=String())


class Room(Read):
    """Each of the semaphores: its capacity, what is held and has not expired, and whether the request is known."""

    def select(self, tables: Tables) -> Executable:
        sem, req, per = tables.semaphore, tables.permit_request, tables.permit
        lasting = or_(req.c.ttl_seconds.is_(None), until(req) > Now())
        used = (
            select(func.coalesce(func.sum(per.c.count), 0))
            .select_from(per.join(req, req.c.id == per.c.permit_request_id))
            .where(per.c.semaphore_id == sem.c.id, per.c.state == HELD_STATE, lasting)
            .scalar_subquery()
        )
        known = exists(select(req.c.id).where(req.c.external_id == _CALLED))
        return select(sem.c.name, sem.c.capacity, used.label("used"), known.label("known")).where(
            sem.c.name.in_(bindparam("names", expanding=True, type_=String()))
        )


class Holdings(Read):
    """Whether a request is held, and its time has not run out."""

    def select(self, tables: Tables) -> Executable:
        req = tables.permit_request
        return select(func.count()).where(
            req.c.external_id == _CALLED,
            req.c.token == bindparam("token", type_=String()),
            req.c.state == HELD_STATE,
            or_(req.c.ttl_seconds.is_(None), until(req) > Now()),
        )


class TimeToLive(Read):
    """The time to live that a request was granted with, in seconds."""

    def select(self, tables: Tables) -> Executable:
        req = tables.permit_request
        return select(req.c.ttl_seconds).where(
            req.c.external_id == _CALLED, req.c.token == bindparam("token", type_=String())
        )


class InTurn(AcquirePermits):
    """As ``AcquirePermits``, unless others wait for one of the semaphores: they come first."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "semaphore.acquire"

    def call(self) -> LockFunction:
        return LockFunction(
            "semaphore_in_turn",
            cast(bindparam("lines", type_=Text()), ARRAY(BigInteger())),
            cast(bindparam("names", type_=Text()), ARRAY(Text())),
            cast(bindparam("counts", type_=Text()), ARRAY(Integer())),
            _CALLED,
            bindparam("owner", type_=Text()),
            bindparam("ttl_seconds", type_=Float()),
            bindparam("lock_wait", type_=Text()),
            type_=NullType(),
        )

    def by_statements(self, execution: Execution, made: Any) -> Grant:
        keys = execution.values["keys"].items() if execution.backend.server_queues else ()
        busy = [name for name, key in keys if not execution.backend.queue_is_free(execution.connection, key)]
        # what was granted already must not wait behind those who wait for it
        if busy and execution.execute(made.request, {"called": execution.values["external_id"]}).first() is None:
            return denied(execution, busy)
        return super().by_statements(execution, made)


_ROOM, _HOLDING, _TTL, _IN_TURN = Room(), Holdings(), TimeToLive(), InTurn()


def room(request: Operation[Any]) -> RowsOperation[Any]:
    """The look at the semaphores of a request; :func:`short_of` reads it."""
    return RowsOperation(
        _ROOM, {"names": list(request._values["permits"]), "external_id": request._values["external_id"]}
    )


def short_of(rows: Any, permits: Mapping[str, int]) -> list[str]:
    """Those of the semaphores that have no room; none of them also where only a try can tell."""
    found = {row.name: row for row in rows}
    if found.keys() != permits.keys() or any(row.known or row.capacity is None for row in rows):
        return []
    return [name for name, count in permits.items() if found[name].used + count > found[name].capacity]


def holding(grant: Grant) -> Operation[Any]:
    """1 while the permits of a grant are held, 0 afterwards."""
    return Operation(_HOLDING, {"external_id": grant.external_id, "token": grant.token})


def time_to_live(grant: Grant) -> Operation[Any]:
    """How long a grant is held without being renewed, in seconds: as it was asked for when it was granted."""
    return Operation(_TTL, {"external_id": grant.external_id, "token": grant.token})


def in_turn(request: Operation[Any], keys: Mapping[str, int]) -> Operation[Any]:
    """The same request, denied while others wait for one of the semaphores.

    :param keys: of each semaphore's line, in the order of the request's permits.
    """
    return Operation(_IN_TURN, {**request._values, "keys": keys, "lines": f"{{{','.join(map(str, keys.values()))}}}"})


def place_key(context: BuildContext, options: Mapping[str, Any]) -> str:
    """What tells the semaphores of one installation from those of another in the same database."""
    moved = options.get("schema_translate_map") or {}
    table = context.tables.semaphore
    return f"{moved.get(table.schema, table.schema)}.{table.name}"


__all__ = ["holding", "in_turn", "place_key", "room", "short_of", "time_to_live"]

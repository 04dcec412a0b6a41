"""The queries of ``Locks`` while a request waits: whether there is room, and whether a grant is still held.

They read without locks: a waiter must not delay a release, and its polls must not leave hundreds of dead rows behind.
They only show whether an attempt is worthwhile. ``acquire.py`` decides whether there is room.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import String, bindparam, exists, func, or_, select
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Operation, RowsOperation
from sqlalchemy_locks.semaphore.monitoring import ReadSemaphores
from sqlalchemy_locks.semaphore.statements import HELD_STATE, expiry
from sqlalchemy_locks.sql.clock import Now
from sqlalchemy_locks.values import Grant

_EXTERNAL_ID = bindparam("external_id", type_=String())
_TOKEN = bindparam("token", type_=String())


class Availability(ReadSemaphores):
    """The capacity of each semaphore, its held permits without expired ones, and whether the request exists."""

    name = "semaphore.availability"

    def build(self, context: BuildContext) -> Executable | None:
        sem, req, per = context.tables.semaphore, context.tables.permit_request, context.tables.permit
        lasting = or_(req.c.ttl_seconds.is_(None), expiry(req) > Now())
        used = (
            select(func.coalesce(func.sum(per.c.count), 0))
            .select_from(per.join(req, req.c.id == per.c.permit_request_id))
            .where(per.c.semaphore_id == sem.c.id, per.c.state == HELD_STATE, lasting)
            .scalar_subquery()
        )
        present = exists(select(req.c.id).where(req.c.external_id == _EXTERNAL_ID))
        return select(sem.c.name, sem.c.capacity, used.label("used"), present.label("known")).where(
            sem.c.name.in_(bindparam("names", expanding=True, type_=String()))
        )


class IsHeld(ReadSemaphores):
    """Whether a request is held, and has not expired."""

    name = "semaphore.is_held"

    def build(self, context: BuildContext) -> Executable | None:
        req = context.tables.permit_request
        return select(func.count()).where(
            req.c.external_id == _EXTERNAL_ID,
            req.c.token == _TOKEN,
            req.c.state == HELD_STATE,
            or_(req.c.ttl_seconds.is_(None), expiry(req) > Now()),
        )


_AVAILABILITY, _IS_HELD = Availability(), IsHeld()


def availability(request: Operation[Any] | Grant) -> RowsOperation[Any]:
    """Read the semaphores of a request; :func:`exhausted_in` interprets the rows."""
    if isinstance(request, Grant):
        names, ident = list(request.permits), request.external_id
    else:
        names, ident = list(request._values["permits"]), request._values["external_id"]
    return RowsOperation(_AVAILABILITY, {"names": names, "external_id": ident})


def exhausted_in(rows: Any, permits: Mapping[str, int]) -> list[str]:
    """Return the semaphores that have no room; an empty list, too, where only an attempt can tell."""
    by_name = {row.name: row for row in rows}
    # the sum of a statement that was killed is NULL, without an error
    unclear = any(row.known or row.capacity is None or row.used is None for row in rows)
    if unclear or by_name.keys() != permits.keys():
        return []
    return [name for name, count in permits.items() if by_name[name].used + count > by_name[name].capacity]


def is_held(grant: Grant) -> Operation[Any]:
    """Return 1 while the permits of a grant are held, 0 afterwards."""
    return Operation(_IS_HELD, {"external_id": grant.external_id, "token": grant.token})

"""oldest, ages: what a page shows of the semaphores, so much of it and no more, as one SELECT each."""

from __future__ import annotations

import itertools
from typing import Any

from sqlalchemy import BigInteger, Integer, String, and_, bindparam, case, cast, func, literal, or_, select
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import positive_int, valid_name
from sqlalchemy_locks.core.operation import RowsOperation
from sqlalchemy_locks.semaphore.queries import Read
from sqlalchemy_locks.semaphore.statements import HELD_STATE, until
from sqlalchemy_locks.sql.clock import Elapsed, Now
from sqlalchemy_locks.sql.tables import Tables

#: the ages that permits are counted by: so many seconds at most; older ones are counted apart
AGES = (60, 600, 3600, 6 * 3600, 86400)
_EACH = bindparam("each", type_=Integer())
_NAME = bindparam("name", type_=String())


class Oldest(Read):
    def select(self, tables: Tables) -> Executable:
        sem, req, per = tables.semaphore, tables.permit_request, tables.permit
        place = func.row_number().over(partition_by=per.c.semaphore_id, order_by=per.c.permit_request_id)
        held = (
            select(per.c.semaphore_id, per.c.permit_request_id, per.c.count, per.c.fence, place.label("place"))
            .join_from(per, sem, sem.c.id == per.c.semaphore_id)
            .where(per.c.state == HELD_STATE, or_(_NAME.is_(None), sem.c.name == _NAME))
            .subquery("held")
        )
        return (
            select(
                sem.c.name,
                req.c.token,
                req.c.external_id,
                req.c.owner,
                held.c.count.label("permits"),
                held.c.fence,
                Elapsed(req.c.created_at).label("age"),
                (-Elapsed(until(req))).label("left"),
                func.coalesce(until(req) <= Now(), literal(False)).label("expired"),
            )
            .select_from(held)
            .join(sem, sem.c.id == held.c.semaphore_id)
            .join(req, req.c.id == held.c.permit_request_id)
            .where(held.c.place <= _EACH)
            .order_by(sem.c.name, held.c.place)
        )


class Ages(Read):
    def select(self, tables: Tables) -> Executable:
        req, per = tables.permit_request, tables.permit
        age = Elapsed(req.c.created_at)
        between = [and_(age >= least, age < most) for least, most in itertools.pairwise(AGES)]
        within = [age < AGES[0], *between, age >= AGES[-1]]
        parts = [_sum(condition, per.c.count).label(f"age_{number}") for number, condition in enumerate(within)]
        expired = _sum(func.coalesce(until(req) <= Now(), literal(False)), per.c.count).label("expired")
        joined = per.join(req, req.c.id == per.c.permit_request_id)
        return select(*parts, expired).select_from(joined).where(per.c.state == HELD_STATE)


def _sum(condition: Any, column: Any) -> Any:
    return cast(func.coalesce(func.sum(case((condition, column), else_=0)), 0), BigInteger())


_OLDEST, _AGES = Oldest(), Ages()


def oldest(each: int, name: str | None = None) -> RowsOperation[Any]:
    """Who has held permits longest: ``name, token, external_id, owner, permits, fence, age, left, expired``.

    :param each: how many of each semaphore. :param name: of one semaphore only.

    ``age`` is since when, and ``left`` how long still, in whole seconds by the server's clock; ``left`` is ``None``
    without a time to live, and less than 0 for what has expired and is still counted.
    """
    of = None if name is None else valid_name(name, "a semaphore's name")
    return RowsOperation(_OLDEST, {"each": positive_int(each, "each"), "name": of})


def ages() -> RowsOperation[Any]:
    """One row: how many permits are held for less than each of ``AGES``, for longer, and by who has ``expired``."""
    return RowsOperation(_AGES, {})

"""usage, holders, history, and what the dashboard shows: one SELECT each, on every engine."""

from __future__ import annotations

import itertools
from typing import Any

from sqlalchemy import (
    BigInteger,
    Integer,
    String,
    and_,
    bindparam,
    case,
    cast,
    func,
    literal,
    or_,
    select,
    type_coerce,
)
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import positive_int, valid_name
from sqlalchemy_locks.core.operation import BuildContext, Execution, OperationImpl, RowsOperation
from sqlalchemy_locks.semaphore.statements import HELD_STATE, until
from sqlalchemy_locks.sql.clock import UTC, Elapsed, Now
from sqlalchemy_locks.sql.tables import Tables

#: the ages in seconds that permits are counted by; older ones are counted apart
AGES = (60, 600, 3600, 6 * 3600, 86400)
_NAME = bindparam("name", type_=String())
_EACH = bindparam("each", type_=Integer())


class ReadSemaphores(OperationImpl):
    writes = False

    def build(self, context: BuildContext) -> Executable | None:
        return self.select(context.tables)

    def select(self, tables: Tables) -> Executable:
        raise NotImplementedError

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        assert statement is not None
        return execution.execute(statement)


class Usage(ReadSemaphores):
    name = "semaphore.usage"

    def select(self, tables: Tables) -> Executable:
        sem, req, per = tables.semaphore, tables.permit_request, tables.permit
        held = and_(per.c.semaphore_id == sem.c.id, per.c.state == HELD_STATE)
        used = select(cast(func.coalesce(func.sum(per.c.count), 0), BigInteger())).where(held).scalar_subquery()
        holders = select(func.count()).where(held).scalar_subquery()
        oldest = select(func.min(per.c.permit_request_id)).where(held).scalar_subquery()
        return (
            select(
                sem.c.name,
                sem.c.capacity,
                used.label("used"),
                req.c.external_id.label("oldest_holder"),
                req.c.owner.label("oldest_owner"),
                type_coerce(req.c.created_at, UTC()).label("oldest_since"),
                holders.label("holders"),
            )
            .select_from(sem.outerjoin(req, req.c.id == oldest))
            .where(sem.c.capacity.is_not(None))
            .order_by(sem.c.name)
        )


class Holders(ReadSemaphores):
    name = "semaphore.holders"

    def select(self, tables: Tables) -> Executable:
        sem, req, per = tables.semaphore, tables.permit_request, tables.permit
        joined = per.join(sem, sem.c.id == per.c.semaphore_id).join(req, req.c.id == per.c.permit_request_id)
        return (
            select(
                req.c.external_id,
                req.c.owner,
                per.c.count.label("permits"),
                per.c.fence,
                type_coerce(req.c.created_at, UTC()).label("since"),
                type_coerce(until(req), UTC()).label("expires_at"),
                _expired(req).label("expired"),
            )
            .select_from(joined)
            .where(sem.c.name == _NAME, per.c.state == HELD_STATE)
            .order_by(per.c.fence)
        )


class History(ReadSemaphores):
    """The changes of capacity. :param of_one: of the semaphore ``name`` alone."""

    name = "semaphore.history"

    def __init__(self, *, of_one: bool) -> None:
        super().__init__()
        self._of_one = of_one

    def select(self, tables: Tables) -> Executable:
        sem, his = tables.semaphore, tables.semaphore_history
        # a subquery: MariaDB would begin a join with the semaphores, and sort
        name = select(sem.c.name).where(sem.c.id == his.c.semaphore_id).scalar_subquery()
        changed_at = type_coerce(his.c.changed_at, UTC()).label("changed_at")
        # in the order of an index, in both cases, so that no more is read than the limit
        changes = (
            select(name.label("name"), his.c.old_capacity, his.c.new_capacity, his.c.changed_by, changed_at)
            .order_by(his.c.id.desc())
            .limit(bindparam("limit", type_=Integer()))
        )
        if self._of_one:
            of_one = select(sem.c.id).where(sem.c.name == _NAME).correlate(None).scalar_subquery()
            changes = changes.where(his.c.semaphore_id == of_one)
        return changes


class OldestHolders(ReadSemaphores):
    name = "semaphore.oldest_holders"

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
                _expired(req).label("expired"),
            )
            .select_from(held)
            .join(sem, sem.c.id == held.c.semaphore_id)
            .join(req, req.c.id == held.c.permit_request_id)
            .where(held.c.place <= _EACH)
            .order_by(sem.c.name, held.c.place)
        )


class HoldingAges(ReadSemaphores):
    name = "semaphore.holding_ages"

    def select(self, tables: Tables) -> Executable:
        req, per = tables.permit_request, tables.permit
        age = Elapsed(req.c.created_at)
        between = [and_(age >= least, age < most) for least, most in itertools.pairwise(AGES)]
        within = [age < AGES[0], *between, age >= AGES[-1]]
        parts = [_sum(condition, per.c.count).label(f"age_{number}") for number, condition in enumerate(within)]
        expired = _sum(_expired(req), per.c.count).label("expired")
        joined = per.join(req, req.c.id == per.c.permit_request_id)
        return select(*parts, expired).select_from(joined).where(per.c.state == HELD_STATE)


def _expired(request: Any) -> Any:
    return func.coalesce(until(request) <= Now(), literal(False))


def _sum(condition: Any, column: Any) -> Any:
    return cast(func.coalesce(func.sum(case((condition, column), else_=0)), 0), BigInteger())


_USAGE, _HOLDERS = Usage(), Holders()
_HISTORY, _HISTORY_OF_ONE = History(of_one=False), History(of_one=True)
_OLDEST_HOLDERS, _HOLDING_AGES = OldestHolders(), HoldingAges()


def usage() -> RowsOperation[Any]:
    """Return every semaphore: ``name``, ``capacity``, ``used``, its longest holder's external id
    (``oldest_holder``), ``oldest_owner``, ``oldest_since`` (UTC, by the server's clock), or ``None``, and the number of
    ``holders``.

    What has expired is counted until it is released.

    >>> session.execute(sl.semaphore.usage()).all()
    """
    return RowsOperation(_USAGE, {})


def holders(name: str) -> RowsOperation[Any]:
    """Return the holders of a semaphore's permits: ``external_id``, ``owner``, ``permits``, ``fence``, ``since``,
    ``expires_at``, ``expired`` (its time ran out, and it isn't released yet), in the order of their grants.

    >>> session.execute(sl.semaphore.holders("network")).all()
    []
    """
    return RowsOperation(_HOLDERS, {"name": valid_name(name, "a semaphore's name")})


def history(name: str | None = None, *, limit: int = 100) -> RowsOperation[Any]:
    """Return the last changes of capacity, newest first: ``name``, ``old_capacity``, ``new_capacity``, ``changed_by``,
    ``changed_at``.

    ``old_capacity`` is ``None`` where the semaphore was created, ``new_capacity`` where it was deleted. Semaphores that
    a lease creates on its first use are not recorded.

    :param name: of one semaphore; without it, of all.
    :param limit: how many at most, at least 1; no more than these are read.

    >>> changes = session.execute(sl.semaphore.history("network", limit=10)).all()
    """
    most = positive_int(limit, "limit")
    if name is None:
        return RowsOperation(_HISTORY, {"limit": most})
    return RowsOperation(_HISTORY_OF_ONE, {"name": valid_name(name, "a semaphore's name"), "limit": most})


def oldest_holders(each: int, name: str | None = None) -> RowsOperation[Any]:
    """Return the longest holders: ``name, token, external_id, owner, permits, fence, age, left, expired``.

    :param each: how many of each semaphore. :param name: of one semaphore only.

    ``age`` is how long it has been held, and ``left`` how long it still is, in whole seconds by the server's clock;
    ``left`` is ``None`` without a time to live, and less than 0 for what has expired and is still counted.
    """
    of_one = None if name is None else valid_name(name, "a semaphore's name")
    return RowsOperation(_OLDEST_HOLDERS, {"each": positive_int(each, "each"), "name": of_one})


def holding_ages() -> RowsOperation[Any]:
    """Return one row: how many permits are held for less than each of ``AGES``, for longer, and ``expired``."""
    return RowsOperation(_HOLDING_AGES, {})

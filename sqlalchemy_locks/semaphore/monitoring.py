"""usage, holders, history, and the queries of the dashboard: one SELECT each, on every engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import valid_int, valid_name
from sqlalchemy_locks.core.operation import BuildContext, OperationImpl, RowsOperation
from sqlalchemy_locks.semaphore.statements import HELD_STATE, expiry
from sqlalchemy_locks.sql.clock import UTC, Elapsed, Now

#: the upper limits, in seconds, of the ages by which held requests are counted; older ones are a group of their own
AGES = (60, 600, 3600, 6 * 3600, 86400)
#: the maximum number of semaphores whose holders are read at once
SEMAPHORES = 50
_NAME = sa.bindparam("name", type_=sa.String())
_NAMES: Any = sa.bindparam("names", type_=sa.String(), expanding=True)
_EACH, _LIMIT = sa.bindparam("each", type_=sa.Integer()), sa.bindparam("limit", type_=sa.Integer())
_ONE: Any = sa.literal_column("1e0", sa.Float())


class ReadSemaphores(OperationImpl):
    """One SELECT without locks, on every engine."""

    writes = False


def _use(context: BuildContext, *, named: bool = False, expiring: bool = False) -> Any:
    """Select each semaphore and its held permits, in one pass: ``id, used, holders, oldest, capacity, on_demand``.

    :param named: only the semaphores ``names``, without ``capacity`` and ``on_demand``.
    :param expiring: count expired permits as ``expired`` instead of ``used``; this also reads each request.
    """
    sem, per, req = (
        context.tables.semaphore.alias("each_semaphore"),
        context.tables.permit,
        context.tables.permit_request,
    )
    held = sa.and_(per.c.semaphore_id == sem.c.id, per.c.state == HELD_STATE)
    source: Any = sem.outerjoin(per, held)
    parts: dict[str, Any] = {"used": per.c.count}
    if expiring:
        source = source.outerjoin(req, req.c.id == per.c.permit_request_id)
        parts = {
            "used": sa.case((_expired(req), 0), else_=per.c.count),
            "expired": sa.case((_expired(req), per.c.count)),
        }
    sums = (
        *(_sum(part).label(name) for name, part in parts.items()),
        sa.func.count(per.c.permit_request_id).label("holders"),
        sa.func.min(per.c.permit_request_id).label("oldest"),
    )
    each: Any = sa.select(sem.c.id, *sums).select_from(source).group_by(sem.c.id)
    if named:
        return each.where(sem.c.name.in_(_NAMES))
    each, columns = each.where(sem.c.capacity.is_not(None)), (sem.c.capacity, sem.c.on_demand)
    if context.backend.partial_indexes:
        return each.add_columns(*columns).group_by(*columns)
    # MySQL and MariaDB would sort all rows to group by more than the key
    return each.add_columns(*(sa.func.min(column).label(column.name) for column in columns))


class ReadUsage(ReadSemaphores):
    """Every semaphore. :param named: only the semaphores ``names``. :param with_id: with the id of its row."""

    name = "semaphore.usage"

    def __init__(self, *, named: bool = False, with_id: bool = False) -> None:
        super().__init__()
        self._named, self._with_id = named, with_id

    def build(self, context: BuildContext) -> Executable | None:
        sem, req = context.tables.semaphore, context.tables.permit_request
        use = _use(context, named=self._named, expiring=True).subquery("counted")
        usage = (
            sa.select(
                sem.c.name,
                sem.c.capacity,
                use.c.used,
                req.c.external_id.label("oldest_holder"),
                req.c.owner.label("oldest_owner"),
                sa.type_coerce(req.c.created_at, UTC()).label("oldest_since"),
                use.c.holders,
                use.c.expired,
            )
            .select_from(sem.join(use, use.c.id == sem.c.id).outerjoin(req, req.c.id == use.c.oldest))
            .where(sem.c.capacity.is_not(None))
        )
        if self._with_id:
            usage = usage.add_columns(sem.c.id)
        return usage.where(sem.c.name.in_(_NAMES)) if self._named else usage.order_by(sem.c.name)


class Fullest(ReadSemaphores):
    """The fullest semaphores and the leases that are held longest, after the counts of both."""

    name = "semaphore.fullest"

    def build(self, context: BuildContext) -> Executable | None:
        sem, req = context.tables.semaphore, context.tables.permit_request
        use = _use(context).cte("counted")
        lease, in_use = use.c.on_demand, use.c.holders > 0
        full = sa.and_(in_use, use.c.used >= use.c.capacity)
        share = sa.case((full, _ONE), (in_use, _ONE * use.c.used / use.c.capacity), else_=_ONE * 0)
        order = sa.case((lease, _ONE), else_=share).desc(), sa.case((lease, use.c.oldest)), use.c.id
        place = sa.func.row_number().over(partition_by=lease, order_by=order)
        # few columns and no names, since all semaphores are sorted
        placed = sa.select(use.c.id, lease, use.c.used, use.c.holders, use.c.oldest, place.label("place"))
        ranked = placed.where(sa.or_(in_use, ~lease)).subquery("ranked")
        none: Any = sa.cast(sa.null(), sa.BigInteger())
        columns = (ranked.c.id, ranked.c.on_demand, ranked.c.used, ranked.c.holders, ranked.c.oldest, ranked.c.place)
        rows = sa.select(*columns, none.label("total"), none.label("full")).where(ranked.c.place <= _LIMIT)
        permits = sa.cast(sa.func.sum(use.c.used), sa.BigInteger())
        counts = (none, lease, permits, _count_if(in_use), none, sa.literal(0), sa.func.count(), _count_if(full))
        chosen = sa.union_all(rows, sa.select(*counts).group_by(lease)).subquery("chosen")
        return (
            sa.select(
                chosen,
                sem.c.name,
                sem.c.capacity,
                req.c.external_id.label("oldest_holder"),
                req.c.owner.label("oldest_owner"),
                sa.type_coerce(req.c.created_at, UTC()).label("oldest_since"),
            )
            .select_from(chosen.outerjoin(sem, sem.c.id == chosen.c.id).outerjoin(req, req.c.id == chosen.c.oldest))
            .order_by(chosen.c.on_demand, chosen.c.place)
        )


class Holders(ReadSemaphores):
    name = "semaphore.holders"

    def build(self, context: BuildContext) -> Executable | None:
        sem, req, per = context.tables.semaphore, context.tables.permit_request, context.tables.permit
        joined = per.join(sem, sem.c.id == per.c.semaphore_id).join(req, req.c.id == per.c.permit_request_id)
        return (
            sa.select(
                req.c.external_id,
                req.c.owner,
                per.c.count.label("permits"),
                per.c.fence,
                sa.type_coerce(req.c.created_at, UTC()).label("since"),
                sa.type_coerce(expiry(req), UTC()).label("expires_at"),
                _expired(req).label("expired"),
            )
            .select_from(joined)
            .where(sem.c.name == _NAME, per.c.state == HELD_STATE)
            .order_by(per.c.fence)
        )


class History(ReadSemaphores):
    """The changes of capacity. :param of_one: only those of the semaphore ``name``."""

    name = "semaphore.history"

    def __init__(self, *, of_one: bool) -> None:
        super().__init__()
        self._of_one = of_one

    def build(self, context: BuildContext) -> Executable | None:
        sem, his = context.tables.semaphore, context.tables.semaphore_history
        # a subquery: MariaDB would begin a join with the semaphores, and sort
        name = sa.select(sem.c.name).where(sem.c.id == his.c.semaphore_id).scalar_subquery()
        changed_at = sa.type_coerce(his.c.changed_at, UTC()).label("changed_at")
        # an index has this order, for one semaphore and for all, so that no more rows than the limit are read
        changes = (
            sa.select(name.label("name"), his.c.old_capacity, his.c.new_capacity, his.c.changed_by, changed_at)
            .order_by(his.c.id.desc())
            .limit(_LIMIT)
        )
        if self._of_one:
            of_one = sa.select(sem.c.id).where(sem.c.name == _NAME).correlate(None).scalar_subquery()
            changes = changes.where(his.c.semaphore_id == of_one)
        return changes


class OldestHolders(ReadSemaphores):
    """The longest holders of up to ``SEMAPHORES`` semaphores, whose ids are ``semaphore_0`` and so on."""

    name = "semaphore.oldest_holders"

    def build(self, context: BuildContext) -> Executable | None:
        req, per = context.tables.permit_request, context.tables.permit

        def part(number: int) -> Any:
            of = per.c.semaphore_id == sa.bindparam(f"semaphore_{number}", type_=sa.BigInteger())
            oldest = sa.select(per.c.id).where(of, per.c.state == HELD_STATE).order_by(per.c.permit_request_id)
            return sa.select(oldest.limit(_EACH).subquery().c.id)

        chosen = sa.union_all(*map(part, range(SEMAPHORES))).subquery("chosen")
        return (
            sa.select(
                per.c.semaphore_id,
                req.c.token,
                req.c.external_id,
                req.c.owner,
                per.c.count.label("permits"),
                per.c.fence,
                Elapsed(req.c.created_at).label("age"),
                (-Elapsed(expiry(req))).label("left"),
                _expired(req).label("expired"),
            )
            .select_from(chosen)
            .join(per, per.c.id == chosen.c.id)
            .join(req, req.c.id == per.c.permit_request_id)
            .order_by(per.c.semaphore_id, per.c.permit_request_id)
        )


class ExpiredPermits(ReadSemaphores):
    name = "semaphore.expired_permits"

    def build(self, context: BuildContext) -> Executable | None:
        req, per = context.tables.permit_request, context.tables.permit
        ids: Any = sa.bindparam("ids", type_=sa.BigInteger(), expanding=True)
        return (
            sa.select(per.c.semaphore_id, _sum(per.c.count))
            .select_from(per.join(req, req.c.id == per.c.permit_request_id))
            .where(per.c.semaphore_id.in_(ids), per.c.state == HELD_STATE, _expired(req))
            .group_by(per.c.semaphore_id)
        )


class HolderAges(ReadSemaphores):
    name = "semaphore.holder_ages"

    def build(self, context: BuildContext) -> Executable | None:
        req = context.tables.permit_request
        # an index has this order; for held requests it is the order of the grants
        held = sa.select(Elapsed(req.c.created_at).label("age"), _expired(req).label("expired"))
        held = held.where(req.c.state == HELD_STATE).order_by(req.c.updated_at)
        oldest = held.limit(_LIMIT).subquery("oldest")
        age = oldest.c.age
        between = [sa.and_(age >= least, age < most) for least, most in itertools.pairwise(AGES)]
        within = [age < AGES[0], *between, age >= AGES[-1]]
        parts = [_count_if(condition).label(f"age_{number}") for number, condition in enumerate(within)]
        return sa.select(*parts, _count_if(oldest.c.expired).label("expired")).select_from(oldest)


def _expired(request: Any) -> Any:
    return sa.func.coalesce(expiry(request) <= Now(), sa.literal(False))


def _sum(number: Any) -> Any:
    return sa.cast(sa.func.coalesce(sa.func.sum(number), 0), sa.BigInteger())


def _count_if(condition: Any) -> Any:
    return _sum(sa.case((condition, 1), else_=0))


_USAGE, _USAGE_OF_ONE, _HOLDERS = ReadUsage(), ReadUsage(named=True), Holders()
_NAMED = ReadUsage(named=True, with_id=True)
_HISTORY, _HISTORY_OF_ONE = History(of_one=False), History(of_one=True)
_FULLEST = Fullest()
_OLDEST_HOLDERS, _HOLDER_AGES, _EXPIRED = OldestHolders(), HolderAges(), ExpiredPermits()


def usage(name: str | None = None) -> RowsOperation[Any]:
    """Return every semaphore: ``name``, ``capacity``, ``used``, its longest holder's external id
    (``oldest_holder``), ``oldest_owner``, ``oldest_since`` (UTC, by the server's clock), or ``None``, the number of
    ``holders``, and ``expired``.

    ``expired`` permits are not ``used``: an acquire that needs the room, or a sweep, takes them back. Their holders are
    counted until then.

    :param name: one semaphore; without it, all of them, in one pass over the held permits.

    >>> session.execute(sl.semaphore.usage()).all()
    """
    if name is None:
        return RowsOperation(_USAGE, {})
    return RowsOperation(_USAGE_OF_ONE, {"names": [valid_name(name, "a semaphore's name")]})


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
    most = valid_int(limit, "limit")
    if name is None:
        return RowsOperation(_HISTORY, {"limit": most})
    return RowsOperation(_HISTORY_OF_ONE, {"name": valid_name(name, "a semaphore's name"), "limit": most})


def fullest(limit: int) -> RowsOperation[Any]:
    """Return the fullest semaphores, and the leases that are held longest: ``id, name, capacity, on_demand, used,
    holders, oldest_holder, oldest_owner, oldest_since``.

    The semaphores begin with a row without an ``id``, which counts all of them, and so do the leases (``on_demand``).
    It has their number as ``total``, the number of those with holders as ``holders``, the number of ``full`` ones, and
    the ``used`` permits. Where there are no semaphores, or no leases, the row is missing, too.

    :param limit: the maximum number of semaphores, including unused ones, and of leases.
    """
    return RowsOperation(_FULLEST, {"limit": valid_int(limit, "limit")})


def named(names: Sequence[str]) -> RowsOperation[Any]:
    """Return the semaphores of these names as :func:`usage` does, and the ``id`` of each."""
    return RowsOperation(_NAMED, {"names": [valid_name(name, "a semaphore's name") for name in names]})


def expired_permits(semaphores: Sequence[int]) -> RowsOperation[Any]:
    """Return the id of each semaphore that has expired permits, and their number.

    :param semaphores: the ids of the semaphores to read.
    """
    return RowsOperation(_EXPIRED, {"ids": semaphores})


def oldest_holders(each: int, semaphores: Sequence[int]) -> RowsOperation[Any]:
    """Return the longest holders: ``semaphore_id, token, external_id, owner, permits, fence, age, left, expired``.

    :param each: the maximum number for each semaphore. :param semaphores: their ids, up to ``SEMAPHORES``.

    ``age`` is the time since the grant, and ``left`` the time until it expires, in whole seconds by the server's clock.
    ``left`` is ``None`` without a time to live, and negative after it.
    """
    ids = dict(enumerate(semaphores))
    parameters = {f"semaphore_{number}": ids.get(number) for number in range(SEMAPHORES)}
    return RowsOperation(_OLDEST_HOLDERS, {"each": valid_int(each, "each"), **parameters})


def holder_ages(limit: int) -> RowsOperation[Any]:
    """Return one row of counts: the held requests by age, in the groups of ``AGES``, and the ``expired`` ones.

    :param limit: the maximum number of counted requests, the oldest first.
    """
    return RowsOperation(_HOLDER_AGES, {"limit": valid_int(limit, "limit")})

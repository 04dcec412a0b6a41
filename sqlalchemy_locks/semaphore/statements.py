"""The statements of a semaphore where there are no functions, and of the sweeps everywhere: built once per schema."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Float,
    Integer,
    Select,
    String,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)

from sqlalchemy_locks.sql.clock import Instant, Now, NowAfterWait, PlusSeconds
from sqlalchemy_locks.sql.elements import InsertAbsent, ReadUncommitted
from sqlalchemy_locks.sql.tables import Tables

ACQUIRED, RELEASED, EXPIRED, DENIED = "ACQUIRED", "RELEASED", "EXPIRED", "DENIED"
UNKNOWN, CONFLICT, HELD, DELETED = "UNKNOWN", "CONFLICT", "HELD", "DELETED"

#: rows that one statement of a sweep or a clean-up handles at most
BATCH = 800

# in the statement itself, so that the index on what is held can be chosen for it
HELD_STATE = literal_column(f"'{ACQUIRED}'", String())
_GONE = literal_column(f"'{RELEASED}'", String())
_NAME = bindparam("called", type_=String())
_ID = bindparam("which", type_=BigInteger())


def expiry(request: Any) -> PlusSeconds:
    """Return when a request's time runs out; NULL without a time to live."""
    return PlusSeconds(request.c.renewed_at, request.c.ttl_seconds)


@cache
def statements(tables: Tables, *, stale_reads: bool) -> Any:
    """Return all of them. :param stale_reads: as of the ``Backend``."""
    sem, req, per, his = tables.semaphore, tables.permit_request, tables.permit, tables.semaphore_history
    dirty = ReadUncommitted() if stale_reads else literal_column("0", Integer())
    held = and_(per.c.semaphore_id == sem.c.id, per.c.state == HELD_STATE)
    total = func.coalesce(func.sum(per.c.count), 0)
    columns = (sem.c.id, sem.c.capacity, sem.c.fence, sem.c.used_at_most, sem.c.on_demand)
    names = select(*columns, dirty.label("dirty")).where(sem.c.name == _NAME)
    floor = select(sem.c.id, sem.c.fence).where(sem.c.name == "")
    called, chosen = req.c.external_id == _NAME, req.c.id == _ID
    state = select(req.c.id, req.c.state, req.c.token)
    permits = select(per.c.semaphore_id, per.c.count, per.c.fence).where(per.c.permit_request_id == _ID)
    alive = or_(req.c.ttl_seconds.is_(None), expiry(req) > Now())
    renewed = update(req).where(req.c.id == _ID, req.c.state != _GONE, alive)
    held_of = select(total).where(per.c.semaphore_id == _ID, per.c.state == HELD_STATE)
    return SimpleNamespace(
        # the request, and what it was granted
        ask=insert(req),
        withdraw=InsertAbsent(req).inline(),
        forget=delete(req).where(req.c.id == _ID),
        request=select(req.c.id).where(called),
        request_shared=_lock_request_shared(req, called, stale_reads),
        chosen_shared=_lock_request_shared(req, chosen, stale_reads),
        request_locked=state.where(called).with_for_update(),
        chosen_locked=state.where(chosen).with_for_update(),
        permits=permits,
        permits_shared=permits.with_for_update(read=True),
        names=select(sem.c.id, sem.c.name).where(sem.c.id.in_(bindparam("ids", expanding=True))),
        # the semaphores
        look=names,
        lock=names.with_for_update(),
        used=select(
            sem.c.id,
            sem.c.fence,
            select(total).where(held).scalar_subquery().label("used"),
            Now().label("now"),
            select(req.c.renewed_at).where(chosen).scalar_subquery().label("began"),
        ).where(sem.c.id.in_(bindparam("ids", expanding=True))),
        held_of=held_of,
        used_now=held_of.with_for_update(read=True),
        clock=select(Now()),
        bump=update(sem)
        .where(sem.c.id == _ID)
        .values(fence=sem.c.fence + 1, used_at_most=bindparam("used", type_=BigInteger()), updated_at=Now()),
        grant=insert(per),
        stamp=update(req).where(req.c.id == _ID).values(renewed_at=bindparam("now", type_=Instant())),
        # the end of a request
        permits_of=select(per.c.id).where(per.c.permit_request_id == _ID).order_by(per.c.id),
        drop_permit=delete(per).where(per.c.id == _ID),
        end=update(req).where(req.c.id == _ID).values(state=RELEASED, updated_at=Now()),
        free_one=update(per).where(per.c.id == _ID).values(state=RELEASED),
        free=update(per).where(per.c.permit_request_id == _ID, per.c.state != _GONE).values(state=RELEASED),
        renew=renewed.values(renewed_at=Now()),
        expired_at_end=select(expiry(req) <= case((req.c.state == RELEASED, req.c.updated_at), else_=Now())).where(
            req.c.id == _ID
        ),
        # a semaphore's life
        create=insert(sem),
        resize=update(sem).where(sem.c.id == _ID).values(capacity=bindparam("size", type_=Integer()), updated_at=Now()),
        revive=update(sem)
        .where(sem.c.id == _ID, sem.c.capacity.is_(None))
        .values(
            capacity=bindparam("size", type_=Integer()),
            on_demand=bindparam("first_use", type_=Boolean()),
            updated_at=Now(),
        ),
        keep=update(sem).where(sem.c.id == _ID, sem.c.capacity.is_not(None)).values(on_demand=False),
        floor=floor.with_for_update(read=True),
        floor_locked=floor.with_for_update(skip_locked=True),
        record=insert(his),
        **_sweep_statements(tables),
    )


def _lock_request_shared(req: Any, which: Any, stale_reads: bool) -> Any:
    """Return the SELECT that locks a request; its ``expired`` is as of the instant at which the lock was granted."""
    if stale_reads:
        return _with_expiry(req).where(which).with_for_update(read=True)
    # PostgreSQL evaluates the columns before it waits for the row, so the lock is a step of its own
    row = (
        select(req.c.id, req.c.state, req.c.token, req.c.renewed_at, req.c.ttl_seconds)
        .where(which)
        .with_for_update(read=True)
    )
    return _with_expiry(row.cte("kept").prefix_with("MATERIALIZED"))


def _with_expiry(request: Any) -> Any:
    expired = expiry(request) <= NowAfterWait()
    columns: Any = (request.c.id, request.c.state, request.c.token, expiry(request).label("until"))
    return select(*columns, expired.label("expired"))


def _sweep_statements(tables: Tables) -> dict[str, Any]:
    sem, req, per, his = tables.semaphore, tables.permit_request, tables.permit, tables.semaphore_history
    after = and_(req.c.state == HELD_STATE, req.c.id > bindparam("after", type_=BigInteger()))
    without = ~select(per.c.id).where(per.c.permit_request_id == req.c.id, per.c.state == HELD_STATE).exists()
    dated = select(req.c.id, req.c.renewed_at)
    cutoff = bindparam("cutoff", type_=Instant())
    # never with a time to live: that is renewed three times in it, however long it is
    stale = and_(req.c.ttl_seconds.is_(None), req.c.renewed_at <= cutoff)
    held = per.join(sem, and_(sem.c.id == per.c.semaphore_id, per.c.state == HELD_STATE))
    old: Select[Any] = select(req.c.id).where(req.c.state == _GONE)
    ids: Any = bindparam("ids", expanding=True)
    chosen = req.c.id.in_(ids)
    return {
        "expired_of": dated.where(
            req.c.id.in_(select(per.c.permit_request_id).where(per.c.semaphore_id == _ID, per.c.state == HELD_STATE)),
            req.c.state == HELD_STATE,
            expiry(req) <= Now(),
        ).limit(BATCH),
        "overdue": dated.where(after, or_(expiry(req) <= Now(), stale, without)).order_by(req.c.id).limit(BATCH),
        "owned": dated.add_columns(req.c.owner).where(after, req.c.owner.is_not(None)).order_by(req.c.id).limit(BATCH),
        "still": dated.add_columns((expiry(req) <= Now()).label("expired"))
        # not "= 'ACQUIRED'", for which an index on states may be chosen, and every request that is held be locked
        .where(chosen, req.c.state != _GONE)
        .with_for_update(skip_locked=True),
        "orphans": select(per.c.id, req.c.id.label("request_id"))
        .select_from(held.outerjoin(req, req.c.id == per.c.permit_request_id))
        .where(per.c.id > bindparam("after", type_=BigInteger()), or_(req.c.id.is_(None), req.c.state != HELD_STATE))
        .order_by(per.c.id)
        .limit(BATCH),
        "ago": select(PlusSeconds(Now(), bindparam("seconds", type_=Float()))),
        "old": old.where(req.c.updated_at <= cutoff).order_by(req.c.updated_at).limit(BATCH),
        "old_locked": old.where(chosen).with_for_update(skip_locked=True),
        "unused": select(sem.c.id, sem.c.fence)
        .where(sem.c.id > bindparam("after", type_=BigInteger()), sem.c.on_demand, sem.c.updated_at <= cutoff)
        .where(~select(per.c.id).where(per.c.semaphore_id == sem.c.id, per.c.state == HELD_STATE).exists())
        .where(~select(his.c.id).where(his.c.semaphore_id == sem.c.id).exists())
        .order_by(sem.c.id)
        .limit(BATCH),
        "used_by": select(per.c.semaphore_id).where(per.c.semaphore_id.in_(ids)).distinct(),
        "unused_locked": select(sem.c.id, sem.c.fence, sem.c.on_demand)
        .where(sem.c.id.in_(ids))
        .with_for_update(skip_locked=True),
        "raise_floor": update(sem).where(sem.c.id == _ID).values(fence=bindparam("least", type_=BigInteger())),
        "remove": delete(sem).where(sem.c.id == _ID),
        "drop_permits": delete(per).where(per.c.permit_request_id == _ID),
        "drop_history": delete(his).where(his.c.changed_at <= cutoff),
    }

"""The statements of semaphores on engines without functions, and of sweeps on every engine; built once per schema."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql import Executable

from sqlalchemy_locks.sql.clock import Instant, Now, NowAfterWait, PlusSeconds
from sqlalchemy_locks.sql.elements import READ_UNCOMMITTED, InsertAbsent, LimitIdle, Touched
from sqlalchemy_locks.sql.tables import Tables

ACQUIRED, RELEASED, EXPIRED, DENIED = "ACQUIRED", "RELEASED", "EXPIRED", "DENIED"
UNKNOWN, CONFLICT, HELD, DELETED = "UNKNOWN", "CONFLICT", "HELD", "DELETED"

#: the maximum number of requests or leases that one SELECT of a sweep or a clean-up returns
MAX_SWEPT = 800

# literals, not bound values, so that the engine can choose the partial index of held permits
HELD_STATE = sa.literal_column(f"'{ACQUIRED}'", sa.String())
_RELEASED_STATE = sa.literal_column(f"'{RELEASED}'", sa.String())
_BY_NAME = sa.bindparam("by_name", type_=sa.String())
_BY_EXTERNAL_ID = sa.bindparam("by_external_id", type_=sa.String())
_ROW_ID = sa.bindparam("row_id", type_=sa.BigInteger())
_ROW_IDS: Any = sa.bindparam("row_ids", expanding=True)
_AFTER = sa.bindparam("after", type_=sa.BigInteger())
_CUTOFF = sa.bindparam("cutoff", type_=Instant())


def expiry(request: Any) -> PlusSeconds:
    """Return the SQL of the instant at which a request expires; NULL without a time to live."""
    return PlusSeconds(request.c.renewed_at, request.c.ttl_seconds)


@dataclass(frozen=True)
class Statements:
    """The statements of a schema. They find a row by ``by_name``, ``by_external_id`` or ``row_id``, its primary key."""

    # a request
    insert_request: sa.Insert
    insert_absent_request: sa.Insert
    find_request: Executable
    lock_request: Executable
    lock_request_by_row: Executable
    #: Its column ``expired`` is evaluated after the shared lock was granted. Where the server can, it then ends a
    #: transaction that is silent for longer than the time to live: otherwise nobody else could get the permits.
    share_request: Executable
    share_request_by_row: Executable
    touch_request: sa.Update
    #: whether it had expired when it was released, or has expired now if it wasn't; NULL without a time to live
    read_expired_at_end: Executable
    renew_request: sa.Update
    #: for many requests at once: read their ids, lock the held ones that no other has locked, renew the locked ones
    read_tokens: Executable
    lock_held: Executable
    renew_requests: sa.Update
    start_lease: sa.Update
    end_request: sa.Update
    delete_request: sa.Delete

    # its permits, by the id of the request, or one of them by its own id
    insert_permit: sa.Insert
    read_permits: Executable
    share_permits: Executable
    read_permit_ids: Executable
    release_permit: sa.Update
    release_permits: sa.Update
    delete_permit: sa.Delete
    delete_permits: sa.Delete

    # a semaphore
    find_semaphore: Executable
    lock_semaphore: Executable
    read_names: Executable
    #: for several semaphores: sum, fence, the instant of the read, and when the request (``row_id``) was inserted
    sum_held: Executable
    sum_held_of_one: Executable
    #: locks the permits, and so reads their latest versions, which a snapshot may hide
    share_held_of_one: Executable
    read_clock: Executable
    raise_fence: sa.Update
    insert_semaphore: sa.Insert
    set_capacity: sa.Update
    revive_semaphore: sa.Update
    clear_on_demand: sa.Update
    insert_history: sa.Insert
    #: The floor is the row with an empty name. Its fence is the greatest fence of all removed semaphores.
    share_floor: Executable
    lock_floor: Executable
    raise_floor: sa.Update
    delete_semaphore: sa.Delete

    # sweeps and clean-ups: read_* searches rows without locks, and lock_* then locks those that no other has locked
    read_expired: Executable
    read_overdue: Executable
    read_owned: Executable
    lock_unreleased: Executable
    read_instant: Executable
    read_released: Executable
    lock_released: Executable
    read_unused_leases: Executable
    read_semaphores_of_permits: Executable
    lock_leases: Executable
    delete_history: sa.Delete


@cache
def statements(tables: Tables, *, stale_reads: bool) -> Statements:
    """Return the statements for these tables. :param stale_reads: the flag of the ``Backend``."""
    sem, req, per, his = tables.semaphore, tables.permit_request, tables.permit, tables.semaphore_history

    by_external_id, by_row = req.c.external_id == _BY_EXTERNAL_ID, req.c.id == _ROW_ID
    request = sa.select(req.c.id, req.c.state, req.c.token)
    ended_at = sa.case((req.c.state == RELEASED, req.c.updated_at), else_=Now())
    unexpired = sa.or_(req.c.ttl_seconds.is_(None), expiry(req) > Now())
    dated_request = sa.select(req.c.id, req.c.renewed_at)
    # never with a time to live: such a request is renewed three times in that time, which may be longer than the cutoff
    stale = sa.and_(req.c.ttl_seconds.is_(None), req.c.renewed_at <= _CUTOFF)
    released_request: sa.Select[Any] = sa.select(req.c.id).where(req.c.state == _RELEASED_STATE)

    permits = sa.select(per.c.semaphore_id, per.c.count, per.c.fence).where(per.c.permit_request_id == _ROW_ID)
    is_held = per.c.state == HELD_STATE
    held_of_request = sa.select(per.c.id).where(per.c.permit_request_id == req.c.id, is_held)
    held_of_semaphore = sa.and_(per.c.semaphore_id == sem.c.id, is_held)
    total = sa.func.coalesce(sa.func.sum(per.c.count), 0)
    sum_held_of_one = sa.select(total).where(per.c.semaphore_id == _ROW_ID, is_held)

    dirty = READ_UNCOMMITTED if stale_reads else sa.literal_column("0", sa.Integer())
    semaphore = sa.select(
        sem.c.id, sem.c.capacity, sem.c.fence, sem.c.used_at_most, sem.c.on_demand, dirty.label("dirty")
    ).where(sem.c.name == _BY_NAME)
    floor = sa.select(sem.c.id, sem.c.fence).where(sem.c.name == "")
    update_semaphore = sa.update(sem).where(sem.c.id == _ROW_ID)
    new_capacity = sa.bindparam("new_capacity", type_=sa.Integer())
    return Statements(
        insert_request=sa.insert(req),
        insert_absent_request=InsertAbsent(req).inline(),
        find_request=sa.select(req.c.id).where(by_external_id),
        lock_request=request.where(by_external_id).with_for_update(),
        lock_request_by_row=request.where(by_row).with_for_update(),
        share_request=_share_request(req, by_external_id, stale_reads),
        share_request_by_row=_share_request(req, by_row, stale_reads),
        touch_request=sa.update(req).where(by_row).values(renewed_at=Touched(req.c.renewed_at)),
        read_expired_at_end=sa.select(expiry(req) <= ended_at).where(by_row),
        renew_request=sa.update(req).where(by_row, req.c.state != _RELEASED_STATE, unexpired).values(renewed_at=Now()),
        read_tokens=sa.select(req.c.id, req.c.token).where(
            req.c.external_id.in_(sa.bindparam("external_ids", expanding=True, type_=sa.String())),
            req.c.token.in_(sa.bindparam("tokens", expanding=True, type_=sa.String())),
        ),
        # by the primary key, so that InnoDB locks these rows and no others
        lock_held=sa.select(req.c.id)
        .where(req.c.id.in_(_ROW_IDS), req.c.state != RELEASED, unexpired)
        .order_by(req.c.id)
        .with_for_update(skip_locked=True, key_share=True),
        renew_requests=sa.update(req).where(req.c.id.in_(_ROW_IDS)).values(renewed_at=Now()),
        start_lease=sa.update(req).where(by_row).values(renewed_at=sa.bindparam("now", type_=Instant())),
        end_request=sa.update(req).where(by_row).values(state=RELEASED, updated_at=Now()),
        delete_request=sa.delete(req).where(by_row),
        insert_permit=sa.insert(per),
        read_permits=permits,
        share_permits=permits.with_for_update(read=True),
        read_permit_ids=sa.select(per.c.id).where(per.c.permit_request_id == _ROW_ID).order_by(per.c.id),
        release_permit=sa.update(per).where(per.c.id == _ROW_ID).values(state=RELEASED),
        release_permits=sa.update(per)
        .where(per.c.permit_request_id == _ROW_ID, per.c.state != _RELEASED_STATE)
        .values(state=RELEASED),
        delete_permit=sa.delete(per).where(per.c.id == _ROW_ID),
        delete_permits=sa.delete(per).where(per.c.permit_request_id == _ROW_ID),
        find_semaphore=semaphore,
        lock_semaphore=semaphore.with_for_update(),
        read_names=sa.select(sem.c.id, sem.c.name).where(sem.c.id.in_(_ROW_IDS)),
        sum_held=sa.select(
            sem.c.id,
            sem.c.fence,
            sa.select(total).where(held_of_semaphore).scalar_subquery().label("used"),
            Now().label("now"),
            sa.select(req.c.renewed_at).where(by_row).scalar_subquery().label("began"),
        ).where(sem.c.id.in_(_ROW_IDS)),
        sum_held_of_one=sum_held_of_one,
        share_held_of_one=sum_held_of_one.with_for_update(read=True),
        read_clock=sa.select(Now()),
        raise_fence=update_semaphore.values(
            fence=sem.c.fence + 1, used_at_most=sa.bindparam("bound", type_=sa.BigInteger()), updated_at=Now()
        ),
        insert_semaphore=sa.insert(sem),
        set_capacity=update_semaphore.values(capacity=new_capacity, updated_at=Now()),
        revive_semaphore=update_semaphore.where(sem.c.capacity.is_(None)).values(
            capacity=new_capacity, on_demand=sa.bindparam("first_use", type_=sa.Boolean()), updated_at=Now()
        ),
        clear_on_demand=update_semaphore.where(sem.c.capacity.is_not(None)).values(on_demand=False),
        insert_history=sa.insert(his),
        share_floor=floor.with_for_update(read=True),
        lock_floor=floor.with_for_update(skip_locked=True),
        raise_floor=update_semaphore.values(fence=sa.bindparam("floor", type_=sa.BigInteger())),
        delete_semaphore=sa.delete(sem).where(sem.c.id == _ROW_ID),
        read_expired=dated_request.where(
            req.c.id.in_(sa.select(per.c.permit_request_id).where(per.c.semaphore_id == _ROW_ID, is_held)),
            req.c.state == HELD_STATE,
            expiry(req) <= Now(),
        ).limit(MAX_SWEPT),
        read_overdue=dated_request.where(
            req.c.state == HELD_STATE, req.c.id > _AFTER, sa.or_(expiry(req) <= Now(), stale, ~held_of_request.exists())
        )
        .order_by(req.c.id)
        .limit(MAX_SWEPT),
        read_owned=dated_request.add_columns(req.c.owner)
        .where(req.c.state == HELD_STATE, req.c.id > _AFTER, req.c.owner.is_not(None))
        .order_by(req.c.id)
        .limit(MAX_SWEPT),
        lock_unreleased=dated_request.add_columns((expiry(req) <= Now()).label("expired"))
        # not "= 'ACQUIRED'", for which InnoDB may choose the index on states, and lock every held request
        .where(req.c.id.in_(_ROW_IDS), req.c.state != _RELEASED_STATE)
        .with_for_update(skip_locked=True),
        read_instant=sa.select(PlusSeconds(Now(), sa.bindparam("seconds", type_=sa.Float()))),
        read_released=released_request.where(req.c.updated_at <= _CUTOFF).order_by(req.c.updated_at).limit(MAX_SWEPT),
        lock_released=released_request.where(req.c.id.in_(_ROW_IDS)).with_for_update(skip_locked=True),
        read_unused_leases=sa.select(sem.c.id, sem.c.fence)
        .where(
            sem.c.id > _AFTER,
            sem.c.on_demand,
            sem.c.updated_at <= _CUTOFF,
            ~sa.select(per.c.id).where(held_of_semaphore).exists(),
            ~sa.select(his.c.id).where(his.c.semaphore_id == sem.c.id).exists(),
        )
        .order_by(sem.c.id)
        .limit(MAX_SWEPT),
        read_semaphores_of_permits=sa.select(per.c.semaphore_id).where(per.c.semaphore_id.in_(_ROW_IDS)).distinct(),
        lock_leases=sa.select(sem.c.id, sem.c.fence, sem.c.on_demand)
        .where(sem.c.id.in_(_ROW_IDS))
        .with_for_update(skip_locked=True),
        delete_history=sa.delete(his).where(his.c.changed_at <= _CUTOFF),
    )


def _share_request(req: Any, condition: Any, stale_reads: bool) -> Any:
    if stale_reads:
        return _with_expiry(req).add_columns(req.c.ttl_seconds).where(condition).with_for_update(read=True)
    # PostgreSQL evaluates the columns before it waits for the row, so the lock is a step of its own
    row = (
        sa.select(req.c.id, req.c.state, req.c.token, req.c.renewed_at, req.c.ttl_seconds)
        .where(condition)
        .with_for_update(read=True)
    )
    locked = row.cte("locked").prefix_with("MATERIALIZED")
    return _with_expiry(locked).add_columns(LimitIdle(locked.c.ttl_seconds).label("idle"))


def _with_expiry(request: Any) -> Any:
    expired = (expiry(request) <= NowAfterWait()).label("expired")
    return sa.select(request.c.id, request.c.state, request.c.token, expiry(request).label("until"), expired)

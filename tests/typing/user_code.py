"""User code for mypy and pyright: every result has its exact type. Checked, never run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import redis
import redis.asyncio
from sqlalchemy import Connection, MetaData, Table, event, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from typing_extensions import assert_type

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.flask import FlaskLocks
from sqlalchemy_locks.redis import Mutex, StateTransition, Task, Timeout


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    locked: Mapped[bool]
    fence: Mapped[int] = sl.Fence()


def in_a_session(session: Session) -> None:
    assert_type(session.scalar(sl.lock.exclusive("a")), None)
    assert_type(session.scalar(sl.lock.shared(7, allow_stale=True)), None)
    assert_type(session.scalar(sl.lock.try_exclusive("a")), bool | None)
    assert_type(session.scalar(sl.lock.try_shared("a")), bool | None)
    assert_type(session.scalar(sl.lock.vacuum()), int | None)
    assert_type(session.scalar(sl.lock.create("a", "b")), int | None)
    assert_type(session.scalar(sl.lock.row(Customer, 42)), Customer | None)
    assert_type(session.scalars(sl.lock.holders("a")).all(), Sequence[sl.KeyHolder])
    assert_type(session.execute(sl.lock.try_exclusive("a")).scalar_one(), bool)
    limited = sl.lock.try_exclusive("a").execution_options(locks_prefix="mine_")
    assert_type(session.scalar(limited), bool | None)
    assert_type(sl.lock.key("invoice", 42), int)


def conditional_updates(session: Session) -> None:
    mutex, timeout = sl.Mutex(), sl.Timeout(every=3600)
    assert_type(session.scalar(mutex.create("a", "b", retries=3)), int | None)
    assert_type(session.scalar(mutex.acquire("a", owner="ann")), bool | None)
    assert_type(session.scalar(mutex.acquire_token("a")), int | None)
    assert_type(session.scalar(mutex.release("a")), bool | None)
    assert_type(session.scalars(mutex.capture(3)).all(), Sequence[Any])
    assert_type(session.scalar(mutex.set_retries("a", None)), bool | None)
    assert_type(session.scalar(timeout.acquire("a")), bool | None)
    assert_type(session.scalar(timeout.acquire_token("a")), int | None)
    written = sl.fenced(update(Customer).where(Customer.id == 42).values(locked=True), Customer.fence, 7)
    assert_type(session.scalar(written), bool | None)


class Job(sl.JobColumns, Base):
    __tablename__ = "job_of_mine"


def captures(session: Session, locks: sl.Locks) -> None:
    paid = sl.capture(Customer, where=Customer.locked, values={"locked": False}, order_by=Customer.id, limit=3)
    assert_type(session.scalars(paid).all(), Sequence[Customer])
    assert_type(session.scalar(paid), Customer | None)
    assert_type(locks.run(paid), list[Customer])
    table = Table("customer", MetaData())
    assert_type(locks.run(sl.capture(table, values={"locked": False})), list[Any])
    assert_type(locks.run(sl.Queue().capture(3)), list[Any])
    assert_type(locks.run(sl.StateTransition(table, id="id", status="status").capture(3)), list[Any])
    own = sl.StateTransition(Customer, id=Customer.id, status=Customer.locked, ready=True, captured=False)
    assert_type(session.scalars(own.capture(limit=3)).all(), Sequence[Customer])
    jobs = sl.Queue(Job)
    assert_type(session.scalars(jobs.capture(10, queue="mail", host="web-1")).all(), Sequence[Job])
    queue, tasks = sl.Queue(), sl.StateTransition()
    assert_type(session.scalar(queue.put({"a": 1})), UUID | None)
    assert_type(session.scalars(queue.put(1, 2)).all(), Sequence[UUID])
    assert_type(session.scalar(queue.complete((1, 1))), int | None)
    assert_type(session.scalar(queue.requeue_stalled(300)), int | None)
    assert_type(session.scalar(tasks.set_status("a", "done")), bool | None)
    assert_type(session.scalar(tasks.create("a")), int | None)


def semaphores(session: Session) -> None:
    assert_type(session.scalar(sl.semaphore.create("a", capacity=3, by="ann")), bool | None)
    assert_type(session.scalar(sl.semaphore.resize("a", 4)), int | None)
    grant = session.scalar(sl.semaphore.acquire({"a": 1}, external_id="job-1", owner="ann", ttl=60))
    assert_type(grant, sl.Grant | None)
    assert_type(session.scalar(sl.semaphore.renew("job-1")), bool | None)
    assert_type(session.scalar(sl.semaphore.release("job-1")), sl.Released | None)
    assert_type(session.scalar(sl.semaphore.sweep(stale_after=3600)), int | None)
    written = sl.guarded(update(Customer).where(Customer.id == 42).values(locked=True), "job-1")
    assert_type(session.scalar(written), bool | None)


def on_a_connection(connection: Connection) -> None:
    assert_type(connection.scalar(sl.lock.try_exclusive("a")), bool | None)
    assert_type(connection.scalar(sl.lock.session_unlock("a")), bool | None)


async def awaited(session: AsyncSession, connection: AsyncConnection) -> None:
    assert_type(await session.scalar(sl.lock.try_exclusive("a")), bool | None)
    assert_type(await session.scalar(sl.lock.row(Customer, 42)), Customer | None)
    assert_type(await connection.scalar(sl.lock.vacuum()), int | None)


def with_locks(locks: sl.Locks) -> None:
    assert_type(locks.run(sl.lock.vacuum()), int | None)
    assert_type(locks.mutex.acquire("a"), bool)
    assert_type(locks.mutex.acquire_token("a"), int | None)
    assert_type(locks.once_per("a", every=60), bool)
    assert_type(locks.owner, str)
    holders = locks.run(sl.lock.holders())
    assert_type(holders, list[sl.KeyHolder])
    assert_type(holders[0].since, datetime | None)
    assert_type(holders[0].waiting[0].waits_for, tuple[int, ...])
    grant = locks.acquire({"a": 1}, ttl=60, timeout=5)
    assert_type(grant, sl.Grant)
    assert_type(grant.fence["a"], int)
    assert_type(locks.renew(grant), bool)
    assert_type(locks.release(grant), sl.Released)
    assert_type(locks.sweep(), int)
    assert_type(locks.maintain(), sl.Report)
    with locks.exclusive("a", "b", timeout=5) as held:
        assert_type(held.session, Session)
        assert_type(held.lost, bool)
        assert_type(held.check(), None)


def decorated(locks: sl.Locks) -> None:
    @locks.exclusive("a", timeout=5)
    def one(a: int, *, b: str = "") -> float:
        return 1.0

    @locks.scheduled("b", every=60)
    def two(a: int) -> float:
        return 1.0

    assert_type(one(1, b="c"), float)
    assert_type(two(1), float | None)

    @event.listens_for(locks, "waited")
    def told(what: sl.LockEvent) -> None:
        assert_type(what.waited, float | None)

    event.remove(locks, "waited", told)
    try:
        one(1)
    except sl.LockTimeout as error:
        assert_type(error.holders, tuple[sl.Holder, ...])


async def async_decorated(locks: sl.AsyncLocks) -> None:
    @locks.exclusive("a", timeout=5)
    async def one(a: int, *, b: str = "") -> float:
        return 1.0

    @locks.scheduled("b", every=60)
    async def two(a: int) -> float:
        return 1.0

    assert_type(await one(1, b="c"), float)
    assert_type(await two(1), float | None)


async def with_async_locks(locks: sl.AsyncLocks) -> None:
    assert_type(await locks.run(sl.capture(Table("customer", MetaData()), values={"locked": False})), list[Any])
    assert_type(await locks.mutex.acquire("a"), bool)
    assert_type(await locks.release("a"), sl.Released)
    assert_type(await locks.mutex.acquire_token("a"), int | None)
    assert_type(await locks.once_per("a", every=60), bool)
    async with locks.shared(7) as held:
        assert_type(held.session, AsyncSession)
        assert_type(held.lost, bool)
        assert_type(await held.check(), None)


def leased(locks: sl.Locks) -> None:
    with locks.lease("a", ttl=60, timeout=0) as grant:
        assert_type(grant, sl.Lease)
        assert_type(grant.fence["a"], int)
        assert_type(grant.check(), None)
        assert_type(bool(grant.lost), bool)
        assert_type(grant.lost.wait(1), bool)
    with locks.semaphore({"a": 1, "b": 2}, ttl=60) as permits:
        assert_type(permits, sl.Lease)
        assert_type(locks.run(sl.guarded(update(Customer).values(locked=True), permits)), bool | None)

    @locks.lease("a")
    def one(a: int, *, b: str = "") -> float:
        return 1.0

    assert_type(one(1, b="c"), float)
    own = locks.mutexes(sl.Mutex())
    assert_type(own.acquire("a"), bool)
    assert_type(own.release("a"), bool)
    assert_type(locks.engine_name, str)


async def async_leased(locks: sl.AsyncLocks) -> None:
    async with locks.lease("a", ttl=60, timeout=0) as grant:
        assert_type(grant, sl.AsyncLease)
        assert_type(grant.fence["a"], int)
        assert_type(await grant.check(), None)
        assert_type(bool(grant.lost), bool)
        assert_type(await grant.lost.wait(1), bool)
    async with locks.semaphore("a", count=2) as permits:
        assert_type(permits, sl.AsyncLease)
        assert_type(await locks.run(sl.guarded(update(Customer).values(locked=True), permits)), bool | None)
    assert_type(await locks.renew("a"), bool)
    assert_type(await locks.sweep(), int)
    assert_type(await locks.maintain(), sl.Report)
    assert_type(await locks.mutexes(sl.Mutex()).release("a"), bool)
    assert_type(locks.owner, str)
    assert_type(locks.engine_name, str)


def on_redis(client: redis.Redis) -> None:
    mutex = Mutex(client)
    assert_type(mutex.create("a", "b", retries=3), int)
    assert_type(mutex.acquire("a", owner="me"), bool)
    assert_type(mutex.acquire_token("a"), int | None)
    assert_type(mutex.release("a"), bool)
    assert_type(mutex.capture(3, queue="mail"), list[str])
    assert_type(mutex.set_retries("a", None), bool)
    timeout = Timeout(client, every=3600, windowed=True, tz="Europe/Paris")
    assert_type(timeout.acquire("a"), bool)
    assert_type(timeout.acquire_token("a"), int | None)
    tasks = StateTransition(client, ready=("new", "failed"), captured="busy")
    assert_type(tasks.capture(3), list[Task])
    assert_type(tasks.capture(3)[0].claim, int)
    assert_type(tasks.set_status("a", "done", claim=1), bool)
    assert_type(tasks.expire(), int)


async def on_redis_awaited(client: redis.asyncio.Redis) -> None:
    assert_type(await Mutex(client).acquire("a"), bool)
    assert_type(await StateTransition(client).capture(3), list[Task])
    assert_type(asyncio.create_task(Mutex(client).acquire("a")), asyncio.Task[bool])


def on_a_redis_cluster(client: redis.RedisCluster) -> None:
    assert_type(Mutex(client).acquire("a"), bool)


def in_a_flask_app(locks: FlaskLocks) -> None:
    assert_type(locks.run(sl.lock.vacuum()), int | None)
    assert_type(locks.mutex.acquire("a"), bool)
    with locks.exclusive("a", timeout=5) as held:
        assert_type(held.session, Session)
    with locks.lease("a", ttl=60) as lease:
        assert_type(lease, sl.Lease)

"""The operations whose SQL the pages show, by the name in the comment before a block."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, Column, MetaData, String, Table, Text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlalchemy_locks as sl


class Base(DeclarativeBase):
    pass


class Import(Base):
    """As on docs/mutex.md."""

    __tablename__ = "imports"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    locked: Mapped[bool]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}


document = Table(
    "document",
    MetaData(),
    Column("id", BigInteger, primary_key=True),
    Column("body", Text),
    Column("fence", BigInteger, nullable=False),
)


class Order(Base):
    """As on docs/capture.md."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(20))


_queue, _tasks = sl.Queue(), sl.StateTransition()
_paid = sl.capture(Order, where=Order.status == "paid", values={"status": "shipping"}, order_by=Order.id, limit=10)
_mutex, _timeout = sl.Mutex(), sl.Timeout()
_hourly = sl.Timeout(every=3600, windowed=True)
_paris = sl.Timeout(every=86400, windowed=True, tz="Europe/Paris")
_write = update(document).where(document.c.id == 1).values(body="text")
ID = "task_a"

_SHOWN: dict[str, sl.Operation[Any]] = {
    "mutex.create": _mutex.create(ID),
    "mutex.acquire": _mutex.acquire(ID),
    "mutex.acquire nowait": _mutex.acquire(ID, nowait=True),
    "mutex.acquire_token": _mutex.acquire_token(ID),
    "mutex.release": _mutex.release(ID),
    "mutex.release owner": _mutex.release(ID, owner="web-1"),
    "mutex.capture": _mutex.capture(2),
    "own.acquire": sl.Mutex(Import, id=Import.name, acquired=Import.locked).acquire(ID),
    "timeout.create": sl.Timeout(every=3600).create(ID),
    "timeout.acquire": _timeout.acquire(ID),
    "timeout.acquire windowed": _hourly.acquire(ID),
    "timeout.acquire civil": _paris.acquire(ID),
    "capture": _paid,
    "tasks.capture": _tasks.capture(3),
    "tasks.set_status": _tasks.set_status(ID, "done", claim=1),
    "tasks.expire": _tasks.expire(),
    "queue.put": _queue.put({"to": "a@example.org"}, queue="mail"),
    "queue.put unique": _queue.put({"product": 7}, queue="index", unique="product:7"),
    "queue.cancel": _queue.cancel(UUID(int=1)),
    "queue.capture": _queue.capture(10, queue="mail", host="web-1"),
    "queue.complete": _queue.complete((1, 1)),
    "queue.fail": _queue.fail((1, 1), error="no route to host"),
    "queue.requeue_stalled": _queue.requeue_stalled(300),
    "fenced": sl.fenced(_write, document.c.fence, 7),
}


def shown(name: str, key: str | int = "name") -> sl.Operation[Any]:
    """Return the operation of a name; a lock is of ``key``."""
    if name.startswith("lock."):
        made: sl.Operation[Any] = getattr(sl.lock, name.removeprefix("lock."))(key)
        return made
    return _SHOWN[name]

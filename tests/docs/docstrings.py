"""The context of examples in docstrings: an app's engines, models and functions, with the locks installed."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sqlalchemy import MetaData, Text, create_engine, update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import sqlalchemy_locks as sl
from sqlalchemy_locks.health import examine
from sqlalchemy_locks.redis import Mutex, StateTransition, Timeout
from tests.docs.apps import Around, of_none

CHECK = doctest.OutputChecker()
HOW = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Base(DeclarativeBase):
    metadata = MetaData()


class Payment(Base):
    __tablename__ = "payment"
    id: Mapped[int] = mapped_column(primary_key=True)
    invoice: Mapped[int]


class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)


class Import(Base):
    __tablename__ = "import"
    name: Mapped[str] = mapped_column(primary_key=True)
    locked: Mapped[bool] = mapped_column(default=False)
    nonce: Mapped[str | None]


class Order(Base):
    __tablename__ = "order_of_mine"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str]


class Document(Base):
    __tablename__ = "document"
    id: Mapped[int] = mapped_column(primary_key=True)
    body: Mapped[str] = mapped_column(Text)
    fence: Mapped[int] = sl.Fence()


def fill(url: str) -> None:
    """Create what the examples use, in a database with the locks."""
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    locks = sl.Locks(engine)
    with locks.exclusive("filling") as held:
        session = held.session
        session.add_all([Customer(id=42), Import(name="prices"), Order(status="paid")])
        session.add(Document(id=1, body="", fence=0))
    for name in ("backup-slots", "network"):
        locks.run(sl.semaphore.create(name, capacity=10))
    locks.run(sl.Mutex().create("task_b", "task_c"))
    locks.run(sl.StateTransition().create("task_c"))
    locks.run(sl.Queue().put({"to": "b@example.org"}, queue="mail"))
    engine.dispose()


def known(url: str, async_url: str, awaits: bool) -> dict[str, Any]:
    """Return the names that examples use without defining them."""

    def nothing(*_: Any, **__: Any) -> None: ...

    async def nothing_awaited(*_: Any, **__: Any) -> None: ...

    class NewBase(DeclarativeBase):
        pass

    engine, async_engine = create_engine(url), create_async_engine(async_url)
    session = AsyncSession(async_engine) if awaits else Session(engine)
    do: Callable[..., Any] = nothing_awaited if awaits else nothing
    return {
        "sl": sl,
        "examine": examine,
        "engine": engine,
        "async_engine": async_engine,
        "session": session,
        "locks": sl.AsyncLocks(async_engine) if awaits else sl.Locks(engine),
        "Session": Session,
        "AsyncSession": AsyncSession,
        "Base": NewBase,
        "Mapped": Mapped,
        "mapped_column": mapped_column,
        **{model.__name__: model for model in (Payment, Customer, Import, Order, Document)},
        "update": update,
        "queue": sl.Queue(),
        "worker": sl.Worker(sl.Queue(), nothing, bind=engine),
        "mutex": sl.Mutex(),
        "token": 7,
        "text": "the text",
        "log": logging.getLogger("an app"),
        **dict.fromkeys(("send_report", "read_prices", "serve", "run_the_import", "alarm", "handler"), do),
        "is_running": lambda owner: True,
    }


async def run(docstring: str, around: dict[str, Any]) -> None:
    """Run the examples of a docstring like a console, and compare the shown results."""
    for example in doctest.DocTestParser().get_examples(docstring):
        code = compile(example.source, "<docstring>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        printed, shown = io.StringIO(), sys.displayhook
        sys.displayhook = lambda value: None if value is None else print(repr(value))
        try:
            with contextlib.redirect_stdout(printed):
                value = eval(code, around)
                if inspect.iscoroutine(value):
                    await value
        finally:
            sys.displayhook = shown
        if example.want:
            assert CHECK.check_output(example.want, printed.getvalue(), HOW), (example.source, printed.getvalue())


def executed(docstring: str, url: str, async_url: str, app: Around = of_none) -> None:
    """Run a docstring's examples in a namespace of their own, with the names of an app."""
    awaits = any(word in docstring for word in (">>> await ", "async ", "if await "))
    around: dict[str, Any] = {}

    async def main() -> None:
        around.update(known(url, async_url, awaits))
        try:
            with app(around):
                await run(docstring, around)
        finally:
            closed = around["session"].close()
            if inspect.isawaitable(closed):
                await closed
            await around["async_engine"].dispose()

    try:
        if awaits:
            asyncio.run(main())
        else:
            _without_a_loop(main())
    finally:
        if around:
            around["engine"].dispose()


def executed_with_redis(docstring: str, client: Any) -> None:
    """Run an example whose ``redis.Redis()`` is a given client."""
    names = {cls.__name__: cls for cls in (Mutex, Timeout, StateTransition)}
    _without_a_loop(run(docstring, {**names, "redis": SimpleNamespace(Redis=lambda: client)}))


def _without_a_loop(coroutine: Any) -> None:
    """Run code of a synchronous app in a thread without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it awaits")

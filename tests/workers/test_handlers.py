"""The kinds of handlers, and the effects of their exceptions."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.exc import DataError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from tests.conftest import Servers
from tests.fixtures.queues import MakeEngine, put
from tests.fixtures.worker_states import all_ended, counts, errors, queue, run_async, run_until_ended, state_of


def test_an_exception_fails_its_job_only(engine: Engine) -> None:
    put(engine, *range(20), max_attempts=1)

    def handler(job: Any) -> None:
        if job.payload == 7:
            raise RuntimeError("seven \0 is unlucky")
        if job.payload == 8:
            raise SystemExit("not even this")

    run_until_ended(sl.Worker(queue, handler, bind=engine, poll=0.05), engine, 20)
    assert counts(engine) == {"all": 20, "completed": 18, "dead": 2, "running": 0, "waiting": 0}
    assert any("RuntimeError: seven \\0 is unlucky" in error and "in handler" in error for error in errors(engine))


def test_a_handler_gets_the_whole_row(engine: Engine) -> None:
    """Also in another process, and although a worker doesn't read what it knows."""
    put(engine, {"to": "a@example.org"})
    jobs: list[Any] = []
    sl.Worker(queue, lambda job: jobs.append(pickle.loads(pickle.dumps(job))), bind=engine).run(until_empty=True)
    with engine.connect() as connection:
        row = connection.execute(select(build_context(connection.dialect, {}).tables.job)).one()
    assert list(jobs[0]._mapping.items()) == list({**row._mapping, "completed_at": None}.items())


@pytest.mark.parametrize(("name", "driver"), [("sqlite", "aiosqlite"), ("postgresql15", "asyncpg")])
@pytest.mark.parametrize("kind", ["raised", "of a future", "its own task's"])
def test_a_cancellation_inside_a_handler_fails_its_job(
    engine_to: MakeEngine, servers: Servers, name: str, driver: str, kind: str
) -> None:
    engine = engine_to(name)
    put(engine, *range(4), max_attempts=1)

    async def handler(job: Any) -> None:
        if job.payload == 1:
            if kind == "raised":
                raise asyncio.CancelledError("not the worker's doing")
            if kind == "of a future":
                future = asyncio.get_running_loop().create_future()
                future.cancel()
                await future
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    async def body(bind: AsyncEngine) -> None:
        worker = sl.AsyncWorker(queue, handler, bind=bind, concurrency=1, poll=0.05)
        task = asyncio.create_task(worker.run())
        await all_ended(engine, 4)
        worker.stop()
        await task

    run_async(servers, name, driver, body)
    assert counts(engine) == {"all": 4, "completed": 3, "dead": 1, "running": 0, "waiting": 0}
    assert "CancelledError" in errors(engine)[0]


@pytest.mark.parametrize("late", [False, True])
def test_a_handler_that_cancels_its_own_task_affects_no_other_job(
    engine_to: MakeEngine, servers: Servers, late: bool
) -> None:
    """At once, as it returns, or by a timer that it has left behind and that goes off while the next job runs."""
    engine = engine_to("postgresql15")
    put(engine, *range(3), max_attempts=1)
    cancelled = asyncio.Event()

    async def handler(job: Any) -> None:
        task: Any = asyncio.current_task()
        if job.payload == 0:
            if late:
                asyncio.get_running_loop().call_later(0.1, lambda: (task.cancel(), cancelled.set()))
            else:
                task.cancel()
                cancelled.set()
        elif job.payload == 1:
            await cancelled.wait()
            await asyncio.sleep(0)

    async def body(bind: AsyncEngine) -> None:
        worker = sl.AsyncWorker(queue, handler, bind=bind, concurrency=1, prefetch=3)
        await worker.run(until_empty=True)

    run_async(servers, "postgresql15", "asyncpg", body)
    assert counts(engine) == {"all": 3, "completed": 3, "dead": 0, "running": 0, "waiting": 0}


def test_context_variables_end_with_their_job(engine_to: MakeEngine, servers: Servers) -> None:
    put(engine_to("postgresql15"), *range(3))
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    seen: list[str] = []

    async def handler(job: Any) -> None:
        seen.append(tenant.get())
        tenant.set(f"of job {job.payload}")

    async def body(bind: AsyncEngine) -> None:
        tenant.set("of the worker")
        worker = sl.AsyncWorker(queue, handler, bind=bind, concurrency=1, prefetch=3)
        await worker.run(until_empty=True)

    run_async(servers, "postgresql15", "asyncpg", body)
    assert seen == ["of the worker"] * 3


class Unformattable(Exception):
    @property
    def __notes__(self) -> list[str]:
        raise RuntimeError("these notes can't be read")


class Speechless(Exception):
    def __str__(self) -> str:
        raise SystemExit("it has no text")


@pytest.fixture
def raising_log() -> Iterator[None]:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the disk of the log is full")

    handler, log = Raises(), logging.getLogger("sqlalchemy_locks.worker")
    log.addHandler(handler)
    yield
    log.removeHandler(handler)


def test_an_unformattable_error_fails_its_job(engine_to: MakeEngine, raising_log: None) -> None:
    engine = engine_to("postgresql15")
    put(engine, *range(4), max_attempts=1)

    def handler(job: Any) -> None:
        if job.payload in (0, 1):
            raise (Unformattable, Speechless)[job.payload]

    run_until_ended(sl.Worker(queue, handler, bind=engine, concurrency=1, poll=0.05), engine, 4)
    assert counts(engine) == {"all": 4, "completed": 2, "dead": 2, "running": 0, "waiting": 0}
    assert "Unformattable" in errors(engine)[0]


class RefusingQueue(sl.Queue):
    """A queue whose database can't store some texts."""

    def fail(self, jobs: Any, *, error: str, **options: Any) -> Any:
        if "unstorable" in error:
            raise DataError("UPDATE", {}, ValueError("invalid byte sequence"))
        return super().fail(jobs, error=error, **options)


def test_an_unstorable_error_fails_its_job(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15")
    put(engine, *range(4), max_attempts=1)

    def handler(job: Any) -> None:
        if job.payload == 1:
            raise RuntimeError("unstorable")

    run_until_ended(sl.Worker(RefusingQueue(), handler, bind=engine, concurrency=1, poll=0.05), engine, 4)
    assert counts(engine) == {"all": 4, "completed": 3, "dead": 1, "running": 0, "waiting": 0}
    assert errors(engine) == ["the error could not be stored: see the log of the worker"]


async def coroutine_function(job: Any) -> None:
    pass


class Awaitable:
    async def __call__(self, job: Any) -> None:
        pass


def test_a_handler_of_the_other_kind_is_refused(lite: Engine) -> None:
    for handler in (coroutine_function, Awaitable(), functools.partial(coroutine_function), Awaitable().__call__):
        with pytest.raises(TypeError, match="use an AsyncWorker"):
            sl.Worker(queue, handler, bind=lite)
    bind = create_async_engine("sqlite+aiosqlite://")

    @functools.wraps(coroutine_function)
    def wrapping(job: Any) -> Any:
        return coroutine_function(job)

    for right in (coroutine_function, Awaitable(), functools.partial(coroutine_function), wrapping):
        with pytest.raises(sl.Unsupported, match="StaticPool"):
            sl.AsyncWorker(queue, right, bind=bind)
    for plain in (print, lambda job: None, functools.partial(put, bind), state_of):
        with pytest.raises(TypeError, match="use a Worker"):
            sl.AsyncWorker(queue, plain, bind=bind)


def test_a_handler_that_returns_an_awaitable_fails(lite: Engine) -> None:
    put(lite, 1, max_attempts=1)
    run_until_ended(sl.Worker(queue, lambda job: coroutine_function(job), bind=lite, poll=0.05), lite, 1)
    assert "use an AsyncWorker" in errors(lite)[0]


def test_what_takes_no_job_is_no_handler(lite: Engine) -> None:
    async def asynchronous(job: Any, more: Any) -> None: ...

    for wrong in (lambda: None, lambda job, more: None, None):
        with pytest.raises(TypeError, match="is a function of one job"):
            sl.Worker(queue, wrong, bind=lite)  # type: ignore[arg-type]
    sl.Worker(queue, lambda job, more=1: None, bind=lite)
    with pytest.raises(TypeError, match="is a coroutine function of one job"):
        sl.AsyncWorker(queue, asynchronous, bind=create_async_engine("sqlite+aiosqlite://"))  # type: ignore[arg-type]


def test_generators_are_no_handlers(lite: Engine) -> None:
    """Their code would never run, and every job would be dead."""

    def generator(job: Any) -> Any:
        yield job

    async def asynchronous(job: Any) -> Any:
        yield job

    for wrong in (generator, asynchronous):
        with pytest.raises(TypeError, match="generator function"):
            sl.Worker(queue, wrong, bind=lite)
    put(lite, 1, max_attempts=1)
    sl.Worker(queue, lambda job: generator(job), bind=lite).run(until_empty=True)
    assert "whose code has not run" in errors(lite)[0]

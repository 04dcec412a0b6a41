"""Workers with whom things go wrong: odd errors, signals at bad moments, databases that come and go."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.exc import DataError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.workers.state import WorkerState
from tests.conftest import PLAIN, Servers
from tests.fixtures.parties import PATIENCE, async_connected, until
from tests.fixtures.queues import MakeEngine, silenced
from tests.workers.test_workers import counts, put, running

ROOT = Path(__file__).parents[2]
queue = sl.Queue()


class Odd(BaseException):
    """Neither an Exception nor anything that Python knows."""


@pytest.fixture
def lite(engine_to: MakeEngine) -> Engine:
    return engine_to("sqlite")


def shift_of(engine: Engine, **terms: Any) -> WorkerState:
    return WorkerState(sl.Worker(queue, print, bind=engine, **terms), time.sleep)


def errors(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        job = build_context(connection.dialect, {}).tables.job
        return list(connection.execute(select(job.c.error).where(job.c.failed_at.is_not(None))).scalars())


def worked(worker: sl.Worker, engine: Engine, number: int) -> None:
    """Let it work until so many jobs have ended."""
    with running(worker):
        until(lambda: counts(engine)["completed"] + counts(engine)["dead"] == number)


def awaited(servers: Servers, name: str, driver: str, body: Callable[[AsyncEngine], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with async_connected(servers.installed(name, driver)) as bind:
            await asyncio.wait_for(body(bind), PATIENCE)

    asyncio.run(main())


async def ends(engine: Engine, number: int) -> None:
    while (counted := await asyncio.to_thread(counts, engine))["completed"] + counted["dead"] < number:
        await asyncio.sleep(0.02)


# what a handler raises


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
        await ends(engine, 4)
        worker.stop()
        await task

    awaited(servers, name, driver, body)
    assert counts(engine) == {"all": 4, "completed": 3, "dead": 1, "running": 0, "waiting": 0}
    assert "CancelledError" in errors(engine)[0]


def test_a_worker_that_is_cancelled_gives_its_jobs_back(engine_to: MakeEngine, servers: Servers) -> None:
    engine = engine_to("sqlite")
    put(engine, *range(4), max_attempts=1)
    begun = asyncio.Event()

    async def handler(_: Any) -> None:
        begun.set()
        await asyncio.sleep(3600)

    async def body(bind: AsyncEngine) -> None:
        task = asyncio.create_task(sl.AsyncWorker(queue, handler, bind=bind, concurrency=2).run())
        await begun.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for each in others:  # as asyncio.run() does at its end
            if each is task or "_hand" in repr(each):
                each.cancel()
        await asyncio.gather(task, return_exceptions=True)

    awaited(servers, "sqlite", "aiosqlite", body)
    assert counts(engine) == {"all": 4, "completed": 0, "dead": 0, "running": 0, "waiting": 4}


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), Odd()], ids=repr)
@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_a_hand_that_holds_survives_what_its_handler_raises(
    engine_to: MakeEngine, name: str, error: BaseException
) -> None:
    engine = engine_to(name)
    put(engine, *range(4), max_attempts=1)

    def handler(job: Any) -> None:
        if job.payload == 0:
            raise error

    worked(sl.Worker(queue, handler, bind=engine, concurrency=1, hold=True, poll=0.05), engine, 4)
    assert counts(engine) == {"all": 4, "completed": 3, "dead": 1, "running": 0, "waiting": 0}


@pytest.mark.parametrize("error", [asyncio.CancelledError(), Odd()], ids=repr)
def test_a_task_that_holds_survives_what_its_handler_raises(
    engine_to: MakeEngine, servers: Servers, error: BaseException
) -> None:
    engine = engine_to("postgresql15")
    put(engine, *range(4), max_attempts=1)

    async def handler(job: Any) -> None:
        if job.payload == 0:
            raise error

    async def body(bind: AsyncEngine) -> None:
        worker = sl.AsyncWorker(queue, handler, bind=bind, concurrency=1, hold=True, poll=0.05)
        task = asyncio.create_task(worker.run())
        await ends(engine, 4)
        worker.stop()
        await task

    awaited(servers, "postgresql15", "asyncpg", body)
    assert counts(engine) == {"all": 4, "completed": 3, "dead": 1, "running": 0, "waiting": 0}


class Untold(Exception):
    @property
    def __notes__(self) -> list[str]:
        raise RuntimeError("these notes can't be read")


@pytest.fixture
def raising_log() -> Iterator[None]:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the disk of the log is full")

    handler, log = Raises(), logging.getLogger("sqlalchemy_locks.worker")
    log.addHandler(handler)
    yield
    log.removeHandler(handler)


@pytest.mark.parametrize("hold", [False, True])
def test_an_error_that_cannot_be_told_fails_its_job_too(engine_to: MakeEngine, raising_log: None, hold: bool) -> None:
    engine = engine_to("postgresql15")
    put(engine, *range(4), max_attempts=1)

    def handler(job: Any) -> None:
        if job.payload in (0, 1):
            raise Untold

    worked(sl.Worker(queue, handler, bind=engine, concurrency=1, hold=hold, poll=0.05), engine, 4)
    assert counts(engine) == {"all": 4, "completed": 2, "dead": 2, "running": 0, "waiting": 0}
    assert all("Untold" in error for error in errors(engine))


class Stored(sl.Queue):
    """A queue in a database that can't store some texts."""

    def fail(self, jobs: Any, *, error: str, **options: Any) -> Any:
        if "unstorable" in error:
            raise DataError("UPDATE", {}, ValueError("invalid byte sequence"))
        return super().fail(jobs, error=error, **options)


@pytest.mark.parametrize("hold", [False, True])
def test_an_error_that_cannot_be_stored_fails_its_job_all_the_same(engine_to: MakeEngine, hold: bool) -> None:
    engine = engine_to("postgresql15")
    put(engine, *range(4), max_attempts=1)

    def handler(job: Any) -> None:
        if job.payload == 1:
            raise RuntimeError("unstorable")

    worked(sl.Worker(Stored(), handler, bind=engine, concurrency=1, hold=hold, poll=0.05), engine, 4)
    assert counts(engine) == {"all": 4, "completed": 3, "dead": 1, "running": 0, "waiting": 0}
    assert errors(engine) == ["the error could not be stored: the worker's log has it"]


@pytest.mark.parametrize("name", ["mysql", "mariadb", "postgresql15"])
@pytest.mark.parametrize("letter", ["\udc80", "\0", "\U0001f512"], ids=ascii)
def test_an_error_of_letters_that_take_room_is_cut(engine_to: MakeEngine, name: str, letter: str) -> None:
    engine = engine_to(name)
    put(engine, 1, max_attempts=1)
    with engine.begin() as connection:
        jobs = connection.execute(queue.capture()).all()
    with engine.begin() as connection:
        assert connection.scalar(queue.fail(jobs, error=letter * 20000 + "the end")) == 1
    (error,) = errors(engine)
    assert len(error) == 16000
    assert error.endswith("the end")


def test_a_worker_that_ends_for_a_mistake_gives_back_the_rest(lite: Engine) -> None:
    class Wrong(sl.Queue):
        def complete(self, jobs: Any) -> Any:
            raise DataError("UPDATE", {}, ValueError("never"))

    put(lite, *range(5))
    shift = WorkerState(sl.Worker(Wrong(), print, bind=lite, concurrency=2, batch=5), time.sleep)
    shift.turn()
    first, _ = shift.take(), shift.take()
    shift.done(first, None)
    with pytest.raises(DataError):
        shift.close()
    assert counts(lite)["waiting"] == 4


# what a handler is


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
    for plain in (print, lambda job: None, functools.partial(put, bind), shift_of):
        with pytest.raises(TypeError, match="use a Worker"):
            sl.AsyncWorker(queue, plain, bind=bind)


def test_a_job_whose_work_would_have_to_be_awaited_fails(lite: Engine) -> None:
    put(lite, 1, max_attempts=1)
    worked(sl.Worker(queue, lambda job: coroutine_function(job), bind=lite, poll=0.05), lite, 1)
    assert "use an AsyncWorker" in errors(lite)[0]


# whose the jobs are


def test_jobs_of_other_queues_are_not_swept(lite: Engine) -> None:
    put(lite, 1, queue="other")
    put(lite, 2)
    with lite.begin() as connection:
        assert len(connection.execute(queue.capture(5, queue="other")).all()) == 1
        assert len(connection.execute(queue.capture(5)).all()) == 1
        silenced(connection)
    shift = shift_of(lite, heartbeat=1, stalled_after=3600)
    shift.sweep()
    assert (counts(lite)["running"], counts(lite)["waiting"]) == (1, 1)


def test_a_sweep_goes_on_until_nothing_is_left(lite: Engine) -> None:
    put(lite, *range(1005))
    with lite.begin() as connection:
        connection.execute(queue.capture(1005)).all()
        silenced(connection)
    shift_of(lite, heartbeat=1, stalled_after=3600).sweep()
    assert counts(lite)["running"] == 0


def test_nothing_is_begun_by_who_was_silent_for_long(lite: Engine) -> None:
    """A process that was stopped: others have its jobs, and it has them in memory."""
    put(lite, *range(3))
    shift = shift_of(lite, heartbeat=1, stalled_after=None, batch=3)
    shift.turn()
    assert len(shift.waiting) == 3
    with lite.begin() as connection:
        silenced(connection)
        connection.execute(queue.requeue_stalled(3600))
        assert len(connection.execute(queue.capture(2)).all()) == 2
    shift._beat -= 3
    assert shift.take() is None
    shift._fetch = lambda: None  # type: ignore[method-assign]
    shift.turn()
    assert shift.take() is None


def test_lost_jobs_are_sorted_out_though_the_database_fails_meanwhile(lite: Engine) -> None:
    put(lite, *range(4))
    shift = shift_of(lite, heartbeat=0.01, stalled_after=None, batch=4)
    shift.turn()
    jobs = list(shift.waiting)
    with lite.begin() as connection:
        assert connection.scalar(queue.complete(jobs[1])) == 1
    asked = 0
    perform = shift._perform

    def failing(operation: Any, *rest: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise OperationalError("UPDATE", {}, OSError("gone"))
        return perform(operation, *rest)

    shift._perform = failing  # type: ignore[method-assign]
    time.sleep(0.02)
    shift.turn()
    assert asked == 2
    assert list(shift.waiting) == jobs
    assert shift.take() is None  # until it is known whose they are
    shift.turn()
    assert list(shift.waiting) == [jobs[0], *jobs[2:]]


def test_what_was_ended_already_is_said_to_be_so(lite: Engine, caplog: pytest.LogCaptureFixture) -> None:
    put(lite, 1)

    def handler(job: Any) -> None:
        with lite.begin() as connection:
            connection.execute(queue.complete(job))

    with caplog.at_level(logging.WARNING, "sqlalchemy_locks.worker"):
        worked(sl.Worker(queue, handler, bind=lite, poll=0.05), lite, 1)
        assert "ended already" in caplog.text


# when something is done


def test_a_finished_job_does_not_wait_for_those_that_run_long(lite: Engine) -> None:
    put(lite, *range(6))
    go_on = threading.Event()

    def handler(job: Any) -> None:
        if job.payload:
            assert go_on.wait(2 * PATIENCE)

    terms = {"heartbeat": 3600, "poll": 3600, "stalled_after": None}
    with running(sl.Worker(queue, handler, bind=lite, concurrency=2, batch=6, **terms)):
        try:
            until(lambda: counts(lite)["completed"] == 1)
        finally:
            go_on.set()


def test_nobody_turns_while_all_hands_are_busy(lite: Engine) -> None:
    put(lite, 1, 2)
    shift = shift_of(lite, concurrency=2, batch=2, stalled_after=None, heartbeat=3600)
    shift.turn()
    assert shift.take() is not None
    assert shift.take() is not None
    shift.turn()
    assert shift.pause() > 5


def test_a_standby_is_waited_for(lite: Engine) -> None:
    put(lite, 1)
    shift = shift_of(lite, stalled_after=None, heartbeat=3600)
    perform = shift._perform

    def standby(*_: Any) -> Any:
        raise sl.NotWritable("a standby")

    shift._perform = standby  # type: ignore[method-assign]
    shift.turn()
    assert shift.pause() > 0
    shift._perform = perform  # type: ignore[method-assign]
    shift.turn()
    assert shift.take() is not None


def test_who_listens_goes_on_whatever_happens(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15")
    bind = engine_to("postgresql15", pool_size=1, max_overflow=1)
    raw, failed = bind.raw_connection, threading.Event()

    def full() -> Any:
        if not failed.is_set():
            failed.set()
            raise PoolTimeout("the pool is exhausted")
        return raw()

    bind.raw_connection = full  # type: ignore[method-assign]
    done = threading.Event()
    worker = sl.Worker(queue, lambda job: done.set(), bind=bind, poll=3600, heartbeat=3600, stalled_after=None)
    with running(worker):
        assert failed.wait(PATIENCE)
        time.sleep(0.2)  # so that it is idle, most likely: what is put is then heard of, or not at all
        put(engine, 1)
        assert done.wait(PATIENCE)


def test_held_work_is_begun_and_stopped_without_polling(engine_to: MakeEngine, servers: Servers) -> None:
    engine = engine_to("postgresql15")

    async def body(bind: AsyncEngine) -> None:
        done = asyncio.Event()

        async def handler(_: Any) -> None:
            done.set()

        worker = sl.AsyncWorker(queue, handler, bind=bind, concurrency=2, hold=True, poll=3600, grace=3600)
        task = asyncio.create_task(worker.run())
        for number in range(3):
            done.clear()
            await asyncio.to_thread(put, engine, number)
            await done.wait()
        await ends(engine, 3)
        worker.stop()
        await task

    awaited(servers, "postgresql15", "asyncpg", body)


INTERRUPTED = """
import os, signal, sys, threading
from sqlalchemy import create_engine
import sqlalchemy_locks as sl
from sqlalchemy_locks.workers.state import WorkerState

sent = False

def look(frame, what, arg):
    # when the main thread goes to wait: with a lock in its hands, if what it waits for has one
    global sent
    waits = what == "call" and frame.f_code is threading.Condition.wait.__code__
    gets = what == "c_call" and getattr(arg, "__name__", "") == "get" and "SimpleQueue" in repr(arg)
    if (waits or gets) and armed and not sent:
        sent = True
        os.kill(os.getpid(), signal.SIGTERM)

worker = sl.Worker(sl.Queue(), print, bind=create_engine(sys.argv[1]), poll=3600, hold=len(sys.argv) > 2)
armed = False
# the last thing that the main thread does before it waits
name, of = ("sweep", WorkerState) if worker.hold else ("_turn", sl.Worker)
last = getattr(of, name)

def begin(*given):
    global armed
    armed = True
    return last(*given)

setattr(of, name, begin)
sys.setprofile(look)
worker.run()
sys.setprofile(None)
print("ended", sent)
"""


@pytest.mark.parametrize("name", ["sqlite", "postgresql15"])
def test_a_signal_at_any_moment_stops_it(servers: Servers, engine_to: MakeEngine, name: str) -> None:
    engine_to(name)
    command = [sys.executable, "-c", INTERRUPTED, servers.installed(name, PLAIN[name])]
    if name != "sqlite":
        command.append("hold")
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.stdout == "ended True\n", ended.stderr


# what it is told


def test_a_signal_before_it_waits_is_not_missed(lite: Engine) -> None:
    worker = sl.Worker(queue, print, bind=lite, poll=3600, heartbeat=3600, stalled_after=None)
    turn = worker._turn

    def late(*given: Any) -> None:
        worker.stop()  # which it hears after it has looked whether it should, and before its bell is cleared
        turn(*given)

    worker._turn = late  # type: ignore[method-assign]
    with running(worker) as thread:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_durations_that_nobody_can_wait_for_are_refused(lite: Engine) -> None:
    for name in ("poll", "heartbeat", "stalled_after", "grace"):
        for long in (float("inf"), 1e10):
            with pytest.raises(ValueError, match=f"{name} must be at most a year"):
                sl.Worker(queue, print, bind=lite, **{name: long})  # type: ignore[arg-type]


def test_a_forked_process_has_its_own_name(lite: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    put(lite, 1)
    worker = sl.Worker(queue, print, bind=lite, stalled_after=None)
    monkeypatch.setattr(os, "getpid", lambda: 12345)
    shift = WorkerState(worker, time.sleep)
    shift.turn()
    (job,) = shift.waiting
    assert job.processing_host.split(":")[1] == "12345"

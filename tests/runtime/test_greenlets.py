"""Greenlets are kept between calls, and behave as SQLAlchemy's, which are made for each call."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import pytest
from greenlet import GreenletExit, getcurrent, greenlet
from sqlalchemy.util import await_only, greenlet_spawn

from sqlalchemy_locks.runtime import greenlets
from sqlalchemy_locks.runtime.greenlets import run_in_greenlet

P = ParamSpec("P")
Spawn = Callable[..., Coroutine[Any, Any, Any]]


def in_event_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a coroutine function a test."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@pytest.fixture(params=[run_in_greenlet, greenlet_spawn], ids=["ours", "SQLAlchemy's"])
def spawn(request: pytest.FixtureRequest) -> Spawn:
    made: Spawn = request.param
    return made


@in_event_loop
async def test_a_greenlet_serves_the_next_call() -> None:
    def current() -> Any:
        await_only(asyncio.sleep(0))
        return getcurrent()

    first = await run_in_greenlet(current)
    assert await run_in_greenlet(current) is first
    assert await asyncio.create_task(run_in_greenlet(current)) is first


@in_event_loop
async def test_concurrent_calls_have_greenlets_of_their_own(spawn: Spawn) -> None:
    def work(number: int, count: int, inside: list[int], all_inside: asyncio.Event) -> tuple[int, Any]:
        inside.append(number)
        if len(inside) == count:
            all_inside.set()
        await_only(all_inside.wait())
        await_only(asyncio.sleep(0))
        return number, getcurrent()

    for count in (3, 100, 3):
        inside, all_inside = list[int](), asyncio.Event()
        answers = await asyncio.gather(*(spawn(work, number, count, inside, all_inside) for number in range(count)))
        assert [number for number, _ in answers] == list(range(count))
        assert len({id(greenlet) for _, greenlet in answers}) == count
        assert len(greenlets._idle.workers) <= greenlets._MAX_IDLE


@in_event_loop
async def test_an_error_of_the_function_is_raised_as_it_is(spawn: Spawn) -> None:
    cause, error = KeyError("cause"), ValueError("error")

    def fail() -> None:
        await_only(asyncio.sleep(0))
        try:
            raise cause
        except KeyError:
            raise error  # noqa: B904 (the context is what is tested)

    try:
        raise RuntimeError("the caller handles another error")
    except RuntimeError:
        with pytest.raises(ValueError, match="error") as raised:
            await spawn(fail)
    assert raised.value is error
    assert raised.value.__context__ is cause
    assert cause.__context__ is None
    assert await spawn(lambda: 1) == 1


def test_the_end_of_a_greenlet_is_raised() -> None:
    """SQLAlchemy returns it, as greenlet does."""

    def end() -> None:
        raise GreenletExit("ended")

    with pytest.raises(GreenletExit, match="ended"):
        _called(end)
    assert _called(lambda: "next") == "next"


@in_event_loop
async def test_what_an_await_raises_is_raised_in_the_function(spawn: Spawn) -> None:
    async def fail() -> None:
        raise ValueError("awaited")

    def work() -> tuple[str, Any]:
        try:
            await_only(fail())
        except ValueError as error:
            # an except clause may await, too
            await_only(asyncio.sleep(0))
            return str(error), sys.exc_info()[1]
        raise AssertionError

    caught, error = await spawn(work)
    assert (caught, str(error)) == ("awaited", "awaited")
    assert await spawn(lambda: sys.exc_info()) == (None, None, None)


@in_event_loop
async def test_a_cancelled_call_cleans_up_with_awaits(spawn: Spawn) -> None:
    events = []
    started = asyncio.Event()

    def work() -> None:
        try:
            started.set()
            await_only(asyncio.sleep(3600))
        finally:
            await_only(asyncio.sleep(0))
            events.append("cleaned up")

    task = asyncio.create_task(spawn(work))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events == ["cleaned up"]
    assert await spawn(lambda: "next") == "next"


@in_event_loop
async def test_a_cancellation_keeps_no_awaited_value() -> None:
    """Its traceback has the frames of the call; one that kept a cursor of SQLite would keep its lock."""

    class Cursor:
        pass

    async def execute() -> Cursor:
        return Cursor()

    def work() -> None:
        cursor = await_only(execute())
        executed.append(weakref.ref(cursor))
        del cursor
        started.set()
        await_only(asyncio.sleep(3600))

    executed, started = list[Any](), asyncio.Event()
    task = asyncio.create_task(run_in_greenlet(work))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await task
    assert cancelled.value.__traceback__ is not None
    assert [each() for each in executed] == [None]


@in_event_loop
async def test_a_function_that_passes_a_cancellation_over_returns(spawn: Spawn) -> None:
    started = asyncio.Event()

    def work() -> str:
        try:
            started.set()
            await_only(asyncio.sleep(3600))
        except asyncio.CancelledError:
            await_only(asyncio.sleep(0))
        return "done"

    task = asyncio.create_task(spawn(work))
    await started.wait()
    task.cancel()
    assert await task == "done"
    assert await spawn(lambda: "next") == "next"


@in_event_loop
async def test_it_runs_in_the_context_of_its_caller(spawn: Spawn) -> None:
    variable = contextvars.ContextVar("variable", default="none")

    def swap(value: str) -> str:
        before = variable.get()
        await_only(asyncio.sleep(0))
        variable.set(value)
        return before

    async def in_task(value: str) -> list[str]:
        variable.set(value)
        seen = [await spawn(swap, f"{value}, set inside") for _ in range(2)]
        return [*seen, variable.get()]

    assert await asyncio.create_task(in_task("a")) == ["a", "a, set inside", "a, set inside"]
    assert await asyncio.create_task(in_task("b")) == ["b", "b, set inside", "b, set inside"]
    assert await spawn(variable.get) == "none"


@in_event_loop
async def test_a_call_inside_a_call(spawn: Spawn) -> None:
    def inner() -> str:
        await_only(asyncio.sleep(0))
        return "inner"

    def outer() -> tuple[str, str]:
        return await_only(spawn(inner)), await_only(asyncio.sleep(0, "outer"))

    assert await spawn(outer) == ("inner", "outer")
    assert await spawn(outer) == ("inner", "outer")


@in_event_loop
async def test_an_idle_greenlet_keeps_nothing_alive() -> None:
    greenlets._idle.workers.clear()  # a new one's first call is the one that greenlet itself would keep

    class Kept:
        pass

    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable")

    def work(argument: Any, *, named: Any) -> Any:
        variable.set(Kept())
        in_context.append(weakref.ref(variable.get()))
        await_only(asyncio.sleep(0))
        return argument

    given, named, in_context = Kept(), Kept(), list[Any]()
    kept = [weakref.ref(given), weakref.ref(named)]
    # each task has its own context
    answer = await asyncio.create_task(run_in_greenlet(work, given, named=named))
    assert answer is given
    assert len(greenlets._idle.workers) == 1
    del answer, given, named
    await asyncio.sleep(0)
    gc.collect()
    assert [each() for each in (*kept, *in_context)] == [None, None, None]


@pytest.mark.parametrize("error", [None, ValueError()], ids=["switch", "throw"])
def test_a_call_that_another_greenlet_resumes(error: Exception | None) -> None:
    """As with nest_asyncio, where code inside a call runs the event loop."""

    def work() -> str:
        with contextlib.suppress(ValueError):
            await_only(asyncio.sleep(0))
        return await_only(asyncio.sleep(0, "resumed"))

    def resuming() -> str:
        answers.extend([_resumed(call, error), _resumed(call)])
        return await_only(asyncio.sleep(0, "resuming"))

    for _ in range(2):
        answers = list[Any]()
        call, other = run_in_greenlet(work), run_in_greenlet(resuming)
        assert _resumed(call) is None
        # the call ends inside the other, which is still in the middle of its own
        assert _resumed(other) is None
        assert answers == [None, "resumed"]
        assert _resumed(other) == "resuming"
        assert _called(lambda: "next") == "next"


def test_a_call_that_began_in_another_greenlet() -> None:
    """As of an eager task, which begins where it is made."""

    def work() -> str:
        await_only(asyncio.sleep(0))
        return await_only(asyncio.sleep(0, "eager"))

    def beginning(slow: bool) -> str:
        call = run_in_greenlet(work)
        assert _resumed(call) is None
        calls.append(call)
        return await_only(asyncio.sleep(0, "slow")) if slow else "quick"

    for slow in (False, True):
        calls = list[Any]()
        outer = run_in_greenlet(beginning, slow)
        if slow:
            assert _resumed(outer) is None
        assert _resumed(outer) == ("slow" if slow else "quick")
        assert _called(lambda: "between") == "between"
        assert [_resumed(calls[0]) for _ in range(2)] == [None, "eager"]
        assert _called(lambda: "next") == "next"


def test_a_greenlet_that_was_made_deep_in_the_stack_is_not_kept() -> None:
    async def deep(depth: int) -> str:
        return await (deep(depth - 1) if depth else run_in_greenlet(lambda: "deep"))

    def room(depth: int = 0) -> int:
        try:
            return room(depth + 1)
        except RecursionError:
            return depth

    def found_in_idle(depth: int) -> int:
        greenlets._idle.workers.clear()
        assert asyncio.run(deep(depth)) == "deep"
        return len(greenlets._idle.workers)

    def begun(depth: int, call: Coroutine[Any, Any, str]) -> None:
        if depth:
            begun(depth - 1, call)
        else:
            assert _resumed(call) is None

    assert (found_in_idle(0), found_in_idle(300)) == (1, 0)
    # as an eager task, or in nest_asyncio's loop
    greenlets._idle.workers.clear()
    call = run_in_greenlet(await_only, asyncio.sleep(0, "done"))
    begun(300, call)
    assert _resumed(call) == "done"
    assert greenlets._idle.workers == []
    asyncio.run(deep(300))
    # the caller's own frames count
    assert _called(room) > sys.getrecursionlimit() / 2


def test_an_idle_greenlet_does_not_keep_the_caller_s_greenlet() -> None:
    closed = []

    def host() -> None:
        try:
            assert _called(lambda: "inside") == "inside"
            parent = getcurrent().parent
            assert parent is not None
            parent.switch()
        finally:
            closed.append("closed")

    hosting = greenlet(host)
    hosting.switch()
    del hosting
    gc.collect()
    assert closed == ["closed"]
    assert _called(lambda: "next") == "next"


def _resumed(call: Coroutine[Any, Any, str], error: Exception | None = None) -> str | None:
    """Resume a coroutine in the current greenlet, and return what it returns, if it does."""
    try:
        if error is None:
            call.send(None)
        else:
            call.throw(error)
    except StopIteration as end:
        return str(end.value)
    return None


def _called(function: Callable[[], Any]) -> Any:
    """Call a function that doesn't await."""
    try:
        run_in_greenlet(function).send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError


def test_an_abandoned_call_is_closed() -> None:
    events = []

    def work() -> None:
        try:
            await_only(asyncio.sleep(3600))
        finally:
            events.append("closed")

    async def abandon() -> None:
        call = run_in_greenlet(work)
        call.send(None)
        call.close()
        assert await run_in_greenlet(lambda: "next") == "next"

    asyncio.run(abandon())
    assert events == ["closed"]


def test_greenlets_that_are_not_kept_end() -> None:
    made: list[weakref.ref[Any]] = []
    alive = []

    def work() -> None:
        made.append(weakref.ref(getcurrent()))
        await_only(asyncio.sleep(0.01))

    async def many() -> None:
        await asyncio.gather(*(run_in_greenlet(work) for _ in range(3 * greenlets._MAX_IDLE)))

    def run() -> None:
        asyncio.run(many())
        alive.append(sum(each() is not None for each in made))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert alive == [greenlets._MAX_IDLE]
    assert len(made) == 3 * greenlets._MAX_IDLE
    assert [each() for each in made if each() is not None] == []


def test_each_thread_has_its_own() -> None:
    found: list[Any] = []

    def current() -> Any:
        await_only(asyncio.sleep(0))
        return getcurrent()

    async def twice() -> None:
        first = await run_in_greenlet(current)
        found.append((first is await run_in_greenlet(current), id(first)))
        kept.append(first)

    kept: list[Any] = []
    threads = [threading.Thread(target=lambda: asyncio.run(twice())) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(twice())
    assert [same for same, _ in found] == [True] * 6
    assert len({ident for _, ident in found}) == 6


def test_await_only_recognizes_it() -> None:
    """What SQLAlchemy looks for is private."""
    assert greenlets._Worker.__sqlalchemy_greenlet_provider__ is True
    awaitable = asyncio.sleep(0)
    with pytest.raises(Exception, match="greenlet_spawn has not been called"):
        await_only(awaitable)

"""A greenlet that is used again: nothing of one call is seen by the next, and errors go where SQLAlchemy's would."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any

import pytest
from greenlet import getcurrent, greenlet
from sqlalchemy.util import await_only

from sqlalchemy_locks import greenlets
from sqlalchemy_locks.greenlets import spawn
from tests.operation.parties import PATIENCE

who: ContextVar[str] = ContextVar("who", default="nobody")


class Thing:
    """Something that a weak reference can be had of."""


def run(awaitable: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(awaitable, PATIENCE)

    return asyncio.run(bounded())


def current() -> Any:
    await_only(asyncio.sleep(0))
    return getcurrent()


def test_it_is_used_again_unless_it_has_raised() -> None:
    def fails() -> None:
        raise LookupError(getcurrent())

    async def calls() -> None:
        first = await spawn(current)
        assert await spawn(current) is first
        with pytest.raises(LookupError) as failed:
            await spawn(fails)
        assert failed.value.args == (first,)
        assert await spawn(current) is not first

    run(calls())


def test_a_context_is_the_callers() -> None:
    def told() -> str:
        was = who.get()
        await_only(asyncio.sleep(0))
        who.set(f"{was}, told")
        return who.get()

    async def task(name: str) -> None:
        who.set(name)
        assert await spawn(told) == f"{name}, told"
        assert who.get() == f"{name}, told", "what it sets is set for whoever called it"

    async def tasks() -> None:
        await spawn(current)
        for name in ("a", "b"):
            await asyncio.create_task(task(name))
        assert await spawn(who.get) == "nobody"

    run(tasks())


def test_tasks_that_overlap_have_one_each() -> None:
    async def tasks(number: int) -> None:
        here = 0
        everyone = asyncio.Event()

        def meets(mine: int) -> tuple[int, Any]:
            nonlocal here
            here += 1
            if here == number:
                everyone.set()
            await_only(everyone.wait())
            return mine, getcurrent()

        met = await asyncio.gather(*(spawn(meets, mine) for mine in range(number)))
        assert [mine for mine, _ in met] == list(range(number))
        assert len({id(runner) for _, runner in met}) == number
        assert len(greenlets._idle.runners) <= greenlets._MOST

    async def bursts() -> None:
        for number in (3, greenlets._MOST + 20, 2):
            await tasks(number)

    run(bursts())


def test_what_is_awaited_raises_where_it_is_awaited() -> None:
    async def fails() -> None:
        raise LookupError("awaited")

    def goes_on() -> str:
        with pytest.raises(LookupError, match="awaited") as failed:
            await_only(fails())
        assert "fails" in [each.name for each in failed.traceback]
        await_only(asyncio.sleep(0))
        return "went on"

    assert run(spawn(goes_on)) == "went on"


def test_who_is_cancelled_cleans_up_before() -> None:
    cleaned: list[str] = []

    async def tasks() -> None:
        waits = asyncio.Event()

        def work() -> None:
            try:
                waits.set()
                await_only(asyncio.Event().wait())
            finally:
                await_only(asyncio.sleep(0))
                cleaned.append("yes")

        task = asyncio.create_task(spawn(work))
        await waits.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cleaned == ["yes"]
        assert await spawn(str, 7) == "7"

    run(tasks())


def test_nothing_is_kept_of_a_call() -> None:
    def same(thing: Thing, *, other: Thing) -> tuple[Thing, Thing]:
        return thing, other

    async def calls() -> list[weakref.ref[Thing]]:
        kept: list[weakref.ref[Thing]] = []
        value: ContextVar[Thing] = ContextVar("value")

        async def task() -> None:
            value.set(Thing())
            kept.append(weakref.ref(value.get()))
            await spawn(current)

        await asyncio.create_task(task())
        await asyncio.sleep(0)  # the loop itself keeps a task's context for one turn
        assert kept[0]() is None
        for each in await spawn(same, Thing(), other=Thing()):
            kept.append(weakref.ref(each))
        del each
        gc.collect()
        assert greenlets._idle.runners
        return [each for each in kept if each() is not None]

    assert run(calls()) == []


def test_each_thread_has_its_own() -> None:
    seen: list[Any] = []

    def thread() -> None:
        first = run(spawn(current))
        # another loop of this thread uses the same one
        assert run(spawn(current)) is first
        seen.append((first, threading.get_ident()))

    mine = run(spawn(current))
    threads = [threading.Thread(target=thread, daemon=True) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE)
    assert len(seen) == 2
    assert run(spawn(current)) is mine
    assert mine not in [runner for runner, _ in seen]


def test_a_thread_that_ends_leaves_none() -> None:
    """Where each request has a thread and a loop, what one thread left would be there for good."""
    kept: list[weakref.ref[Any]] = []

    async def tasks() -> None:
        await asyncio.gather(*(spawn(current) for _ in range(3)))
        kept.extend(map(weakref.ref, greenlets._idle.runners))

    for _ in range(3):
        thread = threading.Thread(target=run, args=(tasks(),), daemon=True)
        thread.start()
        thread.join(PATIENCE)
    assert len(kept) == 9
    # what a thread that ended left to greenlet is dropped when another greenlet is switched to
    greenlet(gc.collect).switch()
    gc.collect()
    assert [each for each in kept if each() is not None] == []


def test_it_comes_back_to_whoever_called_it_last() -> None:
    """A loop in a greenlet, as gevent has it, and then one outside of it."""
    mine = run(spawn(current))
    assert greenlet(lambda: run(spawn(current))).switch() is mine
    assert run(spawn(current)) is mine

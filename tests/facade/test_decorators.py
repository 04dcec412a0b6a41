"""Blocks and ``scheduled`` as decorators: a block for each call, of functions that finish when the call returns."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import flask
import pytest
from sse_starlette import EventSourceResponse
from starlette.responses import Response, StreamingResponse

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ENGINES, PATIENCE, all_of, async_connected, installed, unused


@pytest.mark.parametrize("name", ["postgresql15", "sqlite"])
def test_each_call_enters_its_own_block(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name)
    locks, key = sl.Locks(engine), unused()
    inside = 0

    @locks.exclusive(key, timeout=PATIENCE)
    def work(number: int, *, more: int = 0) -> int:
        """What it does."""
        nonlocal inside
        inside += 1
        assert inside == 1
        with pytest.raises(sl.LockTimeout):
            all_of(lambda: sl.Locks(engine).exclusive(key, timeout=0).__enter__())
        inside -= 1
        return number + more

    assert all_of(*(lambda number=number: work(number, more=1) for number in range(4))) == [1, 2, 3, 4]  # type: ignore[misc]
    assert (work.__name__, work.__doc__) == ("work", "What it does.")
    assert list(inspect.signature(work).parameters) == ["number", "more"]
    with locks.exclusive(key, timeout=0):
        pass


def generator() -> Iterator[int]:
    yield 1


async def coroutine() -> int:
    return 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


def plain() -> int:
    return 1


class Awaited:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize("make", ["exclusive", "shared", "scheduled"])
@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (generator, "a generator's code runs when the lock is released"),
        (async_generator, "a generator's code runs when the lock is released"),
        (coroutine, "is async: use AsyncLocks"),
        (Awaited(), "is async: use AsyncLocks"),
        (staticmethod(plain), "below @staticmethod"),
        (Awaited, "decorates functions, not"),
        ("name", "decorates functions, not"),
    ],
)
def test_results_that_run_after_the_lock_are_refused(
    engine_to: MakeEngine, make: str, what: Any, sentence: str
) -> None:
    locks = sl.Locks(engine_to("sqlite"))
    made = locks.scheduled("a", every=60) if make == "scheduled" else getattr(locks, make)("a")
    with pytest.raises(TypeError, match=sentence):
        made(what)


@pytest.mark.parametrize(
    "function", [generator, coroutine, async_generator, contextmanager(generator), asynccontextmanager(async_generator)]
)
def test_what_a_plain_wrapper_returns_unfinished_is_refused(engine_to: MakeEngine, function: Any) -> None:
    locks = sl.Locks(engine_to("sqlite"))
    for block in (locks.exclusive("a"), locks.lease("a")):
        with pytest.raises(TypeError, match="runs when the lock is released"):
            block(lambda: function())()


def body() -> Iterator[bytes]:
    raise AssertionError
    yield b""


@pytest.mark.parametrize(
    "streaming",
    [
        lambda: StreamingResponse(body()),
        lambda: EventSourceResponse(body()),
        lambda: flask.Response(body()),
        lambda: (body(), 200),
        async_generator,
    ],
)
def test_responses_that_stream_are_refused(servers: Any, engine_to: MakeEngine, streaming: Any) -> None:
    with pytest.raises(TypeError, match="runs when the lock is released"):
        sl.Locks(engine_to("sqlite")).lease("a")(lambda: streaming())()

    async def main() -> None:
        async with async_connected(installed(servers, "sqlite", "aiosqlite")) as engine:

            @sl.AsyncLocks(engine).exclusive("a")
            async def endpoint() -> Any:
                return streaming()

            with pytest.raises(TypeError, match="runs when the lock is released"):
                await endpoint()

    asyncio.run(main())


@pytest.mark.parametrize("complete", [lambda: flask.Response("ok"), lambda: Response("ok"), lambda: ("ok", 200)])
def test_responses_that_are_complete_are_returned(engine_to: MakeEngine, complete: Any) -> None:
    assert sl.Locks(engine_to("sqlite")).exclusive("a")(lambda: complete())()


@pytest.mark.parametrize("which", ["postgresql15/asyncpg", "sqlite/aiosqlite"])
def test_async_decorators(servers: Any, which: str) -> None:
    name, driver = which.split("/")

    async def main() -> None:
        key, inside = unused(), 0
        async with async_connected(installed(servers, name, driver)) as engine:
            locks = sl.AsyncLocks(engine)

            @locks.exclusive(key, timeout=PATIENCE)
            async def work(number: int) -> int:
                nonlocal inside
                inside += 1
                await asyncio.sleep(0)
                assert inside == 1
                inside -= 1
                return number

            assert await asyncio.gather(*(work(number) for number in range(4))) == [0, 1, 2, 3]
            assert inspect.iscoroutinefunction(work)
            for refused in (plain, generator, async_generator, Awaited):
                with pytest.raises(TypeError):
                    locks.exclusive("a")(refused)  # type: ignore[arg-type]
                with pytest.raises(TypeError):
                    locks.scheduled("a", every=60)(refused)  # type: ignore[arg-type]

            done = []

            @locks.scheduled(key, every=3600)
            async def report(to: str) -> str:
                done.append(to)
                return to

            assert await report("ann") == "ann"
            assert await report("ben") is None
            assert done == ["ann"]
            assert await locks.once_per(key, every=3600) is False

    asyncio.run(main())


@pytest.mark.parametrize("name", ENGINES)
def test_once_a_period(engine_to: MakeEngine, name: str) -> None:
    locks, key = sl.Locks(engine_to(name)), unused()
    done = []

    @locks.scheduled(key, every=3600)
    def report(to: str) -> str:
        done.append(to)
        return to

    assert done == []  # decorating sends no statement
    assert report("ann") == "ann"
    assert report("ben") is None
    assert done == ["ann"]


@pytest.mark.parametrize("bad", [{"every": 0}, {"every": True}, {"every": 60, "tz": "Europe/Paris"}])
def test_bad_input_is_refused_when_decorating(engine_to: MakeEngine, bad: Any) -> None:
    locks = sl.Locks(engine_to("sqlite"))
    for asked in (locks.once_per, locks.scheduled):
        with pytest.raises((TypeError, ValueError)):
            asked("a", **bad)

"""Whether a lock does what it is for: two callers are never inside at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

from sqlalchemy_locks._validation import seconds, valid_int


class Inside:
    """The section that only one caller may be in: a context manager, ``with`` or ``async with``.

    >>> def charge(inside: Inside) -> None:
    ...     with locks.exclusive("invoice:42"), inside:
    ...         send_report()
    >>> assert_serialised(charge)
    """

    def __init__(self, limit: int, pause: float) -> None:
        self._limit, self._pause = limit, pause
        self._changed = threading.Condition()
        self._now = 0
        #: the most callers that were inside at the same time, and how often one was
        self.most = self.entered = 0

    def _enter(self) -> None:
        with self._changed:
            self._now += 1
            self.entered += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()

    def _leave(self) -> None:
        with self._changed:
            self._now -= 1

    @property
    def _too_many(self) -> bool:
        return self.most > self._limit

    def __enter__(self) -> Inside:
        self._enter()
        with self._changed:  # another one that isn't kept out enters now
            self._changed.wait_for(lambda: self._too_many, self._pause)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    async def __aenter__(self) -> Inside:
        self._enter()
        deadline = time.monotonic() + self._pause
        while not self._too_many and time.monotonic() < deadline:
            await asyncio.sleep(min(self._pause, 0.001))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()


def assert_serialised(
    function: Callable[[Inside], object] | Callable[[Inside], Awaitable[object]],
    *,
    callers: int = 4,
    calls: int = 3,
    limit: int = 1,
    pause: float | timedelta = 0.01,
) -> None:
    """Call a function from several threads, or tasks, at the same time, and assert that they enter one at a time.

    :param function: takes an :class:`Inside`, and enters it where only one caller may be. Tasks of one event loop call
        a coroutine function.
    :param callers: how many threads or tasks. :param calls: how often each of them calls it.
    :param limit: how many may be inside at the same time: a semaphore's capacity.
    :param pause: how long each stays inside, in seconds or as a ``timedelta``, so that another one can be seen to
        enter.
    :raises AssertionError: when more were inside at the same time, or none entered at all.

    An error of the function is raised here. Without a lock it finds two inside almost certainly, not always; it never
    blames a lock that works.

    >>> def charge(inside: Inside) -> None:
    ...     with locks.exclusive("invoice:42"), inside:
    ...         send_report()
    >>> assert_serialised(charge)
    """
    for number, what in ((callers, "callers"), (calls, "calls"), (limit, "limit")):
        valid_int(number, what)
    if callers <= limit:
        raise ValueError(f"no lock could fail: {limit} may be inside, and there are {callers} callers")
    inside = Inside(limit, seconds(pause, "pause"))
    if inspect.iscoroutinefunction(function):
        asyncio.run(_in_tasks(function, inside, callers, calls))
    else:
        _in_threads(function, inside, callers, calls)
    if inside.most > limit:
        raise AssertionError(
            f"{inside.most} callers were inside at the same time, and {limit} may be: {_name(function)} holds no lock "
            "there, or not the same one"
        )
    if not inside.entered:
        raise AssertionError(f"no call of {_name(function)} entered: use the context manager that it is called with")


def _in_threads(function: Callable[[Inside], object], inside: Inside, callers: int, calls: int) -> None:
    start = threading.Barrier(callers)
    errors: list[BaseException] = []

    def run() -> None:
        with _collected(errors):
            start.wait()
            for _ in range(calls):
                function(inside)

    threads = [threading.Thread(target=run) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


async def _in_tasks(function: Callable[[Inside], Awaitable[object]], inside: Inside, callers: int, calls: int) -> None:
    async def run() -> None:
        for _ in range(calls):
            await function(inside)

    await asyncio.gather(*(run() for _ in range(callers)))


@contextlib.contextmanager
def _collected(errors: list[BaseException]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        errors.append(error)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)

"""What can be decorated: a plain function by ``Locks``, a coroutine function by ``AsyncLocks``, each refusing the rest.

A lock around a function that only makes a coroutine or a generator would be over before any of its code has run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


@contextlib.contextmanager
def _manager() -> Iterator[None]:
    yield


@contextlib.asynccontextmanager
async def _async_manager() -> AsyncIterator[None]:
    yield


#: a context manager whose code is a generator's has no public name of its own
_MANAGERS = type(_manager()), type(_async_manager())


def check_plain(function: Any, what: str) -> None:
    """Refuse what isn't done when its call returns."""
    _check(function, what)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        raise TypeError(f"{what} of Locks decorates plain functions, and {_named(function)} is async: use AsyncLocks")


def check_coroutine(function: Any, what: str) -> None:
    """Refuse what can't be awaited."""
    _check(function, what)
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{what} of AsyncLocks decorates async functions, and {_named(function)} is none: use Locks")


def in_block(
    function: Callable[P, T], what: str, block: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Callable[P, T]:
    """The function, each call of which has a block of its own around it."""
    check_plain(function, what)

    @functools.wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        with block():
            return check_done(function(*args, **kwargs), what)

    return within


def in_async_block(
    function: Callable[P, Awaitable[T]], what: str, block: Callable[[], contextlib.AbstractAsyncContextManager[Any]]
) -> Callable[P, Coroutine[Any, Any, T]]:
    """The same of a coroutine function."""
    check_coroutine(function, what)

    @functools.wraps(function)
    async def within(*args: P.args, **kwargs: P.kwargs) -> T:
        async with block():
            return await function(*args, **kwargs)

    return within


def when_due(due: Callable[[], bool], what: str) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """A decorator of functions that run when ``due`` says so, and give ``None`` otherwise."""

    def decorate(function: Callable[P, T]) -> Callable[P, T | None]:
        check_plain(function, what)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return function(*args, **kwargs) if due() else None

        return run

    return decorate


def check_done(result: T, what: str) -> T:
    """Refuse a result whose code has still to run: a wrapper gave it, which looks like a plain function.

    :raises TypeError: for what has to be awaited, a generator, and what ``contextlib.contextmanager`` makes.
    """
    if isinstance(result, _MANAGERS) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        kind = "runs when the lock is over already: use a with block inside it"
    elif inspect.isawaitable(result):
        kind = "has to be awaited, when the lock is over already: use AsyncLocks, on the async function itself"
        if inspect.iscoroutine(result):
            result.close()
    else:
        return result
    raise TypeError(f"{what} decorates a function that returned {result!r}, which {kind}")


def _check(function: Any, what: str) -> None:
    if isinstance(function, (staticmethod, classmethod)):
        raise TypeError(f"put {what} below @{type(function).__name__}, next to the function")
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"{what} decorates functions, not {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{what} can't decorate {_named(function)}: a generator's code runs when the lock is over already; "
            "use a with block inside it"
        )


def _named(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))

"""Decorators: plain functions by ``Locks``, coroutine functions by ``AsyncLocks``; each refuses all others.

A lock around a function that returns a coroutine or a generator would be released before any of its code has run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from sqlalchemy_locks._validation import UNFINISHED, is_coroutine_function, is_unfinished

T = TypeVar("T")
P = ParamSpec("P")

#: results whose code has yet to run; contextlib.contextmanager and asynccontextmanager make the last two
_UNFINISHED = *UNFINISHED, contextlib.ContextDecorator, contextlib.AsyncContextDecorator


def check_plain(function: Any, what: str) -> None:
    """Refuse a function whose code has not run when its call returns."""
    _check(function, what)
    if is_coroutine_function(function):
        raise TypeError(f"{what} of Locks decorates plain functions, and {_named(function)} is async: use AsyncLocks")


def check_coroutine(function: Any, what: str) -> None:
    """Refuse a function that is no coroutine function."""
    _check(function, what)
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{what} of AsyncLocks decorates async functions, and {_named(function)} is none: use Locks")


def refuse_truth(block: Any) -> bool:
    """Raise, as the ``__bool__`` of a block: ``if locks.exclusive(...):`` would lock nothing."""
    raise TypeError("a block acquires when it is entered: use it in a with statement, or as a decorator")


def in_block(
    function: Callable[P, T], what: str, block: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Callable[P, T]:
    """Return the function with a block around each call."""
    check_plain(function, what)

    @functools.wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        with block():
            return _finished(function(*args, **kwargs), what)

    return within


def in_async_block(
    function: Callable[P, Awaitable[T]], what: str, block: Callable[[], contextlib.AbstractAsyncContextManager[Any]]
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the coroutine function with a block around each call."""
    check_coroutine(function, what)

    @functools.wraps(function)
    async def within(*args: P.args, **kwargs: P.kwargs) -> T:
        async with block():
            return _finished(await function(*args, **kwargs), what)

    return within


def _finished(result: T, what: str) -> T:
    """Return a result; refuse one whose code has yet to run, such as a coroutine or a response that streams."""
    parts = result if isinstance(result, tuple) else (result,)  # as a Flask view returns a body and a status
    if any(is_unfinished(part, _UNFINISHED) or _is_stream(part) for part in parts):
        raise TypeError(
            f"{what} decorates a function that returned {result!r}, whose code runs when the lock is released "
            "already: use a with block inside it, or AsyncLocks on the async function itself"
        )
    return result


def _is_stream(result: Any) -> bool:
    """Return whether this is a response that streams: Starlette's and FastAPI's; Flask's; Django's."""
    return (
        "body_iterator" in getattr(result, "__dict__", ())
        or getattr(result, "is_streamed", None) is True
        or getattr(result, "streaming", None) is True
    )


def _check(function: Any, what: str) -> None:
    if isinstance(function, (staticmethod, classmethod)):
        raise TypeError(f"put {what} below @{type(function).__name__}, next to the function")
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"{what} decorates functions, not {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{what} can't decorate {_named(function)}: a generator's code runs when the lock is released already; "
            "use a with block inside it"
        )


def _named(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))

"""Blocks made before the app is known, as decorators of views are.

A deferred block belongs to the ``Locks`` of the app that is current when it is entered, and ends there. Its arguments
are checked where it is written.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import NullPool, create_engine

from sqlalchemy_locks.errors import ReentryError
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.runtime.decorators import in_block, refuse_truth

P = ParamSpec("P")
T = TypeVar("T")


def deferred(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method whose block is made when it is entered, by ``method`` of ``self.current``.

    :param method: of ``Locks``; returns a context manager that is also a decorator.
    """

    @functools.wraps(method)
    def make(self: Any, *args: Any, **kwargs: Any) -> DeferredBlock:
        checked = method(_unconnected(), *args, **kwargs)
        return DeferredBlock(checked, lambda: method(self.current, *args, **kwargs), f"{method.__name__}()")

    return make


@functools.cache
def _unconnected() -> Locks:
    """Return ``Locks`` that make blocks, and so check arguments; none of these is ever entered."""
    return Locks(create_engine("sqlite://", poolclass=NullPool))


class DeferredBlock:
    """A block of the app that is current when it is entered, for one thread at a time; also a decorator.

    :param checked: the same block of no app, which refuses what can't be decorated.
    :param make: makes the block of the current app.
    :param name: the name of the block in error messages.
    """

    def __init__(self, checked: Any, make: Callable[[], Any], name: str) -> None:
        self._checked, self._make, self._name = checked, make, name
        self._in_use = threading.Lock()
        self._entered: Any = None

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        self._checked(function)
        return in_block(function, self._name, self._make)

    __bool__ = refuse_truth

    def __enter__(self) -> Any:
        if not self._in_use.acquire(blocking=False):
            raise ReentryError("this block is entered already: make one for each use")
        try:
            block = self._make()
            held = block.__enter__()
        except BaseException:
            self._in_use.release()
            raise
        self._entered = block
        return held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block, self._entered = self._entered, None
        if block is None:
            raise ReentryError("this block is not entered")
        try:
            block.__exit__(kind, error, trace)
        finally:
            self._in_use.release()

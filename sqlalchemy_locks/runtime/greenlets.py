"""Greenlets that run synchronous code under asyncio, kept for the next call.

SQLAlchemy's ``greenlet_spawn`` makes a greenlet for each call. CPython maps 16 kB of memory for the frames of each new
greenlet and unmaps it afterwards, which takes as long as half of a round trip to a local server.

A greenlet is recognized by SQLAlchemy's ``await_only`` by ``__sqlalchemy_greenlet_provider__``, which is private, used
only here, and pinned by ``tests/runtime/test_greenlets.py``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from greenlet import getcurrent, greenlet

T = TypeVar("T")
P = ParamSpec("P")

#: the most idle greenlets that a thread keeps
_MAX_IDLE = 32


class _Worker(greenlet):
    __sqlalchemy_greenlet_provider__ = True


class _Done:
    """What a worker switches to its caller with, when it is done."""

    __slots__ = ("answer",)

    answer: Any


def _serve(work: Callable[[], Any]) -> None:
    """Call one function after another, idle between them."""
    # no reference to its own greenlet, which the garbage collector couldn't find: it ends when it is dropped
    done = _Done()
    while True:
        done.answer = work()
        del work  # it would be kept alive while the worker is idle
        caller = getcurrent().parent
        assert caller is not None
        work = caller.switch(done)


class _Idle(threading.local):
    """The idle greenlets of a thread: a greenlet can't run in another one."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []


_idle = _Idle()


async def run_in_greenlet(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a synchronous function in a greenlet, where ``await_only`` awaits.

    As SQLAlchemy's ``greenlet_spawn``: in the caller's context (``contextvars``), and what an ``await`` raises is
    raised in the function.
    """
    idle, caller = _idle.workers, getcurrent()
    worker = idle.pop() if idle else _Worker(_serve)
    worker.parent, worker.gr_context = caller, caller.gr_context
    # an error of the function's ends the worker, and is raised here as it is
    found = worker.switch(partial(function, *args, **kwargs))
    while not isinstance(found, _Done):
        try:
            value = await found
        except BaseException:
            found = worker.throw(*sys.exc_info())
        else:
            found = worker.switch(value)
    answer: T = found.answer
    found.answer = worker.gr_context = None
    if len(idle) < _MAX_IDLE:
        idle.append(worker)
    return answer

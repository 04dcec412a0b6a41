"""Greenlets that run synchronous code under asyncio, kept for the next call.

SQLAlchemy's ``greenlet_spawn`` makes a greenlet for each call. CPython maps 16 kB of memory for the frames of each new
greenlet and unmaps it afterwards, which takes as long as half of a round trip to a local server.

SQLAlchemy's ``await_only`` recognizes a greenlet by ``__sqlalchemy_greenlet_provider__``, which is private, used only
here, and pinned by ``tests/runtime/test_greenlets.py``.
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
#: a greenlet begins at the recursion depth of its maker: one that was made deeper than this is not kept
_MAX_DEPTH = 200


class _Done:
    """What a worker switches to its caller with, when it is done."""

    __slots__ = ("answer",)

    answer: Any


class _Worker(greenlet):
    __sqlalchemy_greenlet_provider__ = True

    def __init__(self) -> None:
        self.done = _Done()
        super().__init__(partial(_serve, self.done))
        # started without a function: greenlet keeps the arguments of a start alive
        self.switch()


def _serve(done: _Done) -> None:
    """Call one function after another, idle between them.

    It has no reference to its own greenlet, so that the greenlet ends when it is dropped.
    """
    while True:
        caller = getcurrent().parent
        assert caller is not None
        work: Callable[[], Any] = caller.switch(done)
        done.answer = work()
        del work, caller  # they would be kept alive while the worker is idle


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
    try:
        worker, keep = idle.pop(), True
    except IndexError:
        worker, keep = _Worker(), not _is_deep()
    done = worker.done
    worker.parent, worker.gr_context = caller, caller.gr_context
    # an error of the function's ends the worker, and is raised here as it is
    found = worker.switch(partial(function, *args, **kwargs))
    while found is not done:
        if worker.dead:  # greenlet returns a GreenletExit, which it doesn't raise
            raise found
        try:
            value = [await found]
        except BaseException as error:
            # a task may be resumed in another greenlet (nest_asyncio, eager tasks), to which the worker then returns
            caller = worker.parent = getcurrent()
            found = worker.throw(type(error), error, error.__traceback__)
        else:
            caller = worker.parent = getcurrent()
            # not kept: a cancellation's traceback has this frame, and an open cursor of SQLite's keeps its lock
            found = worker.switch(value.pop())
    answer: T = done.answer
    done.answer = worker.gr_context = None
    # an idle worker keeps its caller alive, which may only be the greenlet that a thread begins with
    if keep and len(idle) < _MAX_IDLE and caller.parent is None:
        idle.append(worker)
    return answer


def _is_deep() -> bool:
    # the frames below those of a greenlet aren't seen in it
    if getcurrent().parent is not None:
        return True
    try:
        sys._getframe(_MAX_DEPTH)
    except ValueError:
        return False
    return True

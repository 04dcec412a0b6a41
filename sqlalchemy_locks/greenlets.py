"""``spawn``: SQLAlchemy's ``greenlet_spawn``, in greenlets that are used again.

It runs a synchronous function whose waits, SQLAlchemy's ``await_only``, are awaited by the caller. To make a greenlet
is most of what that costs, since Python maps memory for its frames and gives it back: a fifth of a whole acquisition.
So one whose function has returned waits for the next function of its thread. One whose function has raised is gone,
and the error leaves it as SQLAlchemy's does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

P = ParamSpec("P")
T = TypeVar("T")

#: so many wait in each thread, for the next burst of tasks
_MOST = 100


class _Runner(greenlet):  # type: ignore[misc]
    # what SQLAlchemy asks of a greenlet in which something is to be awaited
    __sqlalchemy_greenlet_provider__ = True

    result: Any = None
    #: what it answers when its function has returned; not itself, which its frame would have, and never be freed
    done: Any

    def __init__(self) -> None:
        super().__init__(_serve)
        self.done = object()


class _Idle(threading.local):
    def __init__(self) -> None:
        self.runners: list[_Runner] = []


_idle = _Idle()
_current: Any = getcurrent


def _serve(function: Any, args: Any, kwargs: Any) -> None:
    # no name here is its own greenlet: the collector doesn't see the frames of one that waits, and would keep it
    while True:
        _current().result = function(*args, **kwargs)
        function = args = kwargs = None  # they would live until the next call
        function, args, kwargs = _current().parent.switch(_current().done)


async def spawn(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a synchronous function in a greenlet, and await what it waits for.

    :return: what it returns. :raises BaseException: what it raises.
    """
    idle, driver = _idle.runners, getcurrent()
    runner: Any = idle.pop() if idle else _Runner()
    runner.parent = driver
    runner.gr_context = driver.gr_context
    asked = runner.switch(function, args, kwargs)
    while asked is not runner.done:
        try:
            answer = await asked
        except BaseException:
            asked = runner.throw(*sys.exc_info())
        else:
            asked = runner.switch(answer)
    result: T = runner.result
    runner.result = runner.gr_context = None
    if len(idle) < _MOST:
        idle.append(runner)
    return result

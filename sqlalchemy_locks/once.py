"""The answer of ``locks.once_per``: asked for by a condition, or anew by each call of a function that it decorates.

The pattern: a timeout (``timeout.py``). Nothing is sent before the condition is evaluated or the function called.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .decorate import check_plain

T = TypeVar("T")
P = ParamSpec("P")


class OncePer:
    """Whether it is this caller's turn; what :meth:`Locks.once_per` gives.

    As a condition it asks the database, once: ``if locks.once_per(...):``, or ``bool(...)`` where the answer is to be
    kept. As a decorator it asks at each call, and the function runs when it is its turn; else the call gives ``None``.
    One that was used as neither warns, as a coroutine does that was never awaited.

    >>> if locks.once_per("hourly-report", every=3600):
    ...     send_report()
    >>> @locks.once_per("daily-report", every=86400)
    ... def send_daily_report() -> None: ...
    """

    #: one that was never made needs no warning
    _used = True

    def __init__(self, ask: Callable[[], bool], shown: str) -> None:
        self._ask, self._shown = ask, shown
        self._answer: bool | None = None
        self._used = False

    def __bool__(self) -> bool:
        if self._answer is None:
            self._answer = self.ask()
        return self._answer

    def ask(self) -> bool:
        """Ask anew."""
        self._used = True
        return self._ask()

    def used(self) -> str:
        """It is about to decorate something; what sentences call it."""
        self._used = True
        return self._shown

    def __call__(self, function: Callable[P, T]) -> Callable[P, T | None]:
        check_plain(function, self.used())

        @functools.wraps(function)
        def in_turn(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return function(*args, **kwargs) if self._ask() else None

        return in_turn

    def __repr__(self) -> str:
        return f"<{self._shown}: {'not asked yet' if self._answer is None else self._answer}>"

    def __del__(self, warn: Any = warnings.warn) -> None:
        if not self._used:
            warn(
                f"{self._shown} was neither asked (if, bool, await) nor used as a decorator, so nothing was acquired",
                RuntimeWarning,
                source=self,
                stacklevel=2,
            )

"""Validation of what callers pass: names that are stored, numbers, durations. Each is checked once, before any SQL."""

from __future__ import annotations

import inspect
import math
from datetime import timedelta
from functools import partial
from typing import Any

#: characters; the most that fits into an InnoDB index key together with a queue's name
MAX_NAME_LENGTH = 255
#: a hundred years: every engine can add it to a timestamp, and no lock lasts longer
MAX_SECONDS = 100 * 365.25 * 86400
#: of a timeout, in seconds: a new one counts from 1970, and must be due
LONGEST_PERIOD = 50 * 365.25 * 86400


def valid_name(value: object, what: str) -> str:
    """Return a name that every engine stores and compares unchanged.

    :param what: what error messages call it.
    :raises TypeError: unless it is a ``str``.
    :raises ValueError: when it is empty, ends with a space (which MySQL and MariaDB don't compare everywhere), is
        longer than 255 characters, or contains a NUL or half a surrogate pair.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} is a str, not {value!r}")
    if not value:
        raise ValueError(f"{what} must not be empty")
    if len(value) > MAX_NAME_LENGTH:
        raise ValueError(
            f"{what} has {len(value)} characters: {MAX_NAME_LENGTH} are the most that every engine can keep"
        )
    if value.endswith(" "):
        raise ValueError(f"{what} ends with a space, which some collations don't compare: {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} has half a surrogate pair in it, which no database stores: {value!r}") from None
    if "\0" in value:
        raise ValueError(f"{what} has a NUL in it, which not every database stores: {value!r}")
    return value


def escape_unprintable(value: str) -> str:
    """Return a text with control characters and other unprintable ones escaped, for a terminal or a log."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode() for each in value
    )


def int32(value: object, what: str) -> int:
    """Return an integer that fits into a column of 32 bits.

    :raises TypeError: unless it is an ``int``. :raises ValueError: when it has more bits.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is an int, not {value!r}")
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{what} has 32 bits, and {value} has more")
    return value


def positive_int(value: object, what: str) -> int:
    """Return a number of rows, threads or attempts.

    :raises TypeError: unless it is an ``int``. :raises ValueError: unless it is at least 1 and fits into 32 bits.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is an int, not {value!r}")
    if not 1 <= value < 2**31:
        raise ValueError(f"{what} must be at least 1 and fit into 32 bits, not {value}")
    return value


def seconds(value: float | timedelta, name: str, *, zero: bool = True) -> float:
    """Return a duration in seconds; it may be infinite.

    :param zero: whether 0 is allowed.
    :raises TypeError: unless it is a number or a ``timedelta``.
    :raises ValueError: for NaN, a negative duration, and for 0 where that isn't allowed.
    """
    if type(value) is float and value > 0:
        return value
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of seconds or a timedelta, not {value!r}")
    if (isinstance(value, float) and math.isnan(value)) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be {'at least' if zero else 'more than'} 0 seconds, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def bounded_seconds(value: float | timedelta, name: str, *, zero: bool = True) -> float:
    """As :func:`seconds`, for what a server adds to its clock or a thread sleeps.

    :raises ValueError: for more than ``MAX_SECONDS``, too.
    """
    number = seconds(value, name, zero=zero)
    if number > MAX_SECONDS:
        raise ValueError(f"{name} must be at most a hundred years, {MAX_SECONDS:.0f} seconds, not {value!r}")
    return number


def timeout_seconds(timeout: float | timedelta | None) -> float | None:
    """Return a ``timeout`` argument in seconds, ``None`` for no limit.

    :raises TypeError: :raises ValueError: as :func:`seconds`.
    """
    return None if timeout is None else seconds(timeout, "timeout")


def format_duration(seconds: float | None) -> str:
    """Return a duration as people read it: ``3 min``; a dash for ``None``."""
    if seconds is None:
        return "–"
    sign, seconds = ("-" if seconds < 0 else ""), abs(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{sign}{seconds / size:.0f} {unit}"
    return f"{sign}{seconds:.0f} s"


def is_coroutine_function(function: Any) -> bool:
    """Whether a call of it returns a coroutine; also for a ``partial``, and for an object with ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def check_listener(function: Any) -> None:
    """:raises TypeError: for a listener of events whose coroutine nothing would await."""
    if is_coroutine_function(function):
        raise TypeError(f"a listener is a plain function, and {function!r} is async: start a task in a plain function")

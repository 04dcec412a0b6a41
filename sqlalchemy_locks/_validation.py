"""Validation of callers' arguments: names that are stored, numbers, durations. Each is checked once, before any SQL."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncGenerator, Awaitable, Generator
from datetime import datetime, timedelta
from functools import partial
from typing import Any, overload

#: characters; the most that fits into an InnoDB index key together with a queue's name
MAX_NAME_LENGTH = 255
#: a hundred years: every engine can add it to a timestamp, and no lock lasts longer
MAX_SECONDS = 100 * 365.25 * 86400
#: the longest period of a ``Timeout``, in seconds: a new row counts from 1970, and must be due
LONGEST_PERIOD = 50 * 365.25 * 86400
#: results of a plain function whose own code has yet to run
UNFINISHED = Awaitable, Generator, AsyncGenerator


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
    if value[-1] == " ":
        raise ValueError(f"{what} ends with a space, which some collations don't compare: {value!r}")
    try:
        if not value.isascii():  # several times as fast as to encode it
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


def valid_int(value: object, what: str, least: int = 1, most: int = 2**31 - 1) -> int:
    """Return a number of rows, permits, threads or attempts, or another integer that a column stores.

    :raises TypeError: unless it is an ``int``. :raises ValueError: when it is outside the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is an int, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{what} is from {least} to {most}, not {value}")
    return int(value)


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
    """As :func:`seconds`, for a duration that a server adds to its clock, or that a thread sleeps.

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


def period_seconds(value: float | timedelta, name: str) -> int:
    """Return a period: whole seconds, the unit of the instants that are stored.

    :raises TypeError: :raises ValueError: as :func:`seconds`, and for more than ``LONGEST_PERIOD``, or a fraction.
    """
    period = seconds(value, name, zero=False)
    if period > LONGEST_PERIOD:
        raise ValueError(f"{name} is at most 50 years, not {value!r}")
    if period != int(period):
        raise ValueError(f"{name} must be whole seconds, not {value!r}")
    return int(period)


def seconds_since_1970(instant: object) -> int:
    """Return the instant that the caller's clock has returned, in whole seconds since 1970.

    :raises TypeError: unless it is a number or a ``datetime``. :raises ValueError: for one without a zone, or NaN.
    """
    if isinstance(instant, datetime):
        if instant.tzinfo is None:
            raise ValueError(f"the clock returned a datetime without a zone: {instant!r}")
        instant = instant.timestamp()
    if isinstance(instant, bool) or not isinstance(instant, (int, float)):
        raise TypeError(f"the clock returns seconds since 1970 or an aware datetime, not {instant!r}")
    if not math.isfinite(instant):
        raise ValueError(f"the clock returned {instant!r}")
    return math.floor(instant)


def format_duration(seconds: float | None) -> str:
    """Return a duration as people read it: ``3 min``; a dash for ``None``."""
    if seconds is None:
        return "–"
    sign, seconds = ("-" if seconds < 0 else ""), abs(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{sign}{seconds / size:.0f} {unit}"
    return f"{sign}{seconds:.0f} s"


def is_unfinished(result: Any, kinds: tuple[type[Any], ...]) -> bool:
    """Return whether a result is of one of these kinds, so that its code has yet to run. A coroutine is closed."""
    if not isinstance(result, kinds):
        return False
    if inspect.iscoroutine(result):
        result.close()
    return True


def is_coroutine_function(function: Any) -> bool:
    """Return whether a call returns a coroutine; the function may be a ``partial`` or an object with ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


@overload
def milliseconds(wait: float) -> int: ...
@overload
def milliseconds(wait: float | None) -> int | None: ...
def milliseconds(wait: float | None) -> int | None:
    """Return a longest wait in the unit of ``lock_timeout`` and of the shipped functions, where 0 would be no limit.

    :param wait: in seconds; ``None``: the session's own limit.
    """
    return None if wait is None else max(1, math.ceil(min(wait * 1000, 2**31 - 1)))

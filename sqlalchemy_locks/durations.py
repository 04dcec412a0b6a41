"""Durations that a caller gave: seconds, or a ``timedelta``."""

from __future__ import annotations

import math
from datetime import timedelta

#: a hundred years: what any engine can add to an instant, and more than any lock lasts
LONGEST = 100 * 365.25 * 86400


def seconds(value: float | timedelta, name: str, *, zero: bool = True) -> float:
    """A duration that a caller gave, in seconds.

    :raises TypeError: unless it is a number or a ``timedelta``.
    :raises ValueError: for NaN, a negative one, or, unless ``zero``, none at all.
    """
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


def span(value: float | timedelta, name: str, *, zero: bool = True) -> float:
    """As :func:`seconds`, of what a server adds to its clock, or a thread sleeps.

    :raises ValueError: for more than ``LONGEST``, too.
    """
    number = seconds(value, name, zero=zero)
    if number > LONGEST:
        raise ValueError(f"{name} must be at most a hundred years, {LONGEST:.0f} seconds, not {value!r}")
    return number


def longest_wait(timeout: float | timedelta | None) -> float | None:
    """The longest wait that a caller gave, in seconds; ``None``: as long as it takes.

    :raises TypeError: :raises ValueError: as :func:`seconds`.
    """
    return None if timeout is None else seconds(timeout, "timeout")


def duration(seconds: float | None) -> str:
    """So many seconds, as people say it."""
    if seconds is None:
        return "–"
    sign, seconds = ("-" if seconds < 0 else ""), abs(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{sign}{seconds / size:.0f} {unit}"
    return f"{sign}{seconds:.0f} s"

"""Durations that a caller gave: seconds, or a ``timedelta``."""

from __future__ import annotations

import math
from datetime import timedelta

#: a hundred years: what any engine can add to an instant, and any lock can wait
LONGEST = 100 * 365.25 * 86400


def period(value: float | timedelta, name: str, *, zero: bool = True) -> float:
    """As :func:`seconds`, for what is added to instants. :raises ValueError: for more than a hundred years, too."""
    given = seconds(value, name, zero=zero)
    if given > LONGEST:
        raise ValueError(f"{name} must be at most a hundred years, {LONGEST:.0f} seconds, not {value!r}")
    return given


def seconds(value: float | timedelta, name: str, *, zero: bool = True) -> float:
    """A duration that a caller gave, in seconds.

    :raises TypeError: unless it is a number or a ``timedelta``.
    :raises ValueError: for NaN, a negative one, or, unless ``zero``, none at all.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of seconds or a timedelta, not {value!r}")
    if math.isnan(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be {'at least' if zero else 'more than'} 0 seconds, not {value!r}")
    return float(value)

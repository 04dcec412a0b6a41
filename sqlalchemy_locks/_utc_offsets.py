"""Time zones: a zone's UTC offsets around an instant, as numbers that every engine can calculate with.

``conditional/windows.py`` and ``redis/timeout.py`` apply them: they compute the windows.

Servers differ in the zones they know (MySQL's tables are often empty, SQLite has none), so the offsets come from
Python's ``zoneinfo``. The server's clock gives the instant that they are applied to. The app's clock only chooses the
two nearest changes of the offset: an error of months is harmless.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_DAY = 86400
_FAR = 400 * _DAY


class Offsets(NamedTuple):
    """Seconds east of UTC: ``before`` the instant ``first``, ``between`` it and ``second``, and ``after``."""

    first: int
    second: int
    before: int
    between: int
    after: int


def zone(name: str) -> ZoneInfo:
    """Return the zone of a name.

    :raises TypeError: unless it is a ``str``.
    :raises ValueError: for a zone that this machine doesn't have.
    """
    if not isinstance(name, str):
        raise TypeError(f"tz is the name of a zone, such as 'Europe/Paris', not {name!r}")
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"there is no zone {name!r} here: it is misspelt, or Python's tzdata package is missing"
        ) from None


def offsets_around(zone: ZoneInfo, instant: float) -> Offsets:
    """Return the offsets before, at and after an instant (seconds since 1970)."""
    return _offsets_around(zone, int(instant // _DAY) * _DAY)


@lru_cache(maxsize=64)
def _offsets_around(zone: ZoneInfo, day: int) -> Offsets:
    first, second = _nearest_change(zone, day, -_DAY), _nearest_change(zone, day, _DAY)
    return Offsets(first, second, _offset(zone, first - 1), _offset(zone, first), _offset(zone, second))


def _nearest_change(zone: ZoneInfo, start: int, step: int) -> int:
    """Return the nearest instant at which the offset changes, searching by days; a distant one if there is none."""
    here = _offset(zone, start)
    for day in range(start + step, start + step * (_FAR // _DAY), step):
        if _offset(zone, day) != here:
            low, high = sorted((day, day - step))
            earlier = _offset(zone, low)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if _offset(zone, middle) == earlier else (low, middle)
            return high
    return start + step * (_FAR // _DAY)


def _offset(zone: ZoneInfo, instant: int) -> int:
    local = (datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=instant)).astimezone(zone)
    offset = local.utcoffset()
    assert offset is not None
    return round(offset.total_seconds())

"""Windows of time of a ``Timeout``: multiples of its period since 1970, in UTC or in civil time of a zone.

The instant is the server's. ``_utc_offsets.py`` has the zone's offsets around it, which are bound to each statement.
"""

from __future__ import annotations

from typing import Any
from zoneinfo import ZoneInfo

from sqlalchemy import BigInteger, bindparam, case

from sqlalchemy_locks._utc_offsets import Offsets, offsets_around
from sqlalchemy_locks.core.roles import param_name

_OFFSETS = {name: bindparam(param_name(f"zone_{name}"), type_=BigInteger()) for name in Offsets._fields}


def in_earlier_window(instant: Any, now: Any, every: Any, *, civil: bool) -> Any:
    """Return the SQL condition that an instant is in an earlier window than now, both in seconds since 1970.

    :param every: the length of a window, in seconds.
    :param civil: the windows are in civil time, whose :func:`zone_parameters` are bound.
    """
    if civil:
        instant, now = _civil_seconds(instant), _civil_seconds(now)
    return instant < now - now % every


def zone_parameters(zone: ZoneInfo, instant: float) -> dict[str, int]:
    """Return the parameters of a statement about civil time at about this instant."""
    return {_OFFSETS[name].key: value for name, value in offsets_around(zone, instant)._asdict().items()}


def _civil_seconds(instant: Any) -> Any:
    """Return the seconds since 1970 that clocks in the zone show."""
    return instant + case(
        (instant < _OFFSETS["first"], _OFFSETS["before"]),
        (instant < _OFFSETS["second"], _OFFSETS["between"]),
        else_=_OFFSETS["after"],
    )

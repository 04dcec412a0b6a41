"""Timeout: acquired at most once in a period, released by nobody.

The pattern: ``ZADD key XX GT CH <score> id``, which changes a score only to a greater one, and so for the first of all
who come with it. The score is when the id was acquired (elapsed), or when the window began that it was acquired in.

What is promised: an id is acquired at most once in its period, by the server's clock, as long as the server keeps what
it has acknowledged (``docs/redis.md`` says when it doesn't). A clock that goes back delays the next acquisition; it
never gives one too many.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..durations import seconds
from ..zones import around, zone
from .call import Script
from .pattern import Call, Client, Pattern, as_id, as_limit, created, names, operation, token

# A window's score is the second it began at, not its number: a period that is changed later then compares, too.
# In a zone these are seconds of the civil clock, of which no day has two midnights.
_TAKE = """
  local every, windowed, at = tonumber(ARGV[4]), ARGV[5] == '1', tonumber(ARGV[6]) or now
  local civil = at
  if ARGV[7] then
    civil = at + (at < tonumber(ARGV[7]) and ARGV[9] or at < tonumber(ARGV[8]) and ARGV[10] or ARGV[11])
  end

  local function due(id, last)
    local period = every or tonumber(redis.call('HGET', facts, 'timeout:' .. id))
    if not windowed then return last + period < at and at end
    local start = math.floor(civil / period) * period
    return start > last and start
  end

  local function take(id, score)
    if not score or redis.call('ZADD', scores, 'XX', 'GT', 'CH', score, id) == 0 then return 0 end
    return acquired(id)
  end
"""
_ACQUIRE = Script(
    "timeout.acquire",
    _TAKE
    + """
  local id = ARGV[3]
  local last = redis.call('ZSCORE', scores, id)
  if not last then return -1 end
  if exhausted(id) then return 0 end
  return take(id, due(id, tonumber(last)))
""",
)
_CAPTURE = Script(
    "timeout.capture",
    _TAKE
    + """
  local before = civil
  if every then before = windowed and math.floor(civil / every) * every or at - every end
  local ids = first(tonumber(ARGV[3]), '-inf', string.format('(%.17g', before), due)
  for _, id in ipairs(ids) do
    take(id, due(id, tonumber(redis.call('ZSCORE', scores, id))))
  end
  return ids
""",
)


class Timeout(Pattern[Client]):
    """A lock that is acquired at most once in a period, and that nobody has to release.

    :param client: :param prefix: as for :class:`Mutex`.
    :param every: the period, in seconds or as a ``timedelta``; without it, each id has its own (:meth:`create`).
    :param windowed: count in windows that begin at multiples of the period since 1970: the first who comes in a window
        has it. Two acquisitions either side of a boundary may be close to each other. Without it, a full period
        passes between two of them.
    :param tz: the zone, such as ``"Europe/Paris"``, whose civil days the windows are; for an ``every`` of whole days.
    :param clock: what gives the time, in seconds since 1970, instead of the server's clock: for tests.
    :raises TypeError: :raises ValueError: for a period that is none, or a zone that isn't known here.

    The pattern: "Distributed locks: NoSQL", Timeout.

    >>> daily = Timeout(redis.Redis(), every=86400)
    >>> daily.create("report")
    1
    >>> daily.acquire("report"), daily.acquire("report")
    (True, False)
    """

    kind = "timeout"

    def __init__(
        self,
        client: Client,
        *,
        every: float | timedelta | None = None,
        windowed: bool = False,
        tz: str | None = None,
        clock: Callable[[], float] | None = None,
        prefix: str = "sqlalchemy_locks",
    ) -> None:
        super().__init__(client, prefix=prefix)
        self._every = b"" if every is None else as_period(every, "every")
        self._windowed = bool(windowed)
        self._zone = None if tz is None else zone(tz)
        self._clock = clock
        if self._zone is not None and not (self._windowed and self._every and self._every % 86400 == 0):
            raise ValueError(
                "tz= is for windows of whole civil days: give windowed=True and every= in multiples of 86400"
            )

    @operation
    def create(
        self,
        *ids: str,
        queue: str | None = None,
        timeout: float | timedelta | None = None,
        retries: int | None = None,
    ) -> Call[int]:
        """Add the absent ones of some timeouts, never acquired yet.

        :param timeout: their own period, in seconds or as a ``timedelta``; ``every`` where that isn't given.
        :param retries: how many acquisitions they allow; ``None``: as many as you like.
        :return: how many were absent.
        """
        period = self._every if timeout is None else as_period(timeout, "timeout")
        if period == b"":
            raise ValueError("a timeout needs a period: give timeout= to create(), or every= to Timeout")
        return created(ids, queue, retries, period)

    @operation
    def acquire(self, id: str, *, queue: str | None = None) -> Call[bool]:
        """Take a timeout, if its period has passed (or its window is new) and it has a retry left.

        :return: ``True`` when it is yours for this period, else ``False``.
        """
        return _ACQUIRE, queue, (as_id(id), *self._when()), bool

    @operation
    def acquire_token(self, id: str, *, queue: str | None = None) -> Call[int | None]:
        """As :meth:`acquire`, for a fencing token as :meth:`Mutex.acquire_token` gives it, or ``None``."""
        return _ACQUIRE, queue, (as_id(id), *self._when()), token

    @operation
    def capture(self, limit: int, *, queue: str | None = None) -> Call[list[str]]:
        """Take several timeouts at once, whichever are due, those first that have waited longest.

        :return: their ids, at most ``limit``.

        Where each has a period of its own, the ids that aren't due are looked at one by one, while the server waits.
        """
        return _CAPTURE, queue, (as_limit(limit), *self._when()), names

    def _when(self) -> tuple[Any, ...]:
        at = b"" if self._clock is None else repr(float(self._clock())).encode()
        offsets = () if self._zone is None else around(self._zone, float(at) if at else time.time())
        return self._every, int(self._windowed), at, *offsets


def as_period(value: float | timedelta, name: str) -> float:
    period = seconds(value, name, zero=False)
    if math.isinf(period):
        raise ValueError(f"{name} must end some time, not {value!r}")
    return period

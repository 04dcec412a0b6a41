"""Timeout: acquired at most once per period, never released.

It is ``ZADD key XX GT CH <score> id``, which only raises a score, and so succeeds for the first of concurrent
callers. The score is the instant of the acquisition, or with windows the start of the window it was acquired in.

Guarantee: an id is acquired at most once per period, by the server's clock, as long as the server keeps what it has
acknowledged (``docs/redis.md`` says when it doesn't). A clock that is set back delays the next acquisition, and never
allows an extra one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, cast

from sqlalchemy_locks._utc_offsets import offsets_around, zone
from sqlalchemy_locks._validation import period_seconds, seconds_since_1970
from sqlalchemy_locks.redis.base import Call, Client, Pattern, as_id, create_call, decode_token, operation
from sqlalchemy_locks.redis.client import ACQUISITION, RedisScript

# A window's score is its first second, not its number, so that scores stay comparable when the period changes.
# With a time zone these are seconds of local time, in which no day has two midnights.
_TAKE = """
  local every, windowed, at = tonumber(ARGV[3]), ARGV[4] == '1', tonumber(ARGV[5]) or tonumber(now()[1])
  local civil = at
  if ARGV[6] then
    civil = at + (at < tonumber(ARGV[6]) and ARGV[8] or at < tonumber(ARGV[7]) and ARGV[9] or ARGV[10])
  end

  local function due(id, ts)
    local period = every or tonumber(redis.call('HGET', facts, 'timeout:' .. id))
    if not windowed then return ts + period < at and at end
    local start = math.floor(civil / period) * period
    return start > ts and start
  end

  local function take(id, ts)
    local score, fields = due(id, tonumber(ts)), limits(id)
    if not score or fields[1] == '0' or redis.call('ZADD', scores, 'XX', 'GT', 'CH', score, id) == 0 then return 0 end
    return record(id, fields)
  end
"""
_ACQUIRE = RedisScript(
    "timeout.acquire",
    """
  local id = ARGV[2]
  local ts = redis.call('ZSCORE', scores, id)
  return ts and take(id, ts) or -1
""",
    helpers=ACQUISITION + _TAKE,
)


class Timeout(Pattern[Client]):
    """A lock that is acquired at most once per period, and needs no release.

    :param client: :param prefix: as for :class:`Mutex`.
    :param every: the period, in whole seconds or as a ``timedelta``; without it, each id has its own (:meth:`create`).
    :param windowed: allow one acquisition in each window; windows begin at multiples of the period since 1970. Two
        acquisitions on either side of a boundary may be close together. Without it, a full period passes between two.
    :param tz: the name of a time zone, for windows of local time (``every=86400``: from midnight to midnight there).
    :param clock: for tests: returns the instant (seconds since 1970, or an aware ``datetime``) instead of the server.
    :raises TypeError: :raises ValueError: for a period that is not whole seconds, an unknown zone.

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
        clock: Clock | None = None,
        prefix: str = "sqlalchemy_locks",
    ) -> None:
        super().__init__(client, prefix=prefix)
        if tz is not None and not windowed:
            raise ValueError("Timeout: tz is for windows of local time, so pass windowed=True")
        self._every = b"" if every is None else period_seconds(every, "every")
        self._windowed = bool(windowed)
        self._zone = None if tz is None else zone(tz)
        self._clock = as_clock(clock)

    @operation
    def create(
        self, *ids: str, queue: str | None = None, retries: int | None = None, every: float | timedelta | None = None
    ) -> Call[int]:
        """Create timeouts, each free immediately. Ids that exist are left unchanged.

        :param retries: how many acquisitions each allows; ``None``: unlimited.
        :param every: their own period, in whole seconds or as a ``timedelta``; that of this ``Timeout`` if not given.
        :return: how many were created.

        >>> Timeout(redis.Redis(), every=86400).create("report")
        1
        """
        period = self._every if every is None else period_seconds(every, "every")
        if period == b"":
            raise ValueError("Timeout: pass every= here or to Timeout(): each id stores its period")
        return create_call(ids, queue, retries, period)

    @operation
    def acquire(self, id: str, *, queue: str | None = None) -> Call[bool]:
        """Acquire a timeout if its period has passed (or its window is new) and it has a retry left.

        :return: whether it was acquired.

        >>> daily = Timeout(redis.Redis(), every=86400)
        >>> daily.create("report")
        1
        >>> daily.acquire("report"), daily.acquire("report")
        (True, False)
        """
        return _ACQUIRE, queue, (as_id(id), *self._period()), bool

    @operation
    def acquire_token(self, id: str, *, queue: str | None = None) -> Call[int | None]:
        """Acquire a timeout as :meth:`acquire` does, and return a fencing token as :meth:`Mutex.acquire_token` does.

        >>> daily = Timeout(redis.Redis(), every=86400)
        >>> daily.create("report")
        1
        >>> token = daily.acquire_token("report")
        """
        return _ACQUIRE, queue, (as_id(id), *self._period()), decode_token

    def _period(self) -> tuple[Any, ...]:
        at = as_instant(self._clock)
        offsets = () if self._zone is None else offsets_around(self._zone, time.time() if at == b"" else float(at))
        return self._every, int(self._windowed), at, *offsets


Clock = Callable[[], "float | datetime"]


def as_clock(clock: Any) -> Clock | None:
    if clock is not None and not callable(clock):
        raise TypeError(f"clock is a function that returns the instant, not {clock!r}")
    return cast("Clock | None", clock)


def as_instant(clock: Clock | None) -> Any:
    """Return the instant of the caller's clock in whole seconds since 1970; empty without one."""
    return b"" if clock is None else seconds_since_1970(clock())

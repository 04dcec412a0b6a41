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
from datetime import datetime, timedelta
from typing import Any, NamedTuple, cast

from sqlalchemy_locks._timezones import around, zone
from sqlalchemy_locks._validation import seconds
from sqlalchemy_locks.redis.base import (
    Call,
    Client,
    Pattern,
    as_id,
    as_limit,
    as_queue,
    created,
    names,
    operation,
    token,
)
from sqlalchemy_locks.redis.client import FIRST, TAKEN, CachedEstimate, RedisScript

# A window's score is the second it began at, not its number: a period that is changed later then compares, too.
# In a zone these are seconds of the civil clock, of which no day has two midnights.
_TAKE = """
  local every, windowed, at = tonumber(ARGV[3]), ARGV[4] == '1', tonumber(ARGV[5]) or tonumber(time[1])
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
    local score, known = due(id, tonumber(ts)), last(id)
    if not score or known[1] == '0' or redis.call('ZADD', scores, 'XX', 'GT', 'CH', score, id) == 0 then return 0 end
    return acquired(id, known)
  end
"""
_ACQUIRE = RedisScript(
    "timeout.acquire",
    """
  local id = ARGV[2]
  local ts = redis.call('ZSCORE', scores, id)
  return ts and take(id, ts) or -1
""",
    helpers=TAKEN + _TAKE,
)
_CAPTURE = RedisScript(
    "timeout.capture",
    """
  local before = civil
  if every then before = windowed and math.floor(civil / every) * every or at - every end
  local ids = first(tonumber(ARGV[2]), '-inf', '(' .. before, due)
  for _, id in ipairs(ids) do
    take(id, redis.call('ZSCORE', scores, id))
  end
  return ids
""",
    helpers=FIRST + _TAKE,
    listed=True,
)

_LISTED = CachedEstimate(
    "timeout.listed",
    """
  local rows = {redis.call('TIME')[1]}
  local found = redis.call('ZRANGE', scores, 0, ARGV[2] - 1, 'WITHSCORES')
  for i = 1, #found, 2 do
    local known = redis.call('HMGET', facts, 'timeout:' .. found[i], 'retries:' .. found[i])
    rows[#rows + 1] = {found[i], found[i + 1], known[1] or '', known[2] or ''}
  end
  return rows
""",
)


class Listed(NamedTuple):
    """A timeout, as :meth:`Timeout.listed` tells of it."""

    queue: str
    id: str
    every: int | None
    free_in: int | None
    retries: int | None


class Timeout(Pattern[Client]):
    """A lock that is acquired at most once in a period, and that nobody has to release.

    :param client: :param prefix: as for :class:`Mutex`.
    :param every: the period, in whole seconds or as a ``timedelta``; without it, each id has its own (:meth:`create`).
    :param windowed: count in windows that begin at multiples of the period since 1970: the first who comes in a window
        has it. Two acquisitions either side of a boundary may be close to each other. Without it, a full period
        passes between two of them.
    :param tz: for windows of civil time (``every=86400``: from midnight to midnight there), the name of a zone.
    :param clock: for tests: gives the instant (seconds since 1970, or an aware ``datetime``) instead of the server.
    :raises TypeError: :raises ValueError: for a period that is not whole seconds, an unknown zone.

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
        clock: Clock | None = None,
        prefix: str = "sqlalchemy_locks",
    ) -> None:
        super().__init__(client, prefix=prefix)
        if tz is not None and not windowed:
            raise ValueError("Timeout: tz is for windows of civil time, so say windowed=True")
        self._every = b"" if every is None else as_period(every, "every")
        self._windowed = bool(windowed)
        self._zone = None if tz is None else zone(tz)
        self._clock = as_clock(clock)

    @operation
    def create(
        self,
        *ids: str,
        queue: str | None = None,
        retries: int | None = None,
        every: float | timedelta | None = None,
    ) -> Call[int]:
        """Add the absent ones of some timeouts, free at once.

        :param retries: how many acquisitions they allow; ``None``: as many as you like.
        :param every: their own period, in whole seconds or as a ``timedelta``; that of this ``Timeout`` when not given.
        :return: how many were absent.

        >>> Timeout(redis.Redis(), every=86400).create("report")
        1
        """
        period = self._every if every is None else as_period(every, "every")
        if period == b"":
            raise ValueError("Timeout: say every=, here or where the Timeout is made: each id keeps its period")
        return created(ids, queue, retries, period)

    @operation
    def acquire(self, id: str, *, queue: str | None = None) -> Call[bool]:
        """Take a timeout, if its period has passed (or its window is new) and it has a retry left.

        :return: ``True`` when it is yours for this period, else ``False``.

        >>> daily = Timeout(redis.Redis(), every=86400)
        >>> daily.create("report")
        1
        >>> daily.acquire("report"), daily.acquire("report")
        (True, False)
        """
        return _ACQUIRE, queue, (as_id(id), *self._when()), bool

    @operation
    def acquire_token(self, id: str, *, queue: str | None = None) -> Call[int | None]:
        """As :meth:`acquire`, for a fencing token as :meth:`Mutex.acquire_token` gives it, or ``None``.

        >>> daily = Timeout(redis.Redis(), every=86400)
        >>> daily.create("report")
        1
        >>> token = daily.acquire_token("report")
        """
        return _ACQUIRE, queue, (as_id(id), *self._when()), token

    @operation
    def capture(self, limit: int, *, queue: str | None = None) -> Call[list[str]]:
        """Take several timeouts at once, whichever are due, those first that have waited longest.

        :return: their ids, at most ``limit``.

        Where each has a period of its own, the ids that aren't due are looked at one by one, while the server waits.

        >>> daily = Timeout(redis.Redis(), every=86400)
        >>> daily.create("report")
        1
        >>> daily.capture(3)
        ['report']
        """
        return _CAPTURE, queue, (as_limit(limit), *self._when()), names

    @operation
    def listed(self, limit: int = 1000, *, queue: str | None = None) -> Call[list[Listed]]:
        """The timeouts of a queue, for people, those first that were acquired longest ago.

        :param limit: how many at most.
        :return: tuples of ``queue, id, every, free_in, retries``: the id's own period in seconds; in how many seconds
            it is over by the server's clock, less than 0 when it is over already, and ``None`` in windows of civil
            time; how many acquisitions are left, ``None`` for as many as you like.

        >>> daily = Timeout(redis.Redis(), every=86400)
        >>> daily.create("report", retries=3)
        1
        >>> daily.acquire("report"), daily.listed()
        (True, [Listed(queue='default', id='report', every=86400, free_in=86..., retries=2)])
        """
        name, period, civil, at = as_queue(queue), self._every, self._zone is not None, as_instant(self._clock)

        def listed(now: int, id: bytes, ts: bytes, own: bytes, left: bytes) -> Listed:
            every = int(own) if own else None
            over = period or every
            free_in = None if civil or not over else int(float(ts)) + int(over) - now
            return Listed(name, id.decode(), every, free_in, int(left) if left else None)

        def read(rows: list[Any]) -> list[Listed]:
            now = int(rows[0]) if at == b"" else int(at)
            return [listed(now, *row) for row in rows[1:]]

        return _LISTED, queue, (as_limit(limit),), read

    def _when(self) -> tuple[Any, ...]:
        at = as_instant(self._clock)
        offsets = () if self._zone is None else around(self._zone, time.time() if at == b"" else float(at))
        return self._every, int(self._windowed), at, *offsets


Clock = Callable[[], "float | datetime"]


def as_clock(clock: Any) -> Clock | None:
    if clock is not None and not callable(clock):
        raise TypeError(f"clock is a function that gives the instant, not {clock!r}")
    return cast("Clock | None", clock)


def as_instant(clock: Clock | None) -> Any:
    """What a clock of the caller's own says, in whole seconds since 1970."""
    if clock is None:
        return b""
    given = clock()
    if isinstance(given, datetime):
        if given.tzinfo is None:
            raise ValueError(f"the clock gave a datetime without a zone: {given!r}")
        given = given.timestamp()
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"the clock gives seconds since 1970 or an aware datetime, not {given!r}")
    return math.floor(given)


def as_period(value: float | timedelta, name: str) -> int:
    period = seconds(value, name, zero=False)
    if math.isinf(period) or period != int(period):
        raise ValueError(f"{name} must be whole seconds, not {value!r}")
    return int(period)

"""Mutex: taken or free, and taken until somebody releases it.

The pattern: ``ZADD key XX CH 1 id``, which changes the score of one id for one of all who try. A mutex that nobody
released stays taken: that is its purpose, since the next run must not start when the last one did not succeed.

What is promised: between two releases one acquisition is answered ``True``, as long as the server keeps what it has
acknowledged (``docs/redis.md`` says when it doesn't).
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from sqlalchemy_locks.redis.base import (
    Call,
    Client,
    Pattern,
    as_id,
    as_limit,
    as_owner,
    as_queue,
    created,
    names,
    operation,
    token,
)
from sqlalchemy_locks.redis.client import FIRST, TAKEN, CachedEstimate, RedisScript

_ACQUIRE = RedisScript(
    "mutex.acquire",
    """
  local id, owner = ARGV[2], ARGV[3]
  local known = last(id)
  if known[1] == '0' or redis.call('ZADD', scores, 'XX', 'CH', '1', id) == 0 then
    return redis.call('ZSCORE', scores, id) and 0 or -1
  end
  return acquired(id, known, owner)
""",
    helpers=TAKEN,
)
_RELEASE = RedisScript(
    "mutex.release",
    """
  local id, owner = ARGV[2], ARGV[3]
  local theirs = owner and redis.call('HGET', facts, 'owner:' .. id) ~= owner
  if theirs or redis.call('ZADD', scores, 'XX', 'CH', '0', id) == 0 then
    return redis.call('ZSCORE', scores, id) and 0 or -1
  end
  return 1
""",
)
_CAPTURE = RedisScript(
    "mutex.capture",
    """
  local limit, owner = tonumber(ARGV[2]), ARGV[3]
  local ids = first(limit, 0, 0)
  for _, id in ipairs(ids) do
    redis.call('ZADD', scores, 'XX', 'CH', '1', id)
    acquired(id, last(id), owner)
  end
  return ids
""",
    helpers=FIRST,
    listed=True,
)

# a token is made of the server's clock, which is all that is known of when
_HELD = CachedEstimate(
    "mutex.held",
    """
  local rows = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', scores, 1, 1)) do
    local known = redis.call('HMGET', facts, 'owner:' .. id, 'fence:' .. id)
    rows[#rows + 1] = {id, known[1] or '', known[2] or '0'}
  end
  table.sort(rows, function(one, other) return tonumber(one[3]) < tonumber(other[3]) end)
  local first = {}
  for i = 1, math.min(#rows, tonumber(ARGV[2])) do first[i] = rows[i] end
  return first
""",
)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Held(NamedTuple):
    """A mutex that is taken, as :meth:`Mutex.held` tells of it."""

    queue: str
    id: str
    owner: str | None
    acquired_at: datetime


class Mutex(Pattern[Client]):
    """A lock that is taken until it is released.

    :param client: a ``redis.Redis``, a ``redis.asyncio.Redis`` (every call is awaited then), or their ``RedisCluster``.
    :param prefix: how the keys begin, for several apps in one database.
    :raises TypeError: for any other client, a pipeline included.

    ``queue`` is, at every call, the queue that the ids are unique in (``"default"`` without one). Each call raises
    ``UnknownTask`` for an id that was never created, and ``OutcomeUnknown`` when no answer came.

    The pattern: "Distributed locks: NoSQL", Mutex.

    >>> mutex = Mutex(redis.Redis())
    >>> mutex.create("task_a")
    1
    >>> mutex.acquire("task_a"), mutex.acquire("task_a")
    (True, False)
    """

    kind = "mutex"

    @operation
    def create(self, *ids: str, queue: str | None = None, retries: int | None = None) -> Call[int]:
        """Add the absent ones of some mutexes, free.

        :param retries: how many acquisitions they allow; ``None``: as many as you like.
        :return: how many were absent.

        >>> Mutex(redis.Redis()).create("task_a", "task_b", retries=3)
        2
        """
        return created(ids, queue, retries)

    @operation
    def acquire(self, id: str, *, queue: str | None = None, owner: str | None = None) -> Call[bool]:
        """Take a mutex, if it is free and has a retry left.

        :param owner: who takes it, stored for :meth:`release` and for people.
        :return: ``True`` when it is yours, ``False`` when somebody has it, or no retry is left.

        >>> mutex = Mutex(redis.Redis())
        >>> mutex.create("task_a")
        1
        >>> mutex.acquire("task_a", owner="web-1")
        True
        """
        return _ACQUIRE, queue, (as_id(id), *as_owner(owner)), bool

    @operation
    def acquire_token(self, id: str, *, queue: str | None = None, owner: str | None = None) -> Call[int | None]:
        """As :meth:`acquire`, for a fencing token: greater than any that this mutex gave before, or ``None``.

        It is at least the server's time in microseconds, so that it goes on rising when the server has lost its data.

        >>> mutex = Mutex(redis.Redis())
        >>> mutex.create("task_a")
        1
        >>> token = mutex.acquire_token("task_a")
        """
        return _ACQUIRE, queue, (as_id(id), *as_owner(owner)), token

    @operation
    def release(self, id: str, *, queue: str | None = None, owner: str | None = None) -> Call[bool]:
        """Give a mutex back.

        :param owner: give it back only if it was acquired by this owner.
        :return: ``True`` when it was taken (by that owner) and is free now.

        >>> mutex = Mutex(redis.Redis())
        >>> mutex.create("task_a")
        1
        >>> mutex.acquire("task_a"), mutex.release("task_a")
        (True, True)
        """
        return _RELEASE, queue, (as_id(id), *as_owner(owner)), bool

    @operation
    def capture(self, limit: int, *, queue: str | None = None, owner: str | None = None) -> Call[list[str]]:
        """Take several mutexes at once, whichever are free.

        :return: their ids, in order, at most ``limit``.

        >>> mutex = Mutex(redis.Redis())
        >>> mutex.create("task_a")
        1
        >>> mutex.capture(3)
        ['task_a']
        """
        return _CAPTURE, queue, (as_limit(limit), *as_owner(owner)), names

    @operation
    def held(self, limit: int = 1000, *, queue: str | None = None) -> Call[list[Held]]:
        """What is taken in a queue, for people.

        :param limit: how many at most, those first that were taken first.
        :return: tuples of ``queue, id, owner, acquired_at`` (UTC, by the server's clock).

        Of one queue, since each is in a place of its own. ``acquired_at`` is what the token is made of, which tells the
        time unless the server's clock has gone back since.

        >>> mutex = Mutex(redis.Redis())
        >>> mutex.create("task_a")
        1
        >>> mutex.acquire("task_a", owner="web-1")
        True
        >>> mutex.held()
        [Held(queue='default', id='task_a', owner='web-1', acquired_at=datetime.datetime(...))]
        """
        name = as_queue(queue)

        def held(id: bytes, owner: bytes, fence: bytes) -> Held:
            since = _EPOCH + timedelta(microseconds=int(fence))
            return Held(name, id.decode(), owner.decode() or None, since)

        def read(rows: list[list[Any]]) -> list[Held]:
            return [held(*row) for row in rows]

        return _HELD, queue, (as_limit(limit),), read

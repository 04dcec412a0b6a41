"""Mutex: held until it is released.

An acquisition is ``ZADD key XX CH 1 id``, which changes the score for exactly one of concurrent callers. A mutex has no
expiry: after a failed run the next one must not start.

Guarantee: between two releases exactly one acquisition returns ``True``, as long as the server keeps what it has
acknowledged (``docs/redis.md`` says when it doesn't).
"""

from __future__ import annotations

from sqlalchemy_locks._validation import valid_int
from sqlalchemy_locks.redis.base import (
    Call,
    Client,
    Pattern,
    as_id,
    as_owner,
    create_call,
    decode_ids,
    decode_token,
    operation,
)
from sqlalchemy_locks.redis.client import ACQUISITION, CAPTURE, RedisScript

_ACQUIRE = RedisScript(
    "mutex.acquire",
    """
  local id, owner = ARGV[2], ARGV[3]
  local fields = limits(id)
  if fields[1] == '0' or redis.call('ZADD', scores, 'XX', 'CH', '1', id) == 0 then
    return redis.call('ZSCORE', scores, id) and 0 or -1
  end
  return record(id, fields, owner)
""",
    helpers=ACQUISITION,
)
_RELEASE = RedisScript(
    "mutex.release",
    """
  local id, owner = ARGV[2], ARGV[3]
  local other_owner = owner and redis.call('HGET', facts, 'owner:' .. id) ~= owner
  if other_owner or redis.call('ZADD', scores, 'XX', 'CH', '0', id) == 0 then
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
    record(id, limits(id), owner)
  end
  return ids
""",
    helpers=CAPTURE,
)


class Mutex(Pattern[Client]):
    """A lock that is held until it is released.

    :param client: a ``redis.Redis``, a ``redis.asyncio.Redis`` (every call is awaited then), or their ``RedisCluster``.
    :param prefix: how the keys begin, for several apps in one database; without braces and colons.
    :raises TypeError: for any other client, a pipeline included.

    Every method takes ``queue``, in which ids are unique (``"default"`` if not given). Each call raises ``UnknownTask``
    for an id that was never created, and ``OutcomeUnknown`` when no answer came.

    >>> mutex = Mutex(redis.Redis())
    >>> mutex.create("task_a")
    1
    >>> mutex.acquire("task_a"), mutex.acquire("task_a")
    (True, False)
    """

    kind = "mutex"

    @operation
    def create(self, *ids: str, queue: str | None = None, retries: int | None = None) -> Call[int]:
        """Create mutexes, released. Ids that exist are left unchanged.

        :param retries: how many acquisitions each allows; ``None``: unlimited.
        :return: how many were created.

        >>> Mutex(redis.Redis()).create("task_a", "task_b", retries=3)
        2
        """
        return create_call(ids, queue, retries)

    @operation
    def acquire(self, id: str, *, queue: str | None = None, owner: str | None = None) -> Call[bool]:
        """Acquire a mutex if it is free and has a retry left.

        :param owner: the holder's name, stored for :meth:`release`.
        :return: ``True`` if it was acquired, ``False`` if it is held or has no retry left.

        >>> mutex = Mutex(redis.Redis())
        >>> mutex.create("task_a")
        1
        >>> mutex.acquire("task_a", owner="web-1")
        True
        """
        return _ACQUIRE, queue, (as_id(id), *as_owner(owner)), bool

    @operation
    def acquire_token(self, id: str, *, queue: str | None = None, owner: str | None = None) -> Call[int | None]:
        """Acquire a mutex as :meth:`acquire` does, and return a fencing token.

        :return: a number greater than any earlier token of this mutex, or ``None`` if it was not acquired.

        The token is at least the server's time in microseconds, so it keeps rising after the server has lost its data.

        >>> mutex = Mutex(redis.Redis())
        >>> mutex.create("task_a")
        1
        >>> token = mutex.acquire_token("task_a")
        """
        return _ACQUIRE, queue, (as_id(id), *as_owner(owner)), decode_token

    @operation
    def release(self, id: str, *, queue: str | None = None, owner: str | None = None) -> Call[bool]:
        """Release a mutex.

        :param owner: release it only if this owner acquired it.
        :return: ``True`` if it was held (by that owner) and is free now.

        >>> mutex = Mutex(redis.Redis())
        >>> mutex.create("task_a")
        1
        >>> mutex.acquire("task_a"), mutex.release("task_a")
        (True, True)
        """
        return _RELEASE, queue, (as_id(id), *as_owner(owner)), bool

    @operation
    def capture(self, limit: int, *, queue: str | None = None, owner: str | None = None) -> Call[list[str]]:
        """Acquire up to ``limit`` free mutexes.

        :return: their ids, in order.

        >>> mutex = Mutex(redis.Redis())
        >>> mutex.create("task_a")
        1
        >>> mutex.capture(3)
        ['task_a']
        """
        return _CAPTURE, queue, (valid_int(limit, "limit"), *as_owner(owner)), decode_ids

"""State transitions: tasks that go from a status in which they may be captured to one in which they are.

The pattern: ``ZADD key XX CH <status> id``, a status being a number. Which number is which name is written down beside
the tasks, when a status is first used, so that names may be added in any order.

What is promised: a task is captured by one caller until its status is set, as long as the server keeps what it has
acknowledged (``docs/redis.md`` says when it doesn't).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.redis.base import Call, Client, Pattern, as_id, as_ids, as_limit, as_queue, as_retries, operation
from sqlalchemy_locks.redis.client import FIRST, RedisScript
from sqlalchemy_locks.redis.timeout import Clock, as_clock, as_instant, as_period

_STATUS = """
  local deadlines = KEYS[4]

  -- The number of a status; with a new one, the next.
  local function number(status)
    local known = redis.call('HGET', facts, 'status:' .. status)
    if known then return tonumber(known) end
    local new = redis.call('HINCRBY', facts, 'statuses', 1) - 1
    redis.call('HSET', facts, 'status:' .. status, new)
    return new
  end

  local function deadline(id, at)
    local timeout = redis.call('HGET', facts, 'timeout:' .. id)
    if timeout then redis.call('ZADD', deadlines, at + timeout, id) end
  end
"""
_CREATE = RedisScript(
    "transition.create",
    """
  local statuses = tonumber(ARGV[4])
  for i = 5, 4 + statuses do number(ARGV[i]) end
  local initial, created = number(ARGV[5]), 0
  for i = 5 + statuses, #ARGV do
    if redis.call('ZADD', scores, 'NX', initial, ARGV[i]) == 1 then
      created = created + 1
      if ARGV[2] ~= '' then redis.call('HSET', facts, 'retries:' .. ARGV[i], ARGV[2]) end
      if ARGV[3] ~= '' then redis.call('HSET', facts, 'timeout:' .. ARGV[i], ARGV[3]) end
    end
  end
  return created
""",
    helpers=_STATUS,
)
_CAPTURE = RedisScript(
    "transition.capture",
    """
  local limit, at, captured = tonumber(ARGV[2]), tonumber(ARGV[3]) or tonumber(time[1]), number(ARGV[4])
  local ids = {}
  for i = 5, #ARGV do
    local ready = number(ARGV[i])
    for _, id in ipairs(first(limit, ready, ready)) do ids[#ids + 1] = id end
  end
  table.sort(ids)
  local tasks = {}
  for i = 1, math.min(limit, #ids) do
    local id = ids[i]
    redis.call('ZADD', scores, 'XX', 'CH', captured, id)
    deadline(id, at)
    local claim = acquired(id, last(id))
    local told = redis.call('HMGET', facts, 'timeout:' .. id, 'retries:' .. id)
    tasks[i] = {id, claim, told[1] or '', told[2] or ''}
  end
  return tasks
""",
    helpers=FIRST + _STATUS,
    listed=True,
)
_SET_STATUS = RedisScript(
    "transition.set_status",
    """
  local id, status, captured, claim = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local force, at = ARGV[6] == '1', tonumber(ARGV[7]) or tonumber(time[1])
  local score = redis.call('ZSCORE', scores, id)
  if not score then return -1 end
  if not force then
    if tonumber(score) ~= number(captured) then return 0 end
    if claim ~= '' and redis.call('HGET', facts, 'fence:' .. id) ~= claim then return 0 end
  end
  redis.call('ZADD', scores, 'XX', 'CH', number(status), id)
  redis.call('ZREM', deadlines, id)
  if status == captured then deadline(id, at) end
  return 1
""",
    helpers=_STATUS,
)
_EXPIRE = RedisScript(
    "transition.expire",
    """
  local at = tonumber(ARGV[2]) or tonumber(time[1])
  local ids = redis.call('ZRANGEBYSCORE', deadlines, '-inf', '(' .. at)
  for _, id in ipairs(ids) do
    redis.call('ZADD', scores, 'XX', 'CH', number('timeout'), id)
    redis.call('ZREM', deadlines, id)
  end
  return #ids
""",
    helpers=_STATUS,
)


class Task(NamedTuple):
    """A task as it was captured; ``claim`` is what tells this capture from every other."""

    queue_id: str
    id: str
    status: str
    claim: int
    timeout: int | None
    retries_left: int | None


class StateTransition(Pattern[Client]):
    """Tasks with a status: captured out of some, and put into another when the work is done.

    :param client: :param prefix: as for :class:`Mutex`.
    :param ready: the statuses that a task is captured from; a new task has the first of them.
    :param captured: the status of a task that somebody works on.
    :param clock: for tests, as for :class:`Timeout`.
    :raises TypeError: :raises ValueError: for statuses that are no names, or the same one twice.

    The pattern: "Distributed locks: NoSQL", State transition.

    >>> tasks = StateTransition(redis.Redis())
    >>> tasks.create("task_a")
    1
    >>> [task.id for task in tasks.capture(3)]
    ['task_a']
    >>> tasks.set_status("task_a", "done")
    True
    """

    kind = "task"
    _suffixes = (b":facts", b":deadlines")

    def __init__(
        self,
        client: Client,
        *,
        ready: Sequence[str] = ("done", "failed"),
        captured: str = "in_progress",
        clock: Clock | None = None,
        prefix: str = "sqlalchemy_locks",
    ) -> None:
        super().__init__(client, prefix=prefix)
        if isinstance(ready, str) or not isinstance(ready, Sequence):
            raise TypeError(f"ready is a sequence of statuses, not {ready!r}")
        if not ready:
            raise ValueError("ready needs at least one status")
        self._ready = [as_status(status) for status in ready]
        self._captured = as_status(captured)
        # in the order of the pattern: 0 is done, 1 is in_progress, 2 is failed
        self._statuses = [self._ready[0], self._captured, *self._ready[1:]]
        if len(set(self._statuses)) < len(self._statuses):
            raise ValueError(f"the same status twice among ready={tuple(ready)!r} and captured={captured!r}")
        self._clock = as_clock(clock)

    @operation
    def create(
        self,
        *ids: str,
        queue: str | None = None,
        timeout: float | timedelta | None = None,
        retries: int | None = None,
    ) -> Call[int]:
        """Add the absent ones of some tasks, in the first status of ``ready``.

        :param timeout: how long each may be captured before :meth:`expire` takes it back, in whole seconds
            or as a ``timedelta``; ``None``: for ever.
        :param retries: how many captures they allow; ``None``: as many as you like.
        :return: how many were absent.

        >>> StateTransition(redis.Redis()).create("task_a", timeout=60)
        1
        """
        limits = as_retries(retries), b"" if timeout is None else as_period(timeout, "timeout")
        return _CREATE, queue, (*limits, len(self._statuses), *self._statuses, *as_ids(ids)), int

    @operation
    def capture(self, limit: int, *, queue: str | None = None) -> Call[list[Task]]:
        """Take tasks that are ready and have a retry left.

        :return: at most ``limit`` of them, in the order of their ids, which nobody else is given.

        >>> tasks = StateTransition(redis.Redis())
        >>> tasks.create("task_a")
        1
        >>> [task.id for task in tasks.capture(3)]
        ['task_a']
        """
        where, status = as_queue(queue), self._captured.decode()

        def task(id: bytes, claim: int, timeout: bytes, left: bytes) -> Task:
            return Task(
                where, id.decode(), status, claim, int(timeout) if timeout else None, int(left) if left else None
            )

        def tasks(rows: list[list[Any]]) -> list[Task]:
            return [task(*row) for row in rows]

        return _CAPTURE, queue, (as_limit(limit), as_instant(self._clock), self._captured, *self._ready), tasks

    @operation
    def set_status(
        self, id: str, status: str, *, queue: str | None = None, claim: int | None = None, force: bool = False
    ) -> Call[bool]:
        """Say what has become of a task that was captured.

        :param claim: of the task as it was captured: nothing is changed if somebody has captured it since.
        :param force: whatever status it has.
        :return: ``False`` when it was not captured, or not with this claim.
        :raises UnknownTask: when it was never created.

        >>> tasks = StateTransition(redis.Redis())
        >>> tasks.create("task_a")
        1
        >>> [task] = tasks.capture(1)
        >>> tasks.set_status("task_a", "done", claim=task.claim)
        True
        """
        if claim is not None and (isinstance(claim, bool) or not isinstance(claim, int)):
            raise TypeError(f"claim is the number that a captured task has, not {claim!r}")
        if claim is not None and force:
            raise ValueError("force= changes any task's status: leave out claim=, which asks whether it is ours")
        whose = b"" if claim is None else int(claim)
        values = as_id(id), as_status(status), self._captured, whose, int(bool(force)), as_instant(self._clock)
        return _SET_STATUS, queue, values, bool

    @operation
    def expire(self, *, queue: str | None = None) -> Call[int]:
        """Give the captured tasks whose ``timeout`` has passed the status ``timeout``.

        They can be captured again if that is in ``ready``; whoever has them still should have given their claim.

        :return: how many there were.

        >>> tasks = StateTransition(redis.Redis())
        >>> tasks.create("task_a")
        1
        >>> tasks.expire()
        0
        """
        return _EXPIRE, queue, (as_instant(self._clock),), int


def as_status(status: Any) -> bytes:
    return valid_name(status, "a status").encode()
